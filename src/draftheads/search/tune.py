"""The acceptance profile of a head: along held-out texts, or for the user's own prompts along the model's answers."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, repeat
from operator import itemgetter, mul
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from draftheads.checkpoints.checkpoint import resolve_head
from draftheads.checkpoints.registry import folder_to_write, head_name
from draftheads.data.batches import choose_texts
from draftheads.data.features import Document, FeatureStore
from draftheads.data.records import own_prompts, prompts_in
from draftheads.decode.engine import Engine
from draftheads.decode.planner import Planner, rates
from draftheads.decode.prompts import Prompt, prompt_list
from draftheads.decode.step_costs import StepCosts, costs_of
from draftheads.drafters.sources import DEFAULT_COPY_PROBS, MAX_NGRAM, CopyProbs, TextIndex
from draftheads.errors import DataError, InvalidSettings
from draftheads.heads.base import DraftHead
from draftheads.loading import PRECISIONS, engine_on, load_drafter, load_target, template_of
from draftheads.models.file_checks import keys_in
from draftheads.models.fingerprint import Parts
from draftheads.models.model import TargetModel
from draftheads.models.model_names import model_name
from draftheads.search.replay import Answer, Replay, encoded, own_answers
from draftheads.search.settings import ReplaySettings
from draftheads.search.tree_search import expected_tokens, joint_order, path_counts
from draftheads.settings import HELD_OUT, ROUNDED_BITS, Precision
from draftheads.speculation.acceptance_profile import KINDS, MAX_NODES, PROFILE_FILE, AcceptanceProfile
from draftheads.speculation.shapes import Drafting
from draftheads.speculation.tree import Path as RankPath
from draftheads.speculation.tree import Tree
from draftheads.utils.cache import cache_folder
from draftheads.utils.counts import counted
from draftheads.utils.files import check_writable, finish_replacing, locked, user_path, write_atomic
from draftheads.utils.progress import Progress, shown
from draftheads.utils.provenance import provenance

RECORD = "tune.json"
BATCH_SIZES = (1, 2, 4, 8, 16)  # for which speeds are predicted
_ANSWERS_FOLDER = "tune.work"  # where the user has no cache
_PRIOR = 20.0  # pseudo-count of the prior probs, or of those of the next shorter match
_HIGHEST = 0.99  # probability of a copied token given those before it
_STEP = 0.001  # probs are rounded to this, and fall by at least this from token to token
NUM_TEXTS, TOKENS_PER_TEXT = 64, 64  # held-out texts that a profile is measured on after training


@dataclass(frozen=True)
class Tuning:
    """A head's profile and what it was made from."""

    profile: AcceptanceProfile
    record: dict[str, Any]  # as in ``tune.json``
    folder: Path  # where both are written
    engine: Engine  # the model with the head, as it is loaded with this profile


