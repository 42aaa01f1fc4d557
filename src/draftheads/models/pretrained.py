"""Loads a frozen model and its tokenizer by name, and checks that its files hold its weights. An error names the fix.

Knows ``transformers`` and its options; an adapter of peft is merged into its base model. Knows nothing of caches or
trees.
"""

import contextlib
import importlib.util
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from draftheads.cpu.optimise import TYPICAL_TEXT
from draftheads.errors import (
    ConfigWarning,
    DraftHeadsError,
    InvalidSettings,
    MissingDependency,
    ModelNotFound,
    TextOnlyWarning,
    UnsupportedModel,
    first_line,
)
from draftheads.models.adapter import load_merged, require_peft
from draftheads.models.file_checks import (
    check_config,
    check_finite,
    check_quantisation,
    check_size,
    keys_in,
    model_file,
    unread_keys,
    weight_files,
)
from draftheads.models.fingerprint import Parts, inseparable, whole_facts
from draftheads.models.generation import generation_config
from draftheads.models.gguf_architectures import config_of
from draftheads.models.gguf_files import GgufFile
from draftheads.models.gguf_models import without_bars, without_logs
from draftheads.models.model_config import (
    FLOATS,
    default_dtype,
    device_named,
    dtype_named,
    eos_ids_of,
    fits,
    max_positions_of,
    without_layers,
    wrapper_class,
)
from draftheads.models.model_names import ADAPTER_CONFIG, base_of, find_adapter, model_id_of, model_name, resolve_model
from draftheads.models.packed_weights import PackedWeights, load_packed
from draftheads.utils.counts import counted
from draftheads.utils.messages import first_names

if TYPE_CHECKING:  # its import takes three seconds
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ATTENTION = ("sdpa", "eager")  # kinds that take a mask of four dimensions, which trees need
_OF_WHOLE_MODELS = ("four_bit", "quantization_config", "device_map")
_SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")
_NUMBER = r"(?<=\.)\d+(?=\.)"  # of a layer or an expert, in the name of a tensor
# buffers that models compute now, and heads beside the model that draft for it
_IGNORABLE = r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\.attn\.(attention\.)?(bias|masked_bias|causal_mask)$"
_IGNORABLE += r"|\.num_batches_tracked$|^medusa_heads?\.|^(model\.)?mtp(_layers)?\."
_ADVISERS = (
    "integrations.hub_kernels",
    *(f"models.{name}.modeling_{name}" for name in ("jamba", "nemotron_h", "zamba2")),
)
_ADVICE = ("is falling back to its reference PyTorch implementation", "`use_mamba_kernels=False` is deprecated")


class LoadOptions(TypedDict, total=False):
    """How ``transformers`` loads a model. None is the same as an option that is left out."""

    four_bit: bool  # quantise the linear layers, except the lm_head, to 4 bits (NF4)
    quantization_config: Any  # another quantisation of ``transformers``
    device_map: Any  # where it puts the weights, in place of ``device``; they must come to one device
    attn_implementation: str | None  # ``sdpa`` or ``eager``
    trust_remote_code: bool  # whether code that comes with the model may run
    whole: bool  # also what reads images, which text does not need but a copy on disk does
    parts: Parts | None  # the model without its layers
    spread_to: Path | None  # the whole model over all devices, the memory, and this folder for what they do not hold
    packed: "PackedWeights | None"  # of the cache: they are used in place of those in the files
    check: "Callable[[Any], None] | None"  # called with the configuration before weights are read; may raise an error


def hide_gpu_advice() -> None:
    """Hides the advice of ``transformers`` to install kernels for recurrent layers, which run on GPUs only."""
    for name in _ADVISERS:
        logging.getLogger(f"transformers.{name}").addFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not any(part in record.getMessage() for part in _ADVICE)


