"""What a run learns from: the texts with their hidden states, which are kept apart, and all batches in their order.

Knows texts, stores and plans; knows nothing of heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from draftheads.data.batches import choose_texts, in_whole_steps, plan_batches, trainable
from draftheads.data.chat import EncodedChat
from draftheads.data.extract import build_shards, claim, load_texts, missing_shards, needed_bytes
from draftheads.data.features import Documents, FeatureStore
from draftheads.data.live import LiveStore, read_alone
from draftheads.data.plain_text import is_plain, load_blocks
from draftheads.errors import InvalidSettings
from draftheads.models.model import TargetModel
from draftheads.progress import Progress
from draftheads.train import processes
from draftheads.train.options import TrainOptions
from draftheads.train.schedule import Stage


@dataclass(frozen=True)
class Material:
    """Texts and batches of a run."""

    store: Documents
    training: list[int]  # documents with something to guess
    held_out: list[int]
    plan: list[list[int]]  # the documents of every batch; whole steps
    batches_per_step: int  # of all processes together
    stages: tuple[Stage, ...]

    @property
    def num_steps(self) -> int:
        """Steps of the optimiser."""
        return len(self.plan) // self.batches_per_step

    @property
    def tokens_per_step(self) -> list[int]:
        """Tokens of text in every step, padding left out."""
        sizes = [sum(self.store.lengths[i] for i in batch) for batch in self.plan]
        number = self.batches_per_step
        return [sum(sizes[i : i + number]) for i in range(0, len(sizes), number)]


def read_data(target: TargetModel, options: TrainOptions) -> list[EncodedChat]:
    """Plain texts in blocks, and chats.

    Raises:
        DataError: a bad file; no text at all.
    """
    texts: list[EncodedChat] = []
    if options.text:
        texts += load_blocks(
            target.tokenizer,
            options.text,
            eos_ids=target.eos_ids,
            length=options.max_length,
            max_tokens=options.max_tokens,
        )
    if options.data:
        texts += load_texts(target, options.data, max_length=options.max_length, max_tokens=options.max_tokens)
    return texts


def with_hidden_states(
    target: TargetModel, texts: Sequence[EncodedChat], options: TrainOptions, progress: Progress
) -> Documents:
    """The texts in a store: on the disk where it fits the budget, else computed when asked for. The same numbers.

    Several processes share the reading, each has every n-th shard.
    """
    if (needed := needed_bytes(target, texts)) > options.features_budget * 1e9:
        if options.shard_model:
            raise InvalidSettings(
                f"hidden states of {needed / 1e9:.2f} GB do not fit --features-budget {options.features_budget}, and a "
                "model spread with --shard-model cannot compute them anew for each batch: give a larger budget"
            )
        return LiveStore(target, texts)
    folder = options.features or options.out / "features"
    if processes.is_first():
        claim(target, texts, folder)
    processes.wait()  # for nobody writes into a folder that holds something else
    share = (processes.number(), processes.count())
    here = sum(map(len, missing_shards(texts, folder, share).values()))
    most = processes.most_of(here)
    build_shards(target, texts, folder, progress, share=share)
    if options.shard_model:  # its processes make their passes together
        for _ in range(most - here):
            read_alone(target, torch.tensor(texts[0].token_ids[:1]))
    processes.wait()
    return FeatureStore(folder)


def arrange(store: Documents, options: TrainOptions) -> Material:
    """Splits the texts and decides all batches; the same for the same options.

    Raises:
        DataError: too few texts, or none with two learned tokens in a row.
    """
    kinds = [is_plain(loss_mask) for loss_mask in store.loss_masks]
    plain = _first([index for index, kind in enumerate(kinds) if kind], store, options.max_tokens)
    chats = _first([index for index, kind in enumerate(kinds) if not kind], store, options.max_tokens)
    judged = chats or plain  # what the heads are for
    token_ids, loss_masks = ([of[i] for i in judged] for of in (store.token_ids, store.loss_masks))
    parts = choose_texts(token_ids, loss_masks, held_out=options.held_out, seed=options.seed)
    training, held_out = ([judged[i] for i in part] for part in parts)
    per_step = options.accumulate * processes.count()
    plan = in_whole_steps(_plan(training, store, options, num_epochs=options.epochs), per_step)
    stages: tuple[Stage, ...] = (Stage(len(plan) // per_step),)
    if chats and plain:
        num_steps = max(1, round(stages[0].num_steps * options.text_part / (1 - options.text_part)))
        first = _repeated(trainable(plain, store.loss_masks), store, options, num_batches=num_steps * per_step)
        plan = [*first, *plan]
        stages = (Stage(num_steps), Stage(stages[0].num_steps, peak=options.second_stage_rate))
        training = [*plain, *training]
    return Material(store, training, held_out, plan, per_step, stages)


def _first(documents: list[int], store: Documents, max_tokens: int | None) -> list[int]:
    """Those with that many tokens; where the data was read for this run, they are all that is there."""
    if max_tokens is None:
        return documents
    before = accumulate((store.lengths[i] for i in documents), initial=0)  # one number more than there are documents
    return [i for i, tokens in zip(documents, before, strict=False) if tokens < max_tokens]


def _plan(documents: Sequence[int], store: Documents, options: TrainOptions, *, num_epochs: int) -> list[list[int]]:
    return plan_batches(
        documents, store.lengths, max_tokens=options.batch_tokens, num_epochs=num_epochs, seed=options.seed
    )


def _repeated(
    documents: Sequence[int], store: Documents, options: TrainOptions, *, num_batches: int
) -> list[list[int]]:
    """So many batches of these documents, in as many rounds as it takes."""
    rounds = 1
    while len(plan := _plan(documents, store, options, num_epochs=rounds)) < num_batches:
        rounds = -(-num_batches * rounds // len(plan))
    return plan[:num_batches]
