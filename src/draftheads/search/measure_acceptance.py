"""The acceptance profile of a head, measured along held-out texts or the model's own answers."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from draftheads.drafters.copy_probs import DEFAULT_COPY_PROBS, copy_probs
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search.calibrate import Answer
from draftheads.search.replay import Replay
from draftheads.search.settings import ReplaySettings
from draftheads.speculation.acceptance_profile import MAX_NODES, AcceptanceProfile
from draftheads.speculation.tree import Path as RankPath
from draftheads.speculation.tree import Tree
from draftheads.speculation.tree_search import expected_tokens, joint_order, path_counts
from draftheads.utils.progress import Progress

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
