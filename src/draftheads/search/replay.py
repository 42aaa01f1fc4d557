"""Tokens per step with trees of all sizes: the head drafts at every token of recorded answers.

Steps of greedy decoding follow from it, for any tree, without another pass of the model. Uses no clock: the same
answers give the same trees on every machine.

A head that reads the draft tokens above a node reads the true text here: its logits are those of a step in which all
draft tokens above are right. So the ranks of several heads are joint ranks.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.cpu.drafts import largest
from draftheads.data.features import Document
from draftheads.decode.engine import Engine
from draftheads.decode.prompts import Prompt
from draftheads.errors import DataError
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.runners import runner_for
from draftheads.search.settings import ReplaySettings
from draftheads.search.tree_search import NEVER, entries, joint_order, path_counts, path_shares, simulate
from draftheads.settings import SamplingSettings
from draftheads.speculation.draft import Context
from draftheads.speculation.sampling import RowSettings, probabilities
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Path as RankPath
from draftheads.utils.counts import counted
from draftheads.utils.progress import Progress, counted_stage
from draftheads.utils.provenance import identity_digest, saved_json

_ANSWERS_AT_ONCE = 16
_ROWS_AT_ONCE = 64  # answers along which growing trees are drafted together
_DEEPEST = 8  # that heads without a limit draft along the answers …
_SMALLEST_STEP = 1.005  # … as long as the largest tree of one depth more makes so many times the tokens per step
# Nodes are drafted beyond the largest tree's, so that trees of a lower depth can be seen among them. What is not among
# so many is counted as no draft token, which only very wide trees notice.
_SPARE = 3
# candidates for the number that a head's logits are divided by, in steps of 6 %
DIVISORS = torch.logspace(-0.4, 0.6, 41, base=10.0, dtype=torch.float64)
_NUM_BINS = 12  # of the head's probability, for its reliability
_CHUNK = 256  # positions whose logits are held at once


@dataclass(frozen=True)
class Answer:
    """A prompt and the model's answer to it."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    stored: Callable[[], Document] | None = field(default=None, compare=False)  # a text that begins so

    @property
    def text(self) -> list[int]:
        return [*self.prompt_ids, *self.token_ids]

    def states(self, target: TargetModel, head: DraftHead) -> tuple[Tensor, Tensor]:
        """What the head reads of prompt and answer, (T, D or n·D), and h_t, (T, D); stored ones if there are."""
        if self.stored is not None:
            return head.split(self.stored().hidden[: len(self.text)].to(target.device, target.dtype))
        runner = runner_for(target, head.hidden_layers)
        with target.computing():
            ((last, hidden),) = runner.read([runner.open(len(self.text) + 1)], [self.text])
        return hidden, last


def encoded(target: TargetModel, prompts: Sequence[Prompt], settings: ReplaySettings) -> list[list[int]]:
    """The token ids of the first ``num_prompts`` prompts."""
    engine = Engine(target)
    ids = [engine.encode(prompt) for prompt in prompts[: settings.num_prompts]]
    if len(ids) < 2:
        raise DataError(f"{counted(len(ids), 'prompt')} to calibrate on: give at least 2, better 50")
    return ids


def own_answers(
    target: TargetModel, prompts: Sequence[list[int]], settings: ReplaySettings, *, folder: Path, progress: Progress
) -> list[Answer]:
    """The model's own answers to prompts (token ids), without answers of fewer than two tokens.

    They are saved in ``folder``, in a folder for this model, these prompts and settings. Each has its own seed.
    """
    identity = {
        "model": [target.model_id, target.weights_fingerprint, target.precision],
        "prompts": prompts,
        "answers": [settings.max_new_tokens, settings.temperature],
    }
    folder = folder / identity_digest(identity)
    engine = Engine(target, max_batch_size=_ANSWERS_AT_ONCE)
    one = SamplingSettings(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature)
    each = [replace(one, seed=seed) for seed in range(len(prompts))]
    parts = [slice(start, start + _ANSWERS_AT_ONCE) for start in range(0, len(prompts), _ANSWERS_AT_ONCE)]
    advance = counted_stage(progress, f"answering {counted(len(prompts), 'prompt')}", len(parts))
    answers = []
    for number, part in enumerate(parts):
        answered = partial(_answered, engine, prompts[part], each[part])
        texts = saved_json(folder / f"answers-{number:03}.json", answered)
        answers += [Answer(tuple(prompt), tuple(ids)) for prompt, ids in zip(prompts[part], texts, strict=True)]
        advance()
    answers = [answer for answer in answers if len(answer.token_ids) > 1]
    if len(answers) < 2:
        raise DataError(f"{target.model_id} ends its answers at once: there is nothing to calibrate on")
    return answers


