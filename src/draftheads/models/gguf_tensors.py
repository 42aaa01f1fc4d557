"""The weights of a GGUF file in the model of ``transformers``. Each tensor is used, or refused by its name.

The names of tensors are those of the package ``gguf``. What llama.cpp's converter changes in a family's tensors is
undone here.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftheads.errors import UnsupportedModel, first_line
from draftheads.models.gguf_config import BIASES
from draftheads.models.gguf_files import GgufFile
from draftheads.utils.counts import counted
from draftheads.utils.messages import first_names

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# factors of rotary positions, which the configuration has; and frequencies in old files, which follow from it
_NOT_WEIGHTS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
_LLAMAS = {"llama", "mistral", "mixtral", "granite"}  # queries and keys have llama.cpp's order of rows
_FROM_ONE = {"gemma", "gemma2", "gemma3_text", "nemotron"}  # norms multiply by 1 + w, in files by w


def model_of(file: GgufFile, config: Any, advance: Callable[[], None]) -> Any:
    """The model of a configuration with the weights of a file; ``advance`` is called after each tensor.

    Matrices that are all in fp32, fp16 or bf16 keep that type; of several types they become fp32, quantised ones bf16.

    Raises:
        UnsupportedModel: tensors are missing, left over, or of another shape.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

    dtypes = {_DTYPES.get(tensor.tensor_type.name) for tensor in file.tensors.values() if len(tensor.shape) > 1}
    dtype = torch.bfloat16 if None in dtypes else dtypes.pop() if len(dtypes) == 1 else torch.float32
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    places = _places(file, model)
    _check(file, config, {part for parts in places.values() for part in parts})
    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if parts := places[name]:  # none of a weight that is tied
            try:
                tensor = torch.cat([_undone(file, part, config) for part in parts], dim=1 if len(parts) > 1 else 0)
            except (RuntimeError, ValueError) as error:
                raise UnsupportedModel(f"{file.name}: {parts[0]} has another shape: {first_line(error)}") from error
            if tensor.shape != weight.shape:
                shape, wanted = tuple(tensor.shape), tuple(weight.shape)
                raise UnsupportedModel(f"{file.name}: {', '.join(parts)} has the shape {shape}, not {wanted}")
            tensors[name] = tensor.to(dtype)
            for _ in parts:
                advance()
    for name in model.state_dict().keys() - tensors.keys():
        tensors[name] = tensors[next(each for each, parts in places.items() if "token_embd.weight" in parts)]
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    return model


def _places(file: GgufFile, model: Any) -> dict[str, list[str]]:
    """The tensors of the file that make each weight of the model; none of a weight that is tied."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # noqa: PLC0415

    known = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(known[file.architecture], model.config.num_hidden_layers)
    places = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            places[name] = [] if model.config.tie_word_embeddings else ["output.weight"]
        elif name.endswith("experts.gate_up_proj"):
            block = re.findall(r"\d+", name)[0]
            places[name] = [f"blk.{block}.ffn_{part}_exps.weight" for part in ("gate", "up")]
        else:
            own = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
            places[name] = [own if own.endswith((".weight", ".bias")) else f"{own}.weight"]
    return places


def _check(file: GgufFile, config: Any, wanted: set[str]) -> None:
    """Refuses tensors that are left over or missing. A layer that has a bias in no block may lack it: it is zero."""
    have = set(file.tensors)
    if left := {name for name in have - wanted if not _NOT_WEIGHTS.fullmatch(name)}:
        what = f"a {file.architecture} model with {counted(len(left), 'tensor')} that no part of it takes"
        raise file.refused(f"has {what}: {first_names(left)}")
    optional = {f"{part}.bias" for name, parts in BIASES.items() if hasattr(config, name) for part in parts}
    optional -= {name.split(".", 2)[-1] for name in have}
    if missing := {name for name in wanted - have if name.split(".", 2)[-1] not in optional}:
        raise file.refused(f"has no tensor for {first_names(missing)}")


def _undone(file: GgufFile, name: str, config: Any) -> Tensor:
    """A tensor as ``transformers`` has it."""
    kind, heads, part = config.model_type, config.num_attention_heads, name.split(".")[-2]
    if name not in file.tensors:
        return torch.zeros(file.shape(f"{name.removesuffix('bias')}weight")[0])
    tensor = file.tensor(name)
    if part == "ffn_gate_inp_shexp":
        return tensor.view(1, -1)
    if kind in _LLAMAS and part in ("attn_q", "attn_k"):
        rows = heads if part == "attn_q" else config.num_key_value_heads
        tensor = tensor.view(rows, len(tensor) // rows // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
    elif kind in _FROM_ONE and name.endswith("norm.weight"):
        tensor = tensor - 1.0
    elif kind == "gpt2" and tensor.ndim == 2 and part.startswith(("attn", "ffn")):
        tensor = tensor.T
    elif kind == "falcon" and part == "attn_qkv":  # here each group has its queries, its key and its value
        groups = config.num_kv_heads
        size = len(tensor) // (heads + 2 * groups)
        blocks = tensor.split((heads * size, groups * size, groups * size))
        tensor = torch.cat([each.view(groups, -1, *tensor.shape[1:]) for each in blocks], dim=1).reshape(tensor.shape)
    return tensor
