"""Loads a frozen model and its tokenizer by name. An error names the fix.

Knows ``transformers`` and its options; an adapter of peft is merged into its base model. Knows nothing of caches or
trees.
"""

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch

from draftheads.cpu.kernels import native_bf16
from draftheads.errors import (
    DraftHeadsError,
    InvalidSettings,
    MissingDependency,
    ModelNotFound,
    TextOnlyWarning,
    UnsupportedModel,
    first_line,
)
from draftheads.models.adapter import Adapter, require_peft
from draftheads.models.model_config import eos_ids_of, max_positions_of
from draftheads.models.model_names import ADAPTER_CONFIG, base_of, find_adapter, model_id_of, model_name, resolve_model
from draftheads.models.weight_files import check_quantisation, check_series, check_weights
from draftheads.settings import ROUNDED_BITS

if TYPE_CHECKING:  # its import takes three seconds
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION = ("sdpa", "eager")  # kinds that take a mask of four dimensions, which trees need
_BF16_CAPABILITY = (8, 0)  # Ampere and later; T4 (7.5) and V100 (7.0) emulate bf16
_SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")


class LoadOptions(TypedDict, total=False):
    """How ``transformers`` loads a model; for their meaning see :func:`load_pretrained`."""

    four_bit: bool
    quantization_config: Any
    device_map: Any
    attn_implementation: str | None
    trust_remote_code: bool
    check: "Callable[[Any], None] | None"


def load_pretrained(
    name: str | PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: "torch.dtype | str | Callable[[Any], torch.dtype] | None" = None,
    device: str | int | torch.device | None = None,
    four_bit: bool = False,
    quantization_config: Any = None,
    device_map: Any = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    check: "Callable[[Any], None] | None" = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, str]":
    """The causal language model ``name``, frozen and in eval mode, and its tokenizer.

    Args:
        name: ``smollm2-135m``, a folder, or an id on the Hugging Face Hub; also of an adapter of peft, which is merged
            into its base model in fp32.
        tokenizer: used in place of the model's own.
        dtype: the type in which the model computes, or a function that finds it from the model's configuration; by
            default :func:`default_dtype` of the device.
        device: by default :func:`default_device`.
        four_bit: quantise the linear layers, except the lm_head, to 4 bits (NF4).
        quantization_config: another quantisation of ``transformers``.
        device_map: where ``transformers`` puts the weights, in place of ``device``; they must come to one device.
        attn_implementation: ``sdpa`` or ``eager``.
        trust_remote_code: whether code that comes with the model may run.
        check: is called with the model's configuration before its weights are read, and may raise an error.

    Returns:
        The model, its tokenizer, and its id: the Hub id, or the full path of its folder.
    """
    name = model_name(name)
    _check_options(device, device_map, attn_implementation, quantization_config, four_bit=four_bit)
    place = device_named(device)
    source = resolve_model(name)
    adapter = find_adapter(source) if isinstance(source, Path) else None
    if check is not None or callable(dtype):
        config = load_config(name, trust_remote_code=trust_remote_code)
        if check is not None:
            check(config)
        if callable(dtype):
            dtype = dtype(config)
    compute = dtype_named(dtype) or default_dtype(place)
    model: PreTrainedModel
    if adapter is not None:
        whole = {"four_bit": four_bit or None, "quantization_config": quantization_config, "device_map": device_map}
        if given := [key for key, value in whole.items() if value is not None]:
            raise InvalidSettings(
                f"{name} is an adapter, which is merged into its base model, and {given[0]} is for whole models: "
                f"write the merged model with `draftheads merge --adapter {name} --out …` and load that"
            )
        model, usual_tokenizer = _load_adapted(
            adapter, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
        cast_weights(model, compute)
        tokenizer = usual_tokenizer if tokenizer is None else tokenizer
    else:
        quantisation = _four_bit_config(compute) if four_bit else quantization_config
        on_place = (
            {"": str(place)} if quantisation is not None else None
        )  # quantised weights are loaded onto the device
        model, tokenizer = _load_files(
            name,
            source,
            tokenizer,
            dtype=compute,
            quantization_config=quantisation,
            device_map=on_place if device_map is None else device_map,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,  # if left out, transformers asks on the terminal
        )
    if getattr(model, "hf_quantizer", None) is None and device_map is None:
        model.to(place)  # type: ignore[arg-type]  # its stub mistakes the device for self
    return model.eval().requires_grad_(requires_grad=False), tokenizer, model_id_of(name)


def _load_files(name: str, source: Path | str, tokenizer: Any, **options: Any) -> tuple[Any, Any]:
    """A model and its tokenizer; another one that is given stays. Options that are None are those of the model."""
    with _as_our_errors(name), without_bars():
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        trusted = options["trust_remote_code"]
        config = AutoConfig.from_pretrained(source, trust_remote_code=trusted)
        is_quantised = check_quantisation(name, config, options["quantization_config"], source=source)
        if config.get_text_config() is not config:
            warnings.warn(f"{name} reads more than text: only its text model is used", TextOnlyWarning, stacklevel=4)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trusted)
        options = {key: value for key, value in options.items() if value is not None}
        loaded: Any
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                source, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        except RuntimeError:  # tensors of which transformers makes one, such as experts, do not fit each other
            check_series(name, source)
            raise
        model, report = loaded
        check_weights(name, model, report, source, is_quantised=is_quantised)
    for module in model.modules():  # bitsandbytes would repack 4-bit weights, to a form without gradients
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model, tokenizer


