"""What draftheads finds on this machine: processor, packages, GPU, models, heads and cache, with advice.

Nothing is measured, downloaded or written. Nothing here fails: what cannot be read is a finding. torch is imported
late, because one finding is that it cannot be imported.
"""

import importlib
import os
import platform
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from packaging.requirements import Requirement

from draftheads.checkpoints.registry import DATA_PACKAGE, DATA_PACKAGE_HEADS, DATA_PACKAGE_INSTALL, zoo_heads
from draftheads.errors import DraftHeadsError, first_line
from draftheads.models.gguf_models import SMOLLM2_135M, find_gguf, place_in_cache
from draftheads.utils.cache import PARTS, cache_folder, contents_of
from draftheads.utils.counts import byte_size, counted
from draftheads.utils.environment import Environment
from draftheads.utils.files import check_writable
from draftheads.utils.machine import IDLE_CORES, OtherPrograms, find_cores, find_memory, has_nvidia_driver
from draftheads.utils.provenance import installed_version, processor, provenance

Level = Literal["ok", "optional", "advice", "unusable"]

EXTRAS = {
    "demo": "the default model from its package",
    "serve": "serve, and grammars",
    "report": "HTML pages of train, tune and bench",
    "lora": "train --joint and merge",
    "quantised": "--four-bit, --optimizer adamw-8bit",
    "endpoint": "distill --endpoint",
    "tensorboard": "train --tensorboard",
}
_LARGE = ("torch", "transformers")  # packages that are imported
_LOAD_SECONDS = 0.5  # over which the use of the cores is averaged
_LITTLE = 1_000_000_000  # bytes: less memory or disk space than this is little
_FEW_LAYERS, _FEW_NUMBERS = 8, 64  # of a model that is like a large one


@dataclass(frozen=True)
class Finding:
    """One fact, in words and as JSON values."""

    name: str
    text: str
    advice: str = ""  # what to do, or with level "optional" what is possible
    level: Level = "ok"  # "unusable": draftheads cannot work
    facts: dict[str, Any] = field(default_factory=dict)


def _finding(name: str, text: str, advice: str = "", level: Level = "advice", **facts: Any) -> Finding:
    """With that level if there is advice."""
    return Finding(name, text, advice, level if advice else "ok", facts)


def examine(model: str | None = None) -> Iterator[tuple[str, list[Finding]]]:
    """Groups of findings with their titles, one after the other as they are found: importing torch takes seconds."""
    yield "Machine", find_machine()
    packages = find_packages()
    yield "Packages", packages
    if not any(finding.level == "unusable" for finding in packages):
        yield "Computing", find_computing()
        yield "Models and heads", find_models()
        if model is not None:
            yield "Model", [find_passes(model)]
    yield "Cache", find_cache()


# --- machine ---


def find_machine() -> list[Finding]:
    """The system, and what it has for all programs."""
    return [Finding("system", platform.platform()), Finding("processor", processor()), _cores(), _memory(), _load()]


def _cores() -> Finding:
    cores = find_cores()
    text = f"{cores.usable} of {cores.logical} usable"
    text += f" ({cores.physical} physical)" if cores.physical not in (None, cores.logical) else ""
    is_limited = cores.quota is not None and cores.usable < cores.allowed
    text += f"; the container's limit is {cores.quota:g}" if is_limited else ""
    return _finding("cores", text, **cores._asdict(), usable=cores.usable)


def _memory() -> Finding:
    memory = find_memory()
    text = f"{byte_size(memory.total)}, {byte_size(memory.available)} available"
    text += f"; the container's limit is {byte_size(memory.limit)}" if memory.limit is not None else ""
    most = min(memory.available, memory.limit or memory.total)
    return _finding(
        "memory", text, "close other programs, or use a small model" if most < _LITTLE else "", **memory._asdict()
    )


