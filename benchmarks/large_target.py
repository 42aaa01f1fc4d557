"""A head for a target that this machine cannot load: how much memory its training and tuning on stored states take.

    python benchmarks/large_target.py --size 30gb

A model with random weights is written shard by shard, and deleted at the end. So is a store of hidden states for random
texts: not the model's own, but such that its lm_head finds each next token likely. A process of its own trains a head
on them, another one tunes it. Of each the most resident memory is sampled: all of it, and without pages of files
(anonymous), which the system may drop at any time.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import torch
import tyro
from harness import machine, say, write_record
from random_model import CONFIGS, write_model
from transformers import LlamaConfig

from draftheads.data.features import claim, shard_path
from draftheads.data.texts import load_texts
from draftheads.models.fingerprint import Parts
from draftheads.models.model import TargetModel

_SIZES: dict[str, Any] = {
    # 15 billion weights in bf16; embedding and lm_head of Llama-2-13B's size, 0.33 GB each
    "30gb": LlamaConfig(
        hidden_size=5120, num_hidden_layers=54, num_attention_heads=40, num_key_value_heads=8, intermediate_size=13824,
        vocab_size=32000, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None,
    ),
    "1.1b": CONFIGS["1.1b"],
    "tiny": CONFIGS["tiny"],
}  # fmt: skip
_GB = 1e9
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Options:
    """What is measured."""

    size: Annotated[Literal["30gb", "1.1b", "tiny"], tyro.conf.arg(help="The target.")] = "30gb"
    num_texts: int = 24
    """Chats of about 100 tokens."""
    folder: Path = Path(tempfile.gettempdir())
    """Where all is written; as much room as the model takes, and 1 GB."""
    json: Path | None = None
    """Write everything there."""


class Memory(threading.Thread):
    """The most resident memory of a process: all, and without pages of files."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        self.process, self.resident, self.anonymous = process, 0, 0

    def run(self) -> None:
        """Samples until the process ends."""
        while self.process.poll() is None:
            try:
                found = psutil.Process(self.process.pid).memory_info()
            except psutil.NoSuchProcess:
                return
            self.resident = max(self.resident, found.rss)
            self.anonymous = max(self.anonymous, found.rss - found.shared)
            time.sleep(0.05)


def run(name: str, *arguments: str) -> dict[str, Any]:
    """Runs a command of draftheads, and returns what it took."""
    started = time.monotonic()
    with subprocess.Popen([sys.executable, "-m", "draftheads", name, *arguments]) as process:  # noqa: S603
        memory = Memory(process)
        memory.start()
        if process.wait():
            raise SystemExit(f"draftheads {name} failed")
        memory.join()
    took = {"seconds": round(time.monotonic() - started, 1)}
    took |= {"resident_gb": round(memory.resident / _GB, 2), "anonymous_gb": round(memory.anonymous / _GB, 2)}
    say(f"{name}: {took}")
    return {"command": name, **took}


@torch.inference_mode()
def write_states(model: Path, folder: Path, *, num_texts: int) -> None:
    """Chats, and a store of hidden states with a single shard."""
    generator = torch.Generator().manual_seed(0)
    target = TargetModel.load(model, dtype="bf16", parts=Parts(), chat_template=_TEMPLATE)
    letters, chats = "abcdefghijklmnopqrstuvwxyz ", folder / "chats.jsonl"
    with chats.open("w", encoding="utf-8") as file:
        for _ in range(num_texts):
            words = "".join(letters[i] for i in torch.randint(len(letters), (100,), generator=generator).tolist())
            said = [{"role": "user", "content": words[:20]}, {"role": "assistant", "content": words[20:]}]
            file.write(json.dumps({"messages": said}) + "\n")
    texts = load_texts(target, [chats], max_length=256, max_tokens=None)
    claim(target, texts, folder / "states")
    rows = target.weights.lm_head
    with shard_path(folder / "states", 0).open("wb") as shard:
        for text in texts:
            following = rows[torch.tensor(text.token_ids).roll(-1)].float()  # (T, D): near this row the token is likely
            noise = torch.randn(following.shape, generator=generator)
            states = following * (20 / following.norm(dim=-1, keepdim=True)) + noise
            shard.write(states.to(torch.bfloat16).view(torch.int16).numpy().tobytes())


def main(options: Options) -> None:
    """Writes the model, trains, tunes, and deletes all."""
    folder = Path(tempfile.mkdtemp(prefix="large-target-", dir=options.folder))
    try:
        say(f"writing a model of size {options.size} into {folder}")
        (folder / "model").mkdir()
        write_model(_SIZES[options.size], folder / "model")
        stored = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
        write_states(folder / "model", folder, num_texts=options.num_texts)
        model, head, states = str(folder / "model"), str(folder / "head"), ("--features", str(folder / "states"))
        (folder / "chat.jinja").write_text(_TEMPLATE, encoding="utf-8")
        template = ("--chat-template", str(folder / "chat.jinja"))
        sizes = (
            "--method",
            "medusa",
            "--num-heads",
            "2",
            "--draft-vocab-size",
            "64",
            "--epochs",
            "1",
            "--held-out",
            "0.3",
        )
        found = [run("train", "--model", model, *sizes, *states, *template, "--out", head)]
        found.append(run("tune", model, head, *states, "--out", str(folder / "tuned")))
        size = round(stored / _GB, 1)
        print(json.dumps({"model_gb": size, "commands": found}))
        write_record(options.json, machine(1), options, ["size", "num_texts"], model_gb=size, commands=found)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