def _answered(engine: Engine, prompts: Sequence[list[int]], each: Sequence[SamplingSettings]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine.generate(prompts, each)]


@dataclass(frozen=True)
class Observation:
    """A head along one answer of m tokens; at token j, head i drafts token j+1+i."""

    ranks: Tensor  # (m, K) int64: rank of the true token; R is a miss, or the answer has ended
    probs: Tensor  # (m, K, R) float32: the target's probability of each draft token; 1 or 0 where the answer is greedy
    top_logits: Tensor  # (m, K, R) float32: the head's logits of its draft tokens
    # (m, K, len(DIVISORS)) float32: log Σ exp(logits / divisor); 0 where a head before has a miss
    log_norms: Tensor

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
        The observation, on the CPU, and the hidden states (T, D or n·D) of prompt and answer, which the head reads.
    """
    start, length, heads = len(answer.prompt_ids), len(answer.token_ids), head.config.num_heads
    text = torch.tensor([answer.text], device=target.device)
    hidden, last = answer.states(target, head)  # (T, D or n·D), (T, D)
    features = head(hidden[None].to(head.dtype), text)[:, 0, start - 1 : start - 1 + length]  # (K, m, D)
    after = None  # (m, V): at j the distribution that the target samples from behind token j
    if temperature > 0:
        settings = [SamplingSettings(temperature=temperature)] * length
        rows = RowSettings.of(settings, vocab_size=target.vocab_size, device=target.device)
        after = probabilities(target.logits(last[start:]), rows)
    truth = text[0, start:]
    ranks = torch.full((length, heads), top_k)
    probs = torch.zeros(length, heads, top_k)
    top_logits = torch.full((length, heads, top_k), -torch.inf)
    norms = torch.zeros(length, heads, len(DIVISORS))
    for i in range(heads):
        for first in range(0, length - 1 - i, _CHUNK):
            places = torch.arange(first, min(first + _CHUNK, length - 1 - i), device=target.device)
            logits = head.logits(features[i, places], i)  # (n, V')
            values, top, _ = largest(logits, top_k)
            draft_ids = head.to_target_ids(top)  # (n, R)
            hit = draft_ids == truth[places + 1 + i, None]
            rank = torch.where(hit.any(1), hit.int().argmax(1), top_k)
            here, count = places.cpu(), draft_ids.shape[1]
            ranks[here, i] = rank.cpu()
            likely = hit.float() if after is None else after[places + i].gather(1, draft_ids)
            probs[here, i, :count] = likely.float().cpu()
            top_logits[here, i, :count] = values.cpu()
            used = (ranks[here, :i] < top_k).all(1)  # as in `reached`
            logits = logits[used.to(logits.device)]
            norms[here[used], i] = torch.cat([largest(logits, 1, float(each))[2] for each in DIVISORS], 1).cpu()
    return Observation(ranks, probs, top_logits, norms), hidden


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
    head: DraftHead, shape: BestFirst, answers: Sequence[Answer], hidden: Sequence[Tensor], places: Sequence[list[int]]
) -> list[Tensor]:
    """Drafts with growing trees at some tokens of recorded answers, several answers as the rows of a batch.

    ``shape`` is of the largest tree, with the fitted confidence. For each answer, ``hidden`` has the states (T, D) from
    :func:`observe`, and ``places`` the tokens at which it is drafted, in order; elsewhere no draft token is right.

    Returns:
        For each answer (K, m, K): entry d-1 is the smallest size of tree of at most depth d that contains the true
        token at each depth, as in ``tree_search.entries``. A token that the given shape does not have is in
        no tree.
    """
    session = head.start()
    heads = head.config.num_heads
    smallest = [torch.full((heads, len(answer.token_ids), heads), NEVER) for answer in answers]
    limits = torch.arange(1, heads + 1, device=hidden[0].device)[:, None, None]
    going, read = list(range(len(answers))), [0] * len(answers)  # tokens that the session has read
    for step in range(max(map(len, places))):
        staying = [i for i, row in enumerate(going) if step < len(places[row])]
        if len(staying) < len(going):
            if step:
                session.keep(torch.tensor(staying, device=hidden[0].device))
            going = [going[i] for i in staying]
        roots = [len(answers[row].prompt_ids) + places[row][step] for row in going]
        texts = [answers[row].text for row in going]
        begins = [read[row] if head.needs_history else root - 1 for row, root in zip(going, roots, strict=True)]
        spans = list(zip(texts, [hidden[row] for row in going], begins, roots, strict=True))
        draft = session.propose(_context(spans), shape)
        truth = torch.tensor(
            [[*text[root + 1 :][:heads], *[-1] * heads][:heads] for text, root in zip(texts, roots, strict=True)],
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
                smallest[row][:, places[row][step], depth] = size[:, i]
        for row, root in zip(going, roots, strict=True):
            read[row] = root
    return smallest


def _context(spans: Sequence[tuple[list[int], Tensor, int, int]]) -> Context:
    """The input of a step: of each row the text, its hidden states, where what is new begins, and the root's place."""
    device = spans[0][1].device
    states = pad_sequence([hidden[begin:root] for _, hidden, begin, root in spans], batch_first=True)
    tokens = pad_sequence([torch.tensor(text[begin:root]) for text, _, begin, root in spans], batch_first=True)
    counts = torch.tensor([root - begin for _, _, begin, root in spans], device=device)
    return Context(
        states, tokens.to(device), counts, torch.tensor([text[root] for text, *_, root in spans], device=device)
    )