def load_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of the model ``name``; an adapter has its base's. Errors as of :func:`load_pretrained`."""
    source, _ = _base_and_tokenizer(name)
    with _as_our_errors(name):
        from transformers import AutoConfig  # noqa: PLC0415

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


def load_tokenizer(name: str, *, chat_template: str | None = None, trust_remote_code: bool = False) -> ModelTokenizer:
    """The tokenizer of the model ``name``; its weights are not read. Errors as of :func:`load_pretrained`."""
    source, tokenizer_source = _base_and_tokenizer(name)
    with _as_our_errors(name):
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig  # noqa: PLC0415

        tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_source, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        try:
            generation = GenerationConfig.from_pretrained(source)
        except OSError:  # no such file: transformers derives it from the configuration, too
            generation = GenerationConfig.from_model_config(config)
        config = config.get_text_config()
        eos_ids = eos_ids_of(generation, config, tokenizer, vocab_size=getattr(config, "vocab_size", None))
        return ModelTokenizer(tokenizer, eos_ids, chat_template, max_positions_of(config))


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

    The model is changed. Errors as of :class:`draftheads.models.adapter.Adapter`.
    """
    if (tuned := adapter_tokenizer(adapter, trust_remote_code=trust_remote_code)) is not None:
        tokenizer = tuned
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:  # tokens were added
            model.resize_token_embeddings(len(tokenizer))
    return Adapter.load(model, adapter).merge(), tokenizer


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
        raise ModelNotFound(
            f"{adapter} is an adapter for {base}, which cannot be loaded: {error}; correct base_model_name_or_path in "
            f"its {ADAPTER_CONFIG}, or use `draftheads merge --model BASE --adapter {adapter} --out …`"
        ) from error
    return with_adapter(model, tokenizer, adapter, trust_remote_code=options["trust_remote_code"])


def _base_and_tokenizer(name: str) -> tuple[Path | str, Path | str]:
    """From where to load a model's configuration, and its tokenizer."""
    source = resolve_model(name)
    adapter = find_adapter(source) if isinstance(source, Path) else None
    if adapter is None:
        return source, source
    base = resolve_model(base_of(str(adapter)))
    return base, adapter if (adapter / "tokenizer_config.json").is_file() else base


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


def _check_options(
    device: Any, device_map: Any, attn_implementation: Any, quantization_config: Any, *, four_bit: bool
) -> None:
    """Do the arguments of :func:`load_pretrained` go together?"""
    if four_bit and quantization_config is not None:
        kind = type(quantization_config).__name__
        raise InvalidSettings(f"four_bit is True and quantization_config is a {kind}: give one of them")
    if quantization_config is not None and not (
        "quant_method" in quantization_config
        if isinstance(quantization_config, dict)
        else hasattr(quantization_config, "quant_method")
    ):
        raise InvalidSettings(
            f"quantization_config is {quantization_config!r}; give one of transformers, such as BitsAndBytesConfig(…)"
        )
    if device is not None and device_map is not None:
        raise InvalidSettings(f"device is {str(device)!r} and device_map is {device_map!r}: give one of them")
    if isinstance(device_map, str) and device_map not in _SPREADS:
        device_named(device_map)
    if attn_implementation is not None and attn_implementation not in ATTENTION:
        raise InvalidSettings(
            f"attn_implementation is {attn_implementation!r}; trees need a mask of four dimensions, which only "
            f"{' and '.join(ATTENTION)} take"
        )


def _four_bit_config(dtype: torch.dtype) -> Any:
    """QLoRA's NF4 (Dettmers et al. 2023)."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependency("4-bit weights need bitsandbytes", pip_install="'draftheads[quantised]'")
    from transformers import BitsAndBytesConfig  # noqa: PLC0415

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


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
            raise UnsupportedModel(
                f"{name} has code of its own, which would run on this machine: read it, and if you trust it give "
                "trust_remote_code=True (--trust-remote-code)"
            ) from error
        raise UnsupportedModel(f"{name} is not a known causal language model: {first_line(error)}") from error
    except (RuntimeError, TypeError, AttributeError, UnpicklingError, StrictDataclassError) as error:
        raise UnsupportedModel(f"{name} cannot be read, its files are damaged: {first_line(error)}") from error


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hides the bars of ``transformers``, such as "Loading weights": progress is shown by the caller."""
    from transformers.utils import logging  # noqa: PLC0415

    silence = logging.is_progress_bar_enabled()
    if silence:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if silence:
            logging.enable_progress_bar()