def load_pretrained(
    name: str | PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: "torch.dtype | str | Callable[[Any], torch.dtype] | None" = None,
    device: str | int | torch.device | None = None,
    **options: Unpack[LoadOptions],
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, str]":
    """The causal language model ``name``, frozen and in eval mode, and its tokenizer.

    Args:
        name: ``smollm2-135m``, a folder, or an id on the Hugging Face Hub; also of an adapter of peft, which is merged
            into its base model in fp32.
        tokenizer: used in place of the model's own.
        dtype: the type in which the model computes, or a function that finds it from the model's configuration; by
            default :func:`draftheads.models.model_config.default_dtype` of the device.
        device: by default the first CUDA device if there is one, else the CPU.
        options: see :class:`LoadOptions`.

    Returns:
        The model, its tokenizer, and its id: the Hub id, or the full path of its folder.
    """
    name = model_name(name)
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    check, trusted = given.pop("check", None), given.pop("trust_remote_code", False)
    packed, whole, parts = given.pop("packed", None), given.pop("whole", False), given.pop("parts", None)
    if (spread_to := given.pop("spread_to", None)) is not None:
        given["device_map"] = "auto"
    _check_options(device, given)
    place, source = device_named(device), resolve_model(name)
    if place.type == "cpu":
        hide_gpu_advice()
    adapter = find_adapter(source) if isinstance(source, Path) else None
    if check is not None or callable(dtype):
        config = load_config(name, trust_remote_code=trusted)
        if check is not None:
            check(config)
        dtype = dtype(config) if callable(dtype) else dtype
    compute = dtype_named(dtype) or default_dtype(place)
    # if trust_remote_code is left out, transformers asks on the terminal
    how = {"attn_implementation": given.get("attn_implementation"), "trust_remote_code": trusted}
    how |= {} if spread_to is None else {"offload_folder": str(spread_to)}
    model: PreTrainedModel
    if adapter is not None:
        if parts is not None:
            raise inseparable(name, "it is an adapter, which is merged into its base model")
        if wrong := [key for key in _OF_WHOLE_MODELS if given.get(key)]:
            merged = f"{name} is an adapter, which is merged into its base model, and {wrong[0]} is for whole models"
            fix = f"write the merged model with `draftheads merge --adapter {name} --out …` and load that"
            raise InvalidSettings(f"{merged}: {fix}")
        model, own_tokenizer = _load_adapted(adapter, **how)
        cast_weights(model, compute)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    else:
        quantisation = _four_bit_config(compute) if given.get("four_bit") else given.get("quantization_config")
        on_place = None if quantisation is None else {"": str(place)}  # quantised weights are loaded onto the device
        how |= {"quantization_config": quantisation, "device_map": given.get("device_map", on_place)}
        model, tokenizer = _load_files(name, source, tokenizer, packed, parts, dtype=compute, whole=whole, **how)
    if getattr(model, "hf_quantizer", None) is None and "device_map" not in given:
        model.to(place)  # type: ignore[arg-type]  # its stub mistakes the device for self
    if packed is None or not packed.found:  # they were finite when they were packed
        check_finite(name, model, source)
    return model.eval().requires_grad_(requires_grad=False), tokenizer, model_id_of(name)


def _check_options(device: Any, given: Mapping[str, Any]) -> None:
    """Do the arguments of :func:`load_pretrained` go together?"""
    names = ("device_map", "attn_implementation", "quantization_config")
    device_map, attn_implementation, quantization_config = map(given.get, names)
    if given.get("four_bit") and quantization_config is not None:
        kind = type(quantization_config).__name__
        raise InvalidSettings(f"four_bit is True and quantization_config is a {kind}: give one of them")
    of_config = quantization_config if isinstance(quantization_config, dict) else dir(quantization_config)
    if quantization_config is not None and "quant_method" not in of_config:
        raise InvalidSettings(
            f"quantization_config is {quantization_config!r}; give one of transformers, such as BitsAndBytesConfig(…)"
        )
    if device is not None and device_map is not None:
        raise InvalidSettings(f"device is {str(device)!r} and device_map is {device_map!r}: give one of them")
    if isinstance(device_map, str) and device_map not in _SPREADS:
        device_named(device_map)
    if attn_implementation is not None and attn_implementation not in ATTENTION:
        needs = f"trees need a mask of four dimensions, which only {' and '.join(ATTENTION)} take"
        raise InvalidSettings(f"attn_implementation is {attn_implementation!r}; {needs}")


