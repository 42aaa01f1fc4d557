"""Two answers to the same prompt: where they differ first, and whether that is a near-tie or a wrong text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftheads_audit.server import Answer, Outcome, Place

_ROUNDING = 0.01  # nats, by which the log-probability of a server's chosen token may be off

Kind = Literal["equal", "near-tie", "wrong", "reference-wrong", "unscored", "failed"]


@dataclass(frozen=True)
class Score:
    """How much less likely the token of an answer is than the one of the reference, where they differ first."""

    gap: float | None  # nats; negative if it is the more likely one; None if it cannot be known
    is_least: bool = False  # the gap is at least so large
    reason: str = ""  # why there is no gap


Scorer = Callable[[int, Answer, Answer], Score]  # of the prompt's number, the answer and its reference


@dataclass(frozen=True)
class Comparison:
    """An answer beside its reference."""

    index: int  # of the prompt
    kind: Kind
    place: int = 0  # characters that both have in common
    num_characters: int = 0  # of the reference
    answer: str = ""
    reference: str = ""
    gap: float | None = None
    is_least: bool = False
    reason: str = ""  # of a failure, or why a difference could not be scored


def compare(
    index: int, answer: Outcome, reference: Outcome, scorer: Scorer, *, tolerance: float, max_tokens: int
) -> Comparison:
    """The comparison of the answers to one prompt. A gap of at most ``tolerance`` nats is a near-tie."""
    if isinstance(answer, str):
        return Comparison(index, "failed", reason=answer)
    if isinstance(reference, str):
        return Comparison(index, "failed", reason=f"the reference: {reference}")
    texts = (answer.text, reference.text)
    if are_equal(answer, reference, max_tokens=max_tokens):
        return Comparison(index, "equal", min(map(len, texts)), len(texts[1]), *texts)
    score = scorer(index, answer, reference)
    kind, place = kind_of(score, tolerance), common_length(*texts)
    return Comparison(index, kind, place, len(texts[1]), *texts, score.gap, score.is_least, score.reason)


def kind_of(score: Score, tolerance: float) -> Kind:
    """What a difference of such a gap is.

    >>> [kind_of(Score(gap), 0.25) for gap in (0.1, -0.1, 0.3, -0.3, None)]
    ['near-tie', 'near-tie', 'wrong', 'reference-wrong', 'unscored']
    """
    if score.gap is not None and score.gap > tolerance:
        return "wrong"
    if score.gap is None or score.is_least:
        return "unscored"
    return "near-tie" if score.gap >= -tolerance else "reference-wrong"


def are_equal(answer: Answer, reference: Answer, *, max_tokens: int) -> bool:
    """Whether the texts are equal as far as both go: servers count the tokens at which they cut a text differently.

    The shorter of two different texts must have been cut at ``max_tokens``, or one token before.
    """
    short, long = sorted((answer, reference), key=lambda one: len(one.text))
    if short.text == long.text:
        return True
    was_due = short.num_tokens is None or short.num_tokens >= max_tokens - 1
    return short.is_cut and was_due and long.text.startswith(short.text.rstrip("\ufffd"))  # half a character


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Characters or tokens that two texts have in common at their beginning.

    >>> common_length("the cat", "the dog"), common_length("a", "ab")
    (4, 1)
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def gap_by_logprobs(places: Sequence[Place], answer: str, reference: str, *, is_greedy: bool = False) -> Score:
    """The gap by the log-probabilities of the reference's tokens, and of the most likely ones beside them.

    The texts part at the first token of the reference that the answer does not have; or before, where another token
    leads beyond the common part, such as `` cats`` beside `` cat``.
    ``is_greedy`` refuses a reference that is not the most likely token; under a grammar it need not be.

    >>> places = [Place(b"the", -0.1, {}), Place(b" cat", -0.5, {b" cat": -0.5, b" dog": -0.75})]
    >>> gap_by_logprobs(places, "the dog sat", "the cat")
    Score(gap=0.25, is_least=False, reason='')
    """
    ours, theirs = answer.encode(errors="replace"), reference.encode(errors="replace")
    if places and places[0].token.startswith(b" ") and not theirs.startswith(b" "):
        ours, theirs = b" " + ours, b" " + theirs  # the first space of a text is left out by some tokenizers
    start, gaps, last = 0, list[float](), Place(b"", 0.0, {})
    for place in places:
        if not theirs.startswith(place.token, start):
            return Score(None, reason="the tokens with log-probabilities are of another text than the reference")
        last, has_parted = place, not ours.startswith(place.token, start)
        others = [token for token in place.tops if token and ours.startswith(token, start)]
        gaps += [place.logprob - place.tops[one] for one in others if has_parted or not theirs.startswith(one, start)]
        if has_parted:
            break
        start += len(place.token)
    is_end = start == len(ours)
    if is_end and last.end is not None:
        gaps.append(last.logprob - last.end)
    if is_greedy and last.tops and max(last.tops.values()) > last.logprob + _ROUNDING:
        return Score(None, reason="the reference is not its server's most likely token: is a penalty the default?")
    if gaps:
        return Score(min(gaps, key=abs))
    if is_end or start == len(theirs):
        return Score(None, reason="one of the texts ended, and its server does not tell how likely that was")
    if not last.tops:
        return Score(None, reason="the reference's server gives no top log-probabilities")
    return Score(last.logprob - min(last.tops.values()), is_least=True, reason="the token is not among the top ones")
