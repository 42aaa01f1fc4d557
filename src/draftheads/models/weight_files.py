"""Whether a model's files hold what the model needs. ``transformers`` only logs most of what is refused here."""

import json
import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from draftheads.errors import UnsupportedModel
from draftheads.utils.counts import counted
from draftheads.utils.messages import first_names

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NUMBER = r"(?<=\.)\d+(?=\.)"  # of a layer or an expert, in the name of a tensor
_IGNORABLE = (  # buffers that models compute now, and heads beside the model that draft for it
    r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\.attn\.(attention\.)?(bias|masked_bias|causal_mask)$|^medusa_head\.|^(model\.)?mtp(_layers)?\."
)


def check_quantisation(name: str, config: Any, given: Any = None, *, source: Path | str | None = None) -> bool:
    """Whether the files at ``source`` hold quantised weights, by a model's configuration."""
    stored, wanted = (
        quantisation if isinstance(quantisation, dict) else quantisation.to_dict() if quantisation else {}
        for quantisation in (
            getattr(config, "quantization_config", None)
            or getattr(config.get_text_config(), "quantization_config", None),
            given,
        )
    )
    if not stored and source is not None and (path := _file(source, "hf_quant_config.json")):  # of ModelOpt
        try:
            written = json.loads(path.read_text(encoding="utf-8"))["quantization"]
            stored = {"quant_method": "modelopt", **written} if written.get("quant_algo") else {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UnsupportedModel(f"{name}: {path.name} does not say how the weights are quantised") from None
    if any(each.get("load_in_8bit") and each.get("llm_int8_threshold") != 0 for each in (stored, wanted)):
        raise UnsupportedModel(
            f"{name}: the 8 bits of bitsandbytes (LLM.int8()) keep columns whole where any row of a pass has a large "
            "number, so a text depends on the rows and the draft tokens beside it: use precision int8 or four_bit=True"
        )
    from transformers.quantizers.auto import AutoHfQuantizer  # noqa: PLC0415 - slow to import

    quantizer: Any = AutoHfQuantizer
    if stored and not ((method := stored.get("quant_method")) and quantizer.supports_quant_method(stored)):
        kind = " ".join(filter(None, (method, stored.get("quant_algo")))) or "unknown"
        raise UnsupportedModel(
            f"{name} has quantised weights ({kind}), which transformers {transformers.__version__} does not undo: load "
            "the model that it was made from, which precision int8 or four_bit=True quantise here"
        )
    return bool(stored)


def check_weights(name: str, model: Any, report: dict[str, Any], source: Path | str, *, is_quantised: bool) -> None:
    """Compares a model with its files, by the loading info of ``transformers`` and by the types in the files."""
    ignorable = re.compile("|".join((_IGNORABLE, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))))
    # quantised here: the model has other types than its files
    own = (
        {} if getattr(model, "hf_quantizer", None) else {key: value.dtype for key, value in model.state_dict().items()}
    )
    prefix, others = f"{model.base_model_prefix}.", set()  # files of base models leave the prefix out
    for short, tensor in ({} if is_quantised else _stored(source)).items():
        key = prefix + short if prefix + short in own else short
        if not fits(tensor.dtype, own.get(key)) and (key in own or not ignorable.search(key)):
            others.add(f"{key} ({tensor.dtype})")
    for key, weight in model.named_parameters() if is_quantised else ():
        module = model.get_submodule(key.rpartition(".")[0])
        is_own = type(module).__module__.startswith("bitsandbytes.") and key.endswith(".weight")
        if is_own and type(weight) is torch.nn.Parameter:  # what bitsandbytes quantised has another type
            raise UnsupportedModel(
                f"{name}: config.json has a quantization_config of bitsandbytes, but the files hold whole weights, "
                f"such as {key} ({weight.dtype}): delete it there, and give four_bit=True"
            )
        if weight.dtype not in _FLOATS and (
            type(module).__module__.startswith("torch.") or "Norm" in type(module).__name__
        ):
            others.add(f"{key} ({weight.dtype})")
    shapes = {f"{key} ({tuple(shape)}, not {tuple(wanted)})" for key, shape, wanted in report["mismatched_keys"]}
    surplus = {key for key in report["unexpected_keys"] if not ignorable.search(key)}
    _refuse(name, report["missing_keys"], surplus, shapes, others)


def check_series(name: str, source: Path | str) -> None:
    """Compares the tensors of a model's files that differ by numbers in their names: of layers and experts."""
    series: dict[str, dict[tuple[str, ...], torch.Size]] = {}
    for key, tensor in _stored(source).items():
        series.setdefault(re.sub(_NUMBER, "{}", key), {})[tuple(re.findall(_NUMBER, key))] = tensor.shape
    missing, shapes = set[str](), set[str]()
    for pattern, found in series.items():
        usual = Counter(found.values()).most_common(1)[0][0]
        shapes |= {f"{pattern.format(*place)} {tuple(shape)}" for place, shape in found.items() if shape != usual}
        missing |= {
            pattern.format(*place) for place in product(*map(set, zip(*found, strict=True))) if place not in found
        }
    _refuse(name, missing, set(), shapes, set())


def fits(stored: torch.dtype, own: torch.dtype | None) -> bool:
    """Whether a tensor of a file is a value of the model's type; of a tensor with another name there, if it can be."""
    if own is None:
        return stored in _FLOATS
    return own.is_floating_point == (stored in _FLOATS)


def _refuse(name: str, *problems: set[str]) -> None:
    kinds = zip(("missing", "left over", "of another shape", "of another type"), problems, strict=True)
    if found := [f"{kind} ({counted(len(keys), 'tensor')}): {first_names(keys)}" for kind, keys in kinds if keys]:
        raise UnsupportedModel(
            f"the files of {name} do not hold the model of its config.json, so its text would be wrong: "
            f"{'; '.join(found)}"
        )


def _stored(source: Path | str) -> dict[str, Tensor]:
    """All tensors in a model's files, without their values."""
    from transformers.modeling_utils import load_state_dict  # noqa: PLC0415 - slow to import

    for single in ("model.safetensors", "pytorch_model.bin"):
        index = _file(source, f"{single}.index.json")
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index else {single}
        if files := [file for shard in sorted(shards) if (file := _file(source, shard))]:
            return {key: tensor for file in files for key, tensor in load_state_dict(file, "meta").items()}
    return {}


def _file(source: Path | str, name: str) -> Path | None:
    from transformers.utils.hub import cached_file  # noqa: PLC0415 - slow to import

    try:
        path: Any = cached_file(source, name)
        return Path(path)
    except OSError:
        return None
