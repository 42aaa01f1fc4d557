"""How the next token is chosen from logits: per-row settings and pure functions on tensors.

The same functions serve plain and speculative decoding, so both obey the same settings. Randomness comes in as one
uniform number per row and token: the token at place j of an answer uses the j-th number of its row's seed, whoever
drafted it. Therefore a sampled answer does not depend on the drafter, the tree or the other rows.

B rows, V vocabulary. Order of processing as in transformers: penalties, temperature, top-k, top-p, min-p.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from draftheads.cpu.drafts import first_largest
from draftheads.settings import SamplingSettings
from draftheads.utils.transfer import to_device

_PART = 128  # tokens


@dataclass(frozen=True)
class RowSettings:
    """The settings of B rows as tensors."""

    vocab_size: int  # V
    temperature: Tensor  # (B,) float64; 0 is greedy
    filters: tuple["Filter", ...]  # the F filters that a row with a temperature asks for
    filter_values: Tensor  # (B, F) float64
    repetition_penalty: Tensor  # (B,) float32; 1 where off
    frequency_penalty: Tensor  # (B,) float32; 0 where off
    presence_penalty: Tensor  # (B,) float32; 0 where off
    epsilon: Tensor  # (B,) float64
    delta: Tensor  # (B,) float64
    typical: Tensor  # (B,) bool
    rejection: Tensor  # (B,) bool
    block: Tensor  # (B,) bool
    drawn: Tensor  # (S,) int64: the rows whose next token is drawn; that of greedy and typical rows is the likeliest
    any_sampled: bool  # these are known on the host, so that nothing is computed in vain
    any_penalty: bool  # of the three
    any_count_penalty: bool  # frequency or presence
    any_typical: bool
    all_typical: bool
    any_rejection: bool  # or block

    @classmethod
    def of(cls, settings: Sequence[SamplingSettings], *, vocab_size: int, device: torch.device) -> Self:
        """Gathers the settings of the rows, in order."""

        def column(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
            return to_device(values, device, dtype)

        # at temperature 0 the typical set is the most likely token: the exact rule gives the same and is cheaper
        rules = ["exact" if s.temperature == 0 else s.acceptance for s in settings]
        takes_best = [s.temperature == 0 or s.acceptance == "typical" for s in settings]
        filters = [f for f in FILTERS if any(s.temperature > 0 and f.value(s) != f.off for s in settings)]
        return cls(
            vocab_size=vocab_size,
            temperature=column([s.temperature for s in settings], torch.float64),
            filters=tuple(filters),
            filter_values=column([[f.value(s) for f in filters] for s in settings], torch.float64),
            repetition_penalty=column([s.repetition_penalty or 1.0 for s in settings], torch.float32),
            frequency_penalty=column([s.frequency_penalty for s in settings], torch.float32),
            presence_penalty=column([s.presence_penalty for s in settings], torch.float32),
            epsilon=column([s.typical_epsilon for s in settings], torch.float64),
            delta=column([s.typical_delta or s.typical_epsilon**0.5 for s in settings], torch.float64),
            typical=column([rule == "typical" for rule in rules], torch.bool),
            rejection=column([rule == "rejection" for rule in rules], torch.bool),
            block=column([rule == "block" for rule in rules], torch.bool),
            drawn=column([row for row, best in enumerate(takes_best) if not best], torch.int64),
            any_sampled=not all(takes_best),
            any_penalty=any(map(has_penalty, settings)),
            any_count_penalty=any(s.frequency_penalty or s.presence_penalty for s in settings),
            any_typical="typical" in rules,
            all_typical={*rules} == {"typical"},
            any_rejection="rejection" in rules or "block" in rules,
        )

    @cached_property
    def greedy(self) -> Tensor:
        """(B,) bool."""
        return self.temperature == 0.0

    @cached_property
    def of_drawn(self) -> Self:
        """The settings of the S rows whose next token is drawn."""
        return self.at(self.drawn)

    def at(self, rows: Tensor) -> Self:
        """The settings of some rows, (S,) indices, of which each may be there several times."""
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "drawn"}
        picked: dict[str, Any] = {name: part[rows] for name, part in columns.items() if isinstance(part, Tensor)}
        return replace(self, **picked, drawn=torch.arange(len(rows), device=rows.device))


class Filter(NamedTuple):
    """A sampling setting that leaves tokens out of the distribution."""

    name: str  # of the setting
    off: float  # the value that leaves none out; None in the setting counts as this
    leaves_out: Callable[[Tensor, Tensor], Tensor]  # scores (B, …, V), best first, and values (B, …, 1) -> which ones

    def value(self, settings: SamplingSettings) -> float:
        """Of the setting."""
        value = getattr(settings, self.name)
        return self.off if value is None else float(value)


def _outside_top_k(ordered: Tensor, top_k: Tensor) -> Tensor:
    """Ties with the k-th stay."""
    last = top_k.clamp(max=ordered.shape[-1]).long() - 1
    return ordered < ordered.gather(-1, last.expand(*ordered.shape[:-1], 1))


def _outside_top_p(ordered: Tensor, top_p: Tensor) -> Tensor:
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs  # mass of what is more likely
    outside = (before >= top_p) & (top_p < 1.0)
    outside[..., 0] = False
    return outside


FILTERS = (  # in the order in which they are applied
    Filter("top_k", torch.inf, _outside_top_k),
    Filter("top_p", 1.0, _outside_top_p),
    Filter("min_p", 0.0, lambda ordered, min_p: ordered < ordered[..., :1] + min_p.log()),
)


@dataclass(frozen=True)
class SeenTokens:
    """The tokens of texts, at which penalties look."""

    in_prompt: Tensor  # (B, …, V) bool
    in_answer: Tensor  # (B, …, V) int32: how often, the root included

    @classmethod
    def of(cls, texts: Sequence[tuple[list[int], list[int]]], *, vocab_size: int, device: torch.device) -> Self:
        """Of the prompts and the answers so far of B rows."""
        in_prompt = torch.zeros(len(texts), vocab_size, dtype=torch.bool)
        in_answer = torch.zeros(len(texts), vocab_size, dtype=torch.int32)
        for row, (prompt_ids, token_ids) in enumerate(texts):
            in_prompt[row, prompt_ids] = True
            for token in token_ids:
                in_answer[row, token] += 1
        return cls(to_device(in_prompt, device), to_device(in_answer, device))

    def __getitem__(self, index: tuple[Tensor, ...]) -> Self:
        return replace(self, in_prompt=self.in_prompt[index], in_answer=self.in_answer[index])

    def and_then(self, token_ids: Tensor, are_new: Tensor) -> Self:
        """With one more token (B,) in the answers of those rows (B,) bool."""
        counts = self.in_answer.scatter_add(1, token_ids[:, None], are_new[:, None].int())
        return replace(self, in_answer=counts)


def has_penalty(settings: SamplingSettings) -> bool:
    """Whether what is likely depends on the tokens of the text."""
    of_counts = settings.frequency_penalty or settings.presence_penalty
    return bool(of_counts) or settings.repetition_penalty not in (None, 1.0)


def penalised(logits: Tensor, rows: RowSettings, seen: SeenTokens | None) -> Tensor:
    """Logits (B, …, V) after the penalties, in fp32 at least, as in transformers and vLLM.

    ``seen`` is None where no row asks for a penalty, and then the logits do not change.
    """
    if not rows.any_penalty or seen is None:
        return logits
    penalty = per_row(rows.repetition_penalty, logits)  # in fp32: a product with bf16 logits is not rounded
    changed = torch.where(logits < 0, logits * penalty, logits / penalty)
    is_new = seen.in_answer > 0
    scores = torch.where(seen.in_prompt | is_new, changed, logits)
    if not rows.any_count_penalty:
        return scores
    scores = scores - per_row(rows.frequency_penalty, logits) * seen.in_answer
    return scores - per_row(rows.presence_penalty, logits) * is_new


def probabilities(scores: Tensor, rows: RowSettings, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The distribution that rows with a temperature sample from: penalised logits (B, …, V) -> (B, …, V) of the type.

    Greedy rows get the distribution at temperature 1; nothing reads it.
    """
    temperature = torch.where(rows.greedy, 1.0, rows.temperature)
    scaled = scores.to(dtype) / per_row(temperature, scores).to(dtype)
    if rows.filters:
        ordered, order = scaled.sort(-1, descending=True)
        for place, each in enumerate(rows.filters):
            out = each.leaves_out(ordered, per_row(rows.filter_values[:, place], scores))
            ordered = ordered.masked_fill(out, -torch.inf)
        scaled = torch.empty_like(scaled).scatter_(-1, order, ordered)
    return scaled.softmax(-1)


