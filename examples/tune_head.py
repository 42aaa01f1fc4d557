"""Measures a head's acceptance profile on your own prompts.

python examples/tune_head.py --model smollm2-135m --head hydra --prompts questions.txt --out tuned
"""

from pathlib import Path

import tyro

import draftheads


def main(prompts: Path, out: Path, model: str = "smollm2-135m", head: str = "hydra") -> None:
    texts = prompts.read_text(encoding="utf-8").splitlines()  # one prompt per line
    profile = draftheads.tune_head(model, head, texts, out=out).profile
    for nodes in (1, 4, 16):
        print(f"{nodes} nodes: {profile.static_tokens[nodes - 1]:.2f} tokens per step")
    engine = draftheads.load(model, head=head, tree=out)
    print(engine.generate(texts[:1], max_new_tokens=32)[0].text)


if __name__ == "__main__":
    tyro.cli(main)
