"""``draftheads cache`` shows and clears the parts of the cache."""

import io
import sys
from pathlib import Path

import pytest

from cli_world import Run, slow_imports
from draftheads.cli.main import main
from draftheads.utils.files import locked

COST = "costs/04d6347cd77c26e13234ed0c.json"
BENCH = "bench/0123456789abcdef/found/0.json"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two parts, 1.5 kB."""
    folder = tmp_path / "cache"
    for name, size in ((COST, 500), (BENCH, 1000)):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"x" * size)
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(folder))
    monkeypatch.setenv("COLUMNS", "80")
    return folder


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, typed: str) -> _Terminal:
    """Both ends are a terminal, and that is typed. Returns what is shown."""
    shown = _Terminal()
    monkeypatch.setattr(sys, "stdin", _Terminal(typed))
    monkeypatch.setattr(sys, "stdout", shown)
    return shown


def test_show_lists_the_parts_in_80_columns(cache: Path, run: Run):
    out = run(["cache"]).out
    first, *lines = out.splitlines()
    assert first == f"{cache}: 1.5 kB in 2 files"
    assert max(map(len, lines)) <= 80
    rows = [line.split(maxsplit=4)[:4] for line in lines if " B " in line or " kB " in line]
    assert rows == [["costs", "1", "500", "B"], ["bench", "1", "1.0", "kB"]]
    assert "measured again in a second for each head" in out


def test_show_of_one_part_and_of_an_empty_cache(cache: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    out = run(["cache", "show", "costs"]).out
    assert "500 B in 1 file\n" in out
    assert "bench" not in out.replace(str(cache), "")
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(cache / "none"))
    assert run(["cache"]).out.startswith(f"{cache / 'none'}: empty\n")


def test_show_imports_nothing_slow(cache: Path):
    code = 'assert main(["cache", "show"]) == main(["cache", "clear", "--yes"]) == 0'
    assert slow_imports(code).endswith("\n[]\n")


def test_clear_needs_yes_where_there_is_no_terminal(cache: Path, run: Run):
    err = run(["cache", "clear"], code=1).err
    assert err == (
        f"error: {cache}: nothing was deleted, because there is no terminal to ask on; "
        "add --yes to delete 1.5 kB in 2 files\n"
    )
    assert (cache / COST).exists()
    assert run(["cache", "clear", "--yes"]).out == "deleted 1.5 kB in 2 files\n"
    assert not (cache / COST).exists()
    assert run(["cache", "clear", "--yes"]).out == f"{cache}: nothing to delete\n"


def test_clear_of_one_part_leaves_the_others(cache: Path, run: Run):
    assert run(["cache", "clear", "bench", "--yes"]).out == "deleted 1.0 kB in 1 file\n"
    assert (cache / COST).exists()
    assert not (cache / BENCH).exists()


@pytest.mark.parametrize("typed", ["n\n", "\n", "", "all\n"])
def test_a_declined_question_deletes_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch, typed: str):
    shown = at_a_terminal(monkeypatch, typed)
    assert main(["cache", "clear"]) == 0
    assert "Delete 2 parts, 1.5 kB in 2 files? [y/N]" in shown.getvalue()
    assert "nothing was deleted" in shown.getvalue()
    assert (cache / COST).exists()
    assert (cache / BENCH).exists()


@pytest.mark.parametrize("typed", ["y\n", "Yes\n"])
def test_an_agreed_question_deletes(cache: Path, monkeypatch: pytest.MonkeyPatch, typed: str):
    shown = at_a_terminal(monkeypatch, typed)
    assert main(["cache", "clear", "costs"]) == 0
    assert "Delete 1 part, 500 B in 1 file? [y/N]" in shown.getvalue()
    assert "deleted 500 B in 1 file" in shown.getvalue()
    assert not (cache / COST).exists()
    assert (cache / BENCH).exists()


def test_an_unknown_part_names_the_parts(cache: Path, run: Run):
    err = run(["cache", "clear", "cost", "--yes"], code=1).err
    assert "no part 'cost'; its parts are smollm2-135m, gguf, costs, profiles, answers, bench" in err
    assert (cache / COST).exists()


def test_what_another_process_uses_is_named(cache: Path, run: Run):
    with locked(cache / "bench" / "0123456789abcdef", ""):
        out = run(["cache", "clear", "--yes"]).out
    assert out == "deleted 500 B in 1 file\nkept bench/0123456789abcdef: another process is using it\n"
    assert (cache / BENCH).exists()
