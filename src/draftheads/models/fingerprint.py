"""Fingerprints of a base model: a few hundred characters that identify it; from its weights or from its files alone.

Tokenizers must be equal. Matrices are compared by a sample of their numbers. A quantised copy of a model is close to it
and may use its heads; the text is lossless in any case. Another model is far from it. A tuned copy often differs in its
layers only: it may use the heads, with a warning if it differs much.
"""

import copy
import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.errors import UnsupportedModel
from draftheads.models.model_config import precision_of
from draftheads.utils.messages import first_names

MAX_DIFFERENCE = 0.05  # relative, of two samples; eight-bit copies differ by less than 0.01, four-bit ones by 0.1
TUNED_DIFFERENCE = 0.12  # of the layers: above what 4 bits cost, which is 0.09
_NUM_PROBES = 64
_NUM_DIGESTED = 16  # numbers of every weight
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # in safetensors
_JOINS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)], [("Concatenate", 0)])
_MOST_ADDED = 64  # tokens that a tokenizer may have more than in a head's training
_PROBE_TEXTS = (
    "The quick brown fox doesn't jump over 12,345.67 lazy dogs; they'd sleep anyway!",
    "def add(a, b):\n    return a + b\n\n\tprint(add(1, 2))  # three",
    "Füße, naïve façade, Привет мир, 你好世界, こんにちは, مرحبا, 👩‍🚀🎉",
)


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprints of a base model."""

    embedding: str  # 64 of its numbers as bf16, four hexadecimal digits each
    lm_head: str  # likewise; equal to the embedding's if the two are tied
    tokenizer: str  # 16 hexadecimal digits, of its vocabulary and of how it splits a few texts
    layers: str | None = None  # as of the embedding, spread over all layers; None if they are quantised, or not known


@dataclass(frozen=True)
class WeightFacts:
    """What faster modules do not show of the weights that they were made from."""

    dtype: torch.dtype
    precision: str
    weights_fingerprint: str
    layers_fingerprint: str | None


def difference(fingerprint: str, other: str) -> float:
    """The relative difference of two matrices by their fingerprints: |a - b| / |a|. About 1.4 if they are unrelated.

    >>> difference("3f80" * 64, "3f80" * 64)
    0.0
    """
    a, b = _numbers(fingerprint), _numbers(other)
    return float((a - b).norm() / a.norm().clamp_min(1e-30))


def sampled_layers(matrices: "Sequence[Tensor | StoredWeight]") -> str | None:
    """64 numbers spread over the matrices of a model's layers; None if there is none, or if they are quantised."""
    if not matrices or not all(matrix.dtype.is_floating_point for matrix in matrices):
        return None
    numbers = []
    for probe in range(_NUM_PROBES):
        matrix = matrices[probe * (len(matrices) - 1) // (_NUM_PROBES - 1)]  # first and last among them
        columns = matrix.shape[-1]
        rows = matrix.shape.numel() // columns  # experts are stored as one tensor of three dimensions
        place = probe * 7919 % rows * columns + probe * 37 % columns
        numbers.append(_numbers_at(matrix, torch.tensor([place])).to(torch.bfloat16))
    return _digits(torch.cat(numbers))


def fingerprint_of(matrix: Tensor) -> str:
    """64 numbers spread over a matrix (R, D). Only these are copied from the device."""
    steps = torch.arange(_NUM_PROBES)
    rows = steps * (len(matrix) - 1) // (_NUM_PROBES - 1)  # first and last among them
    columns = steps * 37 % matrix.shape[1]
    sample = matrix.detach()[rows.to(matrix.device), columns.to(matrix.device)]
    return _digits(sample.to(torch.bfloat16).cpu())


def weights_digest(weights: "Iterable[tuple[str, Tensor | StoredWeight]]") -> str:
    """16 hexadecimal digits, of some numbers of every weight with its name."""
    digest = hashlib.sha256()
    for name, weight in weights:
        places = torch.linspace(0, weight.shape.numel() - 1, _NUM_DIGESTED, dtype=torch.float64).long()
        digest.update(name.encode() + _numbers_at(weight, places).double().numpy().tobytes())
    return digest.hexdigest()[:16]


def _numbers_at(weight: "Tensor | StoredWeight", places: Tensor) -> Tensor:
    if isinstance(weight, StoredWeight):
        return weight.at(places.tolist())
    return weight.detach().reshape(-1)[places.to(weight.device)].cpu()


def layer_matrices(decoder: Any) -> list[Tensor]:
    """The matrices between embedding and lm_head."""
    return [
        weight
        for name, module in decoder.named_modules()
        if "lora_" not in name and not isinstance(module, nn.Embedding)  # no adapter's
        for weight in module.parameters(recurse=False)
        if weight.dim() > 1
    ]


def _digits(sample: Tensor) -> str:
    return sample.view(torch.int16).numpy().astype(">u2").tobytes().hex()


def _numbers(fingerprint: str) -> Tensor:
    raw = bytes.fromhex(fingerprint)
    if len(raw) != 2 * _NUM_PROBES:
        raise ValueError(f"a matrix has a fingerprint of {4 * _NUM_PROBES} digits, not {len(fingerprint)}")
    bits = [int.from_bytes(raw[at : at + 2], "big") << 16 for at in range(0, len(raw), 2)]
    return torch.tensor(bits, dtype=torch.int64).to(torch.uint32).view(torch.float32)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A digest of the vocabulary and of some token ids, 16 hexadecimal digits.

    Padding, truncation and chat template do not count.
    """
    return next(tokenizer_fingerprints(tokenizer))


def tokenizer_fingerprints(tokenizer: Any) -> Iterator[str]:
    """:func:`tokenizer_fingerprint`, and those before its last tokens were added, the newest first."""
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    added = tokenizer.get_added_vocab().values() if hasattr(tokenizer, "get_added_vocab") else ()
    probes = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in _PROBE_TEXTS]
    # the tokens differ: sorting by them alone gives the same order, ten times as fast
    words = sorted(vocabulary.items(), key=itemgetter(0))
    for end in (math.inf, *sorted(added, reverse=True)[:_MOST_ADDED]):
        words = [pair for pair in words if pair[1] < end]
        yield hashlib.sha256(json.dumps([words, probes]).encode()).hexdigest()[:16]


# --- of weights that are not loaded ---


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file."""

    file: Path
    start: int  # its first byte
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class StoredWeight:
    """A weight as a loaded model would have it, whose numbers are read one by one from the files."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: list[StoredTensor]  # of experts there are several, one after the other

    @property
    def fits(self) -> bool:
        """Whether the files have as many numbers."""
        return sum(piece.shape.numel() for piece in self.pieces) == self.shape.numel()

    def at(self, places: Sequence[int]) -> Tensor:
        """Its numbers (n,) at these places of the flat weight. Nothing else is read, and no file is mapped."""
        starts = [0, *accumulate(piece.shape.numel() for piece in self.pieces)]
        numbers = []
        for place in places:
            which = bisect_right(starts, place) - 1
            piece = self.pieces[which]
            with piece.file.open("rb", buffering=0) as file:
                file.seek(piece.start + (place - starts[which]) * piece.dtype.itemsize)
                numbers.append(torch.frombuffer(bytearray(file.read(piece.dtype.itemsize)), dtype=piece.dtype))
        return torch.cat(numbers).to(self.dtype)


@dataclass
class Parts:
    """Asks a loader for embedding, last norm and lm_head alone. It leaves the facts of the whole model here."""

    facts: WeightFacts | None = None


def inseparable(name: str, reason: str) -> UnsupportedModel:
    """The error of a model that can only be loaded as a whole."""
    return UnsupportedModel(f"embedding, last norm and lm_head of {name} cannot be loaded alone: {reason}")


def whole_facts(
    name: str, model: Any, config: Any, report: Mapping[str, Any], files: Sequence[Path]
) -> tuple[dict[str, Any], WeightFacts]:
    """What loading the whole model would report, and its facts, by its files; ``model`` was loaded without layers.

    The model gets a configuration with the layers of ``config``.
    """
    if differing := [key for key, *_ in report["mismatched_keys"]] or report["missing_keys"]:
        raise inseparable(name, f"without the layers, {first_names(differing)} would have another shape")
    if not all(file.suffix == ".safetensors" for file in files):
        raise inseparable(name, "its files are no safetensors files")
    model.config = copy.deepcopy(model.config)  # has the types in which the model computes
    text, named = model.config.get_text_config(), config.get_text_config()
    for key in [*(key for key, value in vars(text).items() if value == []), "num_hidden_layers"]:
        setattr(text, key, getattr(named, key))
    skeleton = _skeleton(model)
    stored, surplus = stored_weights(skeleton, files)
    own, whole = dict(model.named_parameters()), dict(skeleton.named_parameters())
    of_layers = whole.keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    missing = of_layers - stored.keys()
    wrong = [
        (key, tuple(piece.shape for piece in weight.pieces), weight.shape)
        for key, weight in stored.items()
        if not weight.fits
    ]
    report = {"missing_keys": missing, "unexpected_keys": surplus, "mismatched_keys": wrong}
    precision = precision_of(model.dtype)
    if missing or wrong:  # they are refused
        return report, WeightFacts(model.dtype, precision, "", None)
    names = [key for key in skeleton.state_dict() if key in own or key in of_layers]
    weights: dict[str, Tensor | StoredWeight] = {key: own[key] if key in own else stored[key] for key in names}
    keys = {id(weight): key for key, weight in whole.items()}
    layers = sampled_layers([weights[keys[id(weight)]] for weight in layer_matrices(skeleton.get_decoder())])
    return report, WeightFacts(model.dtype, precision, weights_digest(weights.items()), layers)


def _skeleton(model: Any) -> Any:
    """A model of the same configuration on the meta device, with the types of loaded weights."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        with torch.device("meta"):
            skeleton = type(model)(model.config)
    finally:
        torch.set_default_dtype(usual)
    for pattern in skeleton._get_dtype_plan(model.dtype):  # noqa: SLF001 - no public name for what stays in fp32
        for key, weight in skeleton.named_parameters():
            if re.search(pattern.replace("*", ".*"), key):
                weight.data = weight.data.float()
    return skeleton


def stored_weights(skeleton: Any, files: Sequence[Path]) -> tuple[dict[str, StoredWeight], set[str]]:
    """The weights of a model from its safetensors files, by their names in the model, and the tensors that it has not.

    Args:
        skeleton: the model on the meta device, whose weights have the types in which it computes.
        files: all of its files.

    Raises:
        UnsupportedModel: transformers makes weights of them in a way that is not known here.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - slow to import
    from transformers.core_model_loading import WeightConverter, rename_source_key  # noqa: PLC0415

    mapping: list[Any] = get_model_conversion_mapping(skeleton, None, None)
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    renamings = [each for each in mapping if not isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state: dict[str, Tensor] = skeleton.state_dict()
    found, surplus = dict[str, dict[str | None, list[StoredTensor]]](), set[str]()
    tensors = _tensors_in(files)
    for key in sorted(tensors, key=lambda key: [part.zfill(9) for part in key.split(".")]):  # experts by their numbers
        name, pattern = rename_source_key(key, renamings, converters, skeleton.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name in state:
            found.setdefault(name, {}).setdefault(pattern, []).append(tensors[key])
        else:
            surplus.add(key)
    weights = {}
    for name, by_source in found.items():
        pieces = [piece for sources in by_source.values() for piece in sources]
        if (first := next(iter(by_source))) is not None:
            converter = by_pattern[first]
            if [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations] not in _JOINS:
                raise UnsupportedModel(f"{name} is made of several tensors of its files in an unknown way")
            sources = [by_source.get(pattern, []) for pattern in converter.source_patterns]
            pieces = [piece for expert in zip(*sources, strict=True) for piece in expert]
        weights[name] = StoredWeight(state[name].shape, state[name].dtype, pieces)
    return weights, surplus


def _tensors_in(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """By the headers of safetensors files; tensors that are no numbers with a fraction are left out."""
    tensors = {}
    for path in files:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: Mapping[str, Any] = json.loads(file.read(size))
        for key, entry in header.items():
            if key != "__metadata__" and entry["dtype"] in _FLOATS:
                start, shape = 8 + size + entry["data_offsets"][0], torch.Size(entry["shape"])
                tensors[key] = StoredTensor(path, start, _FLOATS[entry["dtype"]], shape)
    return tensors
