"""How a head's draft tokens rank on recorded answers, and how far to trust its confidence.

Knows models, heads and recorded answers; knows nothing of trees that are to be chosen. A head that reads the guesses
above it is asked along the true text: what it says there is just what it would say if all guesses before were right, so
its ranks are joint ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.draft import Context
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.sampling import RowSettings, SamplingSettings, probabilities
from draftheads.shapes import BestFirst

# what logits may be divided by: steps of 6 %
DIVISORS = torch.logspace(-0.4, 0.6, 41, base=10.0, dtype=torch.float64)
_CHUNK = 256  # positions whose logits are held at once


@dataclass(frozen=True)
class Answer:
    """A prompt and what the model said to it."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Observation:
    """A head along one answer of m tokens; at token j head i guesses token j+1+i."""

    ranks: Tensor  # (m, K) int64: rank of the true token; R, a miss, also where the answer has ended
    probs: Tensor  # (m, K, R) float32: the target's probability of each guess; 1 or 0 where the answer is greedy
    top_logits: Tensor  # (m, K, R) float32: the head's logits of its guesses
    log_norms: Tensor  # (m, K, len(DIVISORS)) float32: log Σ exp(logits / divisor)

    @property
    def complete(self) -> Tensor:
        """(m,) bool: is there a true token for every head?"""
        length, heads = self.ranks.shape
        return torch.arange(length) < length - heads


@torch.inference_mode()
def observe(
    head: DraftHead, target: TargetModel, answer: Answer, *, num_ranks: int, temperature: float, log_norms: bool = True
) -> tuple[Observation, Tensor]:
    """Reads an answer once with the target and asks the head at each of its tokens.

    Args:
        head: bound to the target.
        target: the model whose answer it is.
        answer: at that temperature.
        num_ranks: R.
        temperature: 0 where the answer is greedy.
        log_norms: whether to compute what :func:`fit_confidence` needs.

    Returns:
        What was seen, on the CPU, and the hidden states (m, D) at the places before each token: what a step begins with
        whose root is that token.
    """
    start, length, heads = len(answer.prompt_ids), len(answer.token_ids), head.config.num_heads
    text = torch.tensor([answer.prompt_ids + answer.token_ids], device=target.device)
    hidden = target.hidden_states(text)  # (1, T, D)
    features = head(hidden.to(head.dtype), text)[:, 0, start - 1 : start - 1 + length]  # (K, m, D)
    after = target_probabilities(target, hidden[0, start:], temperature)  # (m, V): at j what follows token j
    truth = text[0, start:]
    divisors = DIVISORS.to(target.device, torch.float32)
    ranks = torch.full((length, heads), num_ranks)
    probs = torch.zeros(length, heads, num_ranks)
    top_logits = torch.full((length, heads, num_ranks), -torch.inf)
    norms = torch.zeros(length, heads, len(DIVISORS))
    for i in range(heads):
        for first in range(0, length - 1 - i, _CHUNK):
            places = torch.arange(first, min(first + _CHUNK, length - 1 - i), device=target.device)
            logits = head.logits(features[i, places], i).float()  # (n, V')
            top = logits.topk(min(num_ranks, logits.shape[1]), dim=-1)
            guesses = head.to_target_ids(top.indices)  # (n, R)
            hit = guesses == truth[places + 1 + i, None]
            rank = torch.where(hit.any(1), hit.int().argmax(1), num_ranks)
            rows, count = places.cpu(), guesses.shape[1]
            ranks[rows, i] = rank.cpu()
            likely = hit.float() if after is None else after[places + i].gather(1, guesses)
            probs[rows, i, :count] = likely.float().cpu()
            top_logits[rows, i, :count] = top.values.cpu()
            if log_norms:
                norms[rows, i] = torch.stack([(logits / divisor).logsumexp(1) for divisor in divisors], 1).cpu()
    return Observation(ranks, probs, top_logits, norms), hidden[0, start - 1 : start - 1 + length]


def target_probabilities(target: TargetModel, hidden: Tensor, temperature: float) -> Tensor | None:
    """(m, D) -> (m, V) what the target samples from; None where it is greedy."""
    if temperature == 0.0:
        return None
    settings = [SamplingSettings(temperature=temperature)] * len(hidden)
    rows = RowSettings.of(settings, vocab_size=target.vocab_size, device=target.device)
    return probabilities(target.logits(hidden), rows)


