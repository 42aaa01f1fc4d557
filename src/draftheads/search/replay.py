"""Tokens per step with trees of all sizes: the head drafts at every token of recorded answers.

Steps of greedy decoding follow from it, for any tree, without another pass of the model. Uses no clock: the same
answers give the same trees on every machine.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftheads.decode.engine import Engine
from draftheads.decode.prompts import Prompt
from draftheads.errors import DataError
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search.calibrate import Answer, Observation, draft_along, fit_confidence, observe, reliability
from draftheads.search.settings import ReplaySettings
from draftheads.search.tree_search import entries, joint_order, path_counts, path_shares, simulate
from draftheads.settings import SamplingSettings
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


def encoded(target: TargetModel, prompts: Sequence[Prompt], settings: ReplaySettings) -> list[list[int]]:
    """The token ids of the first ``num_prompts`` prompts."""
    engine = Engine(target)
    ids = [engine.encode(prompt) for prompt in prompts[: settings.num_prompts]]
    if len(ids) < 2:
        raise DataError(f"{counted(len(ids), 'prompt')} to calibrate on: give at least 2, better 50")
    return ids


def samplings(settings: ReplaySettings, count: int, first: int = 0) -> list[SamplingSettings]:
    """Settings of answers ``first``, ``first + 1`` …; each has its own seed."""
    first_one = SamplingSettings(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature, seed=first)
    return [replace(first_one, seed=first + number) for number in range(count)]


def own_answers(
    target: TargetModel, prompts: Sequence[list[int]], settings: ReplaySettings, *, folder: Path, progress: Progress
) -> list[Answer]:
    """The model's own answers to prompts (token ids), without answers of fewer than two tokens.

    They are saved in ``folder``, in a folder for this model, these prompts and settings.
    """
    identity = {
        "model": [target.model_id, target.weights_fingerprint, target.precision],
        "prompts": prompts,
        "answers": [settings.max_new_tokens, settings.temperature],
    }
    folder = folder / identity_digest(identity)
    engine = Engine(target, max_batch_size=_ANSWERS_AT_ONCE)
    chunks = [prompts[i : i + _ANSWERS_AT_ONCE] for i in range(0, len(prompts), _ANSWERS_AT_ONCE)]
    advance = counted_stage(progress, f"answering {counted(len(prompts), 'prompt')}", len(chunks))
    answers = []
    for number, chunk in enumerate(chunks):
        each = samplings(settings, len(chunk), number * _ANSWERS_AT_ONCE)
        texts = saved_json(folder / f"answers-{number:03}.json", partial(_answered, engine, chunk, each))
        answers += [Answer(tuple(prompt), tuple(ids)) for prompt, ids in zip(chunk, texts, strict=True)]
        advance()
    answers = [answer for answer in answers if len(answer.token_ids) > 1]
    if len(answers) < 2:
        raise DataError(f"{target.model_id} ends its answers at once: there is nothing to calibrate on")
    return answers


def _answered(engine: Engine, prompts: Sequence[list[int]], each: Sequence[SamplingSettings]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine.generate(prompts, each)]


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
            ``confidence`` (``temperatures`` by head; ``before`` and ``after`` as :func:`calibrate.reliability`), and
            ``num_tokens`` of the answers.
        """
        advance = counted_stage(self.progress, "drafting along the answers", 2 * len(answers))
        seen, hidden, prompts = [], [], []
        head, temperature = self._deep_head(answers), self.settings.temperature
        for answer in answers:
            observation, states = observe(head, self.target, answer, top_k=self.top_k, temperature=temperature)
            seen.append(observation)
            hidden.append(states)
            prompts.append(self._prompt_states(answer))
            advance()
        confidence = fit_confidence(seen, self.top_k)
        texts: list[Tensor] = []
        count, drafted = self._most_grown(head)
        shape = BestFirst(drafted, top_k=self.top_k, beam=self.settings.beam, temperatures=tuple(confidence))
        for start in range(0, len(answers), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            texts += draft_along(head, shape, answers[rows], hidden[rows], prompts[rows])
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

    def _prompt_states(self, answer: Answer) -> Tensor:
        """Hidden states (T, D) of the prompt, for heads that read them."""
        if not self.head.needs_history:
            return torch.empty(0)
        prompt = torch.tensor([answer.prompt_ids], device=self.target.device)
        return self.head.split(self.target.hidden_states(prompt, self.head.hidden_layers))[0][0]

    def _static(self, seen: Sequence[Observation]) -> dict[str, Any]:
        """Static trees from all answers. Tokens per step are measured on each half with trees from the other half."""
        count = self.settings.max_nodes
        values = self._values(seen)
        order = joint_order(values, count)
        halves = [seen[0::2], seen[1::2]]
        orders = [joint_order(self._values(half), count) for half in halves]
        texts = [
            entries(observation.ranks, of_other_half)
            for half, of_other_half in zip(halves, orders[::-1], strict=True)
            for observation in half
        ]
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
