"""Texts of a run with their hidden states, which of them are held out, all batches in their order, learning rates."""

import hashlib
import json
import math
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from torch import Tensor

from draftheads.data.batches import NUM_MEASURED, choose_texts, in_whole_steps, plan_batches, trainable
from draftheads.data.features import (
    Documents,
    FeatureStore,
    LiveStore,
    Texts,
    build_shards,
    claim,
    read_meta,
    stored,
)
from draftheads.data.files import files_in
from draftheads.data.lines import LeftOut
from draftheads.data.texts import EncodedChat, chat_texts, known_texts, limited, load_blocks
from draftheads.data.vllm_features import MOST_LIKELY, ExtractedStore, likelihood_problem
from draftheads.errors import DataError, DataWarning
from draftheads.models.chat_template import date_now, reads_variable, template_of
from draftheads.models.fingerprint import tokenizer_fingerprint
from draftheads.models.model import TargetModel
from draftheads.train import processes
from draftheads.train.options import TrainOptions
from draftheads.utils.counts import counted, scripts_of
from draftheads.utils.machine import by_all_cores
from draftheads.utils.progress import NoProgress, Progress

TEXT_PART, SECOND_STAGE_RATE = 5 / 7, 0.1  # of the MLP Speculator: 15k and 6k steps, and a tenth of the learning rate
TEXTS_FOLDER = "texts"  # in --out, until the run is complete
_TEXTS_PER_REPORT = 256
_SCRIPT_TOKENS = 128  # of each text, the first that are learned, whose letters are counted by script
MOST_BATCH_TOKENS = 4096  # more tokens of a step are several batches, whose gradients are added


@dataclass(frozen=True)
class Stage:
    """Steps with a warm-up and a cosine of their own."""

    num_steps: int
    peak: float = 1.0  # part of the highest learning rate


