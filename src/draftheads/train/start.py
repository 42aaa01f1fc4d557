"""A head that starts with what another one has learned: names and shapes decide which of its layers are taken.

Knows saved heads; knows nothing of data, losses or files of a run.
"""

from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from draftheads.checkpoint import TENSORS_FILE, SavedHead, read_head
from draftheads.errors import CheckpointMismatch, InvalidSettings
from draftheads.heads.base import DraftHead
from draftheads.target.fingerprint import Fingerprints
from draftheads.target.model import TargetModel
from draftheads.zoo.registry import find_head

_VOCAB = "draft_vocab"


@dataclass(frozen=True)
class Start:
    """A trained head to start from."""

    name: str  # as it was asked for
    saved: SavedHead
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, name: str, target: TargetModel) -> "Start":
        """A bundled head, a folder or an id of the Hub, as :func:`~draftheads.zoo.registry.find_head` takes it.

        The model may have been tuned since, so its weights may differ; sizes and tokenizer must be the same.

        Raises:
            CheckpointMismatch: made for a model of other sizes or with another tokenizer.
            DraftHeadsError: no such head, or a corrupt one.
        """
        saved = read_head(find_head(name, target.model_id))
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
            InvalidSettings: nothing fits.
        """
        fitting = self._fitting(head)
        if not fitting:
            raise InvalidSettings(
                f"--start-from {self.name}: no layer of this {self.saved.method} head has the name and sizes of one "
                f"of a {head.config.method} head with these settings"
            )
        given = sum(parameter.numel() for parameter in fitting.values())
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
