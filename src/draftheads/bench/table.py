"""The table of a comparison: a row for each way of decoding, the columns, and what it says in sentences.

To add a column: a field of :class:`Row`, a line in :func:`columns`, and where it is measured (``bench/compare.py``).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from draftheads.bench.settings import BenchSettings
from draftheads.bench.timing import Answers
from draftheads.utils.counts import counted, short_count
from draftheads.utils.estimates import quartiles, ratio_with_error

DEFAULTS = "× plain, defaults"  # heading of the speed of drafters as they are loaded …
DEFAULT_FIELDS = ("default_speedup", "default_speedup_error")  # … and the fields of a row
PARTS = ("drafting", "verification", "accept and rest")  # of a step
# acceptance rules at the temperature, and the fields of a row with tokens per step and one standard error
SAMPLED_FIELDS = {
    "exact": ("sampled_tokens_per_step", "sampled_error"),
    "typical": ("typical_tokens_per_step", "typical_error"),
    "rejection": ("rejection_tokens_per_step", "rejection_error"),
    "block": ("block_tokens_per_step", "block_error"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a way of decoding did over all prompts. Errors are one standard error. None: was not measured."""

    name: str
    num_parameters: int = 0  # of the drafter
    tree: str = ""  # the tree that is drafted, in words
    tokens_per_step: float
    tokens_per_step_error: float = 0.0
    over_first: float | None = None  # tokens per step over those of the first drafter in the table
    over_first_error: float | None = None
    tokens_per_second: float
    speedup: float  # over plain decoding: ratio of tokens per second
    speedup_error: float = 0.0
    default_speedup: float | None = None  # over plain decoding, of an engine as ``draftheads.load`` makes it
    default_speedup_error: float = 0.0
    speedup_quartiles: tuple[float, float] | None = None  # of the ratio prompt by prompt
    speedup_over_transformers: float | None = None
    draft_milliseconds: float = 0.0  # of a step
    verify_milliseconds: float = 0.0
    rest_milliseconds: float = 0.0
    step_milliseconds: float = 0.0
    predicted_tokens_per_step: float | None = None  # by the search for its tree, on other prompts
    sampled_tokens_per_step: float | None = None  # at the temperature, exact acceptance
    sampled_error: float | None = None
    typical_tokens_per_step: float | None = None  # the same, typical acceptance
    typical_error: float | None = None
    rejection_tokens_per_step: float | None = None  # drafts drawn on the static tree, rejection sampling
    rejection_error: float | None = None
    block_tokens_per_step: float | None = None  # a drawn chain, block verification
    block_error: float | None = None
    num_different: int = 0  # answers that are not the reference's
    worst_margin: float | None = None  # largest gap between the best logit and an emitted token's, re-scored in fp32
    num_tokens: int = 0  # of all timed answers
    num_drafted: int = 0  # accepted draft tokens
    num_copied: int = 0  # those of them that only a copy from the text brought

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds of the parts of a step, by name."""
        milliseconds = (self.draft_milliseconds, self.verify_milliseconds, self.rest_milliseconds)
        return dict(zip(PARTS, milliseconds, strict=True))


def timed_row(
    name: str, own: Sequence[Answers], plain: Sequence[Answers], stock: Sequence[Answers] | None = None
) -> Row:
    """The row of a way, from its own answers to each group of prompts, plain decoding's, and those of transformers."""
    speeds, of_plain, of_stock = ([answer.speed_share for answer in each or ()] for each in (own, plain, stock))
    speedup, speedup_error = ratio_with_error(speeds, of_plain)
    by_prompt = [ratio_with_error([a], [b])[0] for a, b in zip(speeds, of_plain, strict=True)]
    low, _, high = quartiles(by_prompt)
    per_step, per_step_error = ratio_with_error([share for answer in own for share in answer.step_shares])
    steps = max(1, sum(answer.num_timed_steps for answer in own))
    draft, verify, rest = (
        sum(getattr(answer, f"{part}_milliseconds") for answer in own) / steps for part in ("draft", "verify", "rest")
    )
    return Row(
        name=name,
        tokens_per_step=per_step,
        tokens_per_step_error=per_step_error,
        tokens_per_second=ratio_with_error(speeds)[0],
        speedup=speedup,
        speedup_error=speedup_error,
        speedup_quartiles=(low, high),
        speedup_over_transformers=ratio_with_error(speeds, of_stock)[0] if stock else None,
        draft_milliseconds=draft,
        verify_milliseconds=verify,
        rest_milliseconds=rest,
        step_milliseconds=draft + verify + rest,
        num_tokens=sum(answer.num_tokens for answer in own),
        num_drafted=sum(answer.num_drafted for answer in own),
        num_copied=sum(answer.num_copied for answer in own),
    )


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    heading: str
    cell: Callable[[Row], str]
    kind: str = "greedy"  # or "sampled" or "speed": terminals show a table for each


def columns(settings: BenchSettings, *, first: str, errors: bool = True) -> list[Column]:
    """All columns, the drafter's name first; with ``errors``, cells show one standard error.

    ``first`` is the name of the first drafter, that others' tokens per step are compared with.
    """

    def number(row: Row, field: str, error: str) -> str:
        value, deviation = getattr(row, field), getattr(row, error)
        if value is None:
            return ""
        return f"{value:.2f}" + (f" ± {deviation:.2f}" if errors and deviation is not None else "")

    shown = [
        Column("drafter", lambda row: row.name),
        Column("parameters", lambda row: short_count(row.num_parameters) if row.num_parameters else "none", "speed"),
        Column("tree", lambda row: row.tree),
        Column("tokens/step", partial(number, field="tokens_per_step", error="tokens_per_step_error")),
        Column(f"× {first}", partial(number, field="over_first", error="over_first_error")),
        Column("tokens/s", lambda row: f"{row.tokens_per_second:.1f}", "speed"),
        Column(DEFAULTS, partial(number, field=DEFAULT_FIELDS[0], error=DEFAULT_FIELDS[1]), "speed"),
        Column("× plain", partial(number, field="speedup", error="speedup_error"), "speed"),
        Column("draft ms/step", lambda row: f"{row.draft_milliseconds:.1f}", "speed"),
        Column("step ms", lambda row: f"{row.step_milliseconds:.1f}", "speed"),
    ]
    if settings.temperature:
        for acceptance, (field, error) in SAMPLED_FIELDS.items():
            heading = f"{acceptance} T={settings.temperature:g}"
            shown.append(Column(heading, partial(number, field=field, error=error), "sampled"))
    return shown