@dataclass(frozen=True)
class TrainingData:
    """Texts and batches of a run."""

    store: Documents
    training: list[int]  # documents from which at least one token can be predicted
    held_out: list[int]
    plan: list[list[int]]  # the documents of every batch; whole steps
    batches_per_step: int  # of all processes that see one folder together
    stages: tuple[Stage, ...]
    epoch_ends: frozenset[int]  # steps, to the nearest one; also the end of the first stage

    @property
    def num_steps(self) -> int:
        return len(self.plan) // self.batches_per_step

    def batches_of(self, group: processes.Group, first_step: int) -> Iterator[list[int]]:
        """The numbers of the batches of this process in each step: every n-th of the group's batches."""
        return (
            [*range(step * self.batches_per_step + group.number, (step + 1) * self.batches_per_step, group.size)]
            for step in range(first_step, self.num_steps)
        )

    @property
    def tokens_per_step(self) -> list[int]:
        """Tokens of text in every step, without padding."""
        lengths = self.store.lengths
        sizes = [sum(lengths[i] for i in batch) for batch in self.plan]
        number = self.batches_per_step
        return [sum(sizes[i : i + number]) for i in range(0, len(sizes), number)]

    def sizes(self, documents: Sequence[int]) -> tuple[int, int]:
        """Tokens of some documents, and how many of them are learned."""
        masks = [self.store.texts.part(i)[1] for i in documents]
        return sum(map(len, masks)), int(sum(map(np.sum, masks)))

    def texts(self, documents: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Token ids (T,) and loss mask (T,) of some documents."""
        return [(self.store.token_ids[i], self.store.loss_masks[i]) for i in documents]


def read_texts(
    target: TargetModel, options: TrainOptions, left_out: LeftOut | None = None, progress: Progress | None = None
) -> Texts:
    """Plain texts in blocks, and chats; ``left_out`` gets the lines that cannot be used.

    One process writes them into a folder in ``--out``, and all others map it; so does a run that resumes. Hosts with
    disks of their own read their own files; where all have the same files, each host takes every n-th text.
    """
    folder, lost, group = options.out / TEXTS_FOLDER, LeftOut(), processes.group(options.out)
    lines, key = _lines_and_key(target, options) if group.number == 0 else ({}, "")
    share = (group.index, group.count) if len({*processes.every(key)} - {""}) == 1 else (0, 1)
    key = f"{key} {share} {[*lines]}"
    if group.number == 0 and not ((folder / "texts.json").exists() and Texts.open(folder).facts.get("key") == key):
        given: dict[str, Any] = {"max_tokens": options.max_tokens, "left_out": lost, "mapped": by_all_cores}
        length, eos_ids = limited(options.max_length, target), target.eos_ids
        blocks = load_blocks(target.tokenizer, options.text, eos_ids=eos_ids, length=length, **given)
        chats = chat_texts(target, options.data, max_length=options.max_length, **given)
        texts = chain(blocks if options.text else (), chats if options.data else ())
        own = islice(known_texts(texts, target.vocab_size, lost), share[0], None, share[1])
        facts = {"key": key, "left_out": lost, "scripts": (scripts := Counter[str]())}
        Texts.write(folder, _shown(_with_scripts(own, target, scripts), lines, progress or NoProgress()), facts)
    processes.wait()
    found = Texts.open(folder)
    (left_out if left_out is not None else {}).update(found.facts["left_out"])
    return found


def _lines_and_key(target: TargetModel, options: TrainOptions) -> tuple[dict[str, int], str]:
    """The number of lines of each file, and a digest of all that the tokens depend on."""
    digest, lines = hashlib.sha256(), dict[str, int]()
    for file in chain.from_iterable(map(files_in, (*options.text, *options.data))):
        lines[str(file)] = 0
        digest.update(file.suffix.encode())  # hosts may have the same file in other folders
        with file.open("rb") as content:
            while part := content.read(1 << 20):
                digest.update(part)
                lines[str(file)] += part.count(b"\n")
    facts = (
        *(len(options.text), options.max_length, options.max_tokens),
        *(target.max_positions, target.vocab_size, sorted(target.eos_ids), tokenizer_fingerprint(target.tokenizer)),
        *(template_of(target), date_now() if reads_variable(target, "strftime_now") else ""),
        *(transformers.__version__, tokenizers.__version__),
    )
    digest.update(json.dumps(facts).encode())
    return lines, digest.hexdigest()


def _with_scripts(texts: Iterator[EncodedChat], target: TargetModel, scripts: Counter[str]) -> Iterator[EncodedChat]:
    """The texts; ``scripts`` receives the letters of each script at the beginning of what is learned."""
    for text in texts:
        learned = [*islice(compress(text.token_ids, text.loss_mask), _SCRIPT_TOKENS)]
        scripts.update(scripts_of(target.tokenizer.decode(learned, skip_special_tokens=True)))
        yield text


def _shown(texts: Iterator[EncodedChat], lines: Mapping[str, int], progress: Progress) -> Iterator[EncodedChat]:
    """The texts; ``progress`` receives the lines that were read."""
    before = dict(zip(lines, accumulate(lines.values(), initial=0), strict=False))
    total, num_tokens = max(1, sum(lines.values())), 0
    for number, text in enumerate(texts):
        if number % _TEXTS_PER_REPORT == 0:  # lines of zipped files and of tables are not known
            file, _, line = text.source.rpartition(":")
            progress.progress(min(before[file] + int(line), total), total, counted(num_tokens, "token"))
        num_tokens += len(text.token_ids)
        yield text
    progress.progress(total, total, counted(num_tokens, "token"))


def with_hidden_states(
    target: TargetModel,
    texts: Sequence[EncodedChat],
    options: TrainOptions,
    progress: Progress,
    layers: Sequence[int] = (),
) -> Documents:
    """The texts in a store: on the disk if there is room, else computed for each batch. The numbers are the same.

    With ``layers`` the store also has their inputs. A folder that vLLM wrote has its numbers.
    Several processes that see one folder share the work: each computes every n-th shard.
    """
    group = processes.group(options.out)
    folder = options.features or options.out / "features"
    if is_extracted(folder):
        return ExtractedStore(target, texts, folder, layers)
    if processes.any_of(not has_room(target, texts, folder, layers)):
        progress.stage("the disk has too little room for hidden states: they are computed for each batch")
        return LiveStore(target, texts, layers)
    if group.number == 0:
        claim(target, texts, folder, layers)
    processes.wait()  # no process writes into a folder that holds something else
    build_shards(target, texts, folder, progress, share=(group.number, group.size))
    processes.wait()
    return checked_store(target, folder, layers)


def is_complete(folder: Path) -> bool:
    """Whether a store has the hidden states of all its texts."""
    meta = read_meta(folder)
    with suppress(DataError):  # a run that reads the store names the damage
        return meta is not None and stored(folder)[0] == meta.num_documents
    return False


def is_extracted(folder: Path) -> bool:
    """Whether the folder has files that vLLM wrote."""
    return read_meta(folder) is None and any(folder.rglob("*.safetensors"))


def needed_bytes(target: TargetModel, texts: Sequence[EncodedChat], layers: Sequence[int] = ()) -> int:
    """The size of the store of these texts on the disk, approximately."""
    return int(Texts.of(texts).starts[-1]) * (2 * (len(layers) + 1) * target.hidden_size + 5)


def has_room(target: TargetModel, texts: Sequence[EncodedChat], folder: Path, layers: Sequence[int] = ()) -> bool:
    """Whether what is missing of the store of these texts takes at most half of the disk that is free."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    needed = needed_bytes(target, texts, layers) * (1 - stored(folder)[1] / int(Texts.of(texts).starts[-1]))
    return needed <= shutil.disk_usage(there).free / 2


def checked_store(target: TargetModel, folder: Path | None, layers: Sequence[int]) -> FeatureStore:
    """A complete store of this target's hidden states; that of a run without texts is given.

    Where the target cannot compute them, the likelihood of a text of each shard is looked at.
    """
    assert folder is not None, "options without texts have features"
    store = FeatureStore(folder, layers)
    store.check(target)
    for name, token_ids, hidden in () if target.has_layers else store.last_states(MOST_LIKELY):
        if problem := likelihood_problem(target, hidden, token_ids):
            fix = f"unless this model was never trained, delete {folder}; the same command makes it again"
            warnings.warn(f"{name}: {problem}; {fix}", DataWarning, stacklevel=2)
    return store


def plan_training(store: Documents, options: TrainOptions) -> TrainingData:
    """Holds texts out and decides all batches; the same for the same options.

    Hosts with texts of their own decide for themselves, and make as many steps as the one with the most.
    """
    plain, chats = (_documents(store, options.max_tokens, plain=kind) for kind in (True, False))
    measured = chats or plain  # plain text is held out only if it is all there is
    token_ids, loss_masks = ([of[i] for i in measured] for of in (store.token_ids, store.loss_masks))
    parts = choose_texts(token_ids, loss_masks, held_out=options.held_out, seed=options.seed)
    training, held_out = ([measured[i] for i in part] for part in parts)
    held_out = sorted(held_out[:NUM_MEASURED])
    num_parts = -(-options.batch_tokens // MOST_BATCH_TOKENS)
    per_step = num_parts * processes.group(options.out).size
    size = -(-options.batch_tokens // num_parts)
    planned = partial(plan_batches, lengths=store.lengths, max_tokens=size, seed=options.seed)
    plan = planned(training, num_epochs=options.epochs)
    plan = in_whole_steps(plan, per_step, max(processes.every(-(-len(plan) // per_step))))
    stages: tuple[Stage, ...] = (Stage(len(plan) // per_step),)
    if chats and plain:
        num_steps = max(1, round(stages[0].num_steps * TEXT_PART / (1 - TEXT_PART)))
        of_plain_text = partial(planned, trainable(plain, store.loss_masks))
        plan = [*_repeated(of_plain_text, num_batches=num_steps * per_step), *plan]
        stages = (Stage(num_steps), Stage(stages[0].num_steps, peak=SECOND_STAGE_RATE))
        training = [*plain, *training]
    if len({*processes.every(stages)}) > 1:
        raise DataError("hosts have different kinds of texts: give all of them chats, or plain text, or both")
    first_steps, last_steps = len(plan) // per_step - stages[-1].num_steps, stages[-1].num_steps
    ends = {first_steps + round(last_steps * i / options.epochs) for i in range(options.epochs + 1)}
    return TrainingData(store, training, held_out, plan, per_step, stages, frozenset(ends))


def _documents(store: Documents, max_tokens: int | None, *, plain: bool) -> list[int]:
    """Plain texts, or chats, until ``max_tokens`` tokens are there. Data that was read for this run has no more."""
    documents: list[int] = np.flatnonzero(store.is_plain == plain).tolist()
    if max_tokens is None:
        return documents
    before = accumulate((store.lengths[i] for i in documents), initial=0)  # one number more than there are documents
    return [i for i, tokens in zip(documents, before, strict=False) if tokens < max_tokens]


def _repeated(planned: Callable[..., list[list[int]]], *, num_batches: int) -> list[list[int]]:
    """That many batches, in as many epochs as needed."""
    num_epochs = 1
    while len(plan := planned(num_epochs=num_epochs)) < num_batches:
        num_epochs = -(-num_batches * num_epochs // len(plan))
    return plan[:num_batches]


# --- learning rates by step, counted from 0; pure numbers ---


def staged_rate(step: int, stages: Sequence[Stage], *, warmup: float, final: float) -> float:
    """The learning rate of a step, as a part of the highest.

    Args:
        step: counted through all stages.
        stages: in their order.
        warmup: steps of a stage in which the rate rises: below 1 a part of them, else their number.
        final: where a stage's cosine ends, as a part of its peak.

    >>> stages = [Stage(4), Stage(2, peak=0.1)]
    >>> [round(staged_rate(step, stages, warmup=0.0, final=0.1), 3) for step in range(6)]
    [1.0, 0.868, 0.55, 0.232, 0.1, 0.055]
    """
    for stage in stages:
        if step < stage.num_steps or stage is stages[-1]:
            return stage.peak * rise_and_cosine(step, stage.num_steps, warmup=warmup, final=final)
        step -= stage.num_steps
    raise AssertionError("a schedule needs a stage")


def rise_and_cosine(step: int, num_steps: int, *, warmup: float, final: float = 0.0) -> float:
    """A linear warm-up and half a cosine, as ``transformers``' ``cosine_with_min_lr``.

    >>> [round(rise_and_cosine(step, 6, warmup=0.4), 3) for step in range(7)]
    [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    >>> rise_and_cosine(1, 6, warmup=2)  # below 1 it is a part of the steps, else their number
    0.5
    """
    num_warmup_steps = int(warmup * num_steps if warmup < 1 else warmup)
    if step < num_warmup_steps:
        return step / num_warmup_steps
    part = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return final + (1 - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, part)))
