"""What a decoding step costs on a CUDA GPU, in at most eight minutes. Prints tables, and JSON as the last line.

* captured steps against ordinary ones: largest difference of logits, and whether greedy texts are equal;
* verification of a 7B-shaped Llama with random weights by tree size and length of text, beside its lower bound (bytes
  of the weights / measured bandwidth);
* drafting by bundled head;
* tokens per second of smollm2-135m by batch size, plain and with a head.

Example::

    python benchmarks/cuda.py --json cuda.json
"""

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from machine import machine
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from draftheads.cli.show import quiet_transformers
from draftheads.decode.engine import Engine
from draftheads.decode.step_timer import StepTimer, wait_for
from draftheads.draft import Draft
from draftheads.loading import head_engine, load_drafter, load_target
from draftheads.models.kv_target import Target
from draftheads.models.model import TargetModel
from draftheads.tree import Tree
from draftheads.zoo.registry import zoo_heads

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """What is measured."""

    model: str = "smollm2-135m"
    """The model with heads."""
    heads: tuple[str, ...] = ()
    """Heads whose drafting is timed; all bundled ones by default."""
    nodes: tuple[int, ...] = (1, 8, 16, 32, 64)
    """Nodes of the tree."""
    lengths: tuple[int, ...] = (512, 4096)
    """Tokens of text."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Prompts that are decoded together."""
    max_new_tokens: int = 128
    """Tokens of an answer."""
    repeats: int = 20
    """Steps of each kind; their median counts."""
    minutes: float = 8.0
    """No measurement begins after that time; what is left out is listed."""
    device: str = "cuda"
    """Where."""
    hidden_size: int = 4096
    """Of the Llama with random weights; other sizes follow from it."""
    num_layers: int = 32
    """Of the Llama with random weights."""
    json: Path | None = None
    """Write everything there."""


class Clock:
    """How much time is left."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.left_out: list[str] = []

    def allows(self, what: str) -> bool:
        """Notes what is left out."""
        if time.monotonic() < self.end:
            return True
        self.left_out.append(what)
        return False


def median_ms(action: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Milliseconds, after three calls that warm up: the second of them captures."""
    times = []
    for _ in range(repeats + 3):
        wait_for(device)
        start = time.perf_counter()
        action()
        wait_for(device)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[3:])


def with_graphs(model: TargetModel, *, on: bool) -> TargetModel:
    """The same model, with static steps or without."""
    other = copy.copy(model)
    other.set_graphs(on=on)
    return other


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second that are read and written by a copy of a large tensor."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / (median_ms(lambda: target.copy_(source), 7, device) / 1e3)


def random_llama(options: Options) -> TargetModel:
    """A Llama of 7B's shape (32 layers of 4,096) in bf16."""
    size = options.hidden_size
    config = LlamaConfig(
        hidden_size=size,
        intermediate_size=size * 11008 // 4096,
        num_hidden_layers=options.num_layers,
        num_attention_heads=max(1, size // 128),
        max_position_embeddings=8192,
    )
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return TargetModel(model.eval().requires_grad_(requires_grad=False), None, "random-llama")


# --- the parts ---


@torch.inference_mode()
def check(options: Options, clock: Clock) -> Rows:
    """Captured steps and ordinary ones on the same drafts."""
    found: Rows = []
    model = load_target(options.model, device=options.device, precision="fp32", fast=False)
    targets = [Target(with_graphs(model, on=on)) for on in (True, False)]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.vocab_size, (length,), generator=generator).tolist() for length in (7, 190, 40)]
    for target in targets:
        target.prefill(prompts)
    for nodes in options.nodes:
        tokens = torch.randint(model.vocab_size, (3, nodes), generator=generator).to(model.device)
        draft = Draft.on_tree(Tree.from_paths([(rank,) for rank in range(nodes - 1)]), tokens)
        gaps = []
        for _ in range(3):  # as it is; captured; replayed
            logits = [target.verify(draft)[0].float() for target in targets]
            gaps.append(float((logits[0] - logits[1]).abs().max()))
        found.append({"nodes": nodes, "largest difference": max(gaps), "graphs": len(targets[0].graphs)})
    texts = []
    for target in targets:
        engine = Engine(target.model)
        texts.append([one.token_ids for one in engine.generate(prompts, max_new_tokens=64, ignore_eos=True)])
    found.append({"greedy texts equal": texts[0] == texts[1], "failure": targets[0].graphs.failure})
    return found