def _numbers(*values: float | None, form: str = ".2f") -> str:
    return "-".join("" if value is None else format(value, form) for value in values)


# of ways of decoding as users have them, beside transformers
SPEED_COLUMNS = [
    Column("method", lambda row: row.name),
    Column("tokens /s", lambda row: f"{row.tokens_per_second:.1f}"),
    Column("tokens /step", lambda row: f"{row.tokens_per_step:.2f}"),
    Column("speed-up (quartiles)", lambda row: f"{row.speedup:.2f} ({_numbers(*row.speedup_quartiles or ())})"),
    Column("×\N{NO-BREAK SPACE}trans- formers", lambda row: _numbers(row.speedup_over_transformers)),
    Column("same text", lambda row: "yes" if row.num_different == 0 else f"no ({row.num_different})"),
    Column("worst margin", lambda row: _numbers(row.worst_margin, form=".1g")),
]


def prompts_in_words(num_prompts: int, settings: BenchSettings) -> str:
    """On which prompts the columns are measured."""
    speeds = f"speeds on {min(num_prompts, settings.num_speed_prompts)}"
    greedy = f"Greedy answers to {'all ' * (num_prompts > 1)}{counted(num_prompts, 'prompt')}"
    if not settings.temperature:
        return f"{greedy}, {speeds}."
    return f"{greedy}, sampled ones to {min(num_prompts, settings.num_sampled_prompts)} of them, {speeds}."


def markdown(rows: Sequence[Row], settings: BenchSettings, num_prompts: int) -> Iterator[str]:
    """The lines of the table in Markdown."""
    shown = columns(settings, first=rows[0].name)
    yield f"| {' | '.join(column.heading for column in shown)} |"
    yield "|" + " --- |" * len(shown)
    for row in rows:
        yield f"| {' | '.join(column.cell(row) for column in shown)} |"
    yield ""
    yield f"{prompts_in_words(num_prompts, settings)} ± is one standard error."


# --- what the table says, in sentences: the same on a terminal and on the page ---


def speed_sentence(name: str, speedup: float, error: float, *, given: str = "the defaults") -> str:
    """The first sentence of every comparison: what is measured with a drafter as it is loaded.

    >>> speed_sentence("hydra", 1.5, 0.125)
    'With the defaults on this machine: 1.50 ± 0.12 × plain decoding (hydra).'
    """
    return f"With {given} on this machine: {speedup:.2f} ± {error:.2f} × plain decoding ({name})."


def fastest_with_defaults(rows: Iterable[Row]) -> Row | None:
    """The row of the drafter that is fastest as it is loaded; None if that was not measured."""
    measured = (row for row in rows if row.default_speedup is not None)
    return max(measured, key=lambda row: row.default_speedup or 0.0, default=None)


def defaults_sentence(rows: Iterable[Row]) -> str | None:
    """:func:`speed_sentence` of the drafter that is fastest as it is loaded; None if that was not measured."""
    best = fastest_with_defaults(rows)
    return None if best is None else speed_sentence(best.name, best.default_speedup or 0.0, best.default_speedup_error)


def verdict(rows: Iterable[Row], settings: BenchSettings, num_prompts: int) -> str:
    """One sentence on the drafter that is fastest with trees of one size, with its standard error."""
    trees = f"With trees of {counted(settings.num_nodes, 'node')}"
    best = max(rows, key=lambda row: row.speedup)
    speed = f"{best.speedup:.2f} ± {best.speedup_error:.2f} ×"
    same_text = f"with the same text in {num_prompts - best.num_different} of {counted(num_prompts, 'answer')}"
    if best.speedup - best.speedup_error > 1:
        return f"{trees}, {best.name} is fastest: {speed} plain decoding, {same_text}."
    clearly = "clearly " if best.speedup > 1 else ""
    return (
        f"{trees}, no drafter is {clearly}faster than plain decoding: the fastest, {best.name}, reaches {speed} its "
        f"speed, {same_text}."
    )


def remarks(rows: Iterable[Row], settings: BenchSettings) -> list[str]:
    """Sentences on what limits the verdict."""
    best, *others = sorted(rows, key=lambda row: -row.speedup)
    close = [row.name for row in others if best.speedup - row.speedup < best.speedup_error + row.speedup_error]
    sentences = []
    if any(row.default_speedup is not None for row in (best, *others)):
        sentences.append("Defaults choose the size of each draft for this machine.")
    if close:
        sentences.append(f"Within the errors, {' and '.join(close)} can be as fast as {best.name}.")
    if best.speedup - best.speedup_error <= 1:
        trees = f"Trees of {counted(settings.num_nodes, 'node')}"
        sentences.append(f"{trees} may be too large for this machine: try a smaller `--num-nodes`.")
    if any(row.num_different for row in (best, *others)):
        sentences.append("Texts can differ where rounding decides between equally probable tokens, in fp32 rarely.")
    return sentences