def tune_head(
    model: str | PathLike[str],
    head: str | PathLike[str],
    prompts: Sequence[Prompt] | None = None,
    *,
    chat_template: str | PathLike[str] | None = None,
    out: str | PathLike[str] | None = None,
    settings: ReplaySettings | None = None,
    precision: Precision = "auto",
    progress: Progress | bool = True,
    **load_options: Any,
) -> Tuning:
    """Measures how many tokens a step gains with a head, on the user's prompts; what ``draftheads tune`` does.

    Writes ``acceptance.json``, by which the head is then loaded, and ``tune.json``. The model's answers are saved, so a
    run that was stopped continues, and other heads use them again.

    Args:
        model: ``smollm2-135m``, a folder, or a Hugging Face id.
        head: a bundled head's name, a folder, or a Hugging Face id.
        prompts: to be answered; 64 built-in ones when left out.
        chat_template: as for :func:`draftheads.load`.
        out: the folder to write to. When left out, the head's own folder, or for a bundled or downloaded head a folder
            in the user's cache.
        settings: of the answers and the trees.
        precision: as for :func:`draftheads.load`.
        progress: True shows bars in a notebook or on a terminal; or receives each stage.
        load_options: other arguments of :func:`draftheads.load` for the model, such as ``device`` or ``four_bit``.

    Raises:
        ModelNotFound, CheckpointError: the model or the head cannot be loaded.
        DataError: fewer than two prompts, or fewer than two answers.
        StorageError: the folder cannot be written, or another process writes into it.
    """
    settings, progress = settings or ReplaySettings(), shown(progress)
    prompts = prompts_in(own_prompts("calibration")) if prompts is None else prompt_list(prompts)
    model, head = model_name(model), head_name(head)
    saved = resolve_head(head, model, ignore_profile=True)
    folder = user_path(out) if out else folder_to_write(saved)
    check_writable(folder / PROFILE_FILE)
    template = template_of(chat_template, saved)
    target = load_target(model, chat_template=template, precision=precision, **load_options)
    drafter = load_drafter(saved, target, fast=load_options.get("fast", True))
    with locked(folder, "give --out"):
        answers = own_answers(
            target, encoded(target, prompts, settings), settings, folder=answers_folder(folder), progress=progress
        )
        profile, measured = measured_profile(target, drafter, answers, settings, progress=progress)
        progress.stage("predicting speeds on this machine")
        record = {
            "format_version": 2,
            "method": drafter.config.method,
            "model_id": target.model_id,
            "head": head,
            "dtype": str(target.dtype).removeprefix("torch."),
            "temperature": settings.temperature,
            "num_texts": len(answers),
            **measured,
            **predicted(profile, costs_of(target, drafter)),
            "provenance": provenance(),
        }
        write_atomic(folder / RECORD, json.dumps(record).encode())
        finish_replacing(folder)
        profile.save(folder / PROFILE_FILE)
    drafting = Drafting(saved.name, tree=str(folder))
    engine = engine_on(target, saved, drafting, drafter=drafter, max_batch_size=1)
    return Tuning(profile, record, folder, engine)


def tune_on_states(
    model: str | PathLike[str],
    head: str | PathLike[str],
    features: Path,
    *,
    out: str | PathLike[str] | None = None,
    settings: ReplaySettings | None = None,
    precision: Precision = "auto",
    progress: Progress,
    **load_options: Any,
) -> tuple[AcceptanceProfile, Path]:
    """Measures a head along texts whose hidden states are stored, as :func:`tune_head` along answers of the model.

    The model is loaded without its layers, and nothing is timed. Texts are those that the head's training held out, by
    its ``metrics.json``, else by the defaults of ``draftheads train``.

    ``features`` is a folder that ``draftheads train --features`` made; the other arguments are those of
    :func:`tune_head`. Returns the profile, and the folder in which it was written.

    Raises:
        UnsupportedModel: the model cannot be loaded without layers.
        DataError: the states are not the model's, or fewer than two texts with answers are held out.
    """
    settings, (model, head) = settings or ReplaySettings(), (model_name(model), head_name(head))
    if precision in ROUNDED_BITS:
        raise InvalidSettings(
            f"precision is {precision!r}: stored hidden states are those of a model that is not rounded"
        )
    saved = resolve_head(head, model, ignore_profile=True)
    folder = user_path(out) if out else folder_to_write(saved)
    check_writable(folder / PROFILE_FILE)
    template = template_of(load_options.pop("chat_template", None), saved)
    target = TargetModel.load(model, dtype=PRECISIONS[precision], chat_template=template, parts=Parts(), **load_options)
    drafter = load_drafter(saved, target)
    store = FeatureStore(features, drafter.hidden_layers)
    store.check(target)
    record = saved.folder / "metrics.json"
    trained = keys_in(record).get("options", {}) if record.is_file() else {}
    texts = [index for index, is_plain in enumerate(store.is_plain) if is_plain == store.is_plain.all()]
    token_ids, loss_masks = ([of[index] for index in texts] for of in (store.token_ids, store.loss_masks))
    how = {"held_out": trained.get("held_out", HELD_OUT), "seed": trained.get("seed", 0)}
    held_out = sorted(choose_texts(token_ids, loss_masks, **how)[1])[: settings.num_prompts]
    read = [partial(store.__getitem__, texts[index]) for index in held_out]
    answers = recorded([(token_ids[index], loss_masks[index]) for index in held_out], read)
    if len(answers) < 2:
        found = counted(len(answers), "held-out text")
        raise DataError(f"{features}: {found} with an answer: at least 2 are needed: train on more texts")
    with locked(folder, "give --out"):
        profile, _ = measured_profile(target, drafter, answers, settings, progress=progress)
        finish_replacing(folder)
        profile.save(folder / PROFILE_FILE)
    return profile, folder


