"""The cache folder and its parts: what is counted, what is deleted, and what never is."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from draftheads.checkpoints.checkpoint import read_head
from draftheads.checkpoints.registry import cached_profile_folder
from draftheads.errors import InvalidSettings, StorageError
from draftheads.models.gguf_models import place_in_cache
from draftheads.utils.cache import PARTS, CachePart, cache_folder, clear, contents_of
from draftheads.utils.files import locked
from draftheads.utils.provenance import identity_digest

PART = {part.name: part for part in PARTS}
FILES = {
    "smollm2-135m": "smollm2-135m-v1/model.safetensors",
    "costs": "costs/04d6347cd77c26e13234ed0c.json",
    "profiles": "profiles/markov-medusa-0123456789abcdef/acceptance.json",
    "answers": "answers/0123456789abcdef/answers-000.json",
    "bench": "bench/0123456789abcdef/found/0.json",
    "weights": "weights/04d6347cd77c26e13234ed0c.packed",
    "gguf": "gguf/some-0123456789abcdef-v1/model.safetensors",
}


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("12345", encoding="utf-8")
    return path


def files_below(folder: Path) -> list[str]:
    """All files, without locks."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in found if not name.endswith(".lock"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a file of five bytes in each part."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(folder))
    for name in FILES.values():
        write(folder / name)
    return folder


# --- where it is ---


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("DRAFTHEADS_CACHE")
    assert cache_folder() == tmp_path / "b" / "draftheads"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert cache_folder() == tmp_path / "c" / ".cache" / "draftheads"
    monkeypatch.setenv("DRAFTHEADS_CACHE", "~nobody-9/cache")
    with pytest.raises(InvalidSettings, match=r"~nobody-9/cache.* DRAFTHEADS_CACHE"):
        cache_folder()


# --- what is in it ---


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_each_part_has_its_files_and_no_others(cache: Path, part: CachePart) -> None:
    found = contents_of(part, cache)
    assert (found.num_files, found.num_bytes) == (1, 5)
    deleted, in_use = clear(part, cache)
    assert (deleted, in_use) == (found, [])
    assert files_below(cache) == sorted(set(FILES.values()) - {FILES[part.name]})
    assert not part.folder or not any((cache / part.folder).iterdir())
    assert clear(part, cache / "none")[0].num_files == 0
    assert not (cache / "none").exists()


def test_the_parts_have_the_names_that_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Path
) -> None:
    """By the functions that name or write them."""
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path))
    assert PART["smollm2-135m"].is_own(place_in_cache().name)
    saved = read_head(world / "medusa")
    assert PART["profiles"].is_own(cached_profile_folder(saved).name)
    for name in ("answers", "bench"):
        assert PART[name].is_own(identity_digest(["anything"]))


# --- what is not deleted ---


def test_files_of_others_stay(cache: Path) -> None:
    """As in a folder that another program uses, too."""
    others = ["answers/mine.txt", "bench/2024/results.csv", "costs/rent.json", "hub/models--a--b/x", "notes.txt"]
    for name in others:
        write(cache / name)
    for part in PARTS:
        clear(part, cache)
    assert files_below(cache) == others


def test_links_are_deleted_and_not_what_they_point_to(cache: Path, tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "elsewhere" / "0123456789abcdef" / "precious")
    (cache / "bench" / "fedcba9876543210").symlink_to(elsewhere.parent)  # a folder
    (cache / "bench" / "0123456789abcdef" / "link").symlink_to(elsewhere)  # a file
    assert contents_of(PART["bench"], cache).num_bytes == 5
    assert clear(PART["bench"], cache)[0].num_files == 3
    assert elsewhere.read_text(encoding="utf-8") == "12345"
    assert list((cache / "bench").iterdir()) == []


def test_what_another_process_has_locked_stays(cache: Path) -> None:
    own, second = (cache / "bench" / name for name in ("0123456789abcdef", "fedcba9876543210"))
    write(second / "x")
    with locked(own, ""):
        deleted, in_use = clear(PART["bench"], cache)
    assert (in_use, deleted.num_files, second.exists()) == ([own], 1, False)
    assert contents_of(PART["bench"], cache).num_files == 1, "the lock does not count"


def test_a_file_that_is_being_written_stays(cache: Path) -> None:
    young = write(cache / "costs" / ".04d6347cd77c26e13234ed0c.json.0a1b2c3d.tmp")
    converting = write(cache / ".smollm2-135m-v1.0a1b2c3d.tmp" / "model.safetensors")
    old = write(cache / "costs" / ".04d6347cd77c26e13234ed0c.json.0a1b2c3e.tmp")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    assert contents_of(PART["costs"], cache).num_files == 2
    for name in ("costs", "smollm2-135m"):
        clear(PART[name], cache)
    assert files_below(cache / "costs") == [young.name]
    assert converting.exists()
    assert not (cache / FILES["smollm2-135m"]).exists()


@pytest.mark.parametrize(
    ("method", "act", "named"),
    [
        ("unlink", lambda cache: clear(PART["costs"], cache), r"04d6347cd77c26e13234ed0c.json: Not permitted"),
        ("iterdir", lambda cache: contents_of(PART["smollm2-135m"], cache), r"cache: Not permitted.* DRAFTHEADS_CACHE"),
    ],
)
def test_an_error_of_the_system_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, method: str, act: Callable[[Path], object], named: str
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(1, "Not permitted")

    monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(StorageError, match=named):
        act(cache)
