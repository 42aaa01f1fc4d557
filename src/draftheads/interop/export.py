"""Heads of other projects: a head is written in the layout of one, for its engine, and one of theirs is read."""

import json
import re
import shlex
import warnings
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftheads.checkpoints.checkpoint import load_head
from draftheads.checkpoints.head_files import CONFIG_FILE, read_head_files
from draftheads.checkpoints.registry import find_head, find_published
from draftheads.errors import InvalidSettings, SpeedWarning, no_such
from draftheads.formats.gguf import GGUF_FILE, write_gguf
from draftheads.formats.layout import Format, Layout
from draftheads.formats.reading import FORMATS, convert
from draftheads.heads.base import HeadConfig
from draftheads.heads.eagle3 import Eagle3Config
from draftheads.loading import Loadable, load_target, name_of
from draftheads.models.model_names import base_of, model_id_of
from draftheads.utils.files import atomic_directory, user_path

_ADVISED = "eagle3"  # for engines that read several kinds: most of them run it best
_TOKEN_MAP, _OWN_HEADS = "token_map.pt", "medusa_lm_head.pt"
_BY_PLUG_IN = {"amphista", "hydra", "hydra++", "markov-medusa", "medusa", "mlp-speculator"}  # docs/export.md names them
# an option of EAGLE-3 heads: what engines do that do not know it
_LITTLE_KNOWN = {
    "fc_norm": "llama.cpp refuses it, and optimum-intel (OpenVINO) ignores it and drafts worse",
    "norm_output": "llama.cpp and optimum-intel (OpenVINO) ignore it and draft worse",
    "norm_before_residual": "SGLang ignores it and drafts worse",
    "qkv_bias": "SGLang ignores it and drafts worse",
    "own_embedding": "SGLang ignores it where it has the size of the model's, and drafts worse",
}


class Exported(NamedTuple):
    """What :func:`export_head` wrote."""

    folder: Path
    layout: str
    commands: dict[str, str]  # that decode with it, by engine; of the one that was asked for
    left_out: int | None  # tokens of the draft vocabulary, if all of the model's are predicted now


