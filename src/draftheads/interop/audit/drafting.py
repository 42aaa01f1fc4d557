"""How many draft tokens a server accepted, as far as it tells: in its answers, or by its metrics.

* draftheads: ``usage.draft`` of each answer, with the drafted and accepted tokens of each depth;
* llama.cpp: ``timings.draft_n`` and ``timings.draft_n_accepted`` of each answer;
* vLLM: counters of ``/metrics``; SGLang: a gauge of ``/metrics``. They count other clients' requests, too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_VLLM = "vllm:spec_decode_num_"
_DRAFTS, _DRAFTED, _ACCEPTED = (f"{_VLLM}{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
_SGLANG = "sglang:spec_accept_length"


@dataclass(frozen=True)
class DraftCounts:
    """Of one answer, or of several."""

    steps: int  # passes of the model after the prompt was read
    tokens: int  # that these steps gave
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Drafting:
    """What drafting did for some answers; None where the server does not tell."""

    tokens_per_step: float | None
    accepted_share: float | None  # of the draft tokens


def counts_of(body: Mapping[str, Any]) -> DraftCounts | None:
    """The counts in the JSON of an answer; None where there are none, or not in a form that is known."""
    usage, timings = body.get("usage") or {}, body.get("timings") or {}
    try:
        if draft := usage.get("draft"):
            steps = int(draft["steps"])
            drafted, accepted = sum(draft["drafted_by_depth"]), sum(draft["accepted_by_depth"])
            return DraftCounts(steps, round(steps * draft["tokens_per_step"]), drafted, accepted)
        if "draft_n" in timings:
            accepted, tokens = int(timings["draft_n_accepted"]), int(timings["predicted_n"])
            return DraftCounts(tokens - accepted, tokens, int(timings["draft_n"]), accepted)
    except (LookupError, TypeError, ValueError, AttributeError):
        pass
    return None


def drafting_in(counts: Iterable[DraftCounts | None]) -> Drafting | None:
    """Of all answers that have counts; None if none has."""
    known = [one for one in counts if one is not None]
    if not known:
        return None
    steps, drafted = sum(one.steps for one in known), sum(one.drafted for one in known)
    return Drafting(
        sum(one.tokens for one in known) / steps if steps else None,
        sum(one.accepted for one in known) / drafted if drafted else None,
    )


def drafting_between(before: Mapping[str, float], after: Mapping[str, float]) -> Drafting | None:
    """Of what happened between two readings of a server's metrics; None if they do not tell.

    >>> before = dict.fromkeys([_DRAFTS, _DRAFTED, _ACCEPTED], 0.0)
    >>> drafting_between(before, {_DRAFTS: 10.0, _DRAFTED: 40.0, _ACCEPTED: 12.0})
    Drafting(tokens_per_step=2.2, accepted_share=0.3)
    """
    if _DRAFTS in after:
        drafts, drafted, accepted = (
            after.get(name, 0.0) - before.get(name, 0.0) for name in (_DRAFTS, _DRAFTED, _ACCEPTED)
        )
        if drafts <= 0 or drafted <= 0:
            return None
        return Drafting(1.0 + accepted / drafts, accepted / drafted)
    length = after.get(_SGLANG)
    return Drafting(length, None) if length else None


def read_metrics(text: str) -> dict[str, float]:
    r"""The values of Prometheus's text format by name; those of a name with several labels are added up.

    >>> read_metrics('# HELP a b\na{x="1"} 2\na{x="2"} 3.5\nb 1\n')
    {'a': 5.5, 'b': 1.0}
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        name, _, number = line.rpartition(" ")
        if line.startswith("#") or not name:
            continue
        try:
            value = float(number)
        except ValueError:
            continue
        name = name.partition("{")[0]
        values[name] = values.get(name, 0.0) + value
    return values
