"""What a comparison says, in sentences: the same on a terminal and on the page."""

from collections.abc import Iterable

from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import Row
from draftheads.counts import counted


def verdict(rows: Iterable[Row], num_prompts: int) -> str:
    """One sentence on the fastest drafter, with its standard error."""
    best = max(rows, key=lambda row: row.speedup)
    speed = f"{best.speedup:.2f} ± {best.speedup_error:.2f} ×"
    same_text = f"with the same text in {num_prompts - best.num_different} of {counted(num_prompts, 'answer')}"
    if best.speedup - best.speedup_error > 1:
        return f"{best.name} is fastest: {speed} plain decoding, {same_text}."
    clearly = "clearly " if best.speedup > 1 else ""
    return (
        f"No drafter is {clearly}faster than plain decoding: the fastest, {best.name}, reaches {speed} its speed, "
        f"{same_text}."
    )


def remarks(rows: Iterable[Row], settings: BenchSettings) -> list[str]:
    """Sentences on what limits the verdict."""
    best, *others = sorted(rows, key=lambda row: -row.speedup)
    close = [row.name for row in others if best.speedup - row.speedup < best.speedup_error + row.speedup_error]
    found = []
    if close:
        found.append(f"Within the errors, {' and '.join(close)} can be as fast as {best.name}.")
    if best.speedup - best.speedup_error <= 1:
        trees = f"Trees of {counted(settings.num_nodes, 'node')}"
        found.append(f"{trees} may be too large for this machine: try a smaller `--num-nodes`.")
    if any(row.num_different for row in (best, *others)):
        found.append("Texts can differ where rounding decides between equally probable tokens, in fp32 rarely.")
    return found
