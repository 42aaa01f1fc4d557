"""The head that a run begins with: its size, its draft vocabulary, and what it copies from a head to start from.

Layers of the same name mean the same in a head and in the head that it starts from.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftheads.checkpoints.checkpoint import SavedHead, read_head, read_tensors, weightless_head
from draftheads.checkpoints.registry import find_head
from draftheads.data.features import Documents
from draftheads.errors import InvalidSettings
from draftheads.heads import head_classes, parse_head_options
from draftheads.heads.attention import LayerConfig
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.models.model import TargetModel
from draftheads.models.model_config import default_dtype, head_sizes, num_weights
from draftheads.speculation.draft import TargetWeights
from draftheads.train import processes
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import RECIPES
from draftheads.utils.counts import byte_size, counted, short_count
from draftheads.utils.machine import find_memory

_MAY_DIFFER = frozenset(  # settings that do not change the meaning of layers that both heads have
    {"num_heads", "num_layers", "lm_head", "lm_head_rank", "draft_vocab_size", "embedding_scale"}
)


@dataclass(frozen=True)
class Start:
    """A trained head to start from."""

    name: str  # as given by the user
    saved: SavedHead
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, name: str, target: TargetModel) -> "Start":
        """A bundled head, a folder or an id of the Hub, as :func:`~draftheads.checkpoints.registry.find_head` takes it.

        The model may have been tuned since, so its name and its weights may differ. Sizes and tokenizer must be the
        same.
        """
        saved, tensors = read_tensors(find_head(name, target.model_id))
        facts = (
            ("hidden_size", saved.config.hidden_size, target.hidden_size),
            ("vocab_size", saved.config.vocab_size, target.vocab_size),
            ("tokenizer fingerprint", saved.fingerprints.tokenizer, target.fingerprints.tokenizer),
        )
        for what, theirs, ours in facts:
            fix = "start from a head of this model or of a tuned copy"
            saved.check(what, theirs, ours, target.model_id, name=f"--start-from {name}", fix=fix)
        return cls(name, saved, tensors)

    def has_vocab(self, size: int) -> bool:
        """Whether it drafts as many tokens as a new head with a draft vocabulary of ``size``."""
        return self.saved.config.draft_vocab_size == _trimmed(size, self.saved.config.vocab_size)

    def _check_vocab(self, size: int) -> None:
        """Refuses another draft vocabulary if parameters depend on it, such as those of an lm_head of its own."""
        config, own = self.saved.config, self.saved.config.draft_vocab_size
        if self.has_vocab(size):
            return
        new = _trimmed(size, config.vocab_size)
        both = (weightless_head(replace(config, draft_vocab_size=each)) for each in (own, new))
        shapes, other_shapes = ({name: value.shape for name, value in head.named_parameters()} for head in both)
        if shapes != other_shapes:
            has = f"{self.name} has weights of its own for each of {counted(config.num_draft_tokens, 'draft token')}"
            fix = f"give --draft-vocab-size {own or 0}"
            raise InvalidSettings(f"--draft-vocab-size is {size}, but --start-from {has}: {fix}")

    def part_of_new(self, options: TrainOptions, target: TargetModel) -> float:
        """The part of a new head's parameters that :meth:`copy_into` sets; takes no memory for the head."""
        self._check_vocab(options.draft_vocab_size)
        config = head_config(options, _sizes(target, self, options.draft_vocab_size))
        self._check_meaning(config)
        head = weightless_head(config)
        copied = sum(parameter.numel() for parameter in self._fitting(head).values())
        return copied / sum(parameter.numel() for parameter in head.parameters())

    def _check_meaning(self, config: HeadConfig) -> None:
        """Refuses a new head in which this head's layers mean something else."""
        theirs, ours = self.saved.method, config.method
        if theirs not in (ours, config.extends):
            able = " or ".join(filter(None, (ours, config.extends)))
            raise InvalidSettings(f"--start-from {self.name} is a {theirs} head; heads of {ours} start from {able}")
        before_layers, layers = self.saved.config.num_layers, config.num_layers
        if layers < before_layers:  # the first layers of a deeper head mean something else
            has = f"{counted(before_layers, 'layer')} in each head, the new head {layers}"
            raise InvalidSettings(f"--start-from {self.name} has {has}: give --num-layers {before_layers} or more")
        if theirs == ours:
            before, now = _as_options(self.saved.config), _as_options(config)
            for option in sorted(now.keys() - _MAY_DIFFER):
                own = f"{option}={before[option]}"
                if before[option] != now[option]:
                    differs = f"has {own}, the new head {option}={now[option]}: give --head-options {own}"
                    raise InvalidSettings(f"--start-from {self.name} {differs}")

    @torch.no_grad()
    def copy_into(self, head: DraftHead) -> None:
        """Copies all tensors that fit. The others keep their initial values."""
        own = self.tensors.keys() - {"draft_vocab"}  # which the new head has already, maybe another one
        buffers = {name: buffer for name, buffer in head.named_buffers() if name in own}  # such as of a router
        for name, tensor in (buffers | self._fitting(head)).items():
            tensor.copy_(self.tensors[name])

    def _fitting(self, head: DraftHead) -> dict[str, nn.Parameter]:
        """Parameters by name; all or none of a layer, since a bias means nothing beside another weight."""
        fitting: dict[str, nn.Parameter] = {}
        for prefix, module in head.named_modules():
            named = {f"{prefix}.{name}".lstrip("."): value for name, value in module.named_parameters(recurse=False)}
            if all(name in self.tensors and self.tensors[name].shape == named[name].shape for name in named):
                fitting |= named
        return fitting


