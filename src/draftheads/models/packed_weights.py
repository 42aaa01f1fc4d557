"""Packed int8 and int4 weights in the user's cache: the next load of the same files maps them into memory.

The key has all that the numbers depend on: what the system records of the model's files, the tokens of the typical
text, the library, the machine and the versions. A checksum of every page finds damage. Processes that map the same file
share its memory. Weights in fp32 and bf16 are not kept: packed, they are as large as the model's own files.
"""

import contextlib
import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftheads.cpu.kernels import Native, PackedLinear, RoundedEmbedding, restored
from draftheads.cpu.native_library import FILE, load_library
from draftheads.cpu.optimise import restore
from draftheads.errors import CacheWarning, InvalidSettings, StorageError, first_line
from draftheads.models.fingerprint import WeightFacts
from draftheads.utils.cache import cache_folder
from draftheads.utils.counts import byte_size
from draftheads.utils.files import write_atomic
from draftheads.utils.provenance import installed_version, processor

logger = logging.getLogger(__name__)
_VERSION = 1  # increase it when rounding, packing or the content of a file changes
_PAGE = 4096
_MOST_BYTES = 20 * 10**9  # of all files together; and no more than half of what the disk has free without them
_DAMAGES = (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RuntimeError, UnpicklingError)


class PackedWeights:
    """What the cache keeps of the rounded weights of one model, which is loaded by its name."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.found: dict[str, Any] | None = None  # what the cache has
        self._files: Sequence[Path] = ()
        self._of_inputs: Any = None
        self._key: str | None = None

    def find(self, files: Sequence[Path], of_inputs: Any) -> bool:
        """Reads what the cache has of a model; whether there is something.

        Args:
            files: of the model's weights and configuration.
            of_inputs: what the inputs of the layers on the typical text depend on besides them, for JSON.

        Warns:
            CacheWarning: the file is damaged. The weights are packed anew.
        """
        self._files, self._of_inputs = files, of_inputs
        try:
            self._key = self._current_key()
            path = self._path()
            self.found = self._read(path)
        except (FileNotFoundError, NotADirectoryError, InvalidSettings):
            return False
        except _DAMAGES as error:
            warnings.warn(
                f"{path} is damaged, and the weights are packed anew: {first_line(error)}", CacheWarning, stacklevel=2
            )
            return False
        with contextlib.suppress(OSError):  # a cache that can only be read
            path.touch()  # those that were not used for the longest time are deleted first
        return True

    @property
    def facts(self) -> WeightFacts | None:
        """Of the weights that were found."""
        return WeightFacts(torch.float32, f"int{self.bits}", *self.found["fingerprints"]) if self.found else None

    def give(self, model: Any) -> None:
        """Gives a model of that state its fast modules."""
        assert self.found is not None
        products: list[Any] = [restored(saved) for saved in self.found["products"]]
        embedding = self.found["embedding"]
        restore(model, products, products[embedding] if isinstance(embedding, int) else self.found["state"][embedding])

    def keep(self, model: Any, facts: WeightFacts) -> None:
        """Writes the packed weights of a model with fast modules, if its files did not change since :meth:`find`.

        Warns:
            CacheWarning: they cannot be written.
        """
        products: list[Any] = [module.product for module in model.modules() if isinstance(module, PackedLinear)]
        if self._key is None or self._key != self._current_key() or not all(isinstance(p, Native) for p in products):
            return
        embedding = model.get_input_embeddings()
        if isinstance(embedding, RoundedEmbedding):
            products += [] if embedding.product in products else [embedding.product]
            place: Any = products.index(embedding.product)
        else:
            place = next(name for name, weight in model.named_parameters() if weight is embedding.weight)
        # a tied lm_head names the embedding again
        state = {name: each for name, each in model.state_dict().items() if not name.endswith(".tied")}
        content = {"key": self._key, "embedding": place, "state": state}
        content["products"] = [product.saved() for product in products]
        content["fingerprints"] = facts.weights_fingerprint, facts.layers_fingerprint
        content["checksum"] = _checksum(content)
        size = sum(each.nbytes for each in (*state.values(), *products))
        try:
            if _has_room(self._path().parent, size):
                write_atomic(self._path(), lambda file: torch.save(content, file), flush=False)
                words = "packed weights are kept for the next load (%s): `draftheads cache clear weights` deletes them"
                logger.info(words, byte_size(size))
        except (StorageError, InvalidSettings, OSError) as error:
            warnings.warn(f"the packed weights are not kept: {error}", CacheWarning, stacklevel=2)

    def _path(self) -> Path:
        return cache_folder() / "weights" / f"{self._key}.packed"

    def _current_key(self) -> str:
        """A digest of what the packed weights depend on."""
        facts, library = [path.stat() for path in self._files], load_library()
        kernels = library and [library.draftheads_kernels(b"").decode(), hashlib.sha256(FILE.read_bytes()).hexdigest()]
        whole = [
            *(_VERSION, self.bits, self._of_inputs, kernels),
            [[each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino] for each in facts],  # ctime cannot be set
            *(processor(), torch.get_num_threads()),  # the last bits of inputs depend on them
            [installed_version(name) for name in ("draftheads", "torch", "transformers")],
        ]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:24]

    def _read(self, path: Path) -> dict[str, Any]:
        content: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)  # what is written there stays here
        if content.pop("checksum") != _checksum(content):
            raise ValueError("its checksum is wrong")
        if content["key"] != self._key:
            raise ValueError("its weights are other ones")
        return content


def load_packed(config: Any, packed: PackedWeights, generation: Any, **options: Any) -> Any:
    """A model with the small weights that the cache has, and transformers' report of it; None if they do not fit."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

    assert packed.found is not None
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)
    small, embedding, zero = packed.found["state"], packed.found["embedding"], torch.zeros(())
    state = {name: zero.expand(weight.shape) for name, weight in skeleton.named_parameters()}  # without memory
    # the stock model would convert an embedding of another type
    state |= {name: each for name, each in small.items() if name != embedding or each.dtype == torch.float32}
    options |= {"config": skeleton.config, "state_dict": state, "ignore_mismatched_sizes": True}
    model, report = type(skeleton).from_pretrained(None, output_loading_info=True, **options)
    if any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        packed.found = None  # the family has other names in memory than in files
        return None
    model.config.name_or_path = config.name_or_path
    model.generation_config = generation
    return model, report


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, default=_sums).encode()).hexdigest()


