"""Loads a frozen model and its tokenizer by name. An error names the fix.

A name is ``smollm2-135m``, a folder, or an id on the Hugging Face Hub. Knows nothing of caches or trees.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from draftheads.errors import DraftHeadsError, MissingDependency, ModelNotFound, UnsupportedModel
from draftheads.files import user_path
from draftheads.kernels import native_bf16
from draftheads.models.embedded import SMOLLM2_135M, converted_folder

if TYPE_CHECKING:  # its import takes three seconds, and resolve_model does not need it
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_TIMEOUT_SECONDS = 10.0


def resolve_model(name: str) -> Path | str:
    """The folder or Hub id from which to load the model ``name``.

    ``smollm2-135m`` is the embedded model (write ``./smollm2-135m`` for a folder of that name). If its package is
    installed, the model is converted into the user's cache at the first call. Otherwise its Hub id is used. A Hub model
    that was downloaded before needs no network.

    Returns:
        A folder on this machine, or the id of a model that exists on the Hub.

    Raises:
        ModelNotFound: none of these; the message lists what was tried and the fix.
        InvalidSettings: a path in an unknown home folder.
        StorageError: the embedded model cannot be written to the cache.
        MissingDependency: the embedded model cannot be converted without gguf.
    """
    if name == SMOLLM2_135M.name:
        return converted_folder(SMOLLM2_135M) or _resolve_embedded_on_hub()
    folder = user_path(name)
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"{name} is here, but it is not a model folder: it has no config.json")
        return folder
    return _resolve_on_hub(name)


def load_pretrained(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    four_bit: bool = False,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, str]":
    """The causal language model ``name``, frozen and in eval mode, and its tokenizer.

    Args:
        name: ``smollm2-135m``, a folder, or an id on the Hugging Face Hub.
        dtype: the type in which the model computes; by default :func:`default_dtype` of the device.
        device: by default :func:`default_device`.
        four_bit: quantise the linear layers, except the lm_head, to 4 bits (NF4).

    Returns:
        The model, its tokenizer, and its id: the Hub id, or the full path of its folder.

    Raises:
        ModelNotFound: no such model, or its files are missing or damaged.
        UnsupportedModel: it is not a causal language model, or weights are missing in its files.
        MissingDependency: its tokenizer or code, or ``four_bit``, needs a package that is not installed.
        StorageError: the embedded model cannot be written to the cache.
    """
    source = resolve_model(name)
    place = default_device() if device is None else torch.device(device)
    with _as_our_errors(name), _quiet(embedded=name == SMOLLM2_135M.name):
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
        compute = dtype or default_dtype(place)
        options = _four_bit_options(compute, place) if four_bit else {}
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=compute, output_loading_info=True, **options)
        model: PreTrainedModel = loaded[0]
        _keep_differentiable(model)
        _check_complete(name, loaded[1]["missing_keys"])
        if not four_bit:  # 4-bit weights are loaded onto the device
            model.to(place)  # type: ignore[arg-type]  # its stub mistakes the device for self
    return model.eval().requires_grad_(requires_grad=False), tokenizer, _model_id(name)


class ModelTokenizer(NamedTuple):
    """A model's tokenizer and end tokens, without the model."""

    tokenizer: Any  # a transformers tokenizer
    eos_ids: frozenset[int]  # token ids that end a text
    chat_template: str | None = None  # used in place of the tokenizer's own


def load_tokenizer(name: str, *, chat_template: str | None = None) -> ModelTokenizer:
    """The tokenizer of the model ``name``; its weights are not read. Errors as of :func:`load_pretrained`."""
    source = resolve_model(name)
    with _as_our_errors(name):
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig  # noqa: PLC0415

        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        config = AutoConfig.from_pretrained(source)
        try:
            generation = GenerationConfig.from_pretrained(source)
        except OSError:  # no such file: transformers derives it from the configuration, too
            generation = GenerationConfig.from_model_config(config)
        return ModelTokenizer(tokenizer, eos_ids_of(generation, config.get_text_config(), tokenizer), chat_template)


