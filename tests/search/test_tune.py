"""``draftheads tune`` on a tiny model: the profile it leaves, how it goes on after a kill, and what it refuses."""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

import draftheads
from cli_world import PROMPTS
from draftheads.checkpoints.checkpoint import read_head
from draftheads.checkpoints.registry import (
    cached_profile,
    cached_profile_folder,
    find_profile,
    folder_to_write,
    zoo_heads,
)
from draftheads.cli.main import main
from draftheads.errors import CheckpointCorrupt, InvalidSettings
from draftheads.search.settings import ReplaySettings, TuneOptions
from draftheads.search.tune import answers_folder
from draftheads.speculation.acceptance_profile import AcceptanceProfile, read_profile
from draftheads.speculation.shapes import as_shape
from draftheads.utils.files import locked
from families import ids
from nursery import Nursery

QUICK = ["--num-prompts", "6"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing goes to the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTHEADS_CACHE", str(folder))
        patch.setattr(TuneOptions, "settings", property(settings_of))
        yield folder


def settings_of(options: TuneOptions) -> ReplaySettings:
    """Those of the options, with short answers and small trees."""
    return ReplaySettings(
        num_prompts=options.num_prompts, temperature=options.temperature, max_new_tokens=10, max_nodes=6
    )


@pytest.fixture
def here(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(world)
    monkeypatch.setenv("COLUMNS", "100")
    return world


def tune(method: str, *more: str) -> list[str]:
    options = ["--precision", "fp32", "--prompts", "prompts.jsonl", *QUICK, *more]
    return ["tune", "./model", f"./{method}", *options]


def saved_answers(out: Path) -> dict[Path, int]:
    """Files of answers, and when they were written."""
    return {path: path.stat().st_mtime_ns for path in answers_folder(out).glob("*/answers-*.json")}


@pytest.fixture(scope="module")
def tuned(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What tuning hydra leaves in a folder."""
    out = tmp_path_factory.mktemp("out") / "hydra"
    with contextlib.chdir(world):
        assert main(tune("hydra", "--out", str(out))) == 0
    return out


def test_it_leaves_a_profile_a_record_and_a_page(tuned: Path):
    assert {path.name for path in tuned.iterdir()} == {"acceptance.json", "tune.json", "tune.html", ".lock"}
    assert saved_answers(tuned)
    assert not answers_folder(tuned).is_relative_to(tuned), "prompts are not written beside the head"
    profile = read_profile(tuned / "acceptance.json")
    record = json.loads((tuned / "tune.json").read_text())
    assert (profile.num_texts, profile.num_tokens, profile.temperature) == (6, 60, 0.0)
    assert profile.temperatures == pytest.approx(record["confidence"]["temperatures"], abs=1e-4)
    assert profile.paths == record["static"]["paths"]
    for tokens, expected in (
        (profile.static_tokens, record["static"]["expected"]),
        (profile.dynamic_tokens, record["dynamic"]["expected"]),
    ):
        assert len(tokens) == 6
        assert tokens == pytest.approx(list(accumulate(expected, max)), abs=1e-4)
    assert record["head"] == "./hydra"
    assert [batch["batch_size"] for batch in record["batches"]] == [1, 2, 4, 8, 16]
    assert all(batch["speedup"] >= 1 for batch in record["batches"])
    page = (tuned / "tune.html").read_text()
    assert page.count("<svg") == 3
    assert record["defaults"].keys() == {"speedup", "error"}
    speed = f"{record['defaults']['speedup']:.2f} ± {record['defaults']['error']:.2f} × plain decoding"
    assert speed in page.replace("\N{NO-BREAK SPACE}", " ")


def test_trees_are_timed_and_the_fastest_is_written(
    here: Path, tmp_path: Path, cheap_nodes: None, capsys: pytest.CaptureFixture[str]
):
    assert main(tune("hydra", "--measure", "2", "1", "2", "--out", str(tmp_path))) == 0
    shown = capsys.readouterr().out
    profile, measured = read_profile(tmp_path / "acceptance.json"), json.loads((tmp_path / "tune.json").read_text())
    assert list(measured["measured"]) == ["1", "2"]
    plain = draftheads.load("./model", precision="fp32").generate(PROMPTS, max_new_tokens=12)
    for size, rows in measured["measured"].items():
        assert [row["numbers"]["num_nodes"] for row in rows] == [1, 2, 3, 4, 6]
        best = max(rows, key=lambda row: row["decode_tokens_per_second"])
        path = tmp_path / f"static-{size}.json"
        assert as_shape(path) == profile.tree(best["numbers"]["num_nodes"])
        assert f"wrote {path}; to use it: `--head ./hydra --tree {path}`" in shown
        engine = draftheads.load("./model", "./hydra", tree=path, precision="fp32")
        assert engine.shape == as_shape(path) or best["numbers"]["num_nodes"] == 1
        assert ids(engine.generate(PROMPTS, max_new_tokens=12)) == ids(plain)
    assert shown.index("Measured with one request, ") < shown.index("Measured with 2 requests at a time, ")
    assert "Static trees with 2 requests at a time" in (tmp_path / "tune.html").read_text()
    assert main(tune("hydra", "--measure", "--out", str(tmp_path / "one"))) == 0
    assert list(json.loads((tmp_path / "one" / "tune.json").read_text())["measured"]) == ["1"]


def test_batch_sizes_are_checked_before_anything_is_loaded(here: Path, capsys: pytest.CaptureFixture[str]):
    assert "measure is 0; it must be at least 1" in refused(["tune", "./nothing", "./x", "--measure", "1", "0"], capsys)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--num-prompts", "2", "--measure"], "at least 3 prompts, and these are 2"),
        (["--measure", "1", "99"], "at least 99 prompts, and these are 6"),
    ],
)
def test_prompts_are_counted_before_the_profile_is_written(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
):
    assert f"--measure needs {problem}: give more --prompts" in refused(
        tune("hydra", *options, "--out", str(tmp_path / "new")), capsys
    )
    assert not (tmp_path / "new").exists()


def test_the_profile_of_the_user_s_own_head_is_written_into_its_folder(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(tune("medusa")) == 0
    shown = capsys.readouterr().out
    assert "Predicted speed" in shown
    measured = json.loads(Path("medusa/tune.json").read_text())["defaults"]
    speed = f"{measured['speedup']:.2f} ± {measured['error']:.2f} × plain decoding (./medusa)"
    assert 0 < shown.index(f"With the defaults on this machine: {speed}.") < shown.index("Tokens per step")
    saved = read_profile("medusa/acceptance.json")
    engine = draftheads.load("./model", "./medusa", precision="fp32")
    assert engine.profile == saved != AcceptanceProfile.assumed(3)
    assert draftheads.load("./model", "./medusa", tree="static:10", precision="fp32").profile is None
    assert main(["info", "./medusa"]) == 0
    assert "6 texts, 60 tokens at temperature 0" in capsys.readouterr().out


def test_a_broken_profile_is_replaced_by_tuning(here: Path, tmp_path: Path):
    folder = shutil.copytree("medusa", tmp_path / "head")
    for profile in ("{}", None, "not JSON"):
        (folder / "acceptance.json").unlink(missing_ok=True)
        if profile is not None:
            (folder / "acceptance.json").write_text(profile)
        with pytest.raises(CheckpointCorrupt, match=r"acceptance\.json"):
            draftheads.load("./model", folder, precision="fp32")
    assert main(["tune", "./model", str(folder), *tune("medusa")[3:]]) == 0
    assert find_profile(read_head(folder)).num_texts == 6


def test_answers_are_used_again_for_other_heads(here: Path, tuned: Path, tmp_path: Path):
    before = saved_answers(tuned)
    assert main(tune("medusa", "--out", str(tmp_path / "other"))) == 0
    assert saved_answers(tuned) == before
    assert main(tune("medusa", "--num-prompts", "5", "--out", str(tmp_path / "fewer"))) == 0
    assert len(saved_answers(tuned)) > len(before)


def test_the_function_does_what_the_command_does(here: Path, tuned: Path, tmp_path: Path):
    settings = ReplaySettings(num_prompts=6, max_new_tokens=10, max_nodes=6)
    tuning = draftheads.tune_head(
        "./model", "./hydra", PROMPTS[:6], out=tmp_path / "again", settings=settings, precision="fp32"
    )
    again = read_profile(tmp_path / "again" / "acceptance.json")
    assert tuning.profile == again == read_profile(tuned / "acceptance.json")
    assert tuning.engine.profile == tuning.profile
    first, second = (json.loads((place / "tune.json").read_text()) for place in (tuned, tmp_path / "again"))
    for part in ("num_texts", "static", "dynamic", "accuracy", "confidence"):
        assert first[part] == second[part], "tuning twice finds the same"


def test_a_search_for_a_temperature_counts_probabilities(here: Path, tmp_path: Path):
    assert main(tune("medusa", "--temperature", "0.9", "--out", str(tmp_path / "warm"))) == 0
    record = json.loads((tmp_path / "warm" / "tune.json").read_text())
    counted = [share * record["num_tokens"] for share in record["static"]["shares"][1:]]
    assert any(abs(count - round(count)) > 1e-3 for count in counted)
    assert read_profile(tmp_path / "warm" / "acceptance.json").temperature == 0.9


def test_a_killed_run_continues_with_the_answers_it_had_saved(world: Path, tmp_path: Path):
    out = tmp_path / "killed"
    more = ["--num-prompts", "18"]  # two files of answers
    (tmp_path / "many.jsonl").write_text("\n".join(json.dumps({"prompt": "mom" + "a" * n}) for n in range(18)))
    arguments = [*tune("hydra", "--out", str(out))[1:], *more, "--prompts", str(tmp_path / "many.jsonl")]
    known = saved_answers(out)
    with Nursery("tune") as nursery:
        process = nursery.start(arguments, folder=world)
        until = time.monotonic() + 60
        while saved_answers(out) == known and time.monotonic() < until:
            time.sleep(0.001)
        os.kill(process, signal.SIGKILL)
        assert nursery.wait() == -signal.SIGKILL
        written = saved_answers(out)
        assert written != known
        assert not (out / "acceptance.json").exists()
        nursery.start(arguments, folder=world)
        assert nursery.wait() == 0
    assert saved_answers(out).items() >= written.items(), "answers from before the kill are used"
    assert read_profile(out / "acceptance.json").num_texts == 18


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 1
    return capsys.readouterr().err


def test_impossible_searches_are_refused(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = ["--out", str(tmp_path / "no")]
    one = ["tune", "./model", "./hydra", "--precision", "fp32", "--prompts", "one.jsonl", *QUICK, *out]
    assert "1 prompt to calibrate on" in refused(one, capsys)
    assert "no such file or folder: ./nothing" in refused(["tune", "./model", "./nothing", *out], capsys)
    assert "cannot be read" in refused(["tune", "./model", "./hydra", "--prompts", "none.jsonl", *out], capsys)
    (tmp_path / "file").write_text("")
    assert "file is not a folder" in refused(tune("hydra", "--out", str(tmp_path / "file" / "x")), capsys)


@pytest.mark.parametrize("name", ["num_prompts", "max_nodes"])
def test_one_prompt_or_node_is_refused(name: str):
    with pytest.raises(InvalidSettings, match=f"--{name.replace('_', '-')} is 1: must be at least 2"):
        ReplaySettings(**{name: 1})


def test_a_second_run_into_the_same_folder_is_refused(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with locked(tmp_path / "busy", ""):
        assert "another process is writing" in refused(tune("hydra", "--out", str(tmp_path / "busy")), capsys)


def test_profiles_of_bundled_and_downloaded_heads_go_to_the_cache(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    saved = read_head("hydra")
    assert folder_to_write(saved) == Path("hydra")
    in_cache = cached_profile_folder(saved)
    assert in_cache.is_relative_to(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here))
    assert folder_to_write(saved) == in_cache
    assert cached_profile(saved) is None
    assert main(tune("hydra")) == 0
    assert cached_profile(saved) == in_cache / "acceptance.json"
    assert read_profile("hydra/acceptance.json") == saved.profile, "the head's own stays"
    engine = draftheads.load("./model", "./hydra", precision="fp32")
    assert engine.profile == read_profile(in_cache / "acceptance.json") != saved.profile
    monkeypatch.undo()
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(here)
    for head in zoo_heads():
        assert folder_to_write(read_head(head.folder)).is_relative_to(tmp_path / "cache")
