"""Which product is the fastest for each shape of layer on this machine: measured once, then read from a file.

A weight is held in one form only, so one product per shape serves all numbers of rows: the one whose times, weighted
by how often a decoder meets that number of rows, are the shortest.
"""

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftheads.errors import CacheWarning, StorageError
from draftheads.files import write_atomic
from draftheads.kernels import PRODUCTS, QUANTISED, Int8, PackedLinear, Plain, Product, candidates, keeps_bits
from draftheads.provenance import processor

Shape = tuple[int, int]  # out, in
ROW_WEIGHTS = {1: 2.0, 4: 1.0, 8: 2.0, 16: 1.0, 64: 0.1, 256: 0.02}  # numbers of rows, and how much each counts
BUDGET_SECONDS = 3.0
_SAMPLE_BYTES = 64 << 20  # of weights of one shape: more than a cache holds, as in a real pass
_MOST_LAYERS = 12
_VOCABULARY, _MOST_VOCABULARY_ROWS = 16384, 16  # of a prompt only the last token's logits are computed


def pack(
    layers: Sequence[PackedLinear], *, exact_bits: bool = False, int8: bool = False, folder: Path | None = None
) -> None:
    """Gives each layer that is not packed yet the fastest form of its weight. Options as for :func:`choose`."""
    layers = [layer for layer in layers if type(layer.product) is Plain]
    if not layers:
        return
    weights = [layer.product.weight for layer in layers]
    chosen = choose(weights, exact_bits=exact_bits, quantised=int8, folder=folder)
    for layer, weight in zip(layers, weights, strict=True):
        kind = chosen[_shape(weight)]
        if not kind.fits(weight):  # the choice was made on a sample of the layers
            kind = Plain
        if issubclass(kind, Int8):
            layer.product = kind(weight, layer.bias, layer.inputs)
        elif kind is not Plain:
            layer.product = kind(weight, layer.bias)
        layer.inputs = None
        layer.multiple = kind.exact_rows if exact_bits else 1


def choose(
    weights: Sequence[Tensor],
    *,
    exact_bits: bool = False,
    quantised: bool = False,
    folder: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Shape, type[Product]]:
    """The fastest products for some layers' weights (out, in), all of one type and on one device.

    Args:
        weights: of all layers.
        exact_bits: only products that keep a row's bits in any company (:func:`draftheads.kernels.keeps_bits`).
        quantised: among products that change the weights, instead of exact ones.
        folder: where choices are kept; None measures each time.
        clock: seconds.

    Warns:
        CacheWarning: the folder cannot be read or written, or holds something else; then it is measured again.
    """
    groups: dict[Shape, list[Tensor]] = {}
    for weight in weights:
        groups.setdefault(_shape(weight), []).append(weight)
    samples = {shape: _sample(group) for shape, group in groups.items()}
    kinds = {shape: candidates(sample, quantised=quantised) for shape, sample in samples.items()}
    if exact_bits:
        kinds = {shape: _exact(found, samples[shape][0]) for shape, found in kinds.items()}
    open_shapes = [shape for shape, found in kinds.items() if len(found) > 1]
    known = {shape: found[0] for shape, found in kinds.items() if len(found) == 1}
    if not open_shapes:
        return known
    path = None if folder is None else folder / f"{_key(weights[0], kinds)}.json"
    kept = None if path is None else _read(path, open_shapes)
    if kept is None:
        deadline = clock() + BUDGET_SECONDS
        kept = {}
        for place, shape in enumerate(open_shapes):
            share = (deadline - clock()) / (len(open_shapes) - place)
            kept[shape] = fastest(samples[shape], kinds[shape], seconds=share, clock=clock, outputs=shape[0])
        if path is not None:
            _write(path, kept)
    return {**known, **kept}


@torch.inference_mode()
def fastest(
    weights: Sequence[Tensor],
    kinds: Sequence[type[Product]],
    *,
    seconds: float,
    clock: Callable[[], float],
    outputs: int | None = None,
) -> type[Product]:
    """The candidate with the least weighted time over :data:`ROW_WEIGHTS`, measured in about so many seconds.

    Candidates take turns; the least time of several turns counts, for what disturbs a machine only adds. A number of
    rows counts only if all candidates were timed at it. ``outputs`` is the number of whole weights' rows.
    """
    deadline = clock() + seconds
    packs = {kind: [kind(weight, None) for weight in weights] for kind in kinds}
    totals = dict.fromkeys(kinds, 0.0)
    for rows, weight in ROW_WEIGHTS.items():
        if rows > _MOST_VOCABULARY_ROWS and (outputs or weights[0].shape[0]) >= _VOCABULARY:
            break
        x = torch.randn(rows, weights[0].shape[1]).to(weights[0].dtype)
        best = dict.fromkeys(kinds, float("inf"))
        for turn in range(4):  # the first one warms up
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
    return min(kinds, key=totals.__getitem__)


def _sample(weights: Sequence[Tensor]) -> list[Tensor]:
    """Some weights of one shape, no more than :data:`_SAMPLE_BYTES`; of a large one its first rows."""
    row = weights[0].nbytes // max(1, len(weights[0]))
    most = max(1, _SAMPLE_BYTES // max(1, row))  # rows
    if len(weights[0]) > most:
        return [weights[0][:most]]
    return list(weights[: min(_MOST_LAYERS, most // len(weights[0]))])


def _exact(kinds: Sequence[type[Product]], weight: Tensor) -> list[type[Product]]:
    """Those that keep bits here; the plain one where none does, which a check of the whole model then finds."""
    return [kind for kind in kinds if keeps_bits(kind(weight, None))] or [Plain]


def _shape(weight: Tensor) -> Shape:
    return weight.shape[0], weight.shape[1]


def _key(weight: Tensor, kinds: Mapping[Shape, Sequence[type[Product]]]) -> str:
    """Of what the choice depends on."""
    facts = [
        processor(),
        torch.get_num_threads(),
        torch.__version__,
        str(weight.dtype),
        ROW_WEIGHTS,
        sorted((shape, [kind.name for kind in found]) for shape, found in kinds.items()),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _read(path: Path, shapes: Sequence[Shape]) -> dict[Shape, type[Product]] | None:
    """What was chosen for these shapes; None where nothing is known."""
    by_name = {kind.name: kind for kind in (*PRODUCTS, *QUANTISED)}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {shape: by_name[found[f"{shape[0]}x{shape[1]}"]] for shape in shapes}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path}: no choice of kernels ({error!r}); they are measured again", CacheWarning, stacklevel=4)
        return None


def _write(path: Path, kept: Mapping[Shape, type[Product]]) -> None:
    text = json.dumps({f"{shape[0]}x{shape[1]}": kind.name for shape, kind in kept.items()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except (OSError, StorageError) as error:
        warnings.warn(
            f"the choice of kernels cannot be kept, so each start measures for some seconds: {error}",
            CacheWarning,
            stacklevel=4,
        )
