"""What a comparison says, in sentences: the same on a terminal and on the page."""

from collections.abc import Iterable

from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import Row
from draftheads.utils.counts import counted


def speed_sentence(name: str, speedup: float, error: float, *, given: str = "the defaults") -> str:
    """The first sentence of every comparison: what is measured with a drafter as it is loaded.

    >>> speed_sentence("hydra", 1.5, 0.125)
    'With the defaults on this machine: 1.50 ± 0.12 × plain decoding (hydra).'
    """
    return f"With {given} on this machine: {speedup:.2f} ± {error:.2f} × plain decoding ({name})."


def fastest_with_defaults(rows: Iterable[Row]) -> Row | None:
    """The row of the drafter that is fastest as it is loaded; None if that was not measured."""
    return max((row for row in rows if row.default_speedup is not None), key=_default_speedup, default=None)


def defaults_sentence(rows: Iterable[Row]) -> str | None:
    """:func:`speed_sentence` of the drafter that is fastest as it is loaded; None if that was not measured."""
    best = fastest_with_defaults(rows)
    return None if best is None else speed_sentence(best.name, _default_speedup(best), best.default_speedup_error)


def _default_speedup(row: Row) -> float:
    return row.default_speedup or 0.0


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
    found = []
    if any(row.default_speedup is not None for row in (best, *others)):
        found.append("Defaults choose the size of each draft for this machine.")
    if close:
        found.append(f"Within the errors, {' and '.join(close)} can be as fast as {best.name}.")
    if best.speedup - best.speedup_error <= 1:
        trees = f"Trees of {counted(settings.num_nodes, 'node')}"
        found.append(f"{trees} may be too large for this machine: try a smaller `--num-nodes`.")
    if any(row.num_different for row in (best, *others)):
        found.append("Texts can differ where rounding decides between equally probable tokens, in fp32 rarely.")
    return found
