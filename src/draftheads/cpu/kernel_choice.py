"""Chooses the fastest kernel for each layer shape on this machine: measured once, then read from a file.

A weight is stored in one format only, so one product per shape serves all numbers of rows. The chosen one has the
shortest total time, weighted by how often decoding has each number of rows.
"""

import hashlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from draftheads.cpu.kernels import (
    PRODUCTS,
    QUANTISED,
    Int8,
    Native,
    NativeInt8,
    PackedLinear,
    Plain,
    Product,
    candidates,
    keeps_bits,
)
from draftheads.errors import CacheWarning, StorageError
from draftheads.utils.files import write_atomic
from draftheads.utils.machine import OtherPrograms
from draftheads.utils.provenance import processor

logger = logging.getLogger(__name__)

T = TypeVar("T")
Shape = tuple[int, int]  # out, in
ROW_WEIGHTS = {1: 2.0, 4: 1.0, 8: 2.0, 16: 1.0, 64: 0.1, 256: 0.02}  # number of rows: its weight in the total time
BUDGET_SECONDS = 3.0
_STEP_GAIN = 0.8  # with native products, all layers are computed natively: it saves the operators between them
_SAMPLE_BYTES = 64 << 20  # of weights of one shape; larger than the CPU cache, as in a real pass
_MOST_LAYERS = 12
_VOCABULARY, _MOST_VOCABULARY_ROWS = 16384, 16  # an lm_head reads few rows: one per prompt
_TEXT_SIZES = (512, 1024, 2048)  # rows, inputs and outputs of a typical product in training
_TEXT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pack(
    layers: Sequence[PackedLinear], *, batch_invariant: bool = False, int8: bool = False, folder: Path | None = None
) -> None:
    """Packs each layer that is not packed yet for its fastest kernel. Options as for :func:`choose`."""
    layers = [layer for layer in layers if type(layer.product) is Plain]
    if not layers:
        return
    weights = [layer.product.weight for layer in layers]
    chosen = choose(weights, batch_invariant=batch_invariant, quantised=int8, folder=folder)
    for layer, weight in zip(layers, weights, strict=True):
        kind = chosen[_shape(weight)]
        if not kind.fits(weight):  # the choice was made on a sample of the weights
            kind = Plain
        if kind is NativeInt8:
            layer.product = NativeInt8(weight, layer.bias, layer.inputs, halves=layer.halves)
        elif kind is Int8:
            layer.product = Int8(weight, layer.bias, layer.inputs)
        elif kind is Native:
            layer.product = Native(weight, layer.bias, halves=layer.halves)
        elif kind is not Plain:
            layer.product = kind(weight, layer.bias)
        layer.inputs = None
        layer.multiple = kind.exact_rows if batch_invariant else 1


def choose(
    weights: Sequence[Tensor],
    *,
    batch_invariant: bool = False,
    quantised: bool = False,
    folder: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Shape, type[Product]]:
    """The fastest product for each shape of some weights (out, in), all of one type and on one device.

    Args:
        weights: the weights of all layers.
        batch_invariant: only products for which a row's bits are independent of the other rows
            (:func:`draftheads.cpu.kernels.keeps_bits`).
        quantised: choose among quantised products instead of exact ones.
        folder: the cache of choices; None measures each time. A choice that other programs disturbed is not kept.
        clock: returns the time in seconds.

    Warns:
        CacheWarning: the folder cannot be read or written, or its file is invalid. The kernels are measured again.
    """
    groups: dict[Shape, list[Tensor]] = {}
    for weight in weights:
        groups.setdefault(_shape(weight), []).append(weight)
    samples = {shape: _sample(group) for shape, group in groups.items()}
    # Whether a weight is exact in fp16 takes a second for a whole model: one weight of each shape decides which stored
    # choice is used. pack() looks at each weight that it packs.
    kinds = {shape: candidates(sample[:1], quantised=quantised) for shape, sample in samples.items()}
    if batch_invariant:
        kinds = {shape: _exact(fitting, samples[shape][0]) for shape, fitting in kinds.items()}
    open_shapes = [shape for shape, fitting in kinds.items() if len(fitting) > 1]
    known = {shape: fitting[0] for shape, fitting in kinds.items() if len(fitting) == 1}
    if not open_shapes:
        return known

    def measured() -> dict[str, str]:
        logger.info("measuring kernels (%.0f seconds, once per machine and model)", BUDGET_SECONDS)
        deadline = clock() + BUDGET_SECONDS
        names = {}
        for place, shape in enumerate(open_shapes):
            share = (deadline - clock()) / (len(open_shapes) - place)
            fitting = [kind for kind in kinds[shape] if all(map(kind.fits, samples[shape]))]
            chosen = fastest(samples[shape], fitting, seconds=share, clock=clock, outputs=shape[0])
            names[f"{shape[0]}x{shape[1]}"] = chosen.name
        return names

    def products(names: Mapping[str, str]) -> dict[Shape, type[Product]]:
        by_name = {kind.name: kind for kind in (*PRODUCTS, *QUANTISED)}
        return {shape: by_name[names[f"{shape[0]}x{shape[1]}"]] for shape in open_shapes}

    named = sorted((shape, [kind.name for kind in fitting]) for shape, fitting in kinds.items())
    facts = [str(weights[0].dtype), ROW_WEIGHTS, named]
    return {**known, **_measured_once(folder, facts, measured, products)}


