"""``draftheads tune``: measures how many tokens a head's trees gain on the user's prompts, and shows it."""

import json
from typing import Any

from rich.console import Console

from draftheads.bench.timing import over_plain
from draftheads.bench.verdict import speed_sentence
from draftheads.checkpoints.registry import find_head
from draftheads.cli.show import ProgressDisplay, quiet_transformers, simple_table, write_page
from draftheads.data.records import own_prompts, prompts_in
from draftheads.search.replay import encoded
from draftheads.search.settings import TuneOptions
from draftheads.search.tune import RECORD, tune_head
from draftheads.speculation.acceptance_profile import PROFILE_FILE, AcceptanceProfile
from draftheads.utils.files import write_atomic

_SHOWN = (1, 2, 4, 8, 10, 16, 32, 64)


def run(options: TuneOptions) -> None:
    console = Console(highlight=False)
    quiet_transformers()
    find_head(options.head, options.model)  # raises before the prompts are read
    prompts = prompts_in(options.prompts or own_prompts("calibration"))
    with ProgressDisplay(console) as progress:
        try:
            tuning = tune_head(
                options.model,
                options.head,
                prompts,
                out=options.out,
                settings=options.settings,
                **options.load.given(),
                progress=progress,
            )
            progress.stage("timing the defaults and plain decoding in turns")
            asked = encoded(tuning.engine.model, prompts, options.settings)
            speedup, error = over_plain({options.head: tuning.engine}, asked)[options.head]
        except KeyboardInterrupt:
            console.print("stopped; the same command continues from here")
            raise
    record = {**tuning.record, "defaults": {"speedup": speedup, "error": error}}
    write_atomic(tuning.folder / RECORD, json.dumps(record).encode())
    console.print(speed_sentence(options.head, speedup, error), end="\n\n", markup=False)
    _show(console, tuning.profile, record["batches"])
    hint = "" if options.out is None else f"; to use it: `--head {options.head} --tree {tuning.folder}`"
    console.print(f"wrote {tuning.folder / PROFILE_FILE}{hint}", soft_wrap=True)
    write_page(console, tuning.folder, "tune")


def _show(console: Console, profile: AcceptanceProfile, batches: list[dict[str, Any]]) -> None:
    """Tokens per step by nodes, and the fastest trees by rows."""
    kinds = (profile.static_tokens, profile.dynamic_tokens)
    gains = {
        nodes: [f"{tokens[nodes - 1]:.2f}" if nodes <= len(tokens) else "" for tokens in kinds] for nodes in _SHOWN
    }
    lines = [[str(nodes), *cells] for nodes, cells in gains.items() if any(cells)]
    console.print(simple_table(("nodes", "static, tokens/step", "growing, tokens/step"), lines))
    lines = []
    for batch in batches:
        kind = "no draft" if batch["kind"] == "none" else batch["kind"]
        speeds = (f"{batch['tokens_per_second']:.1f}", f"{batch['speedup']:.2f}")
        lines.append([str(batch["batch_size"]), kind, str(batch["num_nodes"]), *speeds])
    console.print(simple_table(("rows", "fastest here", "nodes", "tokens/s, predicted", "over plain"), lines))