def export_head(
    head: str | PathLike[str],
    out: str | PathLike[str],
    *,
    model: Loadable = "smollm2-135m",
    to: str | None = None,
    with_embedding: bool = False,
) -> Exported:
    """Writes a head in the layout of another project, in bf16.

    Args:
        head: a trained head: a name, a folder or a Hub id.
        out: the folder to make.
        model: the model that the head was trained for.
        to: the layout, or an engine that reads it (``vllm``); that of the head's own project when left out. The README
            of the documentation lists which engine reads which.
        with_embedding: whether EAGLE and EAGLE-3 heads get the model's embedding, from which vllm-project/speculators
            trains on; it is always there in its own layout.

    Raises:
        InvalidSettings: no such layout for heads of this method, or one that cannot hold this head.
        ModelNotFound, CheckpointError: the head or the model cannot be read.
        StorageError: the folder exists, or cannot be written.

    Warns:
        SpeedWarning: some engines leave out a part of the head, and draft worse.
    """
    source, folder = find_head(head, name_of(model)), user_path(out)
    files = read_head_files(source)
    form = format_for(files.method, to, files.options)
    if with_embedding and not {"eagle", "eagle3"} & set(form.methods):
        raise InvalidSettings(f"--with-embedding: the layout {form.name} has no place for the model's embedding")
    target = load_target(model, precision="bf16", device="cpu", fast=False)
    loaded = load_head(source, target, dtype=torch.float32)
    base = model_id_of(base_of(fspath(model)) if isinstance(model, str | PathLike) else name_of(model))
    assert form.write is not None
    config, tensors = form.write(loaded, target, base)
    if with_embedding:
        tensors.setdefault("embed_tokens.weight", target.weights.embedding)
    # the loader of heads with lm_heads of their own opens this name only
    file = _OWN_HEADS if form.name == "medusa" and loaded.config.lm_head != "shared" else form.file
    if isinstance(loaded.config, Eagle3Config):
        for option, what in _LITTLE_KNOWN.items():
            if getattr(loaded.config, option):
                warnings.warn(f"the head has {option}: {what}", SpeedWarning, stacklevel=2)
    tensors = {key: as_stored(tensor) for key, tensor in tensors.items()}
    with atomic_directory(folder) as staged:
        if file == GGUF_FILE:  # it has the configuration in it
            write_gguf(staged / file, config, tensors)
        else:
            if file.endswith(".pt"):
                torch.save(tensors, staged / file)
            else:
                save_file(tensors, staged / file, metadata={"format": "pt"})
            (staged / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if form.name == "eagle-sglang" and loaded.config.draft_vocab_size is not None:
            torch.save(loaded.draft_vocab, staged / _TOKEN_MAP)
        if form.has_tokenizer:
            target.tokenizer.save_pretrained(staged)
    left_out = None if form.keeps_vocab else loaded.config.draft_vocab_size
    commands = _commands(form, folder, base, loaded.config)
    asked = {engine: command for engine, command in commands.items() if engine.lower() == to != form.name}
    return Exported(folder, form.name, asked or commands, left_out)


def import_head(source: str | PathLike[str], out: str | PathLike[str], *, model: Loadable = "smollm2-135m") -> Layout:
    """Writes a head of another project as one of this package.

    Args:
        source: a folder, a file or a Hub id.
        out: the folder to make.
        model: the model that it was trained for: a name, a folder, a Hub id, or a loaded model.

    Returns:
        What it was read as.

    Raises:
        ModelNotFound, CheckpointError, UnsupportedModel, InvalidSettings, StorageError: as for
            :func:`draftheads.formats.reading.convert`.
    """
    path = find_published(source, name_of(model))
    return convert(path, out, base=load_target(model, device="cpu", fast=False))


def format_for(method: str, to: str | None, options: Mapping[str, Any]) -> Format:
    """The layout for heads of a method with these options.

    Raises:
        InvalidSettings: there is none, or another one is asked for.
    """
    written = [form for form in FORMATS if form.write is not None]
    known = {name.lower(): form for form in written for name in form.commands} | {form.name: form for form in written}
    if to is not None and to not in known:
        raise no_such("layout", to, known)
    fitting = [form for form in written if method in form.methods]
    serves = "serve the head with `draftheads serve`"
    if method in _BY_PLUG_IN:
        serves += ", or in vLLM by the plug-in of draftheads"
    if not fitting:
        raise InvalidSettings(f"heads of the method {method} are not written for other projects; {serves}")
    if to is None:
        return known["eagle-sglang"] if method == "eagle" and options.get("fusion_bias") else fitting[0]
    named = [form for form in fitting if form.name == to]  # before those that the engine of this name reads
    if found := named or [form for form in fitting if to in map(str.lower, form.commands)]:
        return found[0]
    readers = "; ".join(f"--to {form.name} is read by {' and '.join(form.commands)}" for form in fitting)
    methods = [each for form in written if to in (form.name, *map(str.lower, form.commands)) for each in form.methods]
    raise InvalidSettings(
        f"--to {to} is not for heads of the method {method}: {serves}; {readers}. For {to} "
        f"train another head: `draftheads train --method {_ADVISED if _ADVISED in methods else methods[0]}`"
    )


def _commands(form: Format, folder: Path, model_id: str, head: HeadConfig) -> dict[str, str]:
    """By engine, the command that decodes with an exported head; its steps are draft tokens, or heads."""
    words = {"head": shlex.quote(str(folder)), "model": shlex.quote(model_id)}
    words |= {"steps": str(head.num_heads), "method": head.method}
    found = {}
    for engine, command in form.commands.items():
        if engine == "TensorRT-LLM" and not (folder / _OWN_HEADS).is_file():  # it does not read shared lm_heads
            continue
        has_map = engine == "SGLang" and (folder / _TOKEN_MAP).is_file()
        text = f"{command} --speculative-token-map {shlex.quote(str(folder / _TOKEN_MAP))}" if has_map else command
        if match := re.search(r"VLLM\((\w+)\)", command):
            config = json.dumps({"method": match[1], "model": str(folder), "num_speculative_tokens": head.num_heads})
            text = text.replace(match[0], f"vllm serve {words['model']} --speculative-config {shlex.quote(config)}")
        for word, value in words.items():
            text = text.replace(f"<{word}>", value)
        found[engine] = text
    return found


def as_stored(tensor: Tensor) -> Tensor:
    """As files have it: floating-point numbers in bf16."""
    tensor = tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor.detach()
    return tensor.contiguous().clone()  # a file holds no two names of one memory
