"""Trains a Hydra head on chats, and uses it.

python examples/train_head.py --model ./my-model --data chats.jsonl --out my-head
"""

from pathlib import Path

import tyro

import draftheads


def main(data: Path, out: Path, model: str = "smollm2-135m", epochs: int = 4) -> None:
    report = draftheads.train_head(model=model, method="hydra", recipe="small", data=data, out=out, epochs=epochs)
    assert report is not None, "there is one process, so it has the report"
    print(f"accuracy of the first head on held-out texts: {report.top1[0]:.1%}")
    engine = draftheads.load(model, head=out)
    print(engine.generate(["Name three fruits."], max_new_tokens=32)[0].text)


if __name__ == "__main__":
    tyro.cli(main)