def _four_bit_config(dtype: torch.dtype) -> Any:
    """QLoRA's NF4 (Dettmers et al. 2023)."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependency("4-bit weights need bitsandbytes", extra="quantised")
    from transformers import BitsAndBytesConfig  # noqa: PLC0415

    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)


def _load_files(
    name: str, source: Path | str, tokenizer: Any, packed: Any, parts: Parts | None, *, whole: bool, **options: Any
) -> tuple[Any, Any]:
    """A model and its tokenizer; another one that is given stays. Options that are None are those of the model."""
    with _as_our_errors(name), without_bars():
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        trusted = options["trust_remote_code"]
        if path := model_file(source, "config.json"):
            check_config(path.parent)
        config = AutoConfig.from_pretrained(source, trust_remote_code=trusted)
        check_size(config, source)
        is_quantised = check_quantisation(name, config, options["quantization_config"], source=source)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trusted)
        options = {key: value for key, value in options.items() if value is not None}
        loaded: Any = None
        wrapper = wrapper_class(config, whole=whole)
        if packed is not None and wrapper is None and not getattr(config, "auto_map", None):  # its own code may change
            of_inputs = [list(tokenizer(TYPICAL_TEXT)["input_ids"]), options.get("attn_implementation")]
            if packed.find([*weight_files(source), *filter(None, [model_file(source, "config.json")])], of_inputs):
                loaded = load_packed(config, packed, generation_config(source, config), **options)
        options |= {} if parts is None else _without_layers(name, config, options, is_quantised=is_quantised)
        try:
            # transformers would list all tensors of what is left out
            with without_logs() if wrapper or parts else contextlib.nullcontext(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # without layers
                loaded = loaded or (wrapper or AutoModelForCausalLM).from_pretrained(
                    source, output_loading_info=True, ignore_mismatched_sizes=True, **options
                )
        except RuntimeError:  # tensors of which transformers makes one, such as experts, do not fit each other
            check_series(name, source)
            raise
        model, report = loaded
        if parts is not None:
            with without_logs():
                report, parts.facts = whole_facts(name, model, config, report, weight_files(source))
        _say_unread(source, config, model)
        unread = check_weights(name, model, report, source, is_quantised=is_quantised)
    if config.get_text_config() is not config:
        left_out = f" ({counted(len(unread), 'tensor')} left out: {first_names(unread)})" if unread else ""
        words = f"{name} reads more than text: only its text model is used, images are not read{left_out}"
        warnings.warn(words, TextOnlyWarning, stacklevel=4)
    for module in model.modules():  # bitsandbytes would repack 4-bit weights, to a form without gradients
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model, tokenizer


def _without_layers(name: str, config: Any, options: Mapping[str, Any], *, is_quantised: bool) -> dict[str, Any]:
    if is_quantised or "quantization_config" in options:
        raise inseparable(name, "its weights are quantised")
    return {"config": without_layers(config)}


def _say_unread(source: Path | str, config: Any, model: Any) -> None:
    """Warns of keys that nothing reads."""
    for file, *kinds in (
        ("config.json", type(config), type(config.get_text_config()), type(model)),
        ("generation_config.json", type(model.generation_config)),
    ):
        given = keys_in(path) if (path := model_file(source, file)) else {}
        text = given.get("text_config")
        if unread := unread_keys(given | (text if isinstance(text, dict) else {}), *kinds):
            warnings.warn(
                f"{path}: transformers knows no {first_names(unread)}, so it is not read", ConfigWarning, stacklevel=5
            )


def load_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of the model ``name``; an adapter has its base's. Errors as of :func:`load_pretrained`."""
    source, _ = _base_and_tokenizer(name, converts=False)
    with _as_our_errors(name):
        from transformers import AutoConfig  # noqa: PLC0415

        if isinstance(source, Path) and source.is_file():
            return config_of(GgufFile(source))
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)


def cast_weights(model: Any, dtype: torch.dtype) -> None:
    """Converts a model's weights, in place; not its rotary frequencies, which ``model.to`` would round, too."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


class ModelTokenizer(NamedTuple):
    """A model's tokenizer and end tokens, without the model."""

    tokenizer: Any  # a transformers tokenizer
    eos_ids: frozenset[int]  # token ids that end a text
    chat_template: str | None = None  # used in place of the tokenizer's own
    max_positions: int | None = None  # the maximal number of tokens in a text, if it is known
    model_id: str = ""