def _load() -> Finding:
    """What other programs compute at this moment, averaged over a part of a second."""
    others, busy = OtherPrograms(), None
    while busy is None:
        time.sleep(0.05)
        busy = others.busy_cores(least_seconds=_LOAD_SECONDS)
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    text = f"other programs use {busy:.1f} of {counted(others.num_cores, 'core')}"
    text += "" if average is None else f"; load average {average:.1f}"
    advice = "close them: they take time from decoding" if busy > IDLE_CORES else ""
    return _finding("load", text, advice, busy_cores=round(busy, 2), load_average=average)


# --- packages ---


def find_packages() -> list[Finding]:
    """Versions of what is required, and of the extras."""
    findings = [Finding("python", f"{platform.python_version()} ({platform.python_implementation()})")]
    try:
        requirements = [Requirement(text) for text in metadata.requires("draftheads") or []]
    except metadata.PackageNotFoundError:
        advice = "install it: pip install draftheads (in a checkout: pip install .)"
        findings.append(_finding("installation", "none of draftheads, so versions are not compared", advice))
        requirements = [Requirement(name) for name in _LARGE]
    large = [_imported(package) for package in requirements if package.name in _LARGE]
    if all(finding.level != "unusable" for finding in large):  # provenance() imports torch
        code = provenance()
        text = str(code["draftheads"] or "of an unknown version")
        if code["git_commit"]:
            text += f", commit {str(code['git_commit'])[:10]}{' with changes' if code['git_dirty'] else ''}"
        findings.append(Finding("draftheads", text, facts=code))
    others = [package for package in requirements if package.marker is None and package.name not in _LARGE]
    findings += [*large, _group("others", "all commands", others, "draftheads", "unusable")]
    for extra, purpose in EXTRAS.items():
        packages = [package for package in requirements if package.marker and package.marker.evaluate({"extra": extra})]
        findings.append(_group(f"[{extra}]", purpose, packages, f"draftheads[{extra}]", "optional"))
    return [finding for finding in findings if finding.text]


def _problem(package: Requirement, version: str | None) -> str:
    """What is wrong with that version; empty if it fits.

    >>> [_problem(Requirement("torch<2.12,>=2.9"), version) for version in ("2.10.1+cpu", "2.7.1", None)]
    ['', '2.7.1, but <2.12,>=2.9 is needed', 'missing']
    """
    if version is None or package.specifier.contains(version, prereleases=True):
        return "" if version else "missing"
    return f"{version}, but {package.specifier} is needed"


def _imported(package: Requirement) -> Finding:
    """A large package: it must be possible to import it."""
    name, version, pip_name = package.name, installed_version(package.name), f"'{package.name}{package.specifier}'"
    if version is None:
        return Finding(name, "not installed", f"pip install {pip_name}", "unusable")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: Any = importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a broken installation raises anything
        text = f"{version}, cannot be imported: {first_line(error)}"
        return Finding(name, text, f"pip install --force-reinstall {pip_name}", "unusable")
    problem = _problem(package, version)
    if name == "torch":
        builds = {"CUDA": module.version.cuda, "ROCm": module.version.hip}
        kinds = [f"build for {kind} {number}" for kind, number in builds.items() if number]
        version = f"{module.__version__}, {(*kinds, 'CPU build')[0]}"
    return _finding(name, problem or version, f"pip install --upgrade {pip_name}" if problem else "")


def _group(name: str, purpose: str, packages: list[Requirement], pip_name: str, level_if_missing: Level) -> Finding:
    """Packages that are installed by the same command; no text if there are none."""
    versions: dict[str, Any] = {package.name: installed_version(package.name) for package in packages}
    problems = {package.name: _problem(package, versions[package.name]) for package in packages}
    if problems := {name: problem for name, problem in problems.items() if problem}:
        text = f"for {purpose}: {', '.join(map(' '.join, problems.items()))}"
        level = level_if_missing if None in versions.values() else "advice"
        return _finding(name, text, f"pip install --upgrade '{pip_name}'", level, **versions)
    return _finding(name, ", ".join(f"{name} {version}" for name, version in versions.items()), **versions)


