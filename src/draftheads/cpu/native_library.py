"""The native library for CPUs: where it is, its structures in C, what a pass is given, and its threads.

It is built when the package is installed, if there is a C++ compiler (``hatch_build.py``). Without it all but int8 and
int4 works, more slowly. It has a plain C interface, so one build serves all versions of Python and PyTorch.

Torch computes in one thread while native passes are made: the library's threads need the cores. Torch's own threads
spin for a while after each operator: a step of one token took 14 ms beside them, and 10.6 without. The library's free
threads take the next task, so other programs slow it down by no more than what they use.
"""

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftheads.errors import InvalidSettings
from draftheads.utils.machine import Environment

SETS = ("amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2", "portable")  # the fastest first
FILE = Path(__file__).parent / "native" / "libdraftheads.so"
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
INT4 = 4  # the same, of 4 bits
BLOCK = 32  # outputs that are stored side by side
MOST_PRODUCTS = 6  # that begin a layer


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


_ints, _floats, _pointers = (partial(_fields, kind) for kind in (c_int32, c_float, c_void_p))


class Weight(ctypes.Structure):
    """``draftheads::Weight`` in ``kernels.h``."""

    _fields_ = (
        *_ints("kind", "inputs", "out", "in_"),
        *_pointers("packed", "bias", "smooth", "low_a", "low_b", "scales"),
        *_ints("rank", "low_kind"),
    )


class Norm(ctypes.Structure):
    """``draftheads::Norm`` in ``kernels.h``."""

    _fields_ = (*_pointers("scale", "shift"), *_floats("epsilon"), *_ints("is_centred"))


class Gate(ctypes.Structure):
    """``draftheads::Gate`` in ``kernels.h``."""

    _fields_ = (*_ints("act"), *_floats("alpha", "limit"))


class Experts(ctypes.Structure):
    """``draftheads::Experts`` in ``step.cpp``."""

    _fields_ = (
        *_fields(POINTER(Weight), "weights"),
        *_pointers("router", "router_bias", "choice_bias", "shared_gate"),
        *_ints("count", "chosen", "share_of_all", "is_shared", "are_sigmoids"),
        *_floats("added", "scaling"),
    )


class Place(ctypes.Structure):
    """``draftheads::Place`` in ``step.cpp``."""

    _fields_ = tuple(_ints("first", "step"))


class Recurrence(ctypes.Structure):
    """``draftheads::Recurrence`` in ``step.cpp``."""

    _fields_ = (
        *_fields(Weight, "out"),
        *_pointers("taps", "tap_bias", "decay", "step_bias", "skip"),
        *(("norm", Norm), ("places", Place * 6)),
        *_ints("place", "unused"),
    )


class Layer(ctypes.Structure):
    """``draftheads::Layer`` in ``step.cpp``."""

    _fields_ = (
        *(("qkv", Weight * MOST_PRODUCTS), ("out", Weight), ("gate_up", Weight * 2), ("down", Weight)),
        *_fields(Norm, "norm", "after_attention", "middle", "after_mlp", "query_norm", "key_norm"),
        *_pointers("sinks"),
        *_fields(POINTER(Experts), "experts"),
        *_ints("window", "turns"),
        *_fields(POINTER(Recurrence), "recurrence"),
        *_ints("cache", "unused"),
    )


class Mixing(ctypes.Structure):
    """``draftheads::Mixing`` in ``step.cpp``."""

    _fields_ = (
        *_ints("kind", "groups", "heads", "rows", "values", "taps", "normed", "gates_first"),
        *_floats("share_factor", "least_step", "most_step"),
        *_ints("unused"),
    )


class Model(ctypes.Structure):
    """``draftheads::Model`` in ``step.cpp``."""

    _fields_ = (
        *_ints("size", "heads", "groups", "head_size", "turned", "key_first", "value_first", "query_step", "key_step"),
        *_ints("layers", "cache_kind", "state_kind", "embedding_kind", "vocab"),
        *_ints("is_parallel", "turns_neighbours", "norms_whole", "has_gates", "caches"),
        *_floats("scaling", "cap", "embedding_scale", "residual_scale"),
        *(("gate", Gate), ("final", Norm), ("of_layers", POINTER(Layer))),
        *_pointers("embedding", "embedding_smooth", "positions"),
        *_ints("num_positions", "recurrences"),
        *_fields(Mixing, "mixing"),
    )


