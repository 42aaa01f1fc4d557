"""A head in another project's layout: which of its tensors are which of ours, in both directions."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftheads.checkpoints.checkpoint import weightless_head
from draftheads.errors import CheckpointCorrupt, CheckpointMismatch
from draftheads.formats.source import CONFIG, Source
from draftheads.heads.base import HeadConfig
from draftheads.models.model import TargetModel
from draftheads.speculation.tree import Tree
from draftheads.utils.counts import counted

_CLOSE = 1e-2  # how far a copy of the base's weights may be from them, relative: 16-bit types differ by less


class Made(NamedTuple):
    """A tensor of ours that is computed from some of the file's."""

    of: tuple[str, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class Layout:
    """What a file holds.

    Args:
        format: its name, for messages.
        config: of the head that it is.
        names: the file's tensor for each of ours, or how ours is made.
        copies: the file's tensors that repeat the base model's ``embedding`` or ``lm_head``, which are checked.
        unused: the file's tensors that no head needs.
        tree: on which it was drafted with it, if the file says it.
    """

    format: str
    config: HeadConfig
    names: Mapping[str, str | Made]
    copies: Mapping[str, str] = field(default_factory=dict)
    unused: Collection[str] = ()
    tree: Tree | None = None

    def read(self, source: Source, base: TargetModel) -> dict[str, Tensor]:
        """The head's tensors by name.

        Raises:
            CheckpointCorrupt: one is missing, surplus or misshapen.
            CheckpointMismatch: a copy of the base model's weights is not the base's.
        """
        expected = weightless_head(self.config).state_dict()
        if unnamed := set(expected) ^ set(self.names):
            raise AssertionError(f"{self.format}: {sorted(unnamed)} of {self.config.method} have no place")
        used = {name for where in self.names.values() for name in (where.of if isinstance(where, Made) else [where])}
        found = set(source.shapes)
        for kind, names in (
            ("missing", (used | set(self.copies)) - found),
            ("surplus", found - used - set(self.copies) - set(self.unused)),
        ):
            if names:
                raise CheckpointCorrupt(
                    f"{source.path}: {kind} tensor {min(names)}: read as {self.format} with {self._sizes()}, it needs "
                    f"{counted(len(used), 'tensor')} and has {len(found)}"
                )
        for name, part in self.copies.items():
            self._check_copy(source, name, part, base)
        tensors = {}
        for name, where in self.names.items():
            shape = tuple(expected[name].shape)
            if isinstance(where, Made):
                tensor = where.make(*map(source.tensor, where.of))
                where = " and ".join(where.of)  # noqa: PLW2901 - for the message
            else:
                tensor = source.tensor(where)
            if tuple(tensor.shape) != shape:
                raise CheckpointCorrupt(
                    f"{source.path}: tensor {where} is {tuple(tensor.shape)}; {self.format} with {self._sizes()} "
                    f"makes it {shape}"
                )
            if tensor.is_floating_point() != expected[name].is_floating_point():
                raise CheckpointCorrupt(f"{source.path}: tensor {where} holds {tensor.dtype}")
            tensors[name] = tensor
        return tensors

    def _sizes(self) -> str:
        config = self.config
        return (
            f"{counted(config.num_heads, 'head')} of {counted(config.num_layers, 'layer')}, hidden_size "
            f"{config.hidden_size} and {counted(config.num_draft_tokens, 'draft token')}"
        )

    def _check_copy(self, source: Source, name: str, part: str, base: TargetModel) -> None:
        given, own = source.tensor(name), getattr(base.weights, part)
        fix = "give the base model that the head was trained for"
        if given.shape != own.shape:
            raise CheckpointMismatch(
                f"{source.path}: its {name} is {tuple(given.shape)} and the {part} of {base.model_id} is "
                f"{tuple(own.shape)}: {fix}"
            )
        own = own.detach().float().cpu()
        apart = float((given.float() - own).norm() / own.norm().clamp_min(1e-30))
        if not apart <= _CLOSE:
            raise CheckpointMismatch(
                f"{source.path}: its {name} differs by {apart:.0%} from the {part} of {base.model_id}: {fix}"
            )


def numbers_in(shapes: Collection[str], pattern: str) -> list[tuple[int, ...]]:
    r"""The numbers in all names that match a pattern, sorted.

    >>> numbers_in(["0.1.w", "0.0.w", "norm"], r"(\d+)\.(\d+)\.w")
    [(0, 0), (0, 1)]
    """
    found = (re.fullmatch(pattern, name) for name in shapes)
    return sorted(tuple(map(int, match.groups())) for match in found if match)


def sizes_of(base: TargetModel) -> dict[str, Any]:
    """The sizes that every head shares with its base."""
    return {"hidden_size": base.hidden_size, "vocab_size": base.vocab_size}


def need_config(source: Source, why: str) -> None:
    """Raises :class:`CheckpointCorrupt` without a ``config.json``."""
    if not source.config:
        raise CheckpointCorrupt(f"{source.folder / CONFIG} is missing; {why}")


def zeros(size: int) -> Made:
    """A bias that is not there."""
    return Made((), lambda: torch.zeros(size))
