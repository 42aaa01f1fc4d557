"""What a model's files may hold: sizes that fit their tensors, finite numbers, known quantisations.

Nothing slow is imported here.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftheads.errors import UnsupportedModel
from draftheads.utils.messages import short
from draftheads.utils.strict_json import depth_of, unique

if TYPE_CHECKING:
    from torch import Tensor

_SIZES = re.compile(
    r"\w*hidden_size|\w*intermediate_size|n_embd|n_embed|d_model|d_ff|d_inner|n_inner|ffn_dim|state_size|"
    r"\w*head_dim|\w*_rank|n(um)?_(\w*_)?(heads?|experts)"
)
_VOCABULARIES = re.compile(r"\w*vocab_size\w*")
_LAYERS = re.compile(r"n(um)?_(\w*_)?layers?")
_POSITIONS = re.compile(r"max_position_embeddings|n_positions|n_ctx|max_seq_len")
_MOST, _DEEPEST = 1 << 24, 64  # of any size or length; objects and lists inside each other
# are possible whatever the tensors are: parts that are not read take no memory
_FEW, _FEW_TOKENS, _FEW_LAYERS = 1 << 14, 1 << 20, 1024
_PACKED = 8  # weights in a number, where they are quantised
_ENDLESS = "time_step_limit"  # of Mamba, whose upper end is infinite


def check_config(folder: Path) -> None:
    """Refuses a ``config.json`` whose model would take more memory than its files explain.

    Raises:
        UnsupportedModel: a size or number of layers is beyond the tensors, a number is not finite, or it is no object
            that can be read.
    """
    path = folder / "config.json"
    if not path.is_file():  # transformers says what is wrong
        return
    config = keys_in(path)
    shapes = list(_shapes_in(folder))
    largest = max((size for shape in shapes for size in shape), default=_MOST)
    packed = largest * (_PACKED if "quantization_config" in config else 1)
    no_larger = f"no tensor of its files is larger than {largest:,}"
    limits = (
        (_SIZES, min(_MOST, max(_FEW, packed)), no_larger),
        (_VOCABULARIES, min(_MOST, max(_FEW_TOKENS, packed)), no_larger),
        (_LAYERS, max(_FEW_LAYERS, len(shapes)), f"its files have {len(shapes):,} tensors"),
        (_POSITIONS, _MOST, "no model has so many"),
    )
    for key, number in _numbers(config):
        if not math.isfinite(number) and key != _ENDLESS:
            raise UnsupportedModel(f"{path}: {key} is {number}; it must be a finite number")
        for pattern, most, why in limits:
            if number > most and pattern.fullmatch(key):
                raise UnsupportedModel(f"{path}: {key} is {number:,}; at most {most:,} is possible: {why}")


def keys_in(path: Path) -> dict[str, Any]:
    """The object in a file of a model.

    Raises:
        UnsupportedModel: it is no JSON or no object, a key is there twice, or it is nested too deep.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise UnsupportedModel(f"{path} is nested too deep; {_DEEPEST} is allowed") from None
    except ValueError as error:
        raise UnsupportedModel(f"{path} cannot be read as JSON: {error}") from None
    if (depth := depth_of(value)) > _DEEPEST:
        raise UnsupportedModel(f"{path} is nested {depth} deep; {_DEEPEST} is allowed")
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} is {short(repr(value))}; it must be an object")
    return value


def check_size(config: Any, source: Path | str) -> None:
    """Refuses a model that is far larger than its files: what ``config.json`` leaves out is as usual for its class.

    Raises:
        UnsupportedModel: each layer of a model has more weights than a square of its hidden size.
    """
    text = config.get_text_config()
    layers, width = (getattr(text, name, None) or 0 for name in ("num_hidden_layers", "hidden_size"))
    stored = sum(file.stat().st_size for file in weight_files(source))
    is_quantised = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if layers * width**2 > stored * (_PACKED if is_quantised else 1) > 0:
        sizes = f"num_hidden_layers {layers:,} and hidden_size {width:,}, as given or as usual"
        raise UnsupportedModel(f"{source}: a {config.model_type} model has {sizes}; its files have {stored:,} bytes")


