"""Compares draft heads, and drafting without a head, on your own prompts.

python examples/compare_heads.py --model smollm2-135m --heads medusa hydra prompt-lookup --prompts questions.txt
"""

from pathlib import Path

import tyro

import draftheads
from draftheads.bench.settings import BenchSettings


def main(
    prompts: Path,
    model: str = "smollm2-135m",
    heads: tuple[str, ...] = ("medusa", "hydra"),
    num_nodes: int = 10,
    max_new_tokens: int = 128,
) -> None:
    texts = prompts.read_text(encoding="utf-8").splitlines()  # one prompt per line, at least three
    settings = BenchSettings(trees=("best",), num_nodes=(num_nodes,), max_new_tokens=max_new_tokens)
    for row in draftheads.compare_heads(model, heads, texts, settings=settings).rows:
        print(f"{row.name}: {row.tokens_per_step:.2f} tokens per step")


if __name__ == "__main__":
    tyro.cli(main)