def _sums(value: Any) -> str:
    """A digest of a tensor by the sum of each page's 64-bit numbers, which takes no longer than reading it."""
    if not isinstance(value, Tensor):
        return str(value)
    memory = value.detach().contiguous().flatten().view(torch.uint8).numpy()
    whole = len(memory) // _PAGE * _PAGE
    sums = memory[:whole].view(np.uint64).reshape(-1, _PAGE // 8).sum(axis=1)
    return f"{value.dtype} {value.shape} {hashlib.sha256(sums.tobytes() + memory[whole:].tobytes()).hexdigest()}"


def _has_room(folder: Path, size: int) -> bool:
    """Whether a file of so many bytes may be kept, after the oldest ones were deleted if there are too many."""
    kept = sorted((path.stat().st_mtime_ns, path.stat().st_size, path) for path in folder.glob("*.packed"))
    used = sum(num_bytes for _, num_bytes, _ in kept)
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    most = min(_MOST_BYTES, (shutil.disk_usage(place).free + used) // 2)
    if size > most:
        logger.info("packed weights (%s) are not kept: the cache may have %s", byte_size(size), byte_size(most))
        return False
    while used + size > most:
        _, num_bytes, path = kept.pop(0)
        path.unlink(missing_ok=True)
        used -= num_bytes
        logger.info("%s was deleted: the cache may have %s of packed weights", path, byte_size(most))
    return True
