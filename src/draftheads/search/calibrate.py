"""How a head's draft tokens rank on recorded answers, and a fit of the confidence in them.

A head that reads the draft tokens above a node reads the true text here: its logits are those of a step in which all
draft tokens above are right. So the ranks of several heads are joint ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search.tree_search import NEVER
from draftheads.settings import SamplingSettings
from draftheads.speculation.draft import Context
from draftheads.speculation.sampling import RowSettings, probabilities
from draftheads.speculation.shapes import BestFirst

# candidates for the number that a head's logits are divided by, in steps of 6 %
DIVISORS = torch.logspace(-0.4, 0.6, 41, base=10.0, dtype=torch.float64)
_NUM_BINS = 12  # of the head's probability, for its reliability
_CHUNK = 256  # positions whose logits are held at once


@dataclass(frozen=True)
class Answer:
    """A prompt and the model's answer to it."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Observation:
    """A head along one answer of m tokens; at token j, head i drafts token j+1+i."""

    ranks: Tensor  # (m, K) int64: rank of the true token; R is a miss, or the answer has ended
    probs: Tensor  # (m, K, R) float32: the target's probability of each draft token; 1 or 0 where the answer is greedy
    top_logits: Tensor  # (m, K, R) float32: the head's logits of its draft tokens
    log_norms: Tensor  # (m, K, len(DIVISORS)) float32: log Σ exp(logits / divisor)

    @property
    def complete(self) -> Tensor:
        """(m,) bool: whether there is a true token for every head."""
        length, heads = self.ranks.shape
        return torch.arange(length) < length - heads

    def first(self, depth: int) -> Self:
        return replace(self, **{name: part[:, :depth] for name, part in vars(self).items()})


@torch.inference_mode()
def observe(
    head: DraftHead, target: TargetModel, answer: Answer, *, top_k: int, temperature: float
) -> tuple[Observation, Tensor]:
    """Reads an answer once with the target, and computes the head's R = ``top_k`` draft tokens at each of its tokens.

    The head is bound to the target, which decoded the answer at that temperature.

    Returns:
        The observation, on the CPU, and the hidden states (m, D or n·D) before each token: the input of a step whose
        root is that token.
    """
    start, length, heads = len(answer.prompt_ids), len(answer.token_ids), head.config.num_heads
    text = torch.tensor([answer.prompt_ids + answer.token_ids], device=target.device)
    hidden, last = head.split(target.hidden_states(text, head.hidden_layers))  # (1, T, D or n·D), (1, T, D)
    features = head(hidden.to(head.dtype), text)[:, 0, start - 1 : start - 1 + length]  # (K, m, D)
    after = None  # (m, V): at j the distribution that the target samples from behind token j
    if temperature > 0:
        settings = [SamplingSettings(temperature=temperature)] * length
        rows = RowSettings.of(settings, vocab_size=target.vocab_size, device=target.device)
        after = probabilities(target.logits(last[0, start:]), rows)
    truth = text[0, start:]
    divisors = DIVISORS.to(target.device, torch.float32)
    ranks = torch.full((length, heads), top_k)
    probs = torch.zeros(length, heads, top_k)
    top_logits = torch.full((length, heads, top_k), -torch.inf)
    norms = torch.zeros(length, heads, len(DIVISORS))
    for i in range(heads):
        for first in range(0, length - 1 - i, _CHUNK):
            places = torch.arange(first, min(first + _CHUNK, length - 1 - i), device=target.device)
            logits = head.logits(features[i, places], i).float()  # (n, V')
            top = logits.topk(min(top_k, logits.shape[1]), dim=-1)
            draft_ids = head.to_target_ids(top.indices)  # (n, R)
            hit = draft_ids == truth[places + 1 + i, None]
            rank = torch.where(hit.any(1), hit.int().argmax(1), top_k)
            here, count = places.cpu(), draft_ids.shape[1]
            ranks[here, i] = rank.cpu()
            likely = hit.float() if after is None else after[places + i].gather(1, draft_ids)
            probs[here, i, :count] = likely.float().cpu()
            top_logits[here, i, :count] = top.values.cpu()
            norms[here, i] = torch.stack([(logits / divisor).logsumexp(1) for divisor in divisors], 1).cpu()
    return Observation(ranks, probs, top_logits, norms), hidden[0, start - 1 : start - 1 + length]


def fit_confidence(observations: Sequence[Observation], top_k: int) -> list[float]:
    """For each head the number to divide its logits by, so that its probabilities are those of being accepted.

    Temperature scaling (Guo et al. 2017), on the outcomes that matter to a tree: which of the R best draft tokens is
    the true one, or none of them, where the true tokens of all earlier heads were among their R best. The divisor with
    the highest likelihood is taken; 1 where no token of the answers tells.
    """
    heads = observations[0].ranks.shape[1]
    fitted = []
    for i in range(heads):
        scores = torch.zeros(len(DIVISORS), dtype=torch.float64)
        for seen in observations:
            used = reached(seen, i, top_k)
            log_probs = _log_probs(seen, used, i)  # (n, R, divisors)
            probs = seen.probs[used, i].double()[:, :, None]
            none = (1.0 - log_probs.exp().sum(1)).clamp_min(1e-6).log()  # (n, divisors)
            scores += (probs * log_probs.clamp_min(-50.0)).sum((0, 1)) + ((1.0 - probs.sum(1)) * none).sum(0)
        fitted.append(float(DIVISORS[scores.argmax()]) if scores.any() else 1.0)
    return fitted


