"""Writes a head in the layout of another project, for its engine."""

import json
import re
import shlex
import warnings
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftheads.checkpoints.checkpoint import load_head
from draftheads.checkpoints.head_files import CONFIG_FILE, TENSORS_FILE, read_head_files
from draftheads.checkpoints.registry import find_head
from draftheads.errors import InvalidSettings, SpeedWarning
from draftheads.formats import ExportFormat, check_layout
from draftheads.formats.eagle import write_eagle, write_eagle3, write_speculators
from draftheads.formats.hydra import write_hydra
from draftheads.formats.medusa import write_medusa, write_vllm
from draftheads.formats.mlp_speculator import write_mlp
from draftheads.formats.small_llama import write_small_llama
from draftheads.heads.base import DraftHead
from draftheads.heads.eagle3 import Eagle3Config
from draftheads.loading import Loadable, load_target, name_of
from draftheads.models.model import TargetModel
from draftheads.models.model_names import base_of, model_id_of
from draftheads.utils.files import atomic_directory, user_path

_STEPS = 4  # draft tokens of a step that commands suggest
_TOKEN_MAP, _OWN_HEADS = "token_map.pt", "medusa_lm_head.pt"
_ARCTIC = {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]}
# an option of EAGLE-3 heads: what engines do that do not know it
_LITTLE_KNOWN = {
    "fc_norm": "llama.cpp refuses it, and optimum-intel (OpenVINO) ignores it and drafts worse",
    "norm_output": "llama.cpp and optimum-intel (OpenVINO) ignore it and draft worse",
    "norm_before_residual": "SGLang ignores it and drafts worse",
    "qkv_bias": "SGLang ignores it and drafts worse",
    "own_embedding": "SGLang ignores it where it has the size of the model's, and drafts worse",
}

_SGLANG = (
    "python -m sglang.launch_server --model <model> --speculative-algorithm {} --speculative-draft-model-path <head> "
    "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 12"
)
_COMMANDS: Mapping[str, Mapping[str, str]] = {  # by layout and engine; VLLM(method) stands for its command
    "eagle3": {
        "vLLM": "VLLM(eagle3)",
        "SGLang": _SGLANG.format("EAGLE3"),
        "llama.cpp": "python convert_hf_to_gguf.py <head> --target-model-dir <model> --outfile draft.gguf && "
        "llama-server -m MODEL.gguf -md draft.gguf --spec-type draft-eagle3 --spec-draft-n-max <steps>",
        "OpenVINO": "pip install optimum-intel==2.2.0 diffusers==0.38.0 einops 'huggingface-hub<1.22' && "
        "optimum-cli export openvino --model <head> --task text-generation-with-past --trust-remote-code "
        "openvino-draft  # then openvino_genai.draft_model('openvino-draft', 'CPU')",
    },
    "speculators": {"vLLM": "vllm serve <head>"},
    "eagle": {"vLLM": "VLLM(eagle)"},
    "eagle-sglang": {"SGLang": _SGLANG.format("EAGLE")},
    "small-llama": {
        "vLLM": "VLLM(draft_model)",
        "SGLang": "python -m sglang.launch_server --model <model> --speculative-algorithm STANDALONE "
        "--speculative-draft-model-path <head> --speculative-num-steps <steps>",
        "transformers": "model.generate(…, assistant_model=AutoModelForCausalLM.from_pretrained('<head>'))",
        "llama.cpp": "python convert_hf_to_gguf.py <head> --outfile draft.gguf && llama-server -m MODEL.gguf "
        "-md draft.gguf",
    },
    "medusa": {
        "Medusa": "python -m medusa.inference.cli --model <head>",
        "TensorRT-LLM": "python examples/medusa/convert_checkpoint.py --model_dir <model> --medusa_model_dir <head> "
        "--num_medusa_heads <steps> --output_dir checkpoint && trtllm-build --checkpoint_dir checkpoint "
        "--speculative_decoding_mode medusa --output_dir engine",
    },
    "hydra": {"Hydra": "python -m hydra.inference.cli --model <head>"},
    "vllm-medusa": {"vLLM 0.10 to 0.32": "VLLM(medusa)"},
    "mlp-speculator": {"vLLM up to 0.9.2": "VLLM(mlp_speculator)"},
    "arctic": {"vLLM 0.26 with Arctic Inference": "ARCTIC_INFERENCE_ENABLED=1 VLLM(arctic)"},
}

