"""What the tests of distill share: tiny prompts, and runs of the tiny chat model."""

import json
from pathlib import Path
from typing import Any

from draftheads.decode.engine import Engine
from draftheads.distill.endpoint import EndpointSource
from draftheads.distill.local import EngineSource
from draftheads.distill.options import DistillOptions
from draftheads.distill.run import Outcome, distill, manifest_path
from draftheads.models.model import TargetModel
from draftheads.speculation.drafter import Drafter
from fake_openai import FakeServer
from fake_progress import FakeProgress
from training_world import chat

# prompts of one word, two turns, a system's word, and other people's answers, which do not count
RECORDS: list[dict[str, Any]] = [
    *({"prompt": f"w{i}"} for i in range(12)),
    {"turns": ["w1 w2", "w3", "w4 w5"]},
    {"messages": [{"role": "system", "content": "w40"}, {"role": "user", "content": "w1"}]},
    {"messages": chat("w7", "never", "w8 w9")["messages"]},
    *({"prompt": f"w{i} w{i + 1}"} for i in range(20, 30)),
]


def write_prompts(path: Path, records: list[dict[str, Any]] | None = None) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in (RECORDS if records is None else records)))
    return path


def options(folder: Path, **changes: Any) -> DistillOptions:
    """Of a small run on FOLDER/prompts.jsonl, which is written unless prompts are given."""
    if "prompts" not in changes and not (folder / "prompts.jsonl").exists():
        write_prompts(folder / "prompts.jsonl")
    files = {"out": folder / "out.jsonl", "prompts": (folder / "prompts.jsonl",)}
    return DistillOptions(**{**files, "max_new_tokens": 12, "batch_size": 4, "temperature": (0.0, 1.0), **changes})


def run(
    target: TargetModel, chosen: DistillOptions, progress: FakeProgress | None = None, drafter: Drafter | None = None
) -> Outcome:
    def source() -> EngineSource:
        return EngineSource(Engine(target, drafter, max_batch_size=chosen.batch_size), chosen)

    return distill(chosen, source, progress or FakeProgress())


def remote(folder: Path, *servers: FakeServer, **changes: Any) -> DistillOptions:
    """Of a run that asks servers."""
    addresses = tuple(f"{server.url}/v1" for server in servers)
    return options(folder, **{"endpoint": addresses, "model": "parrot", **changes})


def run_remote(chosen: DistillOptions, progress: FakeProgress | None = None) -> Outcome:
    return distill(chosen, lambda: EndpointSource(chosen), progress or FakeProgress())


def records(chosen: DistillOptions) -> list[dict[str, Any]]:
    return [json.loads(line) for line in chosen.out.read_text(encoding="utf-8").splitlines()]


def manifest(chosen: DistillOptions) -> dict[str, Any]:
    return json.loads(manifest_path(chosen.out).read_text(encoding="utf-8"))