def new_head(
    options: TrainOptions, target: TargetModel, store: Documents, documents: Sequence[int], start: Start | None = None
) -> DraftHead:
    """An untrained head for a target with its initial values, in fp32; the same for the same seed.

    Args:
        options: architecture, sizes and seed.
        target: its end tokens are in the draft vocabulary as far as there is room.
        store: has the documents.
        documents: training texts; their tokens decide the draft vocabulary.
        start: a head whose fitting layers, draft vocabulary and embedding scale are copied. A vocabulary of another
            size has its tokens first.
    """
    torch.manual_seed(options.seed)
    weights, vocab = in_float32(target.weights), None
    size = options.draft_vocab_size
    known = None if start is None else start.tensors.get("draft_vocab")
    if start is not None and start.has_vocab(size):
        vocab = known
    elif _trimmed(size, target.vocab_size):
        vocab = processes.every(frequent_tokens(target, store, documents, size, known))[0]
    config_class, head_class = head_classes(options.method)
    scale = getattr(start and start.saved.config, "embedding_scale", None)
    if scale is None:
        is_measured = getattr(config_class, "scales_embedding", False)
        scale = processes.every(embedding_scale(weights, store, documents))[0] if is_measured else 1.0
    head = head_class(head_config(options, {**_sizes(target, start, size), "embedding_scale": scale}))
    head.to(weights.lm_head.device)
    head.initialise(weights, None if vocab is None else vocab.to(weights.lm_head.device))
    texts = (store[i] for i in documents)
    head.start_near((text.hidden.to(weights.lm_head), text.token_ids.to(weights.lm_head.device)) for text in texts)
    if start is not None:
        start.copy_into(head)
    return head


def unfitted_head(options: TrainOptions, target: TargetModel) -> DraftHead:
    """A head that has seen no text, as fast as a trained one; its draft vocabulary are the first tokens."""
    some = _trimmed(options.draft_vocab_size, target.vocab_size)
    vocab = torch.arange(some) if some else None
    head = head_classes(options.method)[1](head_config(options, _sizes(target, vocab_size=options.draft_vocab_size)))
    head.initialise(in_float32(target.weights), vocab)
    return head


def _trimmed(size: int, vocab_size: int) -> int | None:
    """The size of a draft vocabulary; None: it is the model's, which 0 and sizes that are no smaller ask for."""
    return size if 0 < size < vocab_size else None


