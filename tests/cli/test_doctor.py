"""``draftheads doctor`` prints what was found, with advice; as JSON, too."""

import json
import sys
from dataclasses import asdict
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from cli_world import Run, run_process
from draftheads.cli import doctor
from draftheads.cli.diagnosis import Finding
from draftheads.cli.main import main

LONG = "one two three " * 12
GROUPS = {
    "Machine": [Finding("cores", "2 of 2 usable", facts={"usable": 2}), Finding("variables", LONG)],
    "Packages": [
        Finding("threads", "torch uses 8 on 2 cores", "set OMP_NUM_THREADS=2", "advice"),
        Finding("[lora]", "for train --joint: peft missing", "pip install 'draftheads[lora]'", "optional"),
    ],
}
UNUSABLE = Finding("torch", "not installed", "pip install 'torch>=2.8'", "unusable")


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Finding]]:
    """These groups are found."""
    groups = dict(GROUPS)
    monkeypatch.setattr(doctor, "examine", lambda _: groups.items())
    monkeypatch.setenv("COLUMNS", "80")
    return groups


def test_findings_are_lines_with_marks_and_advice(run: Run):
    lines = run(["doctor"]).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)
    assert lines[:3] == ["", "Machine", " ✓ cores          2 of 2 usable"]
    assert " ".join(" ".join(lines[3:6]).split()) == f"✓ variables {LONG.strip()}"
    assert lines[6:] == [
        "",
        "Packages",
        " ! threads        torch uses 8 on 2 cores",
        "                  → set OMP_NUM_THREADS=2",
        " - [lora]         for train --joint: peft missing",
        "                  → pip install 'draftheads[lora]'",
        "",
        "1 thing to do, marked with !",
    ]


def test_nothing_to_do(found: dict[str, list[Finding]], run: Run):
    del found["Packages"]
    assert run(["doctor"]).out.endswith("\n\nNothing to do.\n")


def test_without_unicode_the_marks_are_plain(monkeypatch: pytest.MonkeyPatch):
    out = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(out, encoding="ascii"))
    assert main(["doctor"]) == 0
    text = out.getvalue().decode("ascii")
    assert "\n + cores " in text
    assert "\n                  -> set OMP_NUM_THREADS=2\n" in text


def test_what_makes_draftheads_unusable_is_an_error(found: dict[str, list[Finding]], run: Run, tmp_path: Path):
    """After all findings; the file has them, too."""
    found["Packages"] = [UNUSABLE]
    found["Cache"] = [Finding("folder", "here")]
    out, err = run(["doctor", "--json", str(tmp_path / "found.json")], code=1)
    assert " ! torch          not installed\n" in out
    assert "folder" in out
    assert err == "error: draftheads cannot work here: torch not installed. Run: pip install 'torch>=2.8'\n"
    record = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert record["findings"]["Packages"] == [asdict(UNUSABLE)]


def test_json_has_the_same_findings(run: Run, tmp_path: Path):
    record = json.loads(run(["doctor", "--json", "-"]).out)
    assert record == {
        "format_version": 1,
        "findings": {title: [asdict(finding) for finding in group] for title, group in GROUPS.items()},
    }
    out, err = run(["doctor", "--json", str(tmp_path)], code=1)
    assert not out  # it fails before anything is looked for
    assert "it is a folder; add the name of a file" in err


@pytest.mark.parametrize("broken", ["torch", "transformers"])
def test_a_broken_installation_is_told_and_not_a_traceback(tmp_path: Path, broken: str):
    """In a process where the package cannot be imported: no module on the way may need it."""
    (tmp_path / f"{broken}.py").write_text("raise ImportError('it is broken')\n", encoding="utf-8")
    done = run_process(["doctor"], tmp_path)
    assert done.returncode == 1, done.stderr
    assert "cannot be imported: it is broken" in " ".join(done.stdout.split())
    assert "\nCache\n" in done.stdout
    assert done.stderr.startswith(f"error: draftheads cannot work here: {broken} ")
    assert len(done.stderr.splitlines()) == 1


def test_this_machine_is_described_in_80_columns(tmp_path: Path):
    done = run_process(["doctor"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    for title in ("Machine", "Packages", "Computing", "Models and heads", "Cache"):
        assert f"\n{title}\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
