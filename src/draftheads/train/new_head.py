"""The head that a run begins with: its settings, its draft vocabulary, and what it takes over from another one."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from draftheads.data.features import Documents
from draftheads.draft import TargetWeights
from draftheads.heads import head_classes, parse_head_options
from draftheads.heads.attention import LayerConfig
from draftheads.heads.base import DraftHead, EmbeddingConfig, HeadConfig
from draftheads.models.model import TargetModel
from draftheads.progress import Progress
from draftheads.train.options import TrainOptions
from draftheads.train.start import Start
from draftheads.train.trainer import find_checkpoint


def new_head(
    options: TrainOptions,
    weights: TargetWeights,
    store: Documents,
    documents: Sequence[int],
    eos_ids: frozenset[int],
    *,
    layer_sizes: Mapping[str, float] = MappingProxyType({}),
    start: Start | None = None,
) -> DraftHead:
    """An untrained head with its starting values, on the weights' device, the same for the same seed.

    ``layer_sizes`` are those of the target's layers, for heads that have some of their own. Of ``start`` it has what
    fits, its draft vocabulary, and its scale of embeddings, without which the weights mean something else.
    """
    torch.manual_seed(options.seed)
    vocab_size, hidden_size = weights.lm_head.shape
    config_class, head_class = head_classes(options.method)
    vocab, scale = None, 1.0
    if start is not None:
        vocab = start.vocab(options.draft_vocab_size)
    elif 0 < options.draft_vocab_size < vocab_size:
        vocab = frequent_tokens(store, documents, options.draft_vocab_size, vocab_size=vocab_size, always=eos_ids)
    if issubclass(config_class, EmbeddingConfig):
        known = None if start is None else start.embedding_scale
        scale = embedding_scale(weights, store, documents) if known is None else known
    config = _head_config(
        options,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=None if vocab is None else len(vocab),
        embedding_scale=scale,
        layer_sizes=layer_sizes,
    )
    head = head_class(config).to(weights.lm_head.device)
    head.initialise(weights, None if vocab is None else vocab.to(weights.lm_head.device))
    if start is not None:
        start.give(head)
    return head


def _head_config(
    options: TrainOptions,
    *,
    hidden_size: int,
    vocab_size: int,
    draft_vocab_size: int | None,
    embedding_scale: float,
    layer_sizes: Mapping[str, float],
) -> HeadConfig:
    """What the options say, for a model of these sizes."""
    config_class, _ = head_classes(options.method)
    measured: dict[str, Any] = {}
    if issubclass(config_class, LayerConfig):
        measured |= layer_sizes
    if issubclass(config_class, EmbeddingConfig):
        measured["embedding_scale"] = embedding_scale
    return config_class(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=options.num_heads,
        num_layers=options.num_layers,
        lm_head=options.lm_head,
        lm_head_rank=options.lm_head_rank,
        draft_vocab_size=draft_vocab_size,
        **{**measured, **parse_head_options(options.method, options.head_options)},
    )


def read_start(options: TrainOptions, target: TargetModel, reporter: Progress) -> Start | None:
    """The head that ``--start-from`` names, if any; says what it gives.

    Raises:
        DraftHeadsError: it is none for this model, or nothing of it fits.
    """
    if options.start_from is None:
        return None
    start = Start.read(options.start_from, target)
    vocab = start.vocab(options.draft_vocab_size)
    config = _head_config(
        options,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=None if vocab is None else len(vocab),
        embedding_scale=1.0,  # decides no shape
        layer_sizes=target.layer_sizes,
    )
    _, head_class = head_classes(options.method)
    with torch.device("meta"):
        head = head_class(config)
    part = start.part_of(head)
    if not (options.resume and find_checkpoint(options.out)):
        reporter.stage(f"starting from {start.name}, which gives {part:.0%} of the head's numbers")
    return start


def embedding_scale(weights: TargetWeights, store: Documents, documents: Sequence[int]) -> float:
    """How much larger hidden states are than embeddings (root mean squares); they are often ten times larger.

    A head that reads both side by side would hardly see the embeddings: Adam's steps are the same for all weights.
    """
    hidden = torch.cat([store[i].hidden.float() for i in documents[:16]])
    ratio = hidden.square().mean().sqrt() / weights.embedding.float().square().mean().sqrt().cpu()
    return round(float(ratio), 3)


def frequent_tokens(
    store: Documents,
    documents: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int,
    always: frozenset[int],
) -> Tensor:
    """The ids (V',) of the assistant's most frequent tokens, rising.

    ``always`` are among them as far as there is room; ties go to the lower id.
    """
    said = torch.cat([store.token_ids[i][store.loss_masks[i]] for i in documents])
    counts = torch.bincount(said, minlength=vocab_size)
    counts[sorted(always)] = len(said) + 1
    return counts.sort(descending=True, stable=True).indices[:num_tokens].sort().values


def in_float32(weights: TargetWeights) -> TargetWeights:
    """Heads' weights are fp32 in training whatever the target computes in; tied matrices stay tied."""
    embedding = weights.embedding.detach().float()
    is_tied = weights.lm_head is weights.embedding
    lm_head = embedding if is_tied else weights.lm_head.detach().float()
    bias = None if weights.lm_head_bias is None else weights.lm_head_bias.detach().float()
    return TargetWeights(embedding, lm_head, bias, weights.logit_scale, weights.logit_softcap)
