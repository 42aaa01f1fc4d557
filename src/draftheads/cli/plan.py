"""``draftheads plan``: how many tokens another engine should draft."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class PlanOptions:
    """Find how many tokens another engine should draft at each batch size, in place of a search by trial.

    A head's acceptance profile says what a chain of draft tokens gives; your own times in that engine say what it
    costs.
    """

    head: tyro.conf.Positional[str]
    """A head. A name, a folder or a Hugging Face id; `draftheads tune` measures its acceptance on your prompts."""
    costs: Path
    """A CSV file of times. Its columns are batch, draft_tokens and milliseconds: of a step in that engine, drafting
    included, for some batch sizes, with 0 draft tokens and with a few."""
    model: str = "smollm2-135m"
    """The model of the head. A name, a folder or a Hugging Face id."""


def run(options: PlanOptions) -> None:
    """Prints a table, and what engines are told."""
    from draftheads.checkpoints.profile_store import find_profile  # noqa: PLC0415 - slow to import
    from draftheads.errors import SpeedWarning  # noqa: PLC0415
    from draftheads.interop.plan import for_vllm, plan, read_costs  # noqa: PLC0415

    profile = find_profile(options.head, options.model, profile="auto")
    if not profile.num_texts:
        warnings.warn(
            "nobody has measured this head's acceptance: half of the draft tokens are assumed to be accepted at each "
            f"depth; measure it: draftheads tune --model {options.model} --head {options.head} --prompts FILE",
            SpeedWarning,
            stacklevel=2,
        )
    choices = plan(profile, read_costs(options.costs))
    table = Table("batch", "draft tokens", "tokens / step", "speed-up")
    for choice in choices:
        row = (choice.batch, choice.draft_tokens, f"{choice.tokens_per_step:.2f}", f"{choice.speed_up:.2f}")
        table.add_row(*map(str, row))
    Console().print(table)
    most = max(choice.draft_tokens for choice in choices)
    if not most:
        print("plain decoding is the fastest everywhere: do not use the head in that engine")
        return
    given = {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": for_vllm(choices)}
    print(f"vLLM: in --speculative-config {json.dumps(given)[1:-1]}")
    first = choices[0]
    print(
        f"SGLang: --speculative-num-steps {first.draft_tokens} --speculative-eagle-topk 1  # batch size {first.batch}"
    )
    print(f"llama.cpp: --spec-draft-n-max {first.draft_tokens}  # batch size {first.batch}")
