"""``draftheads tune``: measures how many tokens a head's trees gain on the user's prompts, and shows it."""

import json

from rich.console import Console

from draftheads.bench.timing import over_plain
from draftheads.checkpoints.registry import find_head
from draftheads.cli.show import ProgressDisplay, quiet_transformers, write_page
from draftheads.data.records import own_prompts, prompts_in
from draftheads.search.replay import encoded
from draftheads.search.settings import TuneOptions
from draftheads.search.tune import RECORD, tune_head
from draftheads.speculation.acceptance_profile import PROFILE_FILE
from draftheads.utils.files import write_atomic


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
    write_page(console, tuning.folder, "tune", show=True)
    hint = "" if options.out is None else f"; to use it: `--head {options.head} --tree {tuning.folder}`"
    console.print(f"wrote {tuning.folder / PROFILE_FILE}{hint}", soft_wrap=True)
