"""An answer to one request, whoever gave it."""

from dataclasses import dataclass

from draftheads.interop.audit.drafting import DraftCounts


@dataclass(frozen=True)
class Answer:
    """A text and what is known about it."""

    text: str
    is_cut: bool  # it ended because it has as many tokens as were asked for
    num_tokens: int | None = None  # None where the server does not count them
    num_prompt_tokens: int | None = None
    seconds: float = 0.0
    draft: DraftCounts | None = None
    token_ids: tuple[int, ...] | None = None  # of the text, where they are known; some servers can send them
    is_split: bool = False  # the server took parts out of the text, such as reasoning: its tokens are not known


@dataclass(frozen=True)
class Failure:
    """A request without an answer."""

    problem: str


Outcome = Answer | Failure


@dataclass(frozen=True)
class Place:
    """One token of an answer with log-probabilities."""

    token: bytes
    logprob: float
    tops: dict[bytes, float]  # log-probabilities of the most likely tokens there
    end: float | None = None  # that of the end of the text there, where it is known