Written = tuple[dict[str, Any], dict[str, Tensor]]


class _Target(NamedTuple):
    methods: tuple[str, ...]  # of heads; the first format of a method is its default
    write: Callable[[DraftHead, TargetModel, str], Written]  # of a head, its base model and that one's name
    file: str = TENSORS_FILE
    has_tokenizer: bool = False
    keeps_vocab: bool = False  # whether the draft vocabulary stays; otherwise all tokens are predicted


def _arctic(head: DraftHead, target: TargetModel, name: str) -> Written:
    about, tensors = write_mlp(head, target, every_stage=True)
    base = getattr(target.config, "architectures", None) or [type(target.model).__name__]
    return {**about, **_ARCTIC, "base_model_archs": list(base)}, tensors


def _named(write: Callable[[DraftHead, TargetModel], Written]) -> Callable[[DraftHead, TargetModel, str], Written]:
    """Files that name their base model."""

    def written(head: DraftHead, target: TargetModel, name: str) -> Written:
        about, tensors = write(head, target)
        return {**about, "base_model_name_or_path": name}, tensors

    return written


_FORMATS: Mapping[ExportFormat, _Target] = {
    "eagle3": _Target(("eagle3",), lambda head, target, _: write_eagle3(head, target), keeps_vocab=True),
    "speculators": _Target(
        ("eagle3",), lambda head, target, name: write_speculators(head, target, verifier=name), keeps_vocab=True
    ),
    "eagle": _Target(("eagle",), lambda head, target, _: write_eagle(head, target, with_bias=False)),
    "eagle-sglang": _Target(
        ("eagle",), lambda head, target, _: write_eagle(head, target, with_bias=True), keeps_vocab=True
    ),
    "small-llama": _Target(
        ("small-llama",), lambda head, target, _: write_small_llama(head, target), has_tokenizer=True
    ),
    "medusa": _Target(("medusa",), _named(write_medusa), "medusa_lm_head.safetensors"),
    "vllm-medusa": _Target(("medusa",), lambda head, *_: write_vllm(head), keeps_vocab=True),
    "hydra": _Target(("hydra", "hydra++", "medusa"), _named(write_hydra), "hydra_lm_head.pt"),
    "mlp-speculator": _Target(("mlp-speculator",), lambda head, target, _: write_mlp(head, target)),
    "arctic": _Target(("mlp-speculator",), _arctic),
}
assert set(_FORMATS) == set(_COMMANDS) == set(get_args(ExportFormat))


