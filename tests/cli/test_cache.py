"""``draftheads cache`` shows and clears the parts of the cache."""

from pathlib import Path

import pytest

from cli_world import Run, slow_imports
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
    return folder


def test_show_lists_the_parts(cache: Path, run: Run):
    first, *lines = run(["cache"]).out.splitlines()
    assert first == str(cache)
    assert [line.split()[:6] for line in lines[:-1]] == [
        ["costs", "500", "B", "in", "1", "file"],
        ["bench", "1.0", "kB", "in", "1", "file"],
    ]
    assert "measured again in a second for each head" in lines[0]
    assert "bench" not in run(["cache", "show", "costs"]).out.replace(str(cache), "")


def test_show_imports_nothing_slow(cache: Path):
    code = 'assert main(["cache", "show"]) == main(["cache", "clear"]) == 0'
    assert slow_imports(code).endswith("\n[]\n")


def test_clear_deletes_all_parts_or_one_but_not_what_another_process_uses(cache: Path, run: Run):
    with locked(cache / "bench" / "0123456789abcdef", ""):
        assert "kept bench/0123456789abcdef: another process is using it\n" in run(["cache", "clear", "bench"]).out
    assert run(["cache", "clear", "bench"]).out.split()[1:] == ["bench", "1.0", "kB", "in", "1", "file", "deleted"]
    assert ((cache / COST).exists(), (cache / BENCH).exists()) == (True, False)
    assert "costs" in run(["cache", "clear"]).out
    assert run(["cache", "clear"]).out == f"{cache}\n"
    assert "no part 'cost'; its parts are smollm2-135m, gguf, weights," in run(["cache", "clear", "cost"], code=1).err