def _sizes(target: TargetModel, start: Start | None = None, vocab_size: int = 0) -> dict[str, Any]:
    """What the configuration of a new head takes from its model, from the head to start from and from its tokens."""
    mask = getattr(start and start.saved.config, "mask_token_id", target.mask_token_id)  # a head goes on with its own
    some = _trimmed(vocab_size, target.vocab_size)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, **target.head_sizes}
    return {**sizes, "mask_token_id": mask, "draft_vocab_size": some}


def layers_read(options: TrainOptions, target: TargetModel) -> tuple[int, ...]:
    """The layers of the target whose inputs a new head reads; empty if it reads h_t."""
    layers = head_config(options, _sizes(target)).hidden_layers
    target.check_layers(layers)
    return layers


def head_config(options: TrainOptions, sizes: Mapping[str, Any]) -> HeadConfig:
    """The configuration of a new head with these options and sizes, of which its method may not have all."""
    config_class, _ = head_classes(options.method)
    known = {field.name: sizes[field.name] for field in fields(config_class) if field.name in sizes}
    chosen = {name: getattr(options, name) for name in ("num_heads", "num_layers", "lm_head")}
    return config_class(**{**known, **chosen, **parse_head_options(options.method, options.head_options)})


def embedding_scale(weights: TargetWeights, store: Documents, documents: Sequence[int]) -> float:
    """Ratio of hidden states to embeddings (root mean squares), often about ten.

    A head that reads both, unscaled, would hardly use the embeddings: Adam's steps are the same for all weights.
    """
    size = weights.embedding.shape[1]
    hidden = torch.cat([store[i].hidden[:, -size:].float() for i in documents[:16]])
    ratio = hidden.square().mean().sqrt() / weights.embedding.float().square().mean().sqrt().cpu()
    return round(float(ratio), 3)


def frequent_tokens(
    target: TargetModel, store: Documents, documents: Sequence[int], num_tokens: int, known: Tensor | None = None
) -> Tensor:
    """The ids (V',) of the assistant's most frequent tokens, in increasing order.

    The model's end tokens are among them as far as there is room, then the known ones. Of equally frequent tokens the
    lower id is taken.
    """
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for i in documents:
        token_ids, mask = store.texts.part(i)
        np.add.at(counts.numpy(), token_ids[mask], 1)
    if known is not None:
        counts[known] += counts.sum() + 1
    counts[sorted(target.eos_ids)] = counts.sum() + 1
    return counts.sort(descending=True, stable=True).indices[:num_tokens].sort().values


def in_float32(weights: TargetWeights) -> TargetWeights:
    """The target's weights in fp32, as heads are trained with them; tied matrices stay tied."""
    embedding = weights.embedding.detach().float()
    lm_head = embedding if weights.lm_head is weights.embedding else weights.lm_head.detach().float()
    bias = None if weights.lm_head_bias is None else weights.lm_head_bias.detach().float()
    return TargetWeights(embedding, lm_head, bias, weights.logit_scale, weights.logit_softcap)


def settings_of(name: str, model_id: str, method: str) -> dict[str, Any]:
    """Settings with which a new head of a method can copy all that a head to start from has.

    If the head has another method, these are the numbers of heads and layers, and the draft vocabulary's size.
    """
    saved = read_head(find_head(name, model_id))
    config = saved.config
    vocab = config.draft_vocab_size or 0
    sizes = {"num_heads": config.num_heads, "num_layers": config.num_layers, "draft_vocab_size": vocab}
    if saved.method != method:
        return sizes
    # sizes of the target's layers are the same in a new head
    common = {field.name for of in (HeadConfig, LayerConfig) for field in fields(of)} | {"embedding_scale", "layer"}
    common.remove("lm_head_rank")
    options = tuple(
        f"{field.name}={json.dumps(getattr(config, field.name))}"
        for field in fields(config)
        if field.name not in common and getattr(config, field.name) != field.default
    )
    return {**sizes, "lm_head": config.lm_head, **({"head_options": options} if options else {})}