class Pass(ctypes.Structure):
    """``draftheads::Pass`` in ``step.cpp``."""

    _fields_ = (
        *_ints("tokens", "texts", "words", "kept"),
        *_pointers("ids", "memory", "slots", "lengths", "counts", "depths", "ancestors", "cos", "sin"),
        *_ints("num_turns", "of_tokens", "last_position", "drafted"),
        *_pointers("kept_layers", "kept_states", "states"),
        *_pointers("states_of_texts", "records", "old_records", "record_slots", "old_slots"),
        *_pointers("accepted_first", "accepted"),
    )


class HeadLayer(ctypes.Structure):
    """``draftheads::HeadLayer`` in ``step.cpp``."""

    _fields_ = (("weight", Weight), ("base", Weight), *_ints("has_base"))


class Depth(ctypes.Structure):
    """``draftheads::Depth`` in ``step.cpp``."""

    _fields_ = (*_ints("first_layer", "layers"), *_floats("divisor"), *_ints("width", "beam"), ("lm_head", Weight))


class Growth(ctypes.Structure):
    """``draftheads::Growth`` in ``step.cpp``."""

    _fields_ = (
        *_ints("rows", "size", "num_depths", "reads_path", "embedding_kind", "nodes"),
        *_floats("likely", "embedding_scale"),
        *_pointers("embedding", "embedding_smooth", "target_ids", "roots", "states", "tokens", "parents", "log_probs"),
        *_ints("capacity"),
        *(("head_layers", POINTER(HeadLayer)), ("depths", POINTER(Depth))),
    )


STRUCTURES = (Weight, Norm, Gate, Experts, Place, Recurrence, Layer, Mixing, Model, Pass, HeadLayer, Depth, Growth)


@dataclass
class TextStates:
    """What recurrent layers know of a text."""

    states: Tensor  # (layers, numbers)
    records: Tensor  # (layers, nodes, numbers) of the nodes of the last tree
    accepted: list[int]  # nodes of it that the text goes on with: the next pass moves the states behind them


@dataclass(frozen=True)
class SequenceBatch:
    """The tokens of a pass: those of a text are neighbours.

    Args:
        memory: of each of b texts keys and values, (layers, 2, groups, slots, d) in the step's ``cache_dtype``.
        lengths: (b,) tokens that each text has before the pass.
        counts: (b,) tokens of each text in the pass.
        depths: (M,) int32, levels below the first token of the same text.
        ancestors: (M, words) uint64: bit m says that a token sees the m-th node of its text; None: all before it.
        are_long: (b,) texts with the long factors of LongRoPE, for models that have it.
        states: (b,) in a model with recurrent layers. Without ancestors they move behind the tokens.
        drafted: nodes of each text's tree that earlier passes wrote behind it, which come before those of this pass; of
            layers with attention to the whole text.
    """

    memory: Sequence[Tensor]
    lengths: Sequence[int]
    counts: Sequence[int]
    depths: Tensor
    ancestors: Tensor | None = None
    are_long: Sequence[bool] | None = None
    states: Sequence[TextStates] = ()
    drafted: int = 0


def addresses_of(tensors: Sequence[Tensor]) -> Any:
    """An array of pointers."""
    return (c_void_p * len(tensors))(*(part.data_ptr() for part in tensors))


class StatesOfPass:
    """The states of some texts as fields of :class:`Pass`, and their records: new ones where those are too few."""

    def __init__(self, texts: Sequence[TextStates], counts: Sequence[int], *, writes: bool) -> None:
        self._texts = texts
        old = [text.records for text in texts]
        self._records = [
            part.new_empty(len(part), count, part.shape[2]) if writes and count > part.shape[1] else part
            for part, count in zip(old, counts, strict=True)
        ]
        paths = [text.accepted for text in texts]
        nodes = np.array([node for path in paths for node in path], dtype=np.int32)
        slots = [np.array([part.shape[1] for part in parts], dtype=np.int32) for parts in (self._records, old)]
        pointers = map(addresses_of, ([text.states for text in texts], self._records, old))
        self._held = [*pointers, *slots, np.cumsum([0, *map(len, paths)], dtype=np.int32), nodes]
        names = ("states_of_texts", "records", "old_records", "record_slots", "old_slots", "accepted_first", "accepted")
        places = (part.ctypes.data if isinstance(part, np.ndarray) else ctypes.addressof(part) for part in self._held)
        self.fields = dict(zip(names, places, strict=True))

    def done(self) -> None:
        """The pass has moved the states, and written records."""
        for text, records in zip(self._texts, self._records, strict=True):
            text.records, text.accepted = records, []


