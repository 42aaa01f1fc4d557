"""Measures of answers: by plain decoding, and by a model. Others, such as a judge, are classes of other packages."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from draftheads.bench.settings import MIN_PROMPTS
from draftheads.bench.table import Estimate, bootstrap
from draftheads.errors import DraftHeadsError, first_line
from draftheads.models.model import TargetModel
from draftheads.utils.progress import Progress, counted_stage

Outcome = tuple[float, ...] | str  # the values of an item, or why it has none
_CHUNK = 256  # tokens whose logits are computed at once: (256, V) floats


@dataclass(frozen=True)
class Item:
    """One answered question. Ids are unique among the items of a call."""

    question_id: str
    category: str
    turns: tuple[str, ...]  # what the user said
    answers: tuple[str, ...]  # the model's, one for each turn
    reference: Any = None  # a text; the judge: a text for each turn, or None
    prompt_ids: tuple[tuple[int, ...], ...] = ()  # token ids before each answer: all that the model had read
    answer_ids: tuple[tuple[int, ...], ...] = ()  # token ids of each answer


@dataclass(frozen=True)
class Scores:
    """One measure of all items."""

    measure: str
    values: dict[str, float]  # by question_id
    problems: dict[str, str]  # by question_id: why there is no value
    weights: dict[str, int] = field(default_factory=dict)  # of values in the mean; 1 where there is none
    is_log: bool = False  # the estimate is exp() of the values' mean

    def estimate(self) -> Estimate | None:
        """The mean of all values with its bootstrap interval; None without any value."""
        values = np.array(list(self.values.values()))
        weights = np.array([self.weights.get(key, 1) for key in self.values])

        def mean(chosen: np.ndarray) -> np.ndarray:
            means: np.ndarray = (values * weights)[chosen].sum(1) / weights[chosen].sum(1)
            return np.exp(means) if self.is_log else means

        return bootstrap(mean, len(values)) if self.values else None


class Measure:
    """The base of all measures. What fails for one item is a problem of that item, and raises nothing."""

    name: ClassVar[str]  # on the command line
    names: ClassVar[tuple[str, ...]] = ()  # of its scores, where they are not its name
    parallel: int = 1  # items at the same time
    asks_others: ClassVar[bool] = False  # a program elsewhere, which can fail and costs money
    made_by: str = ""  # the model that measures
    folder: Path | None = None  # where answers of others are saved, so that they are not asked again

    def score(self, item: Item) -> Outcome:
        """The values of an item, one for each name; or a sentence."""
        raise NotImplementedError

    def __call__(self, items: Sequence[Item], progress: Progress) -> list[Scores]:
        assert len({item.question_id for item in items}) == len(items)
        advance = counted_stage(progress, f"measuring {self.name}", len(items))
        scores = [Scores(name, {}, {}) for name in self.names or (self.name,)]
        pool = ThreadPoolExecutor(self.parallel)  # starts its threads when they are needed
        try:
            outcomes = (pool.map if self.parallel > 1 else map)(self._guarded, items)
            for item, outcome in zip(items, outcomes, strict=True):
                for i, each in enumerate(scores):
                    if isinstance(outcome, str):
                        each.problems[item.question_id] = outcome
                    else:
                        each.values[item.question_id] = outcome[i]
                advance()
        finally:
            pool.shutdown(cancel_futures=True)
        return scores

    def _guarded(self, item: Item) -> Outcome:
        try:
            outcome = self.score(item)
        except DraftHeadsError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - one item must not end a run of hours
            return f"{type(error).__name__}: {first_line(error)}"
        return outcome if isinstance(outcome, str) or np.isfinite(outcome).all() else f"not finite: {outcome}"


class Agreement(Measure):
    """Whether all answers of an item are plain decoding's (100 or 0), and how much is the same until they first differ.

    The second, "common prefix", counts tokens if plain decoding's items have token ids, else characters. It ends with
    the first turn that differs, as the turns after it have other prompts.
    """

    name = "agreement"
    names = ("agreement", "common prefix")

    def __init__(self, plain_items: Sequence[Item]) -> None:
        self._plain = {item.question_id: item for item in plain_items}
        self._field = "answer_ids" if all(item.answer_ids for item in plain_items) else "answers"

    def score(self, item: Item) -> Outcome:
        plain = self._plain.get(item.question_id)
        if plain is None:
            return "plain decoding has no answer"
        if len(item.answers) != len(plain.answers):
            return "plain decoding has another number of turns"
        ours, theirs = getattr(item, self._field), getattr(plain, self._field)
        common = 0
        for one, other in zip(ours, theirs, strict=True):
            pairs = enumerate(zip(one, other, strict=False))
            common += next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
            if one != other:
                break
        return 100.0 * (ours == theirs), float(common)


@dataclass(frozen=True)
class Perplexity(Measure):
    """Perplexity of all answers under a model, by token. The value of an item is its mean negative log-likelihood."""

    model: TargetModel
    name = "perplexity"

    def __call__(self, items: Sequence[Item], progress: Progress) -> list[Scores]:
        weights = {item.question_id: sum(map(_num_scored, item.prompt_ids, item.answer_ids)) for item in items}
        return [replace(each, weights=weights, is_log=True) for each in super().__call__(items, progress)]

    @torch.inference_mode()
    def score(self, item: Item) -> Outcome:
        losses: list[float] = []  # -log p of each token of the answers; a first token that follows nothing has none
        for prompt_ids, answer_ids in zip(item.prompt_ids, item.answer_ids, strict=True):
            if count := _num_scored(prompt_ids, answer_ids):
                text = torch.tensor([*prompt_ids, *answer_ids], device=self.model.device)
                states = self.model.hidden_states(text[None, :-1])[0, -count:]  # (T, D)
                for some, ids in zip(states.split(_CHUNK), text[-count:].split(_CHUNK), strict=True):
                    losses += F.cross_entropy(self.model.logits(some).float(), ids, reduction="none").tolist()
        return (sum(losses) / len(losses),) if losses else "no tokens"


def _num_scored(prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> int:
    return max(len(answer_ids) - (not prompt_ids), 0)


def quality_fields(scores: Sequence[Scores], question_ids: set[str]) -> dict[str, Any]:
    """Means with intervals over these questions, as fields of a row."""
    fields: dict[str, dict[str, Any]] = {"quality": {}, "quality_intervals": {}, "quality_counts": {}}
    for score in scores:
        values = {key: value for key, value in score.values.items() if key in question_ids}
        if (mean := replace(score, values=values).estimate()) is not None:
            fields["quality"][score.measure] = mean.value
            if len(values) >= MIN_PROMPTS:
                fields["quality_intervals"][score.measure] = (mean.low, mean.high)
            if len(values) < len(question_ids):
                fields["quality_counts"][score.measure] = len(values)
    return fields