def fit_confidence(observations: Sequence[Observation], num_ranks: int) -> list[float]:
    """Per head the number to divide its logits by, so that its probabilities are the shares of guesses that are kept.

    Temperature scaling (Guo et al. 2017) on what a tree makes use of: which of the R best guesses is right, or none,
    where all guesses before were among the R best. The likeliest divisor is taken.
    """
    heads = observations[0].ranks.shape[1]
    found = []
    for i in range(heads):
        scores = torch.zeros(len(DIVISORS), dtype=torch.float64)
        for seen in observations:
            used = reached(seen, i, num_ranks)
            log_probs = _log_probs(seen, used, i)  # (n, R, divisors)
            probs = seen.probs[used, i].double()[:, :, None]
            none = (1.0 - log_probs.exp().sum(1)).clamp_min(1e-6).log()  # (n, divisors)
            scores += (probs * log_probs.clamp_min(-50.0)).sum((0, 1)) + ((1.0 - probs.sum(1)) * none).sum(0)
        found.append(float(DIVISORS[scores.argmax()]))
    return found


def reached(seen: Observation, head_index: int, num_ranks: int) -> Tensor:
    """(m,) bool: does a tree ever get to this head here with all guesses right, and is there something to guess?"""
    return seen.complete & (seen.ranks[:, :head_index] < num_ranks).all(1)


def reliability(
    observations: Sequence[Observation], divisors: Sequence[float], num_ranks: int, *, num_bins: int = 12
) -> list[list[float]]:
    """Guesses by how sure the head is: [mean probability, share that is kept, how many] for each bin of probability."""
    nearest = [int((DIVISORS - divisor).abs().argmin()) for divisor in divisors]
    sums = torch.zeros(num_bins, 3, dtype=torch.float64)
    for seen in observations:
        for i, index in enumerate(nearest):
            used = reached(seen, i, num_ranks)
            said = _log_probs(seen, used, i)[:, :, index].exp().flatten()
            right = seen.probs[used, i].double().flatten()
            which = (said * num_bins).long().clamp_(0, num_bins - 1)
            sums.index_add_(0, which, torch.stack([said, right, torch.ones_like(said)], 1))
    return [[said / count, right / count, count] for said, right, count in sums.tolist() if count]


def _log_probs(seen: Observation, used: Tensor, head_index: int) -> Tensor:
    """(n, R, divisors): log-probabilities of the guesses, for each divisor."""
    logits = seen.top_logits[used, head_index].double()[:, :, None] / DIVISORS
    return logits - seen.log_norms[used, head_index].double()[:, None]


@torch.inference_mode()
def replay(
    head: DraftHead, shape: BestFirst, answers: Sequence[Answer], hidden: Sequence[Tensor], prompts: Sequence[Tensor]
) -> tuple[list[Tensor], list[list[float]]]:
    """Drafts at every token of recorded answers with growing trees, all answers side by side.

    Args:
        head: ready to draft.
        shape: of the largest tree, with the calibrated confidence.
        answers: recorded.
        hidden: for each (m, D) from :func:`observe`.
        prompts: for each the hidden states (T, D) of the tokens before the last one of its prompt; only for heads with
            a history.

    Returns:
        For each answer the size of tree from which on the true token at each depth is kept, (m, K), as
        :func:`draftheads.tree_search.entries`; and how often whole paths are kept by how sure the head is, as
        :func:`reliability`.
    """
    session = head.start()
    heads = head.config.num_heads
    found = [torch.full((len(answer.token_ids), heads), shape.num_nodes + 1) for answer in answers]
    sums = torch.zeros(12, 3, dtype=torch.float64)
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
        node = torch.zeros(len(going), 1, dtype=torch.long, device=truth.device)
        on_path = torch.zeros_like(draft.token_ids, dtype=torch.bool)
        alive = torch.ones_like(node, dtype=torch.bool)
        for depth in range(heads):
            child = (draft.parents == node) & (draft.token_ids == truth[:, depth, None]) & (draft.depths > 0)
            alive = alive & child.any(1, keepdim=True)
            node = torch.where(alive, child.int().argmax(1, keepdim=True), node)
            on_path |= child & alive
            sizes = torch.where(alive[:, 0], node[:, 0] + 1, shape.num_nodes + 1).tolist()
            for row, size in zip(going, sizes, strict=True):
                found[row][place, depth] = size
        whole = [i for i, row in enumerate(going) if place < len(answers[row].token_ids) - heads]
        assert draft.path_log_probs is not None, "grown trees come with their probabilities"
        said = draft.path_log_probs[whole, 1:].exp().double().flatten().cpu()
        which = (said * len(sums)).long().clamp_(0, len(sums) - 1)
        right = on_path[whole, 1:].double().flatten().cpu()
        sums.index_add_(0, which, torch.stack([said, right, torch.ones_like(said)], 1))
    return found, [[said / count, right / count, count] for said, right, count in sums.tolist() if count]


def _context(
    head: DraftHead, answers: Sequence[Answer], hidden: Sequence[Tensor], prompts: Sequence[Tensor], place: int
) -> Context:
    """What a step sees whose root is the token at ``place``, if the step before it kept no guess."""
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
