"""Passes of the target: the native library's, or those of the model's own modules."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from draftheads.models.model import TargetModel
from draftheads.models.model_config import kv_numbers
from draftheads.models.model_layers import require_layers
from draftheads.runners.native_runner import NativeRunner
from draftheads.runners.runner import Runner, whole_blocks
from draftheads.runners.transformers_runner import TransformersRunner, held_rows, slots_for

_state_bytes: WeakKeyDictionary[TargetModel, int] = WeakKeyDictionary()  # of one row


def runner_for(model: TargetModel, layers: Sequence[int] = ()) -> Runner:
    """What makes the passes of a model; a drafter reads the inputs of ``layers``. Errors as of :class:`Runner`."""
    require_layers(model)
    return (TransformersRunner if model.native is None else NativeRunner)(model, layers)


def num_slots(model: TargetModel, lengths: Sequence[int], num_nodes: int = 0) -> int:
    """How many tokens' keys and values a runner has memory for, with texts of so many tokens and a tree after each."""
    if model.native is not None:
        return sum(whole_blocks(length + num_nodes) for length in lengths)
    longest = slots_for(max(lengths, default=0), num_nodes, is_static=model.has_static_steps)
    return held_rows(len(lengths)) * longest


def bytes_per_slot(model: TargetModel) -> int:
    """Memory of the keys and values of one token."""
    if model.native is not None:
        return model.native.bytes_per_token
    layers = sum(kind == "hybrid" or kind in model.attention_kinds for kind in model.layer_kinds)
    return layers * kv_numbers(model.config) * model.dtype.itemsize


def bytes_of_states(model: TargetModel, num_rows: int, num_nodes: int = 0) -> int:
    """Memory of the states of recurrent layers, which do not grow with the text, and of trees of so many nodes."""
    if not (model.is_recurrent and num_rows):
        return 0
    if model.native is not None:
        return num_rows * model.native.bytes_of_states(num_nodes)
    if model not in _state_bytes:
        runner = TransformersRunner(model)
        runner.prefill([[0]])
        _state_bytes[model] = runner.state_bytes
    return held_rows(num_rows) * _state_bytes[model]
