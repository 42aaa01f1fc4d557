"""An adapter beside its base: tokens per second of the base alone, of the adapter alone, and of both at once.

All in turn, several rounds; the last line is one JSON object. The adapter is random, for all linear layers.
"""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass

import peft
import torch
import tyro
from harness import machine
from transformers import AutoModelForCausalLM

import draftheads
from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.engine import Engine
from draftheads.decode.request import Lane
from draftheads.models.model_names import resolve_model

PROMPTS = ["Why is the sky blue?", "Write a short story about a dog.", "Name three rivers.", "What is a prime number?"]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Options:
    """What is measured."""

    model: str = "smollm2-135m"
    rank: int = 16
    """Of the adapter's matrices."""
    tokens: int = 48
    """Of each answer."""
    rounds: int = 5


def save_adapter(options: Options, folder: str) -> None:
    torch.manual_seed(0)
    source = resolve_model(options.model)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=options.rank, target_modules=TARGETS, task_type="CAUSAL_LM"))
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.002)
    tuned.save_pretrained(folder)
    config = json.loads(open(f"{folder}/adapter_config.json").read())  # noqa: PTH123, SIM115
    with open(f"{folder}/adapter_config.json", "w") as file:  # noqa: PTH123
        json.dump({**config, "base_model_name_or_path": options.model}, file)


def tokens_per_second(engines: dict[str, Engine], lanes: list[str], tokens: int) -> float:
    """Of one answer for each name."""
    core, requests = EngineCore(engines, CoreLimits()), []
    for prompt, name in zip(PROMPTS, lanes, strict=False):
        requests += engines[name].requests([prompt], max_new_tokens=tokens, ignore_eos=True)
        core.add(requests[-1], Lane(name))
    start = time.perf_counter()
    while core.has_work:
        core.step()
    return sum(len(request.token_ids) for request in requests) / (time.perf_counter() - start)


def main(options: Options) -> None:
    """Prints the medians."""
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(options, folder)
        base = draftheads.load(options.model)
        engines = {"base": base, "adapter": base.with_adapter(folder)}
        ways = {"base": ["base"], "adapter": ["adapter"], "both": ["base", "adapter"]}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(options.rounds + 1):
            for name, lanes in ways.items():
                speed = tokens_per_second(engines, lanes, options.tokens)
                if repeat:  # after warming up
                    found[name].append(round(speed, 1))
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    print(f"base {medians['base']:.1f}, adapter {medians['adapter']:.1f}, both {medians['both']:.1f} tokens/s")
    print(json.dumps({"tokens_per_second": found, "machine": machine(torch.get_num_threads())}))


if __name__ == "__main__":
    main(tyro.cli(Options))