def check_quantisation(name: str, config: Any, given: Any = None, *, source: Path | str | None = None) -> bool:
    """Whether the files at ``source`` hold quantised weights, by a model's configuration."""
    own = (getattr(each, "quantization_config", None) for each in (config, config.get_text_config()))
    both = (next(filter(None, own), None), given)
    stored, wanted = (each if isinstance(each, dict) else each.to_dict() if each else {} for each in both)
    if not stored and source is not None and (path := model_file(source, "hf_quant_config.json")):  # of ModelOpt
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
    import transformers  # noqa: PLC0415 - slow to import
    from transformers.quantizers.auto import AutoHfQuantizer  # noqa: PLC0415

    quantizer: Any = AutoHfQuantizer
    if stored and not ((method := stored.get("quant_method")) and quantizer.supports_quant_method(stored)):
        kind = " ".join(filter(None, (method, stored.get("quant_algo")))) or "unknown"
        what = f"quantised weights ({kind}), which transformers {transformers.__version__} does not undo"
        fix = "load the model that it was made from, which precision int8 or four_bit=True quantise here"
        raise UnsupportedModel(f"{name} has {what}: {fix}")
    return bool(stored)


def unread_keys(given: Mapping[str, Any], *kinds: type) -> list[str]:
    """Keys that are not off, and that the source of no class of ``transformers`` among these and their bases names."""
    modules = {base.__module__ for kind in kinds for base in kind.__mro__ if base.__module__.startswith("transformers")}
    sources = (Path(sys.modules[name].__file__ or "").read_text(encoding="utf-8") for name in modules)
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    return sorted(name for name, value in given.items() if value and name not in words)


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else ((key, each) for each in value):
            yield from _numbers(inner, name)
    elif isinstance(value, int | float):
        yield key, value


def _shapes_in(folder: Path) -> Iterator[list[int]]:
    """By the headers of its safetensors files; of a damaged one transformers says what is wrong."""
    for path in folder.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), path.stat().st_size)))
            yield from (entry["shape"] for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            continue


def not_finite(tensors: "Iterable[tuple[str, Tensor]]") -> str | None:
    """The name of the first tensor with a NaN or an infinity; numbers of 8 bits and less are not looked at."""
    for name, tensor in tensors:
        # the sum reads each number once and makes no copy; that of finite ones may be too large
        is_number = tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.is_meta
        if is_number and not math.isfinite(tensor.sum()) and not bool(tensor.isfinite().all()):
            return name
    return None


def check_finite(name: str, model: Any, source: Path | str) -> None:
    """Refuses a loaded model with a weight that is no finite number. The tensor and its file are looked for.

    Raises:
        UnsupportedModel: there is one in the files at ``source``, or it became one in the model's type.
    """
    # weights that lie on the disk are read later
    loaded = ((key, weight) for key, weight in model.state_dict().items() if not weight.is_meta)
    if (found := not_finite(loaded)) is not None:
        check_stored(name, source)
        raise UnsupportedModel(f"{name}: {found} has numbers that are too large for {model.dtype}: use bf16 or fp32")


def check_stored(name: str, source: Path | str) -> None:
    """As :func:`check_finite`, of the files alone, which are read as a whole."""
    from transformers.modeling_utils import load_state_dict  # noqa: PLC0415 - slow to import

    for file in weight_files(source):
        if (found := not_finite(load_state_dict(file, "cpu").items())) is not None:
            raise UnsupportedModel(f"{name}: the tensor {found} in {file} has a NaN or infinite number: get it anew")


def weight_files(source: Path | str) -> list[Path]:
    """The files with a model's or an adapter's weights."""
    for single in ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin"):
        if found := model_file(source, single):  # transformers reads it in place of shards
            return [found]
        index = model_file(source, f"{single}.index.json")
        shards = set(keys_in(index)["weight_map"].values()) if index else ()
        if files := [file for shard in sorted(shards) if (file := model_file(source, shard))]:
            return files
    return []


def model_file(source: Path | str, name: str) -> Path | None:
    """A file of a folder or of a Hub model; None if there is none."""
    from transformers.utils.hub import cached_file  # noqa: PLC0415 - slow to import

    try:
        path: Any = cached_file(source, name)
        return Path(path)
    except OSError:
        return None
