"""``draftheads distill``: runs a distillation and shows how it goes."""

from rich.console import Console
from rich.table import Table

from draftheads.cli.config import keep_config
from draftheads.cli.progress_display import ProgressDisplay
from draftheads.cli.show import quiet_transformers
from draftheads.distill.conversation import Source
from draftheads.distill.endpoint import EndpointSource
from draftheads.distill.journal import manifest_path
from draftheads.distill.local import EngineSource
from draftheads.distill.options import NO_CHATS, DistillOptions
from draftheads.distill.run import Outcome, distill
from draftheads.errors import UnsupportedModel
from draftheads.loading import load
from draftheads.models.model_names import is_base_model
from draftheads.utils.progress import Progress

_MOST_REFUSED = 3  # are shown; the manifest has all


def run(options: DistillOptions) -> None:
    """Answers, then prints what came of it."""
    console = Console()
    needs_chats = options.num_self_talk or options.turns
    if needs_chats and not (options.endpoint or options.chat_template or options.head) and is_base_model(options.model):
        raise UnsupportedModel(f"{options.model} {NO_CHATS}")
    quiet_transformers()
    with ProgressDisplay(console) as progress:
        outcome = distill(options, lambda: _source(options, progress), progress)
    keep_config(options, options.out.with_suffix(".yaml"))
    if outcome.was_complete:
        console.print(f"{options.out} was complete already; nothing was left to do", soft_wrap=True)
    console.print(_table(outcome))
    for prompt in outcome.refused[:_MOST_REFUSED]:
        console.print(f"refused: {prompt['source']}: {prompt['reason']}", soft_wrap=True, markup=False)
    console.print(f"wrote {options.out} and {manifest_path(options.out).name}", soft_wrap=True)


def _source(options: DistillOptions, progress: Progress) -> Source:
    if options.endpoint is not None:
        return EndpointSource(options)
    progress.stage(f"loading {options.model}")
    engine = load(
        options.model,
        options.head,
        chat_template=options.chat_template,
        tree=options.tree,
        precision=options.precision,
        device=options.device,
        four_bit=options.four_bit,
        max_batch_size=options.batch_size,
    )
    return EngineSource(engine, options)


def _table(outcome: Outcome) -> Table:
    """What came of a run; counts of nothing are left out."""
    counts, survey = outcome.counts, outcome.survey
    rows = {
        "conversations": counts.num_records,
        "answers": counts.num_answers,
        "cut off by --max-new-tokens": counts.num_unfinished,
        "shortened: the next turn was too long, refused or empty, or follows a call": counts.num_shortened,
        "duplicate prompts left out": survey.num_duplicates,
        "self-talk left out: its questions were asked before": counts.num_repeated,
        "prompts left out: longer than the model allows": counts.num_too_long,
        "prompts left out: refused by the server": counts.num_refused,
        "self-talk left out: its first question was empty or too long": counts.num_no_question,
        "tokens": counts.num_tokens,
    }
    table = Table("", "number")
    table.columns[1].justify = "right"
    for what, number in rows.items():
        if number or what == "conversations":
            table.add_row(what, f"{number:,}")
    table.add_row("tokens/s", f"{counts.tokens_per_second:,.1f}")
    if counts.num_steps:
        table.add_row("tokens/step", f"{counts.tokens_per_step:.2f}")
    return table
