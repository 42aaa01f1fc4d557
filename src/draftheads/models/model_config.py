"""What the configuration of a model says: the sizes of its layers, the longest text, the tokens that end a text.

Reads attributes of ``transformers``' configurations, which differ between families and versions. Also the types and
devices that names mean, and those that are taken where none is named; and the classes of models that read more than
text.
"""

import copy
import math
import warnings
from functools import cache
from inspect import signature
from typing import Any

import torch

from draftheads.cpu.kernels import native_bf16
from draftheads.errors import InvalidSettings, LengthWarning, UnsupportedModel, first_line, require_at_least
from draftheads.settings import ROUNDED_BITS

_NOT_OF_A_LAYER = {  # settings of a whole model or of its texts
    *("vocab_size", "hidden_size", "num_hidden_layers", "layer_types", "first_k_dense_replace", "mlp_only_layers"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "use_cache", "num_mtp_layers", "self"),
    *("num_nextn_predict_layers", "output_router_logits", "router_aux_loss_coef"),
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ENDLESS_ROPES = {"default", "linear", "llama3", "yarn"}  # a position has the same cosines in texts of any length
_ORIGINAL = "original_max_position_embeddings"


def layer_sizes(config: Any, hidden_size: int) -> dict[str, Any]:
    """Sizes of a model's layers, for heads with layers of these sizes; usual values where a size is missing.

    Rotary positions are the model's own, with its scaling. Of kinds that change with the length of the text (dynamic,
    longrope) they are those of short texts. ``config`` is that of the text model.
    """
    heads = num_heads(config)
    ropes = _ropes(config)
    kind = "full_attention" if "full_attention" in ropes else None
    rope = ropes.get(kind, {})
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    epsilons = (getattr(config, name, None) for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"))
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    inner = max(inner) if isinstance(inner, list) else inner  # Gemma-3n has a size for each layer
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_size": int(getattr(config, "head_dim", None) or hidden_size // heads),
        "intermediate_size": int(inner or 4 * hidden_size),
        "rope_theta": float(theta),
        "norm_epsilon": float(next((value for value in epsilons if value), 1e-5)),
        **_scaled_rope(config, rope, kind),
    }


def num_heads(config: Any) -> int:
    """Heads of attention; of a model without attention as many as heads' own layers have in models of its size."""
    return int(getattr(config, "num_attention_heads", None) or max(1, config.hidden_size // 64))


def kv_numbers(config: Any) -> int:
    """How many numbers a layer's KV cache has of one token: keys and values of all groups."""
    heads = num_heads(config)
    groups = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    if not groups or (getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", True)):
        groups = 1 if getattr(config, "multi_query", False) else heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key = getattr(config, "qk_head_dim", None) or size  # latent attention has other sizes of keys and values
    return int(groups) * (int(key) + int(getattr(config, "v_head_dim", None) or size))


def head_sizes(config: Any, hidden_size: int) -> dict[str, Any]:
    """Options of heads that follow from the model; ``layers`` are the :func:`three_layers` that heads read."""
    layers = three_layers(int(config.num_hidden_layers))
    return {**layer_sizes(config, hidden_size), "layers": layers, "layer": layer_settings(config)}


def layer_settings(config: Any) -> dict[str, Any]:
    """What the configuration says of a layer, for heads whose layer is of the model's own class."""
    from transformers import PreTrainedConfig  # noqa: PLC0415 - slow to import

    kinds: Any = type(config).__mro__
    known = {name for kind in kinds for name in signature(kind.__init__).parameters} | {"head_dim"}
    names = known - _NOT_OF_A_LAYER - signature(PreTrainedConfig.__init__).parameters.keys()
    return {name: getattr(config, name) for name in ("model_type", *sorted(names)) if hasattr(config, name)}


def three_layers(count: int) -> list[int]:
    """A low, a middle and a high layer of that many, whose inputs heads read; fewer if there are few layers.

    >>> three_layers(30), three_layers(2)
    ([2, 15, 27], [0, 1])
    """
    return sorted({min(2, count - 1), count // 2, max(count - 3, 0)})


def max_positions_of(config: Any, *, switches: bool = True) -> int | None:
    """The maximal number of tokens in a text; None if the configuration of the text model does not contain it.

    Where all positions are scaled by a factor (yarn, linear), many configurations still have the unscaled length.
    With LongRoPE it is the original length unless the model ``switches`` to the factors of longer texts.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    rope = _ropes(config).get(None, {})
    if longest is not None and rope_kinds(config) in ({"yarn"}, {"linear"}):
        return max(longest, int((rope.get(_ORIGINAL) or longest) * (rope.get("factor") or 1.0)))
    limits = longest, None if switches else long_rope_start(config)
    return min((limit for limit in limits if limit is not None), default=None)


def check_length(config: Any, max_length: int | None, model_id: str, *, switches: bool) -> None:
    """Raises :class:`InvalidSettings` if texts of ``max_length`` tokens are impossible; None is allowed."""
    require_at_least(1, max_length=max_length)
    longest, kinds = max_positions_of(config, switches=switches), rope_kinds(config)
    if longest and (max_length or 0) > longest and not (kinds and kinds <= _ENDLESS_ROPES):
        why = "it has no positions for longer texts, or they change with the length"
        raise InvalidSettings(f"max_length is {max_length:,}; {model_id} takes at most {longest:,} tokens: {why}")


def warn_of_length(config: Any, longest: int | None, model_id: str) -> None:
    """Warns if positions would change in texts of more than ``longest`` tokens."""
    if changing := rope_kinds(config) & {"dynamic", "longrope"}:
        most = f"prompt and answer together have at most {longest:,} tokens"
        why = "In longer texts the positions of all tokens change with the length, which drafts cannot follow"
        words = f"{model_id} has {min(changing)} rotary positions: {most}. {why}"
        warnings.warn(words, LengthWarning, stacklevel=4)


def long_rope_start(config: Any) -> int | None:
    """The original length of LongRoPE, beyond which it has other factors; None without LongRoPE."""
    starts = [rope.get(_ORIGINAL) for rope in _ropes(config).values() if "long_factor" in rope]
    return next(filter(None, starts), getattr(config, _ORIGINAL, None)) if starts else None


def rope_kinds(config: Any) -> set[str]:
    """The kinds of rotary positions: default, yarn, dynamic and so on; none if positions are not rotary."""
    ropes = filter(None, _ropes(config).values())
    names = ((rope.get("rope_type") or rope.get("type") or "default", rope) for rope in ropes)
    return {"longrope" if "long_factor" in rope else name for name, rope in names}


def fits(stored: torch.dtype, own: torch.dtype | None) -> bool:
    """Whether a tensor of a file is a value of the model's type; of a tensor with another name there, if it can be."""
    if own is None:
        return stored in FLOATS
    return own.is_floating_point == (stored in FLOATS)


def eos_ids_of(*sources: Any, vocab_size: int | None = None) -> frozenset[int]:
    """Token ids that end a text by any of a model's configurations or its tokenizer.

    Ids outside of the vocabulary are left out: no text has them.
    """
    eos_ids: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if wrong := [each for each in ids if not isinstance(each, int)]:
            raise UnsupportedModel(f"eos_token_id is {wrong[0]!r}; it must be the number of a token")
        eos_ids.update(ids)
    return frozenset(token for token in eos_ids if 0 <= token < (vocab_size or math.inf))


def num_weights(config: Any) -> int:
    """The number of weights of a model with that configuration; takes no memory for them."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

    with torch.device("meta"):
        return sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())


def _ropes(config: Any) -> dict[str | None, dict[str, Any]]:
    """The settings of rotary positions by kind of layer; under None where all kinds have the same."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return {kind: value for kind, value in rope.items() if isinstance(value, dict)} or {None: rope}


def _scaled_rope(config: Any, rope: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """The frequencies and the factor of scaled rotary positions; empty if they are not scaled.

    Also empty where a part of each query is not turned, which the layers of heads do not have.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 - slow to import

    scaling = ROPE_INIT_FUNCTIONS.get(rope.get("rope_type", "default"))
    if scaling is None or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return {}
    frequencies, scale = scaling(config, torch.device("cpu"), layer_type=kind)
    return {"rope_frequencies": frequencies.tolist(), "rope_scale": float(scale)}


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BF16_CAPABILITY = (8, 0)  # Ampere and later; T4 (7.5) and V100 (7.0) emulate bf16


def precision_of(dtype: torch.dtype) -> str:
    """The short name of a type, such as ``bf16``."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def without_layers(config: Any) -> Any:
    """A copy of a model's configuration for its embedding, last norm and lm_head alone."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == text.num_hidden_layers:
            setattr(text, name, [])  # has a value for each layer
    text.num_hidden_layers = 0
    return config


def dtype_named(dtype: object) -> torch.dtype | None:
    """The type that is meant by a type or a name such as ``fp32`` or ``float32``; None for None and ``auto``.

    >>> dtype_named("bf16"), dtype_named("torch.float16"), dtype_named("auto")
    (torch.bfloat16, torch.float16, None)
    """
    if dtype is None or dtype == "auto":
        return None
    named = DTYPES.get(dtype) or getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if isinstance(named, torch.dtype) and named.is_floating_point:
        return named
    also = f"; {dtype} is a precision of draftheads.load" if dtype in ROUNDED_BITS else ""
    raise InvalidSettings(f"dtype is {dtype!r}; choose auto, {', '.join(DTYPES)} or a floating-point torch.dtype{also}")


def device_named(device: object) -> torch.device:
    """A device that this machine has; :func:`default_device` for None."""
    if device is None:
        return default_device()
    try:
        if not isinstance(device, str | int | torch.device) or isinstance(device, bool):
            raise TypeError  # noqa: TRY301
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidSettings(f"device is {device!r}; give cpu, cuda, cuda:0 or another device of PyTorch") from None
    if place.type == "meta":
        raise InvalidSettings("device is 'meta', which holds no weights; give cpu or cuda")
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count <= (place.index or 0):
            fix = f"give cuda:0 … cuda:{count - 1}" if count else "leave device out, or install PyTorch with CUDA"
            raise InvalidSettings(
                f"device is '{place}', and PyTorch {torch.__version__} finds {count or 'no'} CUDA devices: {fix}"
            )
    elif place.type != "cpu":
        try:
            torch.empty(0, device=place)
        except (RuntimeError, AssertionError, ImportError, TypeError) as error:
            raise InvalidSettings(f"device is '{place}', which this PyTorch cannot use: {first_line(error)}") from None
    return place


def default_device() -> torch.device:
    """The first CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: str | torch.device) -> torch.dtype:
    """bf16 where the CPU or GPU computes in it: emulated bf16 is slow. Otherwise fp16 on GPUs, and fp32 elsewhere."""
    kind = torch.device(device).type
    if kind == "cuda":
        has_bf16 = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY
        return torch.bfloat16 if has_bf16 else torch.float16
    return torch.bfloat16 if kind == "cpu" and native_bf16() else torch.float32


# --- models that read more than text: their classes, made without what reads images and sounds ---


def wrapper_class(config: Any, *, whole: bool = False) -> Any:
    """The class of a model whose configuration has a text model in it; None for other models.

    It leaves the towers out unless the ``whole`` model is asked for.
    """
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING  # noqa: PLC0415 - slow to import

    is_text = config.get_text_config() is config or config.is_encoder_decoder
    kind = None if is_text else MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    return kind if whole or kind is None else _without_towers(kind)


@cache
def _without_towers(kind: Any) -> Any:
    """On the meta device, where models are made before their weights are read, towers take no memory."""

    def make(self: Any, config: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, config, *args, **options)
        self.towers = _drop_towers(self)

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})


def _drop_towers(model: Any) -> tuple[str, ...]:
    """Removes the models inside a model that hold no part of its text model. Returns their names."""
    from transformers import PreTrainedModel  # noqa: PLC0415 - slow

    if (lm_head := model.get_output_embeddings()) is None:
        raise UnsupportedModel(f"{type(model).__name__} has no lm_head: give the folder of its text model")
    text = {*model.get_decoder().modules(), lm_head}
    models = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    apart = [name for name, part in models.items() if text.isdisjoint(part.modules())]
    towers = tuple(name for name in apart if not name.startswith(tuple(f"{other}." for other in apart)))
    for name in towers:
        parent, _, own = name.rpartition(".")
        delattr(model.get_submodule(parent), own)
    return towers


def put_back_towers(model: Any, whole: Any) -> None:
    """Gives a model without towers those of a whole one, so that all of it can be written."""
    for name in model.towers:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, whole.get_submodule(name))