def load_tokenizer(name: str, *, chat_template: str | None = None, trust_remote_code: bool = False) -> ModelTokenizer:
    """The tokenizer of the model ``name``; its weights are not read. Errors as of :func:`load_pretrained`."""
    source, tokenizer_source = _base_and_tokenizer(name)
    with _as_our_errors(name):
        from transformers import AutoConfig, AutoTokenizer  # noqa: PLC0415

        tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_source, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        generation = generation_config(source, config)
        config = config.get_text_config()
        eos_ids = eos_ids_of(generation, config, tokenizer, vocab_size=getattr(config, "vocab_size", None))
        return ModelTokenizer(tokenizer, eos_ids, chat_template, max_positions_of(config), name)


def tokenizer_of(tokenizer: Any, *, trust_remote_code: bool) -> Any:
    """The tokenizer itself, or that of a model's name."""
    if isinstance(tokenizer, str | PathLike):
        return load_tokenizer(model_name(tokenizer, "tokenizer"), trust_remote_code=trust_remote_code).tokenizer
    if tokenizer is None or (callable(tokenizer) and hasattr(tokenizer, "decode")):
        return tokenizer
    raise InvalidSettings(
        f"tokenizer is of type {type(tokenizer).__name__}; give a transformers tokenizer, or the name of its model"
    )


