"""The files of a head that another project has saved: names and shapes first, tensors when they are needed.

Nothing in them is executed: a pickle may hold tensors and no other objects.
"""

import json
import pickle
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftheads.errors import CheckpointCorrupt, ModelNotFound, first_line
from draftheads.heads.base import LARGEST_SIZE

CONFIG = "config.json"
_ENDINGS = (".safetensors", ".bin", ".pt")  # the first kind that is there counts
_OF_TRAINING = ("training_args", "optimizer", "scheduler")  # beside the weights
_HEADS_ALONE = ("medusa_lm_head", "hydra_lm_head")  # maybe beside files of a base model


class Source:
    """A folder, or one file in it.

    Args:
        path: of either.

    Raises:
        ModelNotFound: there is none.
        CheckpointCorrupt: a file cannot be read, or holds more than tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path if path.is_dir() else path.parent
        if not path.exists():
            raise ModelNotFound(f"no head at {path}: no such file or folder")
        self.files = _files_of(path)
        self._places: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            for name, shape in self._shapes_in(file).items():
                if name in self._places:
                    raise CheckpointCorrupt(
                        f"{path}: the tensor {name!r} is in {self._places[name].name} and {file.name}"
                    )
                self._places[name], self.shapes[name] = file, shape

    @cached_property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` says; empty where there is none."""
        file = self.folder / CONFIG
        if not file.is_file():
            return {}
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointCorrupt(f"{file} is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointCorrupt(f"{file} holds a {type(values).__name__}; it must be an object")
        return values

    def number(self, name: str, *, most: int = LARGEST_SIZE, given: Mapping[str, Any] | None = None) -> int | None:
        """A key of the configuration, or of the ``given`` part of it; None where it is missing."""
        value = (self.config if given is None else given).get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most):
            raise CheckpointCorrupt(f"{self.folder / CONFIG}: {name} is {value!r}; it must lie in 1 … {most}")
        return value

    def flag(self, name: str) -> bool:
        """Whether a key of the configuration is true; false where it is missing."""
        value = self.config.get(name) or False
        if not isinstance(value, bool):
            raise CheckpointCorrupt(f"{self.folder / CONFIG}: {name} is {value!r}; it must be true or false")
        return value

    def tensor(self, name: str) -> Tensor:
        file = self._places[name]
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
                return tensor
        return self._pickled[file][name]

    @cached_property
    def _pickled(self) -> dict[Path, Mapping[str, Tensor]]:
        return {}

    def _shapes_in(self, file: Path) -> dict[str, tuple[int, ...]]:
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt") as opened:
                    return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise CheckpointCorrupt(f"{file} is not a complete safetensors file: {first_line(error)}") from None
        self._pickled[file] = _tensors_in(file)
        return {name: tuple(tensor.shape) for name, tensor in self._pickled[file].items()}


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    # a pipe of that name would never end
    files = sorted(f for f in path.iterdir() if f.suffix in _ENDINGS and f.stem not in _OF_TRAINING and f.is_file())
    files = [file for file in files if file.stem in _HEADS_ALONE] or files
    for ending in _ENDINGS:
        if found := [file for file in files if file.suffix == ending]:
            return found
    raise ModelNotFound(f"no head at {path}: it has no file that ends in {', '.join(_ENDINGS)}")


def _tensors_in(file: Path) -> Mapping[str, Tensor]:
    """Of a file that ``torch.save`` wrote. Without ``weights_only`` a pickle could run any code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles of other kinds, which are errors
            values = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointCorrupt(
            f"{file} holds more than tensors, and other objects could run code, so nothing of it was read: "
            f"{first_line(error)}"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointCorrupt(f"{file} is not a file of torch.save: {first_line(error)}") from None
    if not isinstance(values, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in values.items()
    ):
        raise CheckpointCorrupt(f"{file} holds a {type(values).__name__}; it must be a dictionary of tensors")
    return values