def eos_ids_of(*sources: Any) -> frozenset[int]:
    """Token ids that end a text by any of a model's configurations or its tokenizer."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def stored_dtype(name: str) -> torch.dtype:
    """The type of the weights in a model's files; fp32 if it is not given. Errors as of :func:`load_pretrained`."""
    source = resolve_model(name)
    with _as_our_errors(name):
        from transformers import AutoConfig  # noqa: PLC0415

        found = getattr(AutoConfig.from_pretrained(source), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _four_bit_options(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for QLoRA's NF4 (Dettmers et al. 2023)."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependency("4-bit weights need bitsandbytes", pip_install="'draftheads[quantised]'")
    from transformers import BitsAndBytesConfig  # noqa: PLC0415

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": quantization, "device_map": {"": str(device)}}


def _keep_differentiable(model: Any) -> None:
    """Stops bitsandbytes from repacking 4-bit weights for CPU inference: the repacked form has no gradients."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def default_device() -> torch.device:
    """The first CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: str | torch.device) -> torch.dtype:
    """bf16 on CUDA and on CPUs with bf16 instructions. Otherwise fp32, because emulated bf16 is slow."""
    kind = torch.device(device).type
    return torch.bfloat16 if kind == "cuda" or (kind == "cpu" and native_bf16()) else torch.float32


def _model_id(name: str) -> str:
    if name == SMOLLM2_135M.name:
        return SMOLLM2_135M.hub_id
    folder = user_path(name)
    return str(folder.resolve()) if folder.exists() else name


def _resolve_embedded_on_hub() -> Path | str:
    try:
        return _resolve_on_hub(SMOLLM2_135M.hub_id)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"{SMOLLM2_135M.name} was found neither in its package nor on the Hugging Face Hub. Install the package: "
            f"{SMOLLM2_135M.pip_install}. The Hub was tried with {SMOLLM2_135M.hub_id}: {error}."
        ) from error


def _resolve_on_hub(model_id: str) -> Path | str:
    """Finds a Hub model with one short request. Offline, the Hub's own client would retry for 23 s per file."""
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        HfApi().model_info(model_id, timeout=_HUB_TIMEOUT_SECONDS)
    except HFValidationError:
        raise ModelNotFound(
            f"{model_id} is not a folder here, and cannot be an id on the Hugging Face Hub (owner/name)"
        ) from None
    except GatedRepoError as error:
        raise ModelNotFound(f"{model_id} is gated: accept its terms on the Hub, then log in") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{model_id} is not a folder here, and the Hugging Face Hub has no such model; if it is private, log in"
        ) from error
    except Exception as error:  # noqa: BLE001 - network errors; their classes depend on the Hub's client
        try:
            return Path(snapshot_download(model_id, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ModelNotFound(
                f"{model_id} is not a folder here, was not downloaded before, "
                f"and the Hugging Face Hub cannot be reached ({_first_line(error)})"
            ) from error
    return model_id


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
        raise ModelNotFound(f"{name} cannot be loaded: {_first_line(error)}") from error
    except ImportError as error:
        raise MissingDependency(f"{name} needs another package: {_first_line(error)}") from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{name} is not a known causal language model: {_first_line(error)}") from error
    except (RuntimeError, TypeError, AttributeError, UnpicklingError, StrictDataclassError) as error:
        raise UnsupportedModel(f"{name} cannot be read, its files are damaged: {_first_line(error)}") from error


@contextlib.contextmanager
def _quiet(*, embedded: bool) -> Iterator[None]:
    """Hides the bar "Loading weights" for the embedded model, which loads in under a second."""
    from transformers.utils import logging  # noqa: PLC0415

    silence = embedded and logging.is_progress_bar_enabled()
    if silence:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if silence:
            logging.enable_progress_bar()


def _check_complete(name: str, missing: "set[str] | list[str]") -> None:
    """Raises if weights are missing: ``transformers`` only warns and fills them with random numbers."""
    if missing:
        raise UnsupportedModel(f"{name} lacks {len(missing)} weights, for example {min(missing)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