def answers_folder(folder: Path) -> Path:
    """Where the model's answers are saved: not with the head, which may be published, for they contain the prompts."""
    try:
        return cache_folder() / "answers"
    except InvalidSettings:
        return folder / _ANSWERS_FOLDER


def predicted(profile: AcceptanceProfile, costs: StepCosts) -> dict[str, Any]:
    """Tokens per second on this machine, for the record: of each kind and size of tree, and of the fastest."""
    planner = Planner(profile, costs)
    found, batches = [], []
    for rows in BATCH_SIZES:
        passes, drafting = planner.costs_now(rows)
        plain = 1e3 * rows / float(passes[0])
        ways: list[dict[str, Any]] = [{"kind": "none", "num_nodes": 1, "depth": 0, "tokens_per_second": plain}]
        for kind in KINDS:
            fastest: dict[int, dict[str, Any]] = {}  # by nodes
            own = [way for way in planner.ways if way.kind == kind]
            for way, by_nodes in zip(own, rates(own, rows, passes, drafting), strict=True):
                for nodes, rate in enumerate(1e3 * by_nodes[1:], 2):
                    new = {"kind": kind, "num_nodes": nodes, "depth": way.depth, "tokens_per_second": float(rate)}
                    fastest[nodes] = max(fastest.get(nodes, new), new, key=itemgetter("tokens_per_second", "depth"))
            ways += fastest.values()
            speeds = [each["tokens_per_second"] for each in fastest.values()]
            found.append({"batch_size": rows, "kind": kind, "num_nodes": list(fastest), "tokens_per_second": speeds})
        best = max(ways, key=itemgetter("tokens_per_second"))
        speedup = best["tokens_per_second"] / plain
        batches.append({"batch_size": rows, **best, "plain_tokens_per_second": plain, "speedup": speedup})
    return {"rates": found, "batches": batches}


def recorded(
    texts: Sequence[tuple[Tensor, Tensor]], stored: Sequence[Callable[[], Document]] | None = None
) -> list[Answer]:
    """The first answer in each text, as if the model had just decoded it; answers of one token are left out.

    Texts are token ids (T,) and loss masks (T,), True for tokens of answers; ``stored`` reads them with hidden states.
    """
    answers = []
    for (token_ids, loss_mask), read in zip(texts, stored or repeat(None, len(texts)), strict=True):
        ids, mask = token_ids.tolist(), loss_mask.tolist()
        start = max(1, mask.index(True)) if True in mask else len(mask)  # else the first token is the prompt
        stop = next((place for place in range(start, len(mask)) if not mask[place]), len(mask))
        stop = min(stop, start + TOKENS_PER_TEXT)
        if stop - start >= 2:
            answers.append(Answer(tuple(ids[:start]), tuple(ids[start:stop]), read))
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
            for at, match in text.matches(1, max_match).items():
                row, copied = min(match, max_match) - 1, text.following(at, num_tokens)
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
        row = list(accumulate((min(share, _HIGHEST) for share in shares), mul))
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