def choose(logits: Tensor, rows: RowSettings, seen: SeenTokens | None, uniforms: Tensor) -> Tensor:
    """The next token of every row: argmax for greedy and typical rows, else the draw by ``uniforms`` (B,).

    Args:
        logits: (B, V).
        rows: settings of the B rows.
        seen: (B, V), tokens in the text so far; only for penalties.
        uniforms: (B,) float64 in [0, 1).

    Returns:
        (B,) int64 token ids.
    """
    scores = penalised(logits, rows, seen)
    best = most_likely(scores)
    if not rows.any_sampled:
        return best
    drawn = rows.drawn
    if len(drawn) < len(scores):  # a distribution is expensive: none for rows that do not need it
        scores, rows, uniforms = scores[drawn], rows.of_drawn, uniforms[drawn]
    return best.index_copy(0, drawn, draw(probabilities(scores, rows), uniforms))


def most_likely(scores: Tensor) -> Tensor:
    """(…, V) -> (…): the first of the highest scores.

    Without the native library, a CPU's argmax uses no vector instructions, but amax does: first the part of the
    vocabulary, then the token in it.
    """
    if (best := first_largest(scores)) is not None:
        return best
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size % _PART or size < _PART**2:
        return scores.argmax(-1)
    parts = scores.unflatten(-1, (-1, _PART))
    part = parts.amax(-1).argmax(-1, keepdim=True)  # (…, 1)
    inside = parts.take_along_dim(part[..., None], -2)[..., 0, :].argmax(-1)
    in_parts: Tensor = part[..., 0] * _PART + inside
    return in_parts


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of tokens (…) by the model's logits (…, V), in float32.

    Returns:
        Those of the tokens (…), those of the ``num_top`` most likely tokens, best first (…, num_top), and their ids.
    """
    log_probs = logits.float().log_softmax(-1)
    top = log_probs.topk(min(num_top, log_probs.shape[-1]), -1)
    return log_probs.gather(-1, token_ids[..., None])[..., 0], top.values, top.indices


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse transform sampling: the token in whose stretch of [0, 1) the uniform number falls.

    >>> draw(torch.tensor([[0.5, 0.0, 0.5]]).double(), torch.tensor([0.5]).double()).tolist()
    [2]
    """
    cumulative = probs.cumsum(-1)  # (B, V)
    total = cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    last = (cumulative < total).sum(-1, keepdim=True)  # rounding must not step past the last possible token
    return torch.minimum(ids, last)[:, 0]


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Values (B,) of rows -> (B, 1, …), with as many dimensions as the other tensor has."""
    return values.reshape(-1, *(1 for _ in like.shape[1:]))
