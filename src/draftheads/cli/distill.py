"""``draftheads distill``: runs a distillation and shows how it goes."""

from rich.console import Console
from rich.table import Table

from draftheads.cli.config import keep_config
from draftheads.cli.show import ProgressDisplay, quiet_transformers
from draftheads.distill.conversation import Source
from draftheads.distill.endpoint import EndpointSource
from draftheads.distill.local import EngineSource
from draftheads.distill.options import NO_CHATS, DistillOptions
from draftheads.distill.run import Outcome, distill, manifest_path
from draftheads.errors import UnsupportedModel
from draftheads.loading import load
from draftheads.models.model_names import is_base_model
from draftheads.utils.progress import Progress

_MOST_REFUSED = 3  # are shown; the manifest has all


def run(options: DistillOptions) -> None:
    """Answers, then prints what came of it."""
    console = Console()
    if (
        options.num_self_talk
        and not (options.endpoint or options.chat_template or options.head)
        and is_base_model(options.model)
    ):
        raise UnsupportedModel(f"{options.model} {NO_CHATS}")
    quiet_transformers()
    with ProgressDisplay(console) as progress:
        outcome = distill(options, lambda: _source(options, progress), progress)
    keep_config(options, options.out.with_name(f"{options.out.name}.config.yaml"))
    if outcome.was_complete:
        console.print(f"{options.out} was complete already; nothing was left to do", soft_wrap=True)
    console.print(_table(outcome))
    for sentence in outcome.left_out:
        console.print(sentence, soft_wrap=True, markup=False)
    for prompt in outcome.refused[:_MOST_REFUSED]:
        console.print(f"refused: {prompt['source']}: {prompt['reason']}", soft_wrap=True, markup=False)
    console.print(f"wrote {options.out} and {manifest_path(options.out).name}", soft_wrap=True)


def _source(options: DistillOptions, progress: Progress) -> Source:
    if options.endpoint:
        return EndpointSource(options)
    progress.stage(f"loading {options.model}")
    engine = load(
        options.model,
        options.head,
        chat_template=options.chat_template,
        precision=options.precision,
        max_batch_size=options.batch_size,
    )
    return EngineSource(engine, options)


def _table(outcome: Outcome) -> Table:
    """What came of a run; counts of nothing are left out."""
    counts = outcome.counts
    rows = {
        "conversations": counts["records"],
        "answers": counts["answers"],
        "cut off by --max-new-tokens": counts["unfinished"],
        "shortened: the next turn was too long or refused, or follows a call": counts["shortened"],
        "duplicate prompts left out": outcome.survey.num_duplicates,
        "self-talk left out: its question was asked before": counts["repeated"],
        "prompts left out: longer than the model allows": counts["too_long"],
        "prompts left out: refused by the server": counts["refused"],
        "self-talk left out: its question was empty or too long": counts["no_question"],
        "tokens": counts["tokens"],
    }
    table = Table("", "number")
    table.columns[1].justify = "right"
    for what, number in rows.items():
        if number or what == "conversations":
            table.add_row(what, f"{number:,}")
    table.add_row("tokens/s", f"{1e3 * counts['tokens'] / max(1, counts['milliseconds']):,.1f}")
    if counts["steps"]:
        table.add_row("tokens/step", f"{(counts['tokens'] - counts['generations']) / counts['steps']:.2f}")
    return table