class Replay:
    """A head, bound to the target, drafts along recorded answers."""

    def __init__(self, target: TargetModel, head: DraftHead, settings: ReplaySettings, *, progress: Progress) -> None:
        self.target, self.head, self.settings, self.progress = target, head, settings, progress
        self.top_k = min(settings.top_k, head.config.num_draft_tokens)

    def run(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Ranks, and tokens per step with trees of all sizes.

        Returns:
            JSON values: ``accuracy`` (a list over ranks for each depth), ``static`` (``paths`` in the order in which
            the tree grows, ``shares``, ``expected`` and ``error`` by nodes), ``dynamic`` (``expected`` and ``error`` by
            nodes; ``shallower``: ``expected`` of trees of at most depth 1, 2, …, for heads that read the path),
            ``confidence`` (``temperatures`` by head; ``before`` and ``after`` as :func:`reliability`), and
            ``num_tokens`` of the answers.
        """
        advance = counted_stage(self.progress, "drafting along the answers", 2 * len(answers))
        seen, hidden = [], []
        head, temperature = self._deep_head(answers), self.settings.temperature
        for answer in answers:
            observation, states = observe(head, self.target, answer, top_k=self.top_k, temperature=temperature)
            seen.append(observation)
            hidden.append(states)
            advance()
        confidence = fit_confidence(seen, self.top_k)
        texts: list[Tensor] = []
        count, drafted = self._most_grown(head)
        shape = BestFirst(drafted, top_k=self.top_k, beam=self.settings.beam, temperatures=tuple(confidence))
        for start in range(0, len(answers), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            places = [(each.ranks[:, 0] < self.top_k).nonzero()[:, 0].tolist() for each in seen[rows]]
            texts += draft_along(head, shape, answers[rows], hidden[rows], places)
            for _ in answers[rows]:
                advance()
        by_depth = [_tokens_per_step([text[i] for text in texts], count) for i in range(head.config.num_heads)]
        depth = self.head.config.num_heads
        while depth < len(by_depth) and (
            by_depth[depth]["expected"][-1] >= _SMALLEST_STEP * by_depth[depth - 1]["expected"][-1]
        ):
            depth += 1
        seen, confidence = [observation.first(depth) for observation in seen], confidence[:depth]
        shallower = [gains["expected"] for gains in by_depth[: depth - 1]] if head.reads_path else []
        return {
            "accuracy": accuracies(seen),
            "static": self._static(seen),
            "dynamic": {**by_depth[depth - 1], "shallower": shallower},
            "confidence": {
                "temperatures": confidence,
                "before": reliability(seen, [1.0] * len(confidence), self.top_k),
                "after": reliability(seen, confidence, self.top_k),
            },
            "num_tokens": sum(len(answer.token_ids) for answer in answers),
        }

    def _deep_head(self, answers: Sequence[Answer]) -> DraftHead:
        """The head, with as many depths as are tried: more than it was trained for, if it has no limit."""
        heads = self.head.config.num_heads
        # confidence is fitted where all depths have a true token, which should be so in most answers
        typical = int(statistics.median(len(answer.token_ids) for answer in answers))
        deepest = min(_DEEPEST, typical - 2)
        return self.head if self.head.depth_limit or deepest <= heads else self.head.with_depth(deepest)

    def _static(self, seen: Sequence[Observation]) -> dict[str, Any]:
        """Static trees from all answers. Tokens per step are measured on each half with trees from the other half."""
        count = self.settings.max_nodes
        values = self._values(seen)
        order = joint_order(values, count)
        texts = []
        for half, other in ((seen[0::2], seen[1::2]), (seen[1::2], seen[0::2])):
            of_other = joint_order(self._values(other), count)
            texts += [entries(observation.ranks, of_other) for observation in half]
        return {
            "paths": [list(path) for path in order],
            "shares": [1.0, *(values[path] for path in order)],
            **_tokens_per_step(texts, len(order) + 1),
        }

    def _values(self, seen: Sequence[Observation]) -> dict[RankPath, float]:
        """How often each path is accepted."""
        used = torch.cat([observation.complete for observation in seen])
        if not used.any():  # answers shorter than the number of heads
            used = torch.ones_like(used)
        ranks = torch.cat([observation.ranks for observation in seen])[used]
        if self.settings.temperature > 0:
            return path_shares(ranks, torch.cat([observation.probs for observation in seen])[used])
        return {path: n / len(ranks) for path, n in path_counts(ranks, top_k=self.top_k).items()}

    def _most_grown(self, head: DraftHead) -> tuple[int, int]:
        """Nodes that a growing tree can have, and how many are drafted for it and for trees of a lower depth."""
        nodes = level = 1
        for _ in range(head.config.num_heads):
            level = (min(level, self.settings.beam) if head.reads_path else level) * self.top_k
            nodes += level
        most = self.settings.max_nodes
        return min(most, nodes), min(_SPARE * most if head.reads_path else most, nodes)


def accuracies(seen: Sequence[Observation]) -> list[list[float]]:
    """(K, R): how often each draft token of each head is the true one, whatever the other heads draft."""
    shares = []
    for i in range(seen[0].ranks.shape[1]):
        probs = torch.cat([each.probs[: max(0, len(each.ranks) - 1 - i), i] for each in seen])
        shares.append(probs.double().mean(0).nan_to_num(0.0).tolist())
    return shares


def _tokens_per_step(texts: Sequence[Tensor], count: int) -> dict[str, list[float]]:
    """Tokens per step and one standard error, with trees of 1 … count nodes."""
    gains = [simulate(texts, size) for size in range(1, count + 1)]
    return {"expected": [ratio for ratio, _ in gains], "error": [error for _, error in gains]}
