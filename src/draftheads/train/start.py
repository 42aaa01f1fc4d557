"""A head that starts with what another one has learned: what is named alike means the same.

Knows saved heads; knows nothing of data, losses or files of a run.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from draftheads.checkpoint import TENSORS_FILE, SavedHead, read_head
from draftheads.errors import CheckpointMismatch, DraftHeadsError, InvalidSettings, ModelNotFound
from draftheads.heads.attention import LayerConfig
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.models.fingerprint import Fingerprints
from draftheads.models.model import TargetModel
from draftheads.zoo.registry import find_head, zoo_heads

_VOCAB = "draft_vocab"
# what is built on another architecture, and named alike where it means the same
_BUILT_ON = {"markov-medusa": "medusa", "amphista": "medusa", "hydra++": "hydra"}
_MAY_DIFFER = frozenset(  # settings that do not change what the layers mean that are there in both
    {"num_heads", "num_layers", "lm_head", "lm_head_rank", "draft_vocab_size", "embedding_scale"}
)


@dataclass(frozen=True)
class Start:
    """A trained head to start from."""

    name: str  # as it was asked for
    saved: SavedHead
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, name: str, target: TargetModel) -> "Start":
        """A bundled head, a folder or an id of the Hub, as :func:`~draftheads.zoo.registry.find_head` takes it.

        The model may have been tuned since, so its name and its weights may differ; sizes and tokenizer must be the
        same.

        Raises:
            CheckpointMismatch: made for a model of other sizes or with another tokenizer.
            DraftHeadsError: no such head, or a corrupt one.
        """
        saved = read_head(_folder(name, target.model_id))
        facts = (
            ("hidden_size", saved.config.hidden_size, target.hidden_size),
            ("vocab_size", saved.config.vocab_size, target.vocab_size),
            ("tokenizer fingerprint", saved.fingerprints.tokenizer, Fingerprints.of(target).tokenizer),
        )
        for what, theirs, ours in facts:
            if theirs != ours:
                raise CheckpointMismatch(
                    f"--start-from {name}: made for {saved.model_id} with {what} {theirs}, "
                    f"{target.model_id} has {ours}: start from a head of this model or of a tuned copy"
                )
        return cls(name, saved, load_file(saved.folder / TENSORS_FILE))

    def vocab(self, size: int) -> Tensor | None:
        """The ids (V',) that it guesses among, rising; None for all of them. A new head guesses among the same.

        Args:
            size: that was asked for, 0 for all.

        Raises:
            InvalidSettings: it has another number of them.
        """
        own = self.saved.config.draft_vocab_size or 0
        wanted = size if size < self.saved.config.vocab_size else 0
        if own != wanted:
            raise InvalidSettings(
                f"--draft-vocab-size is {size}, but --start-from {self.name} guesses among "
                f"{own or 'all'} tokens: give --draft-vocab-size {own}"
            )
        return self.tensors[_VOCAB] if own else None

    @property
    def embedding_scale(self) -> float | None:
        """What its weights were trained with; None where it reads no embeddings."""
        scale: float | None = getattr(self.saved.config, "embedding_scale", None)
        return scale

    def part_of(self, head: DraftHead) -> float:
        """How much of a head's numbers it gives.

        Raises:
            InvalidSettings: nothing, for its layers are none of the head's or mean something else there, as the first
                ones of a deeper head do.
        """
        theirs, ours = self.saved.method, head.config.method
        if theirs not in (ours, _BUILT_ON.get(ours)):
            able = " or ".join(filter(None, (ours, _BUILT_ON.get(ours))))
            raise InvalidSettings(f"--start-from {self.name} is a {theirs} head; heads of {ours} start from {able}")
        before_layers, layers = self.saved.config.num_layers, head.config.num_layers
        if layers < before_layers:
            raise InvalidSettings(
                f"--start-from {self.name} has {before_layers} layers in each head, the new head {layers}: "
                f"give --num-layers {before_layers} or more"
            )
        if theirs == ours:
            before, now = _in_words(self.saved.config), _in_words(head.config)
            for option in sorted(now.keys() - _MAY_DIFFER):
                if before[option] != now[option]:
                    raise InvalidSettings(
                        f"--start-from {self.name} has {option}={before[option]}, the new head {option}={now[option]}: "
                        f"give --head-options {option}={before[option]}"
                    )
        given = sum(parameter.numel() for parameter in self._fitting(head).values())
        return given / sum(parameter.numel() for parameter in head.parameters())

    @torch.no_grad()
    def give(self, head: DraftHead) -> None:
        """Copies what fits into a head; the rest of it keeps its starting values."""
        for name, parameter in self._fitting(head).items():
            parameter.copy_(self.tensors[name])

    def _fitting(self, head: DraftHead) -> dict[str, nn.Parameter]:
        """Parameters by name; those of a layer all together, for a bias means nothing beside another weight."""
        fitting: dict[str, nn.Parameter] = {}
        for prefix, module in head.named_modules():
            own = {f"{prefix}.{name}".lstrip("."): value for name, value in module.named_parameters(recurse=False)}
            if all(name in self.tensors and self.tensors[name].shape == own[name].shape for name in own):
                fitting |= own
        return fitting


def _in_words(config: HeadConfig) -> dict[str, str]:
    """Its settings, as ``--head-options`` takes them."""
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in asdict(config).items()}


def settings_of(name: str, model_id: str, method: str) -> dict[str, Any]:
    """Training options with which a new head of that method takes over all that the start has to give.

    Of a start of another kind these are the numbers of heads and layers, and the draft vocabulary.

    Raises:
        DraftHeadsError: no such head, or a corrupt one.
    """
    saved = read_head(_folder(name, model_id))
    config = saved.config
    vocab = config.draft_vocab_size or 0
    found = {"num_heads": config.num_heads, "num_layers": config.num_layers, "draft_vocab_size": vocab}
    if saved.method != method:
        return found
    # what its layers have of the target's, a new head has of the target, too
    common = {field.name for of in (HeadConfig, LayerConfig) for field in fields(of)} | {"embedding_scale"}
    own = [field for field in fields(config) if field.name not in common]
    changed = [field.name for field in own if getattr(config, field.name) != field.default]
    options = tuple(f"{name}={json.dumps(getattr(config, name))}" for name in changed)
    return {
        **({"head_options": options} if options else {}),
        **found,
        "lm_head": config.lm_head,
        "lm_head_rank": config.lm_head_rank,
    }


def digest_of(name: str, model_id: str) -> str | None:
    """Of the head of that name; None where there is none any more."""
    try:
        return read_head(_folder(name, model_id)).digest
    except DraftHeadsError:
        return None


def _folder(name: str, model_id: str) -> Path:
    """Of a head by its name; a bundled one's also for a model that may be a tuned copy of its base."""
    try:
        return find_head(name, model_id)
    except ModelNotFound:
        folders = [head.folder for head in zoo_heads() if head.method == name]
        if len(folders) != 1:
            raise
        return folders[0]
