"""What the table of a comparison says, in sentences: the same on a terminal and on the page."""

from collections.abc import Iterable

from draftheads.bench.settings import LOADED
from draftheads.bench.table import Row, heads_only
from draftheads.utils.counts import counted


def speed_sentence(name: str, speedup: float, error: float) -> str:
    """The first sentence of every comparison: what is measured with a drafter as it is loaded.

    >>> speed_sentence("hydra", 1.5, 0.125)
    'With the defaults on this machine: 1.50 ± 0.12 × plain decoding (hydra).'
    """
    return f"With the defaults on this machine: {speedup:.2f} ± {error:.2f} × plain decoding ({name})."


def verdict(rows: Iterable[Row]) -> str:
    """One sentence on the fastest drafter, with its standard error."""
    if not (drafters := heads_only(rows)):
        return "There is no drafter to compare."
    best = max(drafters, key=lambda row: row.speedup)
    if best.settings.get("tree") == "defaults":
        return speed_sentence(best.name, best.speedup, best.speedup_error)
    facts = [best.tree]
    if not best.settings.get("temperature"):
        same = best.num_answers - best.num_different
        facts.append(f"with the same text in {same} of {counted(best.num_answers, 'answer')}")
    speed, end = f"{best.speedup:.2f} ± {best.speedup_error:.2f} ×", ", ".join(filter(None, facts))
    if best.speedup - best.speedup_error > 1:
        return f"{best.name} is fastest: {speed} plain decoding ({end})."
    clearly = "clearly " if best.speedup > 1 else ""
    start = f"No drafter is {clearly}faster than plain decoding"
    return f"{start}: the fastest, {best.name}, reaches {speed} its speed ({end})."


def remarks(rows: Iterable[Row]) -> list[str]:
    """Sentences on what limits the verdict."""
    rows = sorted(heads_only(rows), key=lambda row: -row.speedup)
    best, loaded = rows[0], [row for row in rows if row.settings.get("tree") in LOADED]
    near = (row for row in rows if best.speedup - row.speedup < best.speedup_error + row.speedup_error)
    close = list(dict.fromkeys(row.name for row in near if row.name != best.name))
    sentences = []
    if loaded:
        sentences.append("Defaults choose the size of each draft for this machine.")
    if close:
        sentences.append(f"Within the errors, {' and '.join(close)} can be as fast as {best.name}.")
    fixed = any(row.settings.get("num_nodes") and not row.tree.startswith("its own") for row in rows)
    if best.speedup - best.speedup_error <= 1 and fixed:
        sentences.append("Trees may be too large for this machine: try a smaller `--num-nodes`.")
    if slower := dict.fromkeys(row.name for row in loaded if row.speedup < 0.995):
        sentences.append(
            f"Slower than plain decoding here: {', '.join(slower)}. Try `--precision int8`, or measure "
            "trees on your own prompts with `draftheads tune`."
        )
    if any(row.num_different for row in rows):
        sentences.append("Texts can differ where rounding decides between equally probable tokens, in fp32 rarely.")
    if any(row.settings.get("acceptance") == "typical" for row in rows):
        measured = "see its quality beside its speed" if best.quality else "measure it: `--quality`"
        sentences.append(f"Acceptance typical changes the distribution of texts: {measured}.")
    return sentences