@torch.inference_mode()
def fastest(
    weights: Sequence[Tensor],
    kinds: Sequence[type[Product]],
    *,
    seconds: float,
    clock: Callable[[], float],
    outputs: int | None = None,
) -> type[Product]:
    """The candidate with the least total time, weighted by :data:`ROW_WEIGHTS`; measures for about ``seconds``.

    The candidates take turns. The minimum of several turns counts, because other processes can only add time. A number
    of rows counts only if all candidates were timed with it. ``outputs`` is the number of outputs of a whole weight.
    """
    deadline = clock() + seconds
    packs = {kind: [kind(weight, None) for weight in weights] for kind in kinds}
    totals = dict.fromkeys(kinds, 0.0)
    for rows, weight in ROW_WEIGHTS.items():
        if rows > _MOST_VOCABULARY_ROWS and (outputs or weights[0].shape[0]) >= _VOCABULARY:
            break
        x = torch.randn(rows, weights[0].shape[1]).to(weights[0].dtype)
        best = dict.fromkeys(kinds, float("inf"))
        for turn in range(4):  # the first turn is the warm-up
            for kind, products in packs.items():
                start = clock()
                for product in products:
                    product(x)
                if turn:
                    best[kind] = min(best[kind], clock() - start)
            if turn and clock() > deadline:
                break
        for kind in kinds:
            totals[kind] += weight * best[kind]
        if clock() > deadline:
            break
    return min(kinds, key=lambda kind: totals[kind] * (_STEP_GAIN if issubclass(kind, Native) else 1.0))


def dtype_for_texts(*, folder: Path | None = None, clock: Callable[[], float] = time.perf_counter) -> torch.dtype:
    """The type in which this CPU multiplies many rows faster, as in training and in reading whole texts: fp32 or bf16.

    Some CPUs with bf16 instructions need 1.5 times as long for large products in bf16 as in fp32. For the few rows of a
    decoding step they are still faster in bf16, because they read half as many bytes. Arguments and warnings as for
    :func:`choose`.
    """
    return _measured_once(
        folder, [_TEXT_SIZES], lambda: {"texts": _faster_type(clock)}, lambda choice: _TEXT_TYPES[choice["texts"]]
    )


@torch.inference_mode()
def _faster_type(clock: Callable[[], float]) -> str:
    """Takes a tenth of a second. The minimum of several turns counts: other processes can only add time."""
    rows, inputs, outputs = _TEXT_SIZES
    generator = torch.Generator().manual_seed(0)  # not the program's own random numbers
    x, weight = (torch.randn(size, inputs, generator=generator) for size in (rows, outputs))
    factors = {name: (x.to(dtype), weight.to(dtype)) for name, dtype in _TEXT_TYPES.items()}
    best = dict.fromkeys(factors, float("inf"))
    for turn in range(5):  # the first turn is the warm-up
        for name, (left, right) in factors.items():
            start = clock()
            F.linear(left, right)
            if turn:
                best[name] = min(best[name], clock() - start)
    return min(best, key=best.__getitem__)


def _sample(weights: Sequence[Tensor]) -> list[Tensor]:
    """Some weights of one shape, at most :data:`_SAMPLE_BYTES`; of a large weight, its first rows."""
    row = weights[0].nbytes // max(1, len(weights[0]))
    most = max(1, _SAMPLE_BYTES // max(1, row))  # rows
    if len(weights[0]) > most:
        return [weights[0][:most]]
    return list(weights[: min(_MOST_LAYERS, most // len(weights[0]))])


def _exact(kinds: Sequence[type[Product]], weight: Tensor) -> list[type[Product]]:
    """The products that keep bits on this machine; ``Plain`` if none does, and a later check of the model fails."""
    return [kind for kind in kinds if keeps_bits(kind(weight, None))] or [Plain]


def _shape(weight: Tensor) -> Shape:
    return weight.shape[0], weight.shape[1]


def _measured_once(
    folder: Path | None, facts: Sequence[object], measure: Callable[[], Mapping[str, str]], parse: Callable[[Any], T]
) -> T:
    """What was measured on this machine, parsed: read from a file, or measured now and stored.

    It depends on the facts, and on processor, threads and PyTorch. An error of ``parse`` means that a file is invalid.
    """
    if folder is None:
        return parse(measure())
    whole = [processor(), torch.get_num_threads(), torch.__version__, *facts]
    path = folder / f"{hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:24]}.json"
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(
            f"{path}: no valid choice of kernels ({error!r}); they are measured again",
            CacheWarning,
            stacklevel=4,
        )
    others = OtherPrograms()
    choice = measure()
    if not others.disturb(torch.get_num_threads()):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(choice).encode())
        except (OSError, StorageError) as error:
            warnings.warn(
                f"the choice of kernels cannot be saved, so each start measures again for some seconds: {error}",
                CacheWarning,
                stacklevel=4,
            )
    return parse(choice)