def stored_dtype(name: str) -> torch.dtype:
    """The type of the weights in a model's files; fp32 if it is not given. Errors as of :func:`load_pretrained`."""
    dtype = getattr(load_config(name), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def with_adapter(model: Any, tokenizer: Any, adapter: Path, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """A base model with an adapter merged into it, and its tokenizer: the adapter's own if it has one.

    The model is changed. Errors as of :func:`draftheads.models.adapter.load_merged`.
    """
    if (tuned := adapter_tokenizer(adapter, trust_remote_code=trust_remote_code)) is not None:
        tokenizer = tuned
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:  # tokens were added
            model.resize_token_embeddings(len(tokenizer))
    return load_merged(model, adapter), tokenizer


def adapter_tokenizer(adapter: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in an adapter's folder; None if it has none."""
    if not (adapter / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer  # noqa: PLC0415

    with _as_our_errors(str(adapter)):
        return AutoTokenizer.from_pretrained(adapter, trust_remote_code=trust_remote_code)


def _load_adapted(adapter: Path, **options: Any) -> tuple[Any, Any]:
    """The base model of an adapter with the adapter merged into it, in fp32 on the CPU, and its tokenizer."""
    base = base_of(str(adapter))
    require_peft(f"the adapter {adapter}")
    try:
        model, tokenizer, _ = load_pretrained(base, dtype=torch.float32, device="cpu", **options)
    except ModelNotFound as error:
        correct = f"correct base_model_name_or_path in its {ADAPTER_CONFIG}"
        merge = f"or use `draftheads merge --model BASE --adapter {adapter} --out …`"
        problem = f"{adapter} is an adapter for {base}, which cannot be loaded: {error}"
        raise ModelNotFound(f"{problem}; {correct}, {merge}") from error
    return with_adapter(model, tokenizer, adapter, trust_remote_code=options["trust_remote_code"])


def _base_and_tokenizer(name: str, *, converts: bool = True) -> tuple[Path | str, Path | str]:
    """From where to load a model's configuration, and its tokenizer."""
    source = resolve_model(name, converts=converts)
    adapter = find_adapter(source) if isinstance(source, Path) else None
    if adapter is None:
        return source, source
    base = resolve_model(base_of(str(adapter)), converts=converts)
    return base, adapter if (adapter / "tokenizer_config.json").is_file() else base


@contextlib.contextmanager
def _as_our_errors(name: str) -> Iterator[None]:
    """Converts the errors of ``transformers`` while loading into our own."""
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415
    from safetensors import SafetensorError  # noqa: PLC0415

    try:
        yield
    except DraftHeadsError:
        raise
    except (OSError, SafetensorError) as error:
        raise ModelNotFound(f"{name} cannot be loaded: {first_line(error)}") from error
    except ImportError as error:
        raise MissingDependency(f"{name} needs another package: {first_line(error)}") from error
    except (ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            fix = "read it, and if you trust it give trust_remote_code=True (--trust-remote-code)"
            raise UnsupportedModel(f"{name} has code of its own, which would run on this machine: {fix}") from error
        raise UnsupportedModel(f"{name} is not a known causal language model: {first_line(error)}") from error
    except (RuntimeError, TypeError, AttributeError, UnpicklingError, StrictDataclassError) as error:
        raise UnsupportedModel(f"{name} cannot be read, its files are damaged: {first_line(error)}") from error


def check_weights(name: str, model: Any, report: dict[str, Any], source: Path | str, *, is_quantised: bool) -> set[str]:
    """Compares a model with its files, by the loading info of ``transformers`` and by the types in the files.

    Returns the tensors that a text model leaves out.
    """
    ignorable = re.compile("|".join((_IGNORABLE, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))))
    of_towers = tuple(f"{tower}." for tower in getattr(model, "towers", ()))
    unread = {key for key in report["unexpected_keys"] if key.startswith(of_towers)}
    # quantised here: the model has other types than its files
    weights = {} if getattr(model, "hf_quantizer", None) else model.state_dict()
    own = {key: value.dtype for key, value in weights.items()}
    prefix, others = f"{model.base_model_prefix}.", set()  # files of base models leave the prefix out
    for short, tensor in ({} if is_quantised else _stored(source)).items():
        key = prefix + short if prefix + short in own else short
        if not fits(tensor.dtype, own.get(key)) and (key in own or not (ignorable.search(key) or key in unread)):
            others.add(f"{key} ({tensor.dtype})")
    for key, weight in model.named_parameters() if is_quantised else ():
        module = model.get_submodule(key.rpartition(".")[0])
        is_own = type(module).__module__.startswith("bitsandbytes.") and key.endswith(".weight")
        if is_own and type(weight) is torch.nn.Parameter:  # what bitsandbytes quantised has another type
            what = "config.json has a quantization_config of bitsandbytes, but the files hold whole weights"
            fix = "delete it there, and give four_bit=True"
            raise UnsupportedModel(f"{name}: {what}, such as {key} ({weight.dtype}): {fix}")
        if weight.dtype not in FLOATS and (
            type(module).__module__.startswith("torch.") or "Norm" in type(module).__name__
        ):
            others.add(f"{key} ({weight.dtype})")
    shapes = {f"{key} ({tuple(shape)}, not {tuple(wanted)})" for key, shape, wanted in report["mismatched_keys"]}
    surplus = {key for key in report["unexpected_keys"] if not ignorable.search(key)} - unread
    _refuse(name, report["missing_keys"], surplus, shapes, others)
    return unread


def check_series(name: str, source: Path | str) -> None:
    """Compares the tensors of a model's files that differ by numbers in their names: of layers and experts."""
    series: dict[str, dict[tuple[str, ...], torch.Size]] = {}
    for key, tensor in _stored(source).items():
        series.setdefault(re.sub(_NUMBER, "{}", key), {})[tuple(re.findall(_NUMBER, key))] = tensor.shape
    missing, shapes = set[str](), set[str]()
    for pattern, found in series.items():
        usual = Counter(found.values()).most_common(1)[0][0]
        shapes |= {f"{pattern.format(*place)} {tuple(shape)}" for place, shape in found.items() if shape != usual}
        places = product(*map(set, zip(*found, strict=True)))
        missing |= {pattern.format(*place) for place in places if place not in found}
    _refuse(name, missing, set(), shapes, set())


def _refuse(name: str, *problems: set[str]) -> None:
    kinds = zip(("missing", "left over", "of another shape", "of another type"), problems, strict=True)
    if found := [f"{kind} ({counted(len(keys), 'tensor')}): {first_names(keys)}" for kind, keys in kinds if keys]:
        problem = f"the files of {name} do not hold the model of its config.json, so its text would be wrong"
        raise UnsupportedModel(f"{problem}: {'; '.join(found)}")


def _stored(source: Path | str) -> dict[str, Tensor]:
    """All tensors in a model's files, without their values."""
    from transformers.modeling_utils import load_state_dict  # noqa: PLC0415 - slow to import

    return {key: tensor for file in weight_files(source) for key, tensor in load_state_dict(file, "meta").items()}
