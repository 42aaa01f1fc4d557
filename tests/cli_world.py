"""A tiny model of letters with heads in a folder, and commands in a process of their own."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import draftheads
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.models.model import TargetModel
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from families import SMALL, VOCAB, tiny_head

LETTERS = "abcdefghijklmnop \n\té"
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
PROMPTS = ["a dog", "hello", "fog and ice", "black ice on a hill", "mom", "a bad lad", "peking", "old film"]
Run = Callable[..., Any]  # runs a command; gives what it writes: out and err
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def letters_tokenizer(letters: Sequence[str] = LETTERS) -> PreTrainedTokenizerFast:
    """A token for each of a few letters, with the ids that the tiny models' configurations speak of."""
    vocab = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_model(folder: Path, *, profile: AcceptanceProfile | None = None) -> Path:
    """A model of letters (``model``) and two heads for it (``medusa``, ``hydra``) in the folder."""
    torch.manual_seed(22)  # a seed whose answers have many letters
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": VOCAB, "max_position_embeddings": 512})).eval()
    model.lm_head.weight.data[: len(SPECIAL)] = 0  # letters only, and no end
    model.save_pretrained(folder / "model")
    letters_tokenizer().save_pretrained(str(folder / "model"))
    base = TargetModel.load(str(folder / "model"), dtype=torch.float32)
    for method in ("medusa", "hydra"):
        head = tiny_head(method, base)
        draftheads.save_head(head, folder / method, base=base, dtype=torch.float32, profile=profile)
    return folder


def conversation(engine: Engine, *questions: str, system: str = "", max_new_tokens: int = 12) -> list[GenerationResult]:
    """Answers, each after all turns before it."""
    messages = [{"role": "system", "content": system}] if system else []
    results: list[GenerationResult] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        results += engine.generate([messages], max_new_tokens=max_new_tokens)
        messages.append({"role": "assistant", "content": results[-1].text})
    return results


def run_process(arguments: list[str], folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "draftheads", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False, **options)


def slow_imports(code: str, *more: str) -> str:
    """Runs code after ``from draftheads.cli.main import main``; what it prints, and which slow packages it imports."""
    slow = {"numpy", "torch", "transformers", *more}
    lines = ["import sys", "from draftheads.cli.main import main", code, f"print(sorted({slow} & set(sys.modules)))"]
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout


def on_terminal() -> dict[str, str]:
    """The environment of a process on a terminal."""
    return {**os.environ, "COLUMNS": "100", "TERM": "xterm", "OMP_NUM_THREADS": "1"}


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r\n", "\n")
