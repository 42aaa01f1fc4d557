"""Whether a model's files hold what the model needs. ``transformers`` only logs most of what this refuses."""

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

_OF_MODELOPT = "hf_quant_config.json"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NUMBER = r"(?<=\.)\d+(?=\.)"  # of a layer or an expert, in the name of a tensor
# buffers that models compute now, and heads beside the model that draft for it
_IGNORABLE = (
    r"rotary_emb\.inv_freq$",
    r"(^|\.)position_ids$",
    r"\.attn\.(attention\.)?(bias|masked_bias|causal_mask)$",
    r"^medusa_head\.",
)


def check_quantisation(name: str, config: Any, given: Any = None, *, source: Path | str | None = None) -> bool:
    """Whether the model's files hold quantised weights, by their configuration; ``source`` is where they are.

    Raises:
        UnsupportedModel: ``transformers`` does not undo this quantisation, or a text would depend on the rows beside it
            with this one, or with the ``given`` one.
    """
    stored = _settings(getattr(config, "quantization_config", None)) or _settings(
        getattr(config.get_text_config(), "quantization_config", None)
    )
    if not stored and source is not None:
        stored = _of_modelopt(source)
    for settings in (stored, _settings(given)):
        if settings.get("load_in_8bit") and settings.get("llm_int8_threshold") != 0:
            raise UnsupportedModel(
                f"{name}: the 8 bits of bitsandbytes (LLM.int8()) keep columns whole in which any row of a pass has a "
                "large number, so a text depends on the rows and the draft tokens beside it: use precision int8 or "
                "four_bit=True in place of it"
            )
    method = "bitsandbytes_4bit" if stored.get("load_in_4bit") else stored.get("quant_method")
    method = "bitsandbytes_8bit" if stored.get("load_in_8bit") else method
    if stored and method not in transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        kind = " ".join(str(stored[key]) for key in ("quant_method", "quant_algo") if stored.get(key)) or "unknown"
        raise UnsupportedModel(
            f"{name} has quantised weights ({kind}), which transformers {transformers.__version__} does not undo: load "
            "the model that it was made from, which precision int8 or four_bit=True quantise here"
        )
    return bool(stored)


def check_weights(name: str, model: Any, report: dict[str, Any], source: Path | str, *, is_quantised: bool) -> None:
    """Compares a model with its files.

    Args:
        name: the model's.
        model: as it was loaded.
        report: the loading info of ``transformers``.
        source: where the files are.
        is_quantised: whether they hold quantised weights, whose types the model need not have.

    Raises:
        UnsupportedModel: tensors are missing or left over, or have another shape or type than the model's.
    """
    declared = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignorable = re.compile("|".join(f"({pattern})" for pattern in (*_IGNORABLE, *declared)))
    is_quantised_here = getattr(model, "hf_quantizer", None) is not None
    own = {} if is_quantised_here else {key: tensor.dtype for key, tensor in model.state_dict().items()}
    prefix = f"{model.base_model_prefix}."  # files of base models leave it out
    stored = {} if is_quantised else _stored(source)
    types = {prefix + key if prefix + key in own else key: tensor.dtype for key, tensor in stored.items()}
    others = {
        f"{key} ({dtype})"
        for key, dtype in types.items()
        if not (fits(dtype, own.get(key)) or (key not in own and ignorable.search(key)))
    }
    problems = {
        "missing": report["missing_keys"],
        "left over": {key for key in report["unexpected_keys"] if not ignorable.search(key)},
        "of another shape": {
            f"{key} ({tuple(shape)}, not {tuple(wanted)})" for key, shape, wanted in report["mismatched_keys"]
        },
        "of another type": others,
    }
    _refuse(name, problems)


def check_series(name: str, source: Path | str) -> None:
    """Compares the tensors of a model's files that differ by numbers in their names: of layers and experts.

    Raises:
        UnsupportedModel: one of such tensors is missing, or has another shape than most.
    """
    series: dict[str, dict[tuple[str, ...], torch.Size]] = {}
    for key, tensor in _stored(source).items():
        series.setdefault(re.sub(_NUMBER, "{}", key), {})[tuple(re.findall(_NUMBER, key))] = tensor.shape
    missing, others = set(), set()
    for pattern, shapes in series.items():
        missing |= {
            pattern.format(*numbers) for numbers in set(product(*map(set, zip(*shapes, strict=True)))) - set(shapes)
        }
        usual, _ = Counter(shapes.values()).most_common(1)[0]
        others |= {f"{pattern.format(*numbers)} {tuple(shape)}" for numbers, shape in shapes.items() if shape != usual}
    _refuse(name, {"missing": missing, "of another shape": others})


def _refuse(name: str, problems: dict[str, set[str]]) -> None:
    """Raises :class:`UnsupportedModel` with the tensors of each kind of problem, if there are any."""
    found = [f"{what} ({counted(len(keys), 'tensor')}): {first_names(keys)}" for what, keys in problems.items() if keys]
    if found:
        raise UnsupportedModel(
            f"the files of {name} do not hold the model of its config.json, so its text would be wrong: "
            f"{'; '.join(found)}"
        )


def fits(stored: torch.dtype, own: torch.dtype | None) -> bool:
    """Whether a tensor of a file is a value of the model's type; of a tensor with another name there, if it can be."""
    if own is None:
        return stored in _FLOATS or stored.itemsize > 1 or stored == torch.bool
    return own.is_floating_point == (stored in _FLOATS)


def _settings(quantisation: Any) -> dict[str, Any]:
    """As in ``config.json``; empty for None."""
    given = quantisation if isinstance(quantisation, dict | None) else quantisation.to_dict()
    return dict(given or {})


def _of_modelopt(source: Path | str) -> dict[str, Any]:
    """What ModelOpt writes beside a checkpoint whose weights it has quantised; empty if there is nothing."""
    path = _file(source, _OF_MODELOPT)
    quantisation = json.loads(path.read_text(encoding="utf-8")).get("quantization", {}) if path else {}
    return {"quant_method": "modelopt", **quantisation} if quantisation.get("quant_algo") else {}


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
    """One of a model's files, which may have to be downloaded; None if there is none."""
    try:
        return Path(transformers.utils.cached_file(source, name))
    except OSError:
        return None
