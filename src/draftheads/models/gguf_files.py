"""A GGUF file, or all parts of a model that is split into several: its keys and its tensors."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftheads.errors import MissingDependency, ModelNotFound, UnsupportedModel
from draftheads.utils.messages import first_names, printable

if TYPE_CHECKING:  # each import takes a second, and a start from the cache needs none
    from gguf import GGUFReader
    from torch import Tensor

_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_NOT_OF_MODELS = {"clip": "a projector of images or sounds", "mmproj": "a projector of images or sounds"}
_PREFIXES = ("adapter.", "clip.", "diffusion.", "imatrix.", "xielu.")  # of keys that models with text only do not have


def find_gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a folder without other weights; None if none.

    Of a split model it is the first part.

    Raises:
        ModelNotFound: the folder has several.
    """
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    own = (each for each in path.iterdir() if each.suffix.lower() == ".gguf")
    files = sorted(each for each in own if (part := _PART.search(each.name)) is None or int(part[1]) == 1)
    if len(files) > 1:
        raise ModelNotFound(f"{path} has {len(files)} GGUF files: name one of {', '.join(each.name for each in files)}")
    return files[0] if files else None


def parts_of(file: Path) -> list[Path]:
    """All parts of a model that is split, by the name of one of them; else the file itself.

    Raises:
        ModelNotFound: parts are missing.
    """
    if (part := _PART.search(file.name)) is None:
        return [file]
    names = [f"{file.name[: part.start()]}-{i:05}-of-{part[2]}{file.suffix}" for i in range(1, int(part[2]) + 1)]
    if missing := [name for name in names if not (file.parent / name).is_file()]:
        what = f"a part of a model that is split into {len(names)} files"
        raise ModelNotFound(f"{file} is {what}; beside it are missing: {first_names(missing)}")
    return [file.parent / name for name in names]


class GgufFile:
    """What is in a model's file.

    Attributes:
        name: of the file, for messages.
        architecture: llama.cpp's name of it.
        keys: all keys with their values.
        tensors: the reader's tensors by name.

    Raises:
        MissingDependency: gguf is not installed.
        ModelNotFound: the file is damaged, or no GGUF file.
        UnsupportedModel: it has no language model, or a form that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        readers = [_open(part) for part in parts_of(path)]
        self.name = path.name
        self.keys = dict(_values(readers[0], path))
        self.tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self.architecture = str(self.needed("general.architecture"))
        kind = self.keys.get("general.type", "model")
        if kind != "model" or self.architecture in _NOT_OF_MODELS:
            what = _NOT_OF_MODELS.get(self.architecture, f"of the type {kind} (general.type)")
            raise self.refused(f"is no language model but {what}: give the model's own file")
        if wrong := [key for key in self.keys if key.startswith(_PREFIXES)]:
            raise self.refused(f"has the key {printable(wrong[0])}, which no language model has")
        if (count := self.keys.get("split.count", 0)) > 1 and count != len(readers):
            names = f"give the parts their own names, such as model-00001-of-{count:05}.gguf"
            raise self.refused(f"is part {self.keys.get('split.no', 0) + 1} of {count} of a split model: {names}")
        if (told := self.keys.get("split.tensors.count", len(self.tensors))) != len(self.tensors):
            raise ModelNotFound(f"{self.name} and its parts have {len(self.tensors)} tensors, not {told}")

    def refused(self, what: str) -> UnsupportedModel:
        """The error for what is wrong with the file."""
        return UnsupportedModel(f"{self.name} {what}")

    def needed(self, key: str) -> Any:
        """The value of a key that must be there."""
        if key not in self.keys:
            raise self.refused(f"has no field {key}")
        return self.keys[key]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """A tensor's shape, as PyTorch has it."""
        if tensor not in self.tensors:
            raise self.refused(f"has no tensor {tensor}")
        return tuple(int(size) for size in reversed(self.tensors[tensor].shape))

    def tensor(self, name: str) -> "Tensor":
        """A tensor's values, in fp32."""
        import torch  # noqa: PLC0415
        from gguf import dequantize  # noqa: PLC0415

        shape, tensor = self.shape(name), self.tensors[name]
        try:
            return torch.tensor(dequantize(tensor.data, tensor.tensor_type)).view(shape)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise self.refused(f"has {name} in the type {kind}, which gguf does not unpack") from None


def _open(path: Path) -> "GGUFReader":
    try:
        from gguf import GGUFReader  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingDependency(f"the conversion of {path.name} needs gguf", extra="demo") from None
    with path.open("rb") as file:
        start = file.read(8)
    version = int.from_bytes(start[4:], "little")
    if start[:4] == b"GGUF" and (version == 1 or version & 0xFFFF == 0):
        what = "in version 1 of the format" if version == 1 else "with big-endian numbers"
        raise UnsupportedModel(f"{path} is {what}, which cannot be read: convert the model again with llama.cpp")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError) as error:
        if "GGMLQuantizationType" in str(error):
            raise UnsupportedModel(f"{path} has tensors of a type that gguf does not know: {error}") from None
        raise ModelNotFound(f"{path} is damaged ({error}): download it, or install its package, again") from error


def _values(reader: "GGUFReader", path: Path) -> Iterator[tuple[str, Any]]:
    import numpy as np  # noqa: PLC0415

    for key, field in reader.fields.items():
        try:
            value: Any = field.contents()
        except (ValueError, IndexError) as error:
            raise ModelNotFound(f"{path} is damaged ({key}: {error}): download it again") from error
        if isinstance(value, float):  # fp32 numbers such as 9.999999747378752e-06
            value = float(str(np.float32(value)))
        yield key, value