@torch.inference_mode()
def verification(options: Options, clock: Clock) -> Rows:
    """Milliseconds of verifying a tree, ordinary and captured, and the lower bound."""
    model = random_llama(options)
    weights = [model.lm_head.weight, *(weight for layer in model.decoder.layers for weight in layer.parameters())]
    num_bytes = sum(weight.nbytes for weight in weights)
    rate = bandwidth(model.device, min(1 << 30, num_bytes))
    bound = 1e3 * num_bytes / rate
    found: Rows = []
    for length in options.lengths:
        for nodes in options.nodes:
            if not clock.allows(f"verification of {nodes} nodes at {length} tokens"):
                continue
            draft = Draft.on_tree(Tree.chain(nodes - 1), torch.full((1, nodes), 5, device=model.device))
            times = {}
            for name, on in (("ordinary", False), ("captured", True)):
                target = Target(with_graphs(model, on=on))
                target.prefill([[5]])
                target.cache.reserve(1, length)
                target.lengths = [length]  # the keys and values of a text that was not read are 0
                times[name] = median_ms(partial(target.verify, draft), options.repeats, model.device)
            found.append(
                {"text": length, "nodes": nodes}
                | {f"{name}, ms": round(value, 3) for name, value in times.items()}
                | {"bound, ms": round(bound, 3), "captured / bound": round(times["captured"] / bound, 2)}
            )
    return found


def drafting(options: Options, clock: Clock) -> Rows:
    """Milliseconds of drafting 10 nodes, for one row and eight."""
    model = load_target(options.model, device=options.device)
    found: Rows = []
    bundled = [head.method for head in zoo_heads() if head.base_name == options.model]
    for head in options.heads or bundled:
        if not clock.allows(f"drafting with {head}"):
            continue
        timer = StepTimer(model, load_drafter(head, options.model, model))
        row: dict[str, Any] = {"head": head}
        for kind in ("static", "dynamic"):
            for rows in (1, 8):
                times = [timer.milliseconds(kind, rows, 10) for _ in range(options.repeats + 3)][3:]
                row[f"{kind}, {rows} rows, ms"] = round(statistics.median(times), 3)
        found.append(row)
    return found


def decoding(options: Options, clock: Clock) -> Rows:
    """Tokens per second of equally long answers."""
    model = load_target(options.model, device=options.device)
    drafter = load_drafter("hydra", options.model, model)
    text = Path(__file__).parent / "tasks.jsonl"
    lines = [json.loads(line) for line in text.read_text(encoding="utf-8").splitlines()]
    prompts = [line["turns"][0] for line in lines]
    found: Rows = []
    for size in options.batch_sizes:
        engines = {
            "plain, no graphs": Engine(with_graphs(model, on=False), max_batch_size=size),
            "plain": Engine(model, max_batch_size=size),
            "hydra": head_engine(model, drafter, head="hydra", model=options.model, max_batch_size=size),
        }
        row: dict[str, Any] = {"batch": size}
        for name, engine in engines.items():
            if not clock.allows(f"{name} at batch {size}"):
                continue
            engine.generate(prompts[:size], max_new_tokens=8, ignore_eos=True)
            wait_for(model.device)
            start = time.perf_counter()
            results = engine.generate(prompts[:size], max_new_tokens=options.max_new_tokens, ignore_eos=True)
            wait_for(model.device)
            seconds = time.perf_counter() - start
            row[f"{name}, tokens/s"] = round(sum(len(one.token_ids) for one in results) / seconds, 1)
            row[f"{name}, tokens/step"] = round(statistics.mean(one.tokens_per_step for one in results), 2)
        found.append(row)
    return found


# --- showing ---


def show(console: Console, title: str, rows: Rows) -> None:
    """A table; columns as they come."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in columns))
    console.print(table)


def main(options: Options) -> int:
    """Measures, prints, and returns the exit code."""
    console = Console(width=140)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        console.print("no CUDA device: nothing was measured")
        return 1
    quiet_transformers()
    clock = Clock(options.minutes)
    found: dict[str, Any] = {"machine": machine(torch.get_num_threads())}
    if options.device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(torch.device(options.device))
        console.print(found["gpu"])
    for title, part in (
        ("captured against ordinary steps, fp32", check),
        ("verification, Llama of 7B's shape, bf16", verification),
        (f"drafting 10 nodes, {options.model}", drafting),
        (f"decoding, {options.model}", decoding),
    ):
        if not clock.allows(title):
            continue
        found[part.__name__] = part(options, clock)
        show(console, title, found[part.__name__])
    if clock.left_out:
        console.print(f"left out, for time: {', '.join(clock.left_out)}")
    found["left_out"] = clock.left_out
    if options.json:
        options.json.write_text(json.dumps(found), encoding="utf-8")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