def reached(seen: Observation, head_index: int, top_k: int) -> Tensor:
    """(m,) bool: whether a path of right draft tokens can reach this head here, and every head has a true token."""
    return seen.complete & (seen.ranks[:, :head_index] < top_k).all(1)


def reliability(observations: Sequence[Observation], divisors: Sequence[float], top_k: int) -> list[list[float]]:
    """For each bin of the head's probability: [mean probability, share that is accepted, number of draft tokens]."""
    nearest = [int((DIVISORS - divisor).abs().argmin()) for divisor in divisors]
    sums = torch.zeros(_NUM_BINS, 3, dtype=torch.float64)
    for seen in observations:
        for i, index in enumerate(nearest):
            used = reached(seen, i, top_k)
            sure = _log_probs(seen, used, i)[:, :, index].exp().flatten()
            right = seen.probs[used, i].double().flatten()
            which = (sure * _NUM_BINS).long().clamp_(0, _NUM_BINS - 1)
            sums.index_add_(0, which, torch.stack([sure, right, torch.ones_like(sure)], 1))
    return [[sure / count, right / count, count] for sure, right, count in sums.tolist() if count]


def _log_probs(seen: Observation, used: Tensor, head_index: int) -> Tensor:
    """(n, R, divisors): log-probabilities of the draft tokens, for each divisor."""
    logits = seen.top_logits[used, head_index].double()[:, :, None] / DIVISORS
    return logits - seen.log_norms[used, head_index].double()[:, None]


@torch.inference_mode()
def draft_along(
    head: DraftHead, shape: BestFirst, answers: Sequence[Answer], hidden: Sequence[Tensor], prompts: Sequence[Tensor]
) -> list[Tensor]:
    """Drafts with growing trees at every token of recorded answers, several answers as the rows of a batch.

    ``shape`` is of the largest tree, with the fitted confidence. For each answer, ``hidden`` has the states (m, D) from
    :func:`observe`, and ``prompts`` those (T, D) of its prompt, which are not read for heads without a history.

    Returns:
        For each answer (K, m, K): entry d-1 is the smallest size of tree of at most depth d that contains the true
        token at each depth, as in ``tree_search.entries``. A token that the given shape does not have is in
        no tree.
    """
    session = head.start()
    heads = head.config.num_heads
    smallest = [torch.full((heads, len(answer.token_ids), heads), NEVER) for answer in answers]
    limits = torch.arange(1, heads + 1, device=hidden[0].device)[:, None, None]
    going = list(range(len(answers)))
    for place in range(max(len(answer.token_ids) for answer in answers)):
        staying = [i for i, row in enumerate(going) if place < len(answers[row].token_ids)]
        if len(staying) < len(going):
            session.keep(torch.tensor(staying, device=hidden[0].device))
            going = [going[i] for i in staying]
        context = _context(head, [answers[row] for row in going], [hidden[row] for row in going], prompts, place)
        draft = session.propose(context, shape)
        truth = torch.tensor(
            [[*answers[row].token_ids[place + 1 : place + 1 + heads], *[-1] * heads][:heads] for row in going],
            device=draft.token_ids.device,
        )
        sizes = (draft.depths <= limits).cumsum(2)  # (K, B, N) of the smallest tree with each node
        node = torch.zeros(len(going), 1, dtype=torch.long, device=truth.device)
        alive = torch.ones_like(node, dtype=torch.bool)
        for depth in range(heads):
            child = (draft.parents == node) & (draft.token_ids == truth[:, depth, None]) & (draft.depths > 0)
            alive = alive & child.any(1, keepdim=True)
            node = torch.where(alive, child.int().argmax(1, keepdim=True), node)
            in_tree = alive[:, 0] & (limits[:, :, 0] > depth)  # (K, B)
            size = torch.where(in_tree, sizes.gather(2, node.expand(heads, -1, -1))[:, :, 0], NEVER).cpu()
            for i, row in enumerate(going):
                smallest[row][:, place, depth] = size[:, i]
    return smallest


def _context(
    head: DraftHead, answers: Sequence[Answer], hidden: Sequence[Tensor], prompts: Sequence[Tensor], place: int
) -> Context:
    """The input of a step whose root is the token at ``place``, where the step before accepted no draft token."""
    device = hidden[0].device
    roots = torch.tensor([answer.token_ids[place] for answer in answers], device=device)
    last = torch.stack([states[place] for states in hidden])[:, None]  # (B, 1, D)
    texts = [(answer.prompt_ids + answer.token_ids)[: len(answer.prompt_ids) + place] for answer in answers]
    if place or not head.needs_history:
        tokens = torch.tensor([text[-1:] for text in texts], device=device)
        return Context(last, tokens, torch.ones_like(roots), roots)
    width = max(len(text) for text in texts)
    states = last.new_zeros(len(texts), width, last.shape[-1])
    tokens = torch.zeros(len(texts), width, dtype=torch.long, device=device)
    for row, text in enumerate(texts):
        states[row, : len(text) - 1] = prompts[row][: len(text) - 1]
        states[row, len(text) - 1] = last[row, 0]
        tokens[row, : len(text)] = torch.tensor(text, device=device)
    return Context(states, tokens, torch.tensor([len(text) for text in texts], device=device), roots)
