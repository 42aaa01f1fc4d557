"""Adapters: read from a folder, checked against their base, and merged. The only file that imports ``peft``.

LoRA (Hu et al. 2021) adds to a frozen matrix W a product of two thin ones: W + (α/r) B A.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from draftheads.errors import (
    AdapterWarning,
    CheckpointCorrupt,
    CheckpointMismatch,
    MissingDependency,
    ModelNotFound,
    UnsupportedModel,
    first_line,
)
from draftheads.models.file_checks import check_stored, keys_in
from draftheads.models.fingerprint import MAX_DIFFERENCE, Fingerprints, difference
from draftheads.models.model_config import fits
from draftheads.models.model_names import ADAPTER_CONFIG, BASE_FILE, base_of, model_id_of
from draftheads.utils.messages import first_names
from draftheads.utils.strict_json import checked, read_dataclass, read_object

FORMAT_VERSION = 1  # of ``base.json``
_WEIGHTS_FILE = "adapter_model.safetensors"
# of LoRA, what adapters beside their base follow or what only matters in training; other fields must be as by default
_USED_BESIDE = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "runtime_config", "lora_dropout", "bias", "megatron_core", "layers_pattern"),
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "init_lora_weights"),
        *("target_modules", "exclude_modules", "layers_to_transform"),
    }
)
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # others change the weights of the base, too


@dataclass(frozen=True)
class LowRank:
    """What LoRA adds to a matrix W: B A."""

    a: Tensor  # (r, in)
    b: Tensor  # (out, r), with the factor α/r


def load_merged(model: Any, folder: Path) -> Any:
    """An ordinary model: this one, which is changed, with a saved adapter of peft merged into its weights."""
    with _reading(folder) as (peft, _):
        tuned = peft.PeftModel.from_pretrained(model, str(folder))
        left_over = tuned.load_adapter(str(folder), "default").unexpected_keys  # peft does not mention them
        # it writes a whole embedding or lm_head twice if there are more tokens
        if surplus := [key for key in left_over if not key.endswith(".modules_to_save.weight")]:
            raise ValueError(f"tensors that belong to no layer: {first_names(surplus)}")
    check_stored(str(folder), folder)
    return merged(tuned)


def merged(tuned: Any) -> Any:
    """The ordinary model of a model of peft.

    If only one of lm_head and embedding is adapted, the two are no longer tied.
    """
    _untie(tuned.get_base_model())
    with quiet():
        try:
            model = tuned.merge_and_unload(safe_merge=True)
        except (AttributeError, NotImplementedError, TypeError) as error:
            raise _not_mergeable(tuned.active_peft_config.peft_type) from error
        except ValueError as error:
            raise CheckpointCorrupt(f"the adapter cannot be merged: {first_line(error)}") from error
        except RuntimeError as error:  # lora_bias=True, and the layers of the base have no bias
            raise UnsupportedModel(f"the adapter cannot be merged: {first_line(error)}") from error
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}  # transformers would tie them again
    return model


def read_lora(model: Any, folder: Path) -> dict[str, LowRank]:
    """The matrices of a saved LoRA adapter by the names of the linear layers of its base model, in fp32 on the CPU.

    The base model does not change, and its layers may be replaced by faster ones.
    """
    layers = _lora_layers(model, folder)
    path = folder / _WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ModelNotFound(
            f"{folder} has no {_WEIGHTS_FILE}: save the adapter as safetensors with peft's save_pretrained"
        ) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {first_line(error)}") from None
    matrices = {}
    for name, layer in layers.items():
        pair = []
        for part, expected in zip("AB", (layer.lora_A, layer.lora_B), strict=True):
            key = f"base_model.model.{name}.lora_{part}.weight"
            tensor, shape = tensors.pop(key, None), tuple(next(iter(expected.values())).weight.shape)
            if tensor is None or tuple(tensor.shape) != shape:
                has = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
                raise CheckpointCorrupt(f"{path} does not fit the model: {key} {has}; the model needs {shape}")
            pair.append(tensor.float())
        matrices[name] = LowRank(pair[0], pair[1] * next(iter(layer.scaling.values())))
    if tensors:
        raise _not_beside_base(folder, f"has {next(iter(tensors))!r}, which does not belong to a linear layer")
    return matrices


def _lora_layers(model: Any, folder: Path) -> dict[str, Any]:
    """The LoRA layers that peft makes for this adapter, by name and without weights."""
    settings = copy.deepcopy(model.config)
    settings._attn_implementation = "eager"  # noqa: SLF001 - nothing is computed; ours are not known to all models
    with _reading(folder) as (peft, config):
        if config.peft_type != "LORA" or config.use_dora:
            raise _not_beside_base(folder, f"is {'DoRA' if config.peft_type == 'LORA' else config.peft_type.value}")
        given, usual = vars(config), vars(type(config)())
        others = {name for name in given if (given[name] or None) != (usual.get(name) or None)} - _USED_BESIDE
        if config.init_lora_weights not in _PLAIN_STARTS:
            others.add("init_lora_weights")
        if others:
            named = ", ".join(f"{name}={given[name]!r}" for name in sorted(others))
            raise _not_beside_base(folder, f"has {named} in its {ADAPTER_CONFIG}")
        with torch.device("meta"):
            tuned = peft.PeftModel(type(model)(settings), config).get_base_model()
    return {name: module for name, module in tuned.named_modules() if hasattr(module, "lora_A") and module.lora_A}


def _not_beside_base(folder: Path, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{folder} {what}; only LoRA of linear layers can be used beside its base model. "
        f"Merge it: `draftheads merge --adapter {folder} --out …`"
    )


@contextmanager
def _reading(folder: Path) -> Iterator[tuple[Any, Any]]:
    """The package peft and its configuration of a saved adapter; its errors in the block are those of the adapter."""
    peft = require_peft(f"the adapter {folder}")
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelNotFound(f"no adapter at {folder}: it has no {ADAPTER_CONFIG}")
    with quiet():
        try:
            config = peft.PeftConfig.from_pretrained(str(folder))
            if config.is_prompt_learning:
                raise _not_mergeable(config.peft_type)
            _check_keys(folder, config, peft.__version__)
            if config.task_type not in (None, "CAUSAL_LM"):
                raise UnsupportedModel(f"{folder} is an adapter for {config.task_type}; it must be for CAUSAL_LM")
            weights = folder / _WEIGHTS_FILE
            types = {key: value.dtype for key, value in load_file(weights).items()} if weights.is_file() else {}
            if wrong := [f"{key} ({dtype})" for key, dtype in types.items() if not fits(dtype, None)]:
                raise ValueError(f"quantised tensors: {first_names(wrong)}")  # noqa: TRY301
            yield peft, config
        except SafetensorError as error:
            raise CheckpointCorrupt(f"{folder} cannot be read: {first_line(error)}") from None
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, UserWarning) as error:
            raise CheckpointCorrupt(f"{folder} does not fit the model: {' '.join(str(error).split())[:300]}") from error


def _check_keys(folder: Path, config: Any, version: str) -> None:
    """Refuses settings of other versions of peft, which peft ignores; names once those that are switched off."""
    given = keys_in(folder / ADAPTER_CONFIG)
    unknown = given.keys() - vars(config).keys() - {"runtime_config"}
    what = f"{folder / ADAPTER_CONFIG} has settings that peft {version} does not know"
    if on := [name for name in unknown if given[name]]:
        raise UnsupportedModel(f"{what}: {first_names(on)}. Install the version of peft that wrote it")
    if unknown:
        warnings.warn(f"{what}, and which are switched off: {first_names(unknown)}", AdapterWarning, stacklevel=2)


def _untie(model: Any) -> None:
    """Gives lm_head and embedding a matrix each if one of them is adapted: the adapter does not change the other."""
    layers = model.get_output_embeddings(), model.get_input_embeddings()
    lm_head, embedding = (_original(layer) for layer in layers)
    if is_tied(model) and (lm_head, embedding) != layers:
        lm_head.weight = nn.Parameter(lm_head.weight.detach().clone(), requires_grad=False)


def _original(layer: Any) -> Any:
    """The model's own layer under an adapter."""
    if hasattr(layer, "get_base_layer"):  # of LoRA and its like
        return layer.get_base_layer()
    return getattr(layer, "original_module", layer)  # of a layer that was trained as a whole


