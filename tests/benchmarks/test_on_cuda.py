"""The CUDA benchmark: its parts run on a CPU, too, where a stand-in captures steps."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import on_cuda

import families
from draftheads.runners import transformers_runner
from fake_cuda import FakeCuda, Tape

FOLDER = Path(on_cuda.__file__).parent
TINY = {name: size for name, size in families.SMALL.items() if name.startswith(("hidden", "intermediate", "num"))}
SMALL = on_cuda.Options(
    model=on_cuda.RANDOM,
    device="cpu",
    heads=("hydra", "medusa"),
    nodes=(1, 3),
    lengths=(16,),
    batch_sizes=(2,),
    warm_steps=8,
    steps=2,
    repeats=1,
)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Steps are captured as on a GPU, and models are small."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    monkeypatch.setattr(transformers_runner, "capture_for", lambda _: fake.capture)
    monkeypatch.setattr(on_cuda, "SMOLLM", {**on_cuda.SMOLLM, **TINY, "vocab_size": 96})
    monkeypatch.setattr(on_cuda, "LLAMA_7B", {**on_cuda.LLAMA_7B, **TINY})
    return fake


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert on_cuda.main(on_cuda.Options()) == 1
    assert "no CUDA device" in capsys.readouterr().out


def test_a_wrong_text_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Graphs that compute nothing, as those of another device."""
    monkeypatch.setattr(Tape, "replay", lambda _: None)
    options = replace(SMALL, json=tmp_path / "cuda.jsonl", heads=())
    assert on_cuda.main(options) == 1
    row = next(line for line in lines(tmp_path / "cuda.jsonl") if line["part"] == "check")
    assert not row["captured = plain"]
    assert set(row["captured differs"]) == {"row", "token", "logits"}


def test_all_parts_write_their_results(tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in: FakeCuda):
    """Captured texts are those of ordinary steps and of plain decoding."""
    file = tmp_path / "cuda.jsonl"
    assert on_cuda.main(replace(SMALL, json=file)) == 0
    found = lines(file)
    assert found == [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert list(dict.fromkeys(line["part"] for line in found)) == [
        *("machine", "check", "decoding", "verification", "drafting", "end")
    ]
    decoding = [line for line in found if line["part"] == "decoding"]
    assert [line["drafter"] for line in decoding] == ["plain, no graphs", "plain", "hydra", "medusa"]
    assert [line["tokens/step"] for line in decoding[:2]] == [1.0, 1.0]
    assert [line["graphs"] > 0 for line in decoding] == [False, True, True, True]
    assert all(line["captured, ms"] > 0 for line in found if line["part"] == "verification")
    assert all(line["static, 8 rows, ms"] > 0 for line in found if line["part"] == "drafting")
    assert found[-1] == {"part": "end", "right": True, "left_out": []}
    none, *heads = [line for line in found if line["part"] == "check"]
    assert (none["drafter"], none["captured = plain"]) == ("none", True)
    texts, logits = heads[:4], heads[4:]
    trees = [(method, tree) for method in SMALL.heads for tree in ("static", "growing")]
    assert [(row["drafter"], row["tree"]) for row in texts] == trees
    assert all(row["captured = plain"] and row["ordinary = plain"] for row in texts)
    assert min(row["graphs"] for row in [none, *texts]) > 0
    assert max(row["tokens/step"] for row in texts) > 1.2, "some paths are accepted"
    assert [row["nodes"] for row in logits] == [1, 3]
    assert 0 <= max(row["largest difference"] for row in logits) < 1e-4
    assert sum(tape.num_replays for tape in stand_in.tapes) > 100


def test_a_run_that_is_cut_off_leaves_its_results_and_a_part_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def cut(*_: object) -> Iterator[on_cuda.Row]:
        yield {"batch": 1}
        raise KeyboardInterrupt

    def failing(*_: object) -> Iterator[on_cuda.Row]:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(on_cuda, "check", failing)
    monkeypatch.setattr(on_cuda, "decoding", cut)
    with pytest.raises(KeyboardInterrupt):
        on_cuda.main(replace(SMALL, json=tmp_path / "cuda.jsonl"))
    _, failed, last = lines(tmp_path / "cuda.jsonl")
    assert failed == {"part": "check", "error": "RuntimeError: CUDA out of memory"}
    assert last["part"] == "decoding"


def test_a_step_that_cannot_be_captured_is_an_error(stand_in: FakeCuda, tmp_path: Path):
    stand_in.fails_at = "end"
    assert on_cuda.main(replace(SMALL, json=tmp_path / "cuda.jsonl", heads=())) == 1
    errors = [line["error"] for line in lines(tmp_path / "cuda.jsonl") if "error" in line]
    assert errors == ["RuntimeError: a step was not captured: CUDA out of memory"]


def test_what_there_is_no_time_for_is_listed():
    late = on_cuda.Clock(0.0)
    assert list(on_cuda.verification(SMALL, late)) == []
    assert late.left_out == ["verification of 1 nodes at 16 tokens", "verification of 3 nodes at 16 tokens"]
    assert on_cuda.parsed([]).minutes < 8


def test_it_runs_without_optional_packages():
    """The real sizes, with no time for a measurement."""
    code = (
        "import runpy, sys; sys.modules.update(dict.fromkeys(sys.argv[1].split())); del sys.argv[:2]; "
        "sys.path.insert(0, sys.argv[0]); runpy.run_path(sys.argv[0] + '/on_cuda.py', run_name='__main__')"
    )
    absent = "tyro gguf llguidance fastapi uvicorn matplotlib peft"
    command = [sys.executable, "-c", code, absent, str(FOLDER), "--device", "cpu", "--minutes", "0"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1])["left_out"] == ["check", "decoding", "verification", "drafting"]


def test_no_script_has_the_name_of_a_package_that_torch_imports():
    """A script's folder comes first when modules are looked for; NVIDIA's package is ``cuda``."""
    assert not {"cuda", "torch", "transformers"} & {path.stem for path in FOLDER.iterdir()}