def export_head(
    head: str | PathLike[str],
    out: str | PathLike[str],
    *,
    model: Loadable = "smollm2-135m",
    to: ExportFormat | None = None,
    with_embedding: bool = False,
) -> Path:
    """Writes a head in the layout of another project, in bf16.

    Args:
        head: a trained head: a name, a folder or a Hub id.
        out: the folder to make.
        model: the model that the head was trained for.
        to: the layout; that of the head's own project when left out. The README of the documentation lists which
            engine reads which.
        with_embedding: whether EAGLE and EAGLE-3 heads get the model's embedding, from which vllm-project/speculators
            trains on; it is always there in its own layout.

    Returns:
        The folder.

    Raises:
        InvalidSettings: no such layout for heads of this method, or one that cannot hold this head.
        ModelNotFound, CheckpointError: the head or the model cannot be read.
        StorageError: the folder exists, or cannot be written.

    Warns:
        SpeedWarning: some engines leave out a part of the head, and draft worse.
    """
    source, folder = find_head(head, name_of(model)), user_path(out)
    files = read_head_files(source)
    name, form = format_for(files.method, to, files.options)
    if with_embedding and not {"eagle", "eagle3"} & set(form.methods):
        raise InvalidSettings(f"--with-embedding: the layout {name} has no place for the model's embedding")
    target = load_target(model, precision="bf16", device="cpu", fast=False)
    loaded = load_head(source, target, dtype=torch.float32)
    base = base_of(fspath(model)) if isinstance(model, str | PathLike) else name_of(model)
    config, tensors = form.write(loaded, target, model_id_of(base))
    if with_embedding:
        tensors.setdefault("embed_tokens.weight", target.weights.embedding)
    # the loader of heads with lm_heads of their own opens this name only
    file = _OWN_HEADS if name == "medusa" and loaded.config.lm_head != "shared" else form.file
    if isinstance(loaded.config, Eagle3Config):
        for option, what in _LITTLE_KNOWN.items():
            if getattr(loaded.config, option):
                warnings.warn(f"the head has {option}: {what}", SpeedWarning, stacklevel=2)
    tensors = {key: as_stored(tensor) for key, tensor in tensors.items()}
    with atomic_directory(folder) as staged:
        if file.endswith(".pt"):
            torch.save(tensors, staged / file)
        else:
            save_file(tensors, staged / file, metadata={"format": "pt"})
        (staged / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if name == "eagle-sglang" and loaded.config.draft_vocab_size is not None:
            torch.save(loaded.draft_vocab, staged / _TOKEN_MAP)
        if form.has_tokenizer:
            target.tokenizer.save_pretrained(staged)
    return folder


def format_for(method: str, to: str | None, options: Mapping[str, Any]) -> tuple[ExportFormat, _Target]:
    """The layout for heads of a method with these options.

    Raises:
        InvalidSettings: there is none, or another one is asked for.
    """
    check_layout(to)
    fitting = [name for name, form in _FORMATS.items() if method in form.methods]
    serves = "serve the head with `draftheads serve`, or in vLLM by the plug-in of draftheads"
    if not fitting:
        raise InvalidSettings(f"no other project has heads of the method {method}; {serves}")
    if to is not None and to not in fitting:
        readers = "; ".join(f"--to {name} is read by {' and '.join(_COMMANDS[name])}" for name in fitting)
        form = next(form for name, form in _FORMATS.items() if name == to)
        raise InvalidSettings(
            f"--to {to} is not for heads of the method {method}: {serves}; {readers}. For vLLM, SGLang or llama.cpp "
            f"train another head: `draftheads train --method {form.methods[0]}`"
        )
    default: ExportFormat = "eagle-sglang" if method == "eagle" and options.get("fusion_bias") else fitting[0]
    name = next((name for name in fitting if name == to), default)
    return name, _FORMATS[name]


def commands(form: ExportFormat, folder: Path, model_id: str, steps: int = _STEPS) -> dict[str, str]:
    """By engine, the command that decodes with an exported head; ``steps`` are draft tokens, or heads."""
    words = {"head": shlex.quote(str(folder)), "model": shlex.quote(model_id), "steps": str(steps)}
    found = {}
    for engine, command in _COMMANDS[form].items():
        if engine == "TensorRT-LLM" and not (folder / _OWN_HEADS).is_file():  # it does not read shared lm_heads
            continue
        has_map = engine == "SGLang" and (folder / _TOKEN_MAP).is_file()
        text = f"{command} --speculative-token-map {shlex.quote(str(folder / _TOKEN_MAP))}" if has_map else command
        if match := re.search(r"VLLM\((\w+)\)", command):
            given = {"method": match[1], "model": str(folder), "num_speculative_tokens": steps}
            config = shlex.quote(json.dumps(given))
            text = text.replace(match[0], f"vllm serve {words['model']} --speculative-config {config}")
        for word, value in words.items():
            text = text.replace(f"<{word}>", value)
        found[engine] = text
    return found


def as_stored(tensor: Tensor) -> Tensor:
    """As files have it: floating-point numbers in bf16."""
    tensor = tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor.detach()
    return tensor.contiguous().clone()  # a file holds no two names of one memory