# --- computing ---


def find_computing() -> list[Finding]:
    """GPUs, threads, and what follows from them."""
    return [*_gpus(), _threads(), *_precision()]


def _gpus() -> list[Finding]:
    import torch  # noqa: PLC0415

    with warnings.catch_warnings(record=True) as caught:  # torch warns if the driver is too old
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if is_available:
        return [_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    if not has_nvidia_driver() and shutil.which("nvidia-smi") is None:
        return [Finding("GPU", "none")]
    if torch.version.cuda is None:
        advice = "install it for CUDA: https://pytorch.org/get-started/locally"
        return [_finding("GPU", "an NVIDIA driver is here, but torch is a CPU build", advice)]
    hidden = Environment().gpus
    if hidden in ("", "-1"):
        text = f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}"
        return [_finding("GPU", text, "unset CUDA_VISIBLE_DEVICES to use it", "optional")]
    reason = f": {str(caught[0].message).splitlines()[0]}" if caught else ""
    advice = f"see whether `nvidia-smi` lists a GPU, and its driver supports CUDA {torch.version.cuda}"
    return [_finding("GPU", f"an NVIDIA driver is here, but torch finds no GPU{reason}", advice)]


def _gpu(device: Any) -> Finding:
    capability = f"{device.major}.{device.minor}"
    text = f"{device.name}, {byte_size(device.total_memory)}, compute capability {capability}"
    return _finding("GPU", text, memory=device.total_memory, capability=capability)


def _threads() -> Finding:
    import torch  # noqa: PLC0415

    threads, usable, chosen = torch.get_num_threads(), find_cores().usable, Environment().num_threads
    if threads > usable:
        text = f"torch uses {threads} on {counted(usable, 'core')}, so they wait for each other"
        return _finding("threads", text, f"set OMP_NUM_THREADS={usable}", threads=threads)
    is_limited = threads < usable and chosen
    advice = f"OMP_NUM_THREADS={chosen} limits it: unset it to use all cores" if is_limited else ""
    return _finding(
        "threads", f"torch uses {threads} of {counted(usable, 'core')}", advice, "optional", threads=threads
    )


def _precision() -> list[Finding]:
    """What ``--precision auto`` is, and the native library."""
    import torch  # noqa: PLC0415

    from draftheads.cpu.native_library import how_to_get, load_library  # noqa: PLC0415
    from draftheads.models.devices import DTYPES, default_device, default_dtype  # noqa: PLC0415

    device = default_device()
    dtype = default_dtype(device)
    name = next(name for name, kind in DTYPES.items() if kind == dtype)
    reason = "bf16 instructions" if dtype == torch.bfloat16 else "no bf16 instructions, and emulated bf16 is slower"
    text = f"auto is {name}: this {'GPU' if device.type == 'cuda' else 'processor'} has {reason}"
    findings = [_finding("precision", text, auto=name, device=device.type)]
    if device.type == "cpu":
        native = load_library()
        text = "none, so decoding is slower" if native is None else native.draftheads_kernels(b"").decode()
        findings.append(_finding("native library", text, "" if native else how_to_get()))
    return findings


# --- models and heads ---


def find_models() -> list[Finding]:
    """The default model and the installed heads."""
    return [_default_model(), *_heads()]


