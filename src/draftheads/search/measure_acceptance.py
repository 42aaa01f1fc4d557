"""The acceptance profile of a head, measured along held-out texts or the model's own answers."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from draftheads.drafters.copy_probs import DEFAULT_COPY_PROBS, MAX_NGRAM, CopyProbs
from draftheads.drafters.sources import TextIndex
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search.calibrate import Answer
from draftheads.search.replay import Replay
from draftheads.search.settings import ReplaySettings
from draftheads.search.tree_search import expected_tokens, joint_order, path_counts
from draftheads.speculation.acceptance_profile import MAX_NODES, AcceptanceProfile
from draftheads.speculation.tree import Path as RankPath
from draftheads.speculation.tree import Tree
from draftheads.utils.progress import Progress

_PRIOR = 20.0  # pseudo-count of the prior probs, or of those of the next shorter match
_HIGHEST = 0.99  # probability of a copied token given those before it
_STEP = 0.001  # probs are rounded to this, and fall by at least this from token to token
NUM_TEXTS, TOKENS_PER_TEXT = 64, 64  # held-out texts that a profile is measured on after training


def recorded(texts: Sequence[tuple[Tensor, Tensor]]) -> list[Answer]:
    """The first answer in each text, as if the model had just decoded it; answers of one token are left out.

    Texts are token ids (T,) and loss masks (T,), True for tokens of answers.
    """
    answers = []
    for token_ids, loss_mask in texts:
        ids, mask = token_ids.tolist(), loss_mask.tolist()
        start = max(1, mask.index(True)) if True in mask else len(mask)  # else the first token is the prompt
        stop = next((place for place in range(start, len(mask)) if not mask[place]), len(mask))
        stop = min(stop, start + TOKENS_PER_TEXT)
        if stop - start >= 2:
            answers.append(Answer(tuple(ids[:start]), tuple(ids[start:stop])))
    return answers


def measured_profile(
    target: TargetModel, head: DraftHead, answers: Sequence[Answer], settings: ReplaySettings, *, progress: Progress
) -> tuple[AcceptanceProfile, dict[str, Any]]:
    """The profile of a head along recorded answers, and the record of :meth:`Replay.run` that it was made from."""
    replay = Replay(target, head, settings, progress=progress)
    record = replay.run(answers)
    paths = record["static"]["paths"][: MAX_NODES - 1]
    profile = AcceptanceProfile(
        temperature=settings.temperature,
        num_texts=len(answers),
        num_tokens=record["num_tokens"],
        temperatures=[round(divisor, 4) for divisor in record["confidence"]["temperatures"]],
        paths=paths,
        static_tokens=_rising(record["static"]["expected"][: len(paths) + 1]),
        dynamic_tokens=_rising(record["dynamic"]["expected"][:MAX_NODES]),
        top_k=replay.top_k,
        beam=settings.beam,
        shallower_tokens=[_rising(tokens[:MAX_NODES]) for tokens in record["dynamic"]["shallower"]],
        copies=copy_probs(((answer.prompt_ids, answer.token_ids) for answer in answers), prior=DEFAULT_COPY_PROBS),
    )
    return profile, record


def static_profile(joint_ranks: Tensor, *, top_k: int, only_chain: bool = False) -> AcceptanceProfile:
    """A profile without growing trees, from ranks (S, K) of true tokens; with ``only_chain`` of chains."""
    heads = joint_ranks.shape[1]
    paths: list[RankPath] = [(0,) * depth for depth in range(1, heads + 1)]
    if not only_chain:
        paths = joint_order(path_counts(joint_ranks, top_k=top_k), ReplaySettings.max_nodes)
    trees = [Tree.from_paths(paths[:count]) for count in range(len(paths) + 1)]
    return AcceptanceProfile(
        temperature=0.0,
        num_texts=0,
        num_tokens=len(joint_ranks),
        temperatures=[1.0] * heads,
        paths=[list(path) for path in paths],
        static_tokens=_rising([expected_tokens(joint_ranks, tree) for tree in trees]),
        dynamic_tokens=[],
        top_k=top_k,
        beam=1,
    )


def _rising(tokens: Sequence[float]) -> list[float]:
    """Never falling: a larger tree contains the smaller one, so where it seems to gain less, that is noise."""
    return [round(value, 4) for value in accumulate(tokens, max)]


def copy_probs(
    texts: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    num_tokens: int = 9,
    max_match: int = 8,
    prior: CopyProbs | None = None,
) -> list[list[float]]:
    """Row m-1, place d: the probability that the first d+1 copied tokens are right after a match of m tokens.

    At every token of an answer, what would be copied is compared with what follows. The last row is for ``max_match``
    tokens and more. Rows fall from token to token and do not fall from a match to a longer one; with few observations
    they are drawn to ``prior``, or to the row of the next shorter match.

    Args:
        texts: pairs of prompt and answer, token ids.
        num_tokens: the most tokens that are copied.
        max_match: longer matches count as matches of this length.
        prior: probs of as many tokens and matches, measured on other texts.
    """
    right = [[0] * (num_tokens + 1) for _ in range(max_match)]  # the first d tokens are; all of them are known
    tried = [[0] * (num_tokens + 1) for _ in range(max_match)]  # the first d-1 are, and the next one is known
    for prompt, answer in texts:
        text = TextIndex(max_ngram=MAX_NGRAM)
        text.read(prompt)
        for place, token in enumerate(answer):
            copied, match = text.copy(num_tokens, longest=max_match)
            if match:
                row = min(match, max_match) - 1
                for depth, (copy, real) in enumerate(zip(copied, answer[place:], strict=False), start=1):
                    tried[row][depth] += 1
                    if copy != real:
                        break
                    right[row][depth] += 1
            text.read([token])
    return _smooth(right, tried, num_tokens, prior)


def _smooth(
    right: Sequence[Sequence[int]], tried: Sequence[Sequence[int]], num_tokens: int, prior: CopyProbs | None
) -> list[list[float]]:
    """Counts as smooth products of conditional probabilities."""
    depths = range(1, num_tokens + 1)
    all_right, all_tried = (list(map(sum, zip(*counts, strict=True))) for counts in (right, tried))
    shares = [(all_right[d] + 1) / (all_tried[d] + 2) for d in depths]
    probs: list[list[float]] = []
    for number, (hits, trials) in enumerate(zip(right, tried, strict=True)):
        if prior is not None:
            shares = [after / before for before, after in pairwise([1.0, *prior[number]])]
        shares = [(hits[d] + _PRIOR * shares[d - 1]) / (trials[d] + _PRIOR) for d in depths]
        row, product = [], 1.0
        for share in shares:
            product *= min(share, _HIGHEST)
            row.append(product)
        probs.append([max(pair) for pair in zip(row, probs[-1], strict=True)] if probs else row)
    return [_rounded(row) for row in probs]


def _rounded(row: Sequence[float]) -> list[float]:
    """To three digits, still falling, above 0."""
    rounded: list[float] = []
    for depth, value in enumerate(row):
        lowest = _STEP * (len(row) - depth)
        highest = rounded[-1] - _STEP if rounded else 1.0
        rounded.append(round(min(max(value, lowest), highest), 3))
    return rounded
