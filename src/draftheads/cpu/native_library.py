"""The native library for CPUs: where it is, and its structures in C.

It is built when the package is installed, if there is a C++ compiler (``hatch_build.py``). Without it all but int8 and
int4 works, more slowly. It has a plain C interface, so one build serves all versions of Python and PyTorch.
"""

import ctypes
import os
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from draftheads.errors import InvalidSettings
from draftheads.utils.environment import Environment

SETS = ("amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2", "portable")  # the fastest first
FILE = Path(__file__).parent / "native" / "libdraftheads.so"
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
INT4 = 4  # the same, of 4 bits
BLOCK = 32  # outputs that are stored side by side


class Weight(ctypes.Structure):
    """``draftheads::Weight`` in ``kernels.h``."""

    _fields_ = (
        ("kind", c_int32),
        ("inputs", c_int32),
        ("out", c_int32),
        ("in_", c_int32),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("smooth", c_void_p),
        ("low_a", c_void_p),
        ("low_b", c_void_p),
        ("rank", c_int32),
        ("low_kind", c_int32),
    )


class Norm(ctypes.Structure):
    """``draftheads::Norm`` in ``kernels.h``."""

    _fields_ = (("scale", c_void_p), ("shift", c_void_p), ("epsilon", c_float), ("is_centred", c_int32))


class Experts(ctypes.Structure):
    """``draftheads::Experts`` in ``step.cpp``."""

    _fields_ = (
        ("weights", POINTER(Weight)),
        ("router", c_void_p),
        ("router_bias", c_void_p),
        ("count", c_int32),
        ("chosen", c_int32),
        ("share_of_all", c_int32),
        ("unused", c_int32),
    )


class Layer(ctypes.Structure):
    """``draftheads::Layer`` in ``step.cpp``."""

    _fields_ = (
        ("qkv", Weight * 3),
        ("out", Weight),
        ("gate_up", Weight * 2),
        ("down", Weight),
        ("norms", Norm * 4),
        ("head_norms", Norm * 2),
        ("sinks", c_void_p),
        ("experts", POINTER(Experts)),
        ("window", c_int32),
        ("turns", c_int32),
    )


class Model(ctypes.Structure):
    """``draftheads::Model`` in ``step.cpp``."""

    _fields_ = (
        ("size", c_int32),
        ("heads", c_int32),
        ("groups", c_int32),
        ("head_size", c_int32),
        ("turned", c_int32),
        ("key_first", c_int32),
        ("value_first", c_int32),
        ("query_step", c_int32),
        ("key_step", c_int32),
        ("layers", c_int32),
        ("cache_kind", c_int32),
        ("state_kind", c_int32),
        ("embedding_kind", c_int32),
        ("vocab", c_int32),
        ("is_parallel", c_int32),
        ("turns_neighbours", c_int32),
        ("norms_whole", c_int32),
        ("scaling", c_float),
        ("cap", c_float),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("gate", c_int32),
        ("gate_alpha", c_float),
        ("gate_limit", c_float),
        ("final", Norm),
        ("of_layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("embedding_smooth", c_void_p),
        ("positions", c_void_p),
        ("num_positions", c_int32),
        ("unused", c_int32),
    )


class Pass(ctypes.Structure):
    """``draftheads::Pass`` in ``step.cpp``."""

    _fields_ = (
        ("tokens", c_int32),
        ("texts", c_int32),
        ("words", c_int32),
        ("kept", c_int32),
        ("ids", c_void_p),
        ("memory", c_void_p),
        ("slots", c_void_p),
        ("lengths", c_void_p),
        ("counts", c_void_p),
        ("depths", c_void_p),
        ("ancestors", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_turns", c_int32),
        ("of_tokens", c_int32),
        ("last_position", c_int32),
        ("unused", c_int32),
        ("kept_layers", c_void_p),
        ("kept_states", c_void_p),
        ("states", c_void_p),
    )


class HeadLayer(ctypes.Structure):
    """``draftheads::HeadLayer`` in ``step.cpp``."""

    _fields_ = (("weight", Weight), ("base", Weight), ("has_base", c_int32))


class Depth(ctypes.Structure):
    """``draftheads::Depth`` in ``step.cpp``."""

    _fields_ = (
        ("first_layer", c_int32),
        ("layers", c_int32),
        ("divisor", c_float),
        ("width", c_int32),
        ("beam", c_int32),
        ("lm_head", Weight),
    )


class Growth(ctypes.Structure):
    """``draftheads::Growth`` in ``step.cpp``."""

    _fields_ = (
        ("rows", c_int32),
        ("size", c_int32),
        ("num_depths", c_int32),
        ("reads_path", c_int32),
        ("embedding_kind", c_int32),
        ("nodes", c_int32),
        ("likely", c_float),
        ("embedding_scale", c_float),
        ("embedding", c_void_p),
        ("embedding_smooth", c_void_p),
        ("target_ids", c_void_p),
        ("roots", c_void_p),
        ("states", c_void_p),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("log_probs", c_void_p),
        ("capacity", c_int32),
        ("head_layers", POINTER(HeadLayer)),
        ("depths", POINTER(Depth)),
    )


@cache
def load_library() -> Any:
    """The library, with the fastest instructions of this machine; None if it was not built or is switched off."""
    wanted = Environment().kernels
    if wanted == "off" or not FILE.exists():
        return None
    try:
        found = ctypes.CDLL(str(FILE))
        found.draftheads_size.restype, found.draftheads_size.argtypes = c_int32, (c_int32,)
        structures = (Weight, Norm, Experts, Layer, Model, Pass, HeadLayer, Depth, Growth)
        if [found.draftheads_size(number) for number in range(len(structures))] != [*map(ctypes.sizeof, structures)]:
            return None  # of another version: `make native`
    except (AttributeError, OSError):  # the same, or built for another machine
        return None
    found.draftheads_kernels.restype, found.draftheads_kernels.argtypes = c_char_p, (c_char_p,)
    found.draftheads_threads.restype, found.draftheads_threads.argtypes = None, (c_int32,)
    found.draftheads_forked.restype, found.draftheads_forked.argtypes = None, ()
    found.draftheads_packed_size.restype = c_int64
    found.draftheads_packed_size.argtypes = (c_int32, c_int32, c_int32)
    found.draftheads_pack.restype = None
    found.draftheads_pack.argtypes = (c_int32, c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_int32)
    found.draftheads_multiply.restype = None
    found.draftheads_multiply.argtypes = (POINTER(Weight), c_void_p, c_int32, c_int32, c_void_p)
    found.draftheads_best_outputs.restype = None
    found.draftheads_best_outputs.argtypes = (POINTER(Weight), c_void_p, c_int32, c_int32, c_float, c_void_p)
    found.draftheads_grow.restype, found.draftheads_grow.argtypes = c_int32, (POINTER(Growth),)
    found.draftheads_best.restype = None
    found.draftheads_best.argtypes = (
        *(c_void_p, c_void_p, c_int32, c_int32, c_int32),
        *(c_void_p, c_void_p, c_void_p, c_void_p),
    )
    found.draftheads_top.restype = None
    found.draftheads_top.argtypes = (
        *(c_int32, c_void_p, c_int32, c_int32, c_int32),
        *(c_float, c_void_p, c_void_p, c_void_p),
    )
    found.draftheads_pass.restype, found.draftheads_pass.argtypes = c_int32, (POINTER(Model), POINTER(Pass))
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