def _as_options(config: HeadConfig) -> dict[str, str]:
    """Its settings as ``--head-options`` takes them."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in asdict(config).items()}


# --- whether a head fits the model and the memory, before the model's weights are read ---

# weights, gradients and Adam's two moments: fp32 each, or moments of 8 bits; at most so much with Muon's one moment
BYTES_PER_PARAMETER = {"adamw": 16, "adamw-8bit": 10, "muon": 16}


def check_sizes(options: TrainOptions, config: Any) -> int | None:
    """Checks the sizes of new heads against a model's configuration and the memory of this machine.

    Returns the number of parameters that are trained; None if this is not a model that can be loaded, which raises the
    error.
    """
    config = config.get_text_config()
    if any(getattr(config, name, None) is None for name in ("hidden_size", "vocab_size", "num_attention_heads")):
        return None
    hidden_size, vocab_size = int(config.hidden_size), int(config.vocab_size)
    recipe = {} if options.recipe is None else RECIPES[options.recipe].settings
    not_chosen = (TrainOptions.draft_vocab_size, recipe.get("draft_vocab_size"))  # not chosen for this model
    if options.draft_vocab_size > vocab_size and options.draft_vocab_size not in not_chosen:
        differs = f"is {options.draft_vocab_size}, but {options.model} has {vocab_size} tokens"
        raise InvalidSettings(f"--draft-vocab-size {differs}: give a smaller size, or 0 for the whole vocabulary")
    rank = parse_head_options(options.method, options.head_options).get("lm_head_rank", 0)
    if options.lm_head == "low_rank" and rank > hidden_size:
        raise InvalidSettings(
            f"lm_head_rank is {rank}, but the hidden size of {options.model} is {hidden_size}: give a lower rank"
        )
    count, is_full = num_parameters(options, config), options.joint == "full"
    try:
        count += num_weights(config) if is_full else 0
    except ValueError:  # transformers knows no such language model
        return None
    needed, memory = count * BYTES_PER_PARAMETER[options.optimizer], memory_bytes()
    if needed > memory:
        place = "GPU" if processes.device().type == "cuda" else "machine"
        smaller = ", or give --optimizer adamw-8bit" if options.optimizer != "adamw-8bit" else ""
        smaller += ", or give --joint text, which trains an adapter" if is_full else ""
        raise InvalidSettings(
            f"{'a model and ' if is_full else ''}heads of {short_count(count)} parameters need about "
            f"{byte_size(needed)} of memory to train, but this {place} has {byte_size(memory)}: "
            f"lower --num-heads, --num-layers, --draft-vocab-size or --head-options{smaller}"
        )
    return count


def num_parameters(options: TrainOptions, config: Any) -> int:
    """The number of parameters of new heads for a text model of that configuration; takes no memory for them."""
    vocab_size, hidden_size = int(config.vocab_size), int(config.hidden_size)
    size = options.draft_vocab_size if 0 < options.draft_vocab_size < vocab_size else None
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "draft_vocab_size": size}
    head = weightless_head(head_config(options, {**sizes, **head_sizes(config, hidden_size)}))
    return sum(parameter.numel() for parameter in head.parameters())


def memory_bytes() -> int:
    """Of the GPU, or of this machine or container where there is none."""
    device = processes.device()
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    memory = find_memory()
    return memory.limit or memory.total


def reading_dtype(options: TrainOptions, config: Any) -> torch.dtype:
    """The type in which the model reads the texts: that of its device.

    With ``--precision fp32`` on a CPU it is fp32, if the model then takes at most half of the memory.
    """
    device = processes.device()
    usual = default_dtype(device)
    if options.precision != "fp32" or device.type != "cpu":
        return usual
    return torch.float32 if fits_memory(config, torch.float32) else usual


def fits_memory(config: Any, dtype: torch.dtype, *, part: float = 0.5, unknown: bool = False) -> bool:
    """Whether a model of this configuration takes at most a part of the memory in that type, if its size is known."""
    try:
        return dtype.itemsize * num_weights(config) <= part * memory_bytes()
    except ValueError:  # a configuration that only its own code knows
        return unknown