def _not_mergeable(kind: Any) -> UnsupportedModel:
    name = getattr(kind, "value", kind)
    return UnsupportedModel(f"an adapter of kind {name} cannot be merged into the weights of its base; LoRA can")


def check_base(folder: Path, model_id: str, fingerprints: Fingerprints) -> None:
    """Checks an adapter of any origin."""
    if (folder / BASE_FILE).exists():
        check_adapter_base(folder, model_id, fingerprints)
        return
    name = base_of(str(folder))
    if model_id_of(name) != model_id:
        fix = f"if these are the same model, correct base_model_name_or_path in its {ADAPTER_CONFIG}"
        raise CheckpointMismatch(f"{folder} is an adapter for {name}, and this model is {model_id}; {fix}")


def check_adapter_base(folder: Path, model_id: str, ours: Fingerprints) -> None:
    """Checks by its record that this is the model that the adapter of a joint run was tuned for."""
    path, parts = folder / BASE_FILE, {"model_id": str, "fingerprints": dict[str, Any]}
    base = checked(read_object(path, newest=FORMAT_VERSION).get("base"), parts, path, "base")
    theirs = read_dataclass(Fingerprints, {"layers": None, **base["fingerprints"]}, path, "base.fingerprints")
    matrices = {name: (getattr(theirs, name), getattr(ours, name)) for name in ("embedding", "lm_head")}
    apart = [name for name, pair in matrices.items() if not difference(*pair) <= MAX_DIFFERENCE]
    what = f"{' and '.join(apart)} are those of another model" if apart else ""
    if theirs.tokenizer != ours.tokenizer:
        what = f"tokenizer is {ours.tokenizer}, not {theirs.tokenizer}"
    if what:
        is_now = f"this model is {model_id}, whose {what}: use it with {base['model_id']}"
        raise CheckpointMismatch(f"{folder} was tuned for {base['model_id']}; {is_now}")


def is_tied(model: Any) -> bool:
    """Whether the lm_head's matrix is that of the embedding."""
    lm_head, embedding = (_original(layer) for layer in (model.get_output_embeddings(), model.get_input_embeddings()))
    return lm_head.weight is embedding.weight


def require_peft(what: str = "joint training") -> Any:
    """The package, or MissingDependency with its pip line."""
    try:
        import peft  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingDependency(f"{what} needs peft", extra="lora") from None
    return peft


@contextmanager
def quiet() -> Iterator[None]:
    """Ignores peft's warnings of tied or transposed matrices, which are handled here; missing tensors are errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("always", category=AdapterWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)  # peft 0.21 uses names that transformers 6 drops
        warnings.filterwarnings("error", message="(?s).*missing adapter keys", category=UserWarning)
        yield
