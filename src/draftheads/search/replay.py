"""What trees of all sizes gain: the model answers prompts, and the head drafts along the answers.

Knows what trees are grown from, but no clock: the same prompts give the same trees on every machine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftheads.decode.engine import Engine, Prompt
from draftheads.errors import DataError, InvalidSettings
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.progress import Progress, counted_stage
from draftheads.sampling import SamplingSettings
from draftheads.search.calibrate import Answer, Observation, fit_confidence, observe, reliability, replay
from draftheads.search.workbook import Workbook
from draftheads.shapes import BestFirst
from draftheads.tree import Path as RankPath
from draftheads.tree import Tree
from draftheads.tree_search import entries, joint_order, marginal_order, path_counts, path_shares, simulate

_ANSWERS_AT_ONCE = 16
_ROWS_AT_ONCE = 64  # answers that growing trees are tried on side by side
_MOST_DENSE = 100  # dense trees that are shown


@dataclass(frozen=True)
class RehearsalSettings:
    """What is searched for, and on how much."""

    num_prompts: int = 64
    """Prompts that the head is calibrated on."""
    max_new_tokens: int = 128
    """Tokens of each answer to them."""
    temperature: float = 0.0
    """The temperature of the answers; above 0 the model's probabilities count, not its single choice."""
    max_nodes: int = 64
    """The largest tree that is looked at, root included."""
    num_ranks: int = 10
    """How many guesses of each head are looked at."""
    beam: int = 6
    """In growing trees: guesses of a depth that go on, for heads that read the guesses above them."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_new_tokens", "max_nodes", "num_ranks", "beam"):
            least = 2 if name in ("num_prompts", "max_nodes", "max_new_tokens") else 1
            if getattr(self, name) < least:
                raise InvalidSettings(f"{name} is {getattr(self, name)}; it must be at least {least}")


def encoded(target: TargetModel, prompts: Sequence[Prompt], settings: RehearsalSettings) -> list[list[int]]:
    """The ids of the first ``num_prompts`` of them.

    Raises:
        DataError: fewer than two: trees grow on one half and are judged by the other.
    """
    engine = Engine(target)
    found = [engine.encode(prompt) for prompt in prompts[: settings.num_prompts]]
    if len(found) < 2:
        raise DataError(f"{len(found)} prompts to calibrate on: give at least 2, better 50")
    return found


def samplings(settings: RehearsalSettings, count: int, first: int = 0) -> list[SamplingSettings]:
    """Of answers ``first``, ``first + 1`` …; every one draws numbers of its own."""
    one = SamplingSettings(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature)
    return [replace(one, seed=first + number) for number in range(count)]


def own_answers(
    target: TargetModel,
    prompts: Sequence[list[int]],
    settings: RehearsalSettings,
    *,
    book: Workbook,
    progress: Progress,
) -> list[Answer]:
    """The model's own answers to prompts, a few at a time, kept in the book; those of less than two tokens left out.

    Raises:
        DataError: hardly any is left.
    """
    engine = Engine(target, max_batch_size=_ANSWERS_AT_ONCE)
    chunks = [prompts[i : i + _ANSWERS_AT_ONCE] for i in range(0, len(prompts), _ANSWERS_AT_ONCE)]
    advance = counted_stage(progress, f"answering {len(prompts)} prompts", len(chunks))
    answers = []
    for number, chunk in enumerate(chunks):
        each = samplings(settings, len(chunk), number * _ANSWERS_AT_ONCE)
        said = book.get(f"answers-{number:03}", partial(_said, engine, chunk, each))
        answers += [Answer(tuple(prompt), tuple(ids)) for prompt, ids in zip(chunk, said, strict=True)]
        advance()
    answers = [answer for answer in answers if len(answer.token_ids) > 1]
    if len(answers) < 2:
        raise DataError(f"{target.model_id} ends its answers at once: there is nothing to calibrate on")
    return answers


def _said(engine: Engine, prompts: Sequence[list[int]], each: Sequence[SamplingSettings]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine.generate(prompts, each)]


class Rehearsal:
    """A head guesses along recorded answers.

    Args:
        target: the model.
        head: bound to it.
        settings: of the answers and the trees.
        progress: is told how far the work is.
    """

    def __init__(
        self, target: TargetModel, head: DraftHead, settings: RehearsalSettings, *, progress: Progress
    ) -> None:
        self.target, self.head, self.settings, self.progress = target, head, settings, progress
        self.num_ranks = min(settings.num_ranks, head.config.num_draft_tokens)

    def run(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Ranks, trees of all sizes and what they promise."""
        advance = counted_stage(self.progress, "asking the heads along the answers", 2 * len(answers))
        seen, hidden, prompts = [], [], []
        for answer in answers:
            observation, states = observe(
                self.head, self.target, answer, num_ranks=self.num_ranks, temperature=self.settings.temperature
            )
            seen.append(observation)
            hidden.append(states)
            prompts.append(self._history(answer))
            advance()
        confidence = fit_confidence(seen, self.num_ranks)
        found = self._grow(seen)
        ones = [1.0] * len(confidence)
        found["confidence"] = {
            "temperatures": confidence,
            "before": reliability(seen, ones, self.num_ranks),
            "after": reliability(seen, confidence, self.num_ranks),
        }
        found["dynamic"] = self._dynamic(answers, hidden, prompts, tuple(confidence), advance)
        found["num_tokens"] = sum(len(answer.token_ids) for answer in answers)
        return found

    def _history(self, answer: Answer) -> Tensor:
        """Hidden states of the prompt, for heads that read them."""
        if not self.head.needs_history:
            return torch.empty(0)
        return self.target.hidden_states(torch.tensor([answer.prompt_ids], device=self.target.device))[0]

    def _grow(self, seen: Sequence[Observation]) -> dict[str, Any]:
        """Trees of all sizes from all answers; what they promise from growing on one half and judging by the other."""
        count = self.settings.max_nodes
        accuracy = marginal_accuracy(seen)
        values = self._values(seen)
        joint = joint_order(values, count)
        halves = [seen[0::2], seen[1::2]]
        orders = [
            (joint_order(self._values(half), count), marginal_order(marginal_accuracy(half), count)) for half in halves
        ]
        pairs = [(halves[0], orders[1]), (halves[1], orders[0])]  # each half with what grew on the other
        by_joint, by_marginal = (
            [entries(one.ranks, order[way]) for half, order in pairs for one in half] for way in (0, 1)
        )
        num_nodes = len(joint) + 1
        return {
            "accuracy": accuracy,
            "static": {
                "paths": [list(path) for path in joint],
                "shares": [1.0, *(values[path] for path in joint)],
                **_promises(by_joint, num_nodes),
            },
            "marginal": _promises(by_marginal, num_nodes),
            "dense": list(self._dense(seen)),
        }

    def _values(self, seen: Sequence[Observation]) -> dict[RankPath, float]:
        """Of each path, how often it is kept."""
        used = torch.cat([one.complete for one in seen])
        if not used.any():  # answers shorter than the heads reach
            used = torch.ones_like(used)
        ranks = torch.cat([one.ranks for one in seen])[used]
        if self.settings.temperature > 0:
            return path_shares(ranks, torch.cat([one.probs for one in seen])[used])
        return {path: n / len(ranks) for path, n in path_counts(ranks, num_ranks=self.num_ranks).items()}

    def _dense(self, seen: Sequence[Observation]) -> Iterator[dict[str, Any]]:
        """Full trees whose widths do not grow with depth."""
        every = dense_widths(self.head.config.num_heads, self.num_ranks, self.settings.max_nodes)
        for widths in every[:: 1 + len(every) // _MOST_DENSE]:
            tree = Tree.cartesian(widths)
            width = torch.tensor([*widths, *[0] * (self.head.config.num_heads - len(widths))])
            texts = [2 - (one.ranks < width).long().cumprod(1) for one in seen]  # 1 where it is kept, else 2
            yield {
                "widths": list(widths),
                "num_nodes": tree.num_nodes,
                "expected": simulate(texts, 1)[0],
            }

    def _dynamic(
        self,
        answers: Sequence[Answer],
        hidden: Sequence[Tensor],
        prompts: Sequence[Tensor],
        confidence: tuple[float, ...],
        advance: Callable[[], None],
    ) -> dict[str, Any]:
        """What growing trees promise, and how sure of whole paths one may be."""
        count = self._most_grown()
        shape = BestFirst(count, num_ranks=self.num_ranks, beam=self.settings.beam, confidence=confidence)
        texts: list[Tensor] = []
        bins: list[list[float]] = []
        for start in range(0, len(answers), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            kept, sure = replay(self.head, shape, answers[rows], hidden[rows], prompts[rows])
            texts += kept
            bins += sure
            for _ in answers[rows]:
                advance()
        return {**_promises(texts, count), "reliability": _together(bins)}

    def _most_grown(self) -> int:
        """Nodes that a growing tree can have."""
        found = level = 1
        for _ in range(self.head.config.num_heads):
            level = (min(level, self.settings.beam) if self.head.reads_path else level) * self.num_ranks
            found += level
        return min(self.settings.max_nodes, found)


def marginal_accuracy(seen: Sequence[Observation]) -> list[list[float]]:
    """(K, R): how often each guess of each head is right, whatever the others do, where there is something to guess."""
    length = [torch.arange(len(one.ranks)) for one in seen]
    heads = seen[0].ranks.shape[1]
    found = []
    for i in range(heads):
        probs = torch.cat(
            [one.probs[: max(0, len(places) - 1 - i), i] for one, places in zip(seen, length, strict=True)]
        )
        found.append(probs.double().mean(0).nan_to_num(0.0).tolist())
    return found


def dense_widths(depth: int, widest: int, max_nodes: int) -> list[tuple[int, ...]]:
    """Widths of full trees of at most that many nodes, none growing with depth, small trees first.

    >>> dense_widths(2, 3, 8)
    [(1,), (2,), (1, 1), (3,), (2, 1), (2, 2), (3, 1)]
    """
    found: list[tuple[int, tuple[int, ...]]] = []

    def extend(widths: tuple[int, ...], nodes: int, level: int) -> None:
        for width in range(1, min(widest, *widths[-1:], widest) + 1):
            total = nodes + level * width
            if total <= max_nodes and len(widths) < depth:
                found.append((total, (*widths, width)))
                extend((*widths, width), total, level * width)

    extend((), 1, 1)
    return [widths for _, widths in sorted(found, key=lambda item: (item[0], len(item[1]), item[1]))]


def _together(bins: Sequence[Sequence[float]]) -> list[list[float]]:
    """Bins of [mean probability, share, count] of several groups as those of all, by probability in twelfths.

    >>> _together([[0.25, 0.0, 1.0], [0.75, 1.0, 2.0], [0.25, 0.5, 3.0]])
    [[0.25, 0.375, 4.0], [0.75, 1.0, 2.0]]
    """
    sums: dict[int, list[float]] = {}
    for said, right, count in bins:
        one = sums.setdefault(min(int(said * 12), 11), [0.0, 0.0, 0.0])
        one[:] = [one[0] + said * count, one[1] + right * count, one[2] + count]
    return [[said / count, right / count, count] for _, (said, right, count) in sorted(sums.items())]


def _promises(texts: Sequence[Tensor], count: int) -> dict[str, list[float]]:
    """Tokens per step and one standard error, of trees of 1 … count nodes."""
    found = [simulate(texts, size) for size in range(1, count + 1)]
    return {"expected": [ratio for ratio, _ in found], "error": [error for _, error in found]}