def ancestor_bits(ancestors: Tensor, batch: int) -> Tensor:
    """(B·W, words) int64 of what the W last nodes of so many trees see, (B or 1, W, N) bool."""
    packed = np.packbits(ancestors.numpy(), axis=-1, bitorder="little")  # (B or 1, W, bytes)
    whole = np.zeros((*packed.shape[:2], -(-packed.shape[2] // 8) * 8), dtype=np.uint8)
    whole[..., : packed.shape[2]] = packed
    return torch.from_numpy(whole).view(torch.int64).expand(batch, -1, -1).flatten(0, 1).contiguous()


_POINTER, _INT = c_void_p, c_int32
_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # what they return, and their arguments
    "kernels": (c_char_p, c_char_p),
    "threads": (None, _INT),
    "forked": (None,),
    "packed_size": (c_int64, *3 * [_INT]),
    "pack": (None, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER, _INT),
    "multiply": (None, POINTER(Weight), _POINTER, _INT, _INT, _POINTER),
    "best_outputs": (None, POINTER(Weight), _POINTER, _INT, _INT, c_float, _POINTER),
    "grow": (_INT, POINTER(Growth)),
    "best": (None, _POINTER, _POINTER, *3 * [_INT], *4 * [_POINTER]),
    "top": (None, _INT, _POINTER, *3 * [_INT], c_float, *3 * [_POINTER]),
    "pass": (_INT, POINTER(Model), POINTER(Pass)),
    **dict.fromkeys(("states_size", "record_size"), (c_int64, POINTER(Model))),
}


def _layout() -> str:
    """What functions do besides, then name, offset and size of each field, a line each, as the library tells them."""
    fields = ((each, name, getattr(each, name)) for each in STRUCTURES for name, *_ in each._fields_)
    return "rounds int8\n" + "".join(
        f"{each.__name__}.{name.rstrip('_')} {at.offset} {at.size}\n" for each, name, at in fields
    )


@cache
def load_library() -> Any:
    """The library, with the fastest instructions of this machine; None if it was not built or is switched off."""
    wanted = Environment().kernels
    if wanted == "off" or not FILE.exists():
        return None
    try:
        found = ctypes.CDLL(str(FILE))
        found.draftheads_layout.restype = c_char_p
        if found.draftheads_layout().decode() != _layout():
            return None  # of another version: `make native`
    except (AttributeError, OSError):  # the same, or built for another machine
        return None
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(found, f"draftheads_{name}")
        function.restype, function.argtypes = result, arguments
    if found.draftheads_kernels(wanted.encode() if wanted else None) is None:
        raise InvalidSettings(
            f"DRAFTHEADS_KERNELS is {wanted!r}; this machine has {', '.join(sets_here(found))}, and off"
        )
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=found.draftheads_forked)
    return found


def how_to_get() -> str:
    """What to do where :func:`load_library` gives none."""
    off = Environment().kernels == "off"
    return "unset DRAFTHEADS_KERNELS, which is off" if off else "install a C++ compiler, and draftheads again"


def sets_here(native: Any) -> list[str]:
    """The sets of instructions that this machine has. The one in use does not change."""
    used = native.draftheads_kernels(b"")
    here = [name for name in SETS if native.draftheads_kernels(name.encode())]
    native.draftheads_kernels(used)
    return here


class _Threads(threading.local):
    native: int | None = None  # of the library, while torch has one
    is_known: bool = False  # whether torch's number in this thread is one that somebody chose


_here = _Threads()
_usual: int | None = None  # torch's number where nothing has lowered it


def native_threads() -> int:
    """How many threads the native library has now."""
    return _here.native or torch.get_num_threads()


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """The native library has the threads that torch had; contexts may be nested."""
    if _here.native is not None:
        yield
        return
    before = _here.native = _usual_number()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _here.native = None
        torch.set_num_threads(before)


def _usual_number() -> int:
    """Of torch in this thread. A thread that begins while another one is in the context inherits one."""
    global _usual  # the number of torch's threads is one of the process, too
    number = torch.get_num_threads()
    if number == 1 and _usual is not None and not _here.is_known:
        number = _usual
    _here.is_known, _usual = True, number
    return number
