"""``draftheads demo``: a comparison by ``bench`` in a time box, and an answer of the fastest head."""

from rich.console import Console
from rich.text import Text

from draftheads.bench.compare import compare_heads
from draftheads.bench.options import DemoOptions
from draftheads.bench.settings import BenchSettings
from draftheads.cli.bench import show
from draftheads.cli.progress_display import ProgressDisplay, error_console
from draftheads.cli.show import DRAFTED, check_json_path, quiet_transformers, write_json
from draftheads.data.records import own_prompts, prompts_in
from draftheads.errors import InvalidSettings


def run(options: DemoOptions) -> None:
    if not options.seconds > 0:
        raise InvalidSettings(f"seconds is {options.seconds:g}; it must be above 0")
    check_json_path(options.json)
    console = Console(highlight=False)
    quiet_transformers()
    with ProgressDisplay(error_console(), transient=True) as progress:
        comparison = compare_heads(
            options.model,
            options.heads,
            prompts_in(options.prompts or own_prompts("demo"))[: options.limit],
            settings=BenchSettings(trees=("defaults",), max_new_tokens=options.max_new_tokens),
            transformers=True,
            precision=options.precision,
            max_seconds=options.seconds,
            progress=progress,
        )
    if example := comparison.record["example"]:
        colours = Text.assemble("; draft tokens are ", ("green", DRAFTED)) if console.color_system else ""
        console.print(Text.assemble((example["question"], "bold"), f"   ({example['way']}", colours, ")\n"))
        pieces = ((text, DRAFTED if is_drafted else "") for text, is_drafted in example["pieces"])
        console.print(Text.assemble(*pieces), end="\n\n")
    show(console, comparison.rows)
    write_json(options.json, comparison.record)
