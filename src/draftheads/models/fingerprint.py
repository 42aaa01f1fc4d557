"""Fingerprints of a base model: a few hundred characters that identify it.

Tokenizers must be equal. Matrices are compared by a sample of their numbers. A quantised copy of a model is close to it
and may use its heads; the text is lossless in any case. Another model is far from it. A tuned copy often differs in its
layers only: it may use the heads, with a warning if it differs much.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

MAX_DIFFERENCE = 0.05  # relative, of two samples; eight-bit copies differ by less than 0.01, four-bit ones by 0.1
TUNED_DIFFERENCE = 0.12  # of the layers: above what 4 bits cost, which is 0.09
_NUM_PROBES = 64
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


def sampled_layers(matrices: Sequence[Tensor]) -> str | None:
    """64 numbers spread over the matrices of a model's layers; None if there is none, or if they are quantised."""
    if not matrices or not all(matrix.is_floating_point() for matrix in matrices):
        return None
    numbers = []
    for probe in range(_NUM_PROBES):
        matrix = matrices[probe * (len(matrices) - 1) // (_NUM_PROBES - 1)].detach()  # first and last among them
        rows = matrix.reshape(-1, matrix.shape[-1])  # experts are stored as one tensor of three dimensions
        numbers.append(rows[probe * 7919 % len(rows), probe * 37 % rows.shape[1]].to(torch.bfloat16).cpu())
    return _digits(torch.stack(numbers))


def fingerprint_of(matrix: Tensor) -> str:
    """64 numbers spread over a matrix (R, D). Only these are copied from the device."""
    steps = torch.arange(_NUM_PROBES)
    rows = steps * (len(matrix) - 1) // (_NUM_PROBES - 1)  # first and last among them
    columns = steps * 37 % matrix.shape[1]
    sample = matrix.detach()[rows.to(matrix.device), columns.to(matrix.device)]
    return _digits(sample.to(torch.bfloat16).cpu())


def weights_digest(model: Any) -> str:
    """16 hexadecimal digits, of some numbers of every weight."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        places = torch.linspace(0, weight.numel() - 1, 16, dtype=torch.float64).long().to(weight.device)
        digest.update(name.encode() + weight.detach().reshape(-1)[places].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


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