def find_passes(name: str) -> Finding:
    """Which passes a model gets here, and why. From its configuration: its first layers are made, and narrower."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from draftheads.cpu.native_library import how_to_get, load_library  # noqa: PLC0415
    from draftheads.cpu.native_step import OTHERWISE_BUILT, NativeStep  # noqa: PLC0415
    from draftheads.models.devices import default_device  # noqa: PLC0415
    from draftheads.models.model import TargetModel  # noqa: PLC0415
    from draftheads.models.pretrained import load_config  # noqa: PLC0415
    from draftheads.runners.structure import checked  # noqa: PLC0415

    stock = "passes of transformers, which are slower"
    try:
        whole = load_config(name)
        config = whole.get_text_config()
        if vars(config).get("layer_types"):
            config.layer_types = config.layer_types[:_FEW_LAYERS]
        config.num_hidden_layers = min(config.num_hidden_layers, _FEW_LAYERS)
        config.vocab_size, config.intermediate_size, config.pad_token_id = _FEW_NUMBERS, _FEW_NUMBERS, None
        target = TargetModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, name)
    except (DraftHeadsError, ValueError) as error:
        return _finding(name, f"cannot be loaded: {first_line(error)}", "choose another model")
    if (device := default_device()).type != "cpu":
        return _finding(name, f"passes of transformers on {device}; native ones are for CPUs", native=False)
    if load_library() is None:
        return _finding(name, f"{stock}: there is no native library", how_to_get(), native=False)
    if getattr(whole, "quantization_config", None) is not None:
        return _finding(name, f"{stock}: its weights are quantised", native=False)
    fast = checked(target, lambda: target, fast=True)
    if fast.native is None:
        reason = "not built as the library knows (its layers do not compute what the names of their parts say)"
        try:
            NativeStep(fast.model, fast.windows)
        except OTHERWISE_BUILT as error:
            reason = f"not built as the library knows ({first_line(error)})"
        reason = "its recurrent layers have no native ones" if target.is_recurrent else reason
        return _finding(name, f"{stock}: {reason}", native=False)
    return _finding(name, "native passes: the native library computes all layers of a step", native=True)


def _default_model() -> Finding:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow to import

    model = SMOLLM2_135M
    try:
        is_converted = place_in_cache(model).is_dir()
    except DraftHeadsError:
        is_converted = False
    package = installed_version(model.distribution) if find_gguf(model) is not None else None
    if is_converted:
        return _finding(model.name, "in the cache, converted from its package", converted=True, package=package)
    if package is not None and installed_version("gguf") is None:
        text = f"in its package {model.distribution}, but gguf is missing, which converts it"
        return _finding(model.name, text, "pip install 'draftheads[demo]'", converted=False, package=package)
    if package is not None:
        text = f"in its package {model.distribution} {package}; converted at the first use"
    elif isinstance(try_to_load_from_cache(model.hub_id, "config.json"), str):
        text = "downloaded from the Hugging Face Hub"
    else:
        text = "is downloaded at the first use; or install it"
        return _finding(model.name, text, model.pip_install, "optional", converted=False, package=package)
    return _finding(model.name, text, converted=False, package=package)


def _heads() -> Iterator[Finding]:
    heads: dict[str, list[str]] = {}
    for head in zoo_heads():
        heads.setdefault(head.base_name, []).append(head.method)
    text = "; ".join(f"{', '.join(methods)} for {base}" for base, methods in heads.items())
    yield _finding("heads", text or "none", "" if heads else "reinstall draftheads: its wheel has two", installed=heads)
    version = installed_version(DATA_PACKAGE)
    if version is not None:
        yield Finding(DATA_PACKAGE, version)
    elif missing := set(DATA_PACKAGE_HEADS).difference(heads.get(SMOLLM2_135M.name, [])):
        text = f"not installed; it has {len(missing)} more of them"
        yield _finding(DATA_PACKAGE, text, DATA_PACKAGE_INSTALL, "optional")


# --- the cache ---


def find_cache() -> list[Finding]:
    """The cache folder."""
    try:
        folder = cache_folder()
    except DraftHeadsError as error:
        return [_finding("folder", first_line(error), "set DRAFTHEADS_CACHE to a folder that you own")]
    num_bytes = sum(contents_of(part, folder).num_bytes for part in PARTS)
    text, advice = f"{folder}, {byte_size(num_bytes)}", ""
    try:
        check_writable(folder / "x")
    except DraftHeadsError:
        text, advice = f"{folder} cannot be written", "set DRAFTHEADS_CACHE; until then each start measures again"
    return [_finding("folder", text, advice, path=str(folder), bytes=num_bytes, writable=not advice)]
