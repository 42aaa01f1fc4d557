"""A head is found by its name: installed, a folder, or on the Hub; the error lists the installed heads."""

import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest

from draftheads.checkpoints import registry
from draftheads.checkpoints.registry import ZooHead, find_head, zoo_heads
from draftheads.errors import ModelNotFound


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three bundled heads, and folders that are none; the working directory is an empty one beside it."""
    root = tmp_path / "weights"
    for name in ("smollm2-135m/medusa", "smollm2-135m/hydra", "other-1b/medusa"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text("{}")
    (root / "smollm2-135m" / "unfinished").mkdir()
    (root / "config.json").write_text("{}")
    monkeypatch.setattr(registry, "weights_folder", lambda: root)
    monkeypatch.setattr(registry, "data_package_folder", lambda: None)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return root


def test_the_zoo_is_listed_by_base_and_method(zoo: Path) -> None:
    assert zoo_heads() == [
        ZooHead("other-1b", "medusa", zoo / "other-1b" / "medusa"),
        ZooHead("smollm2-135m", "hydra", zoo / "smollm2-135m" / "hydra"),
        ZooHead("smollm2-135m", "medusa", zoo / "smollm2-135m" / "medusa"),
    ]


def test_the_packages_own_zoo_lies_within_the_package() -> None:
    assert registry.weights_folder() == Path(registry.__file__).parents[1] / "zoo" / "weights"
    assert all((head.folder / "config.json").is_file() for head in zoo_heads())


def install_data_package(site: Path, *methods: str) -> Path:
    """A package draftheads_zoo in ``site`` with these heads; returns the folder of the heads."""
    weights = site / "draftheads_zoo" / "weights" / "smollm2-135m"
    for method in methods:
        (weights / method).mkdir(parents=True)
        (weights / method / "config.json").write_text("{}")
    (site / "draftheads_zoo" / "__init__.py").touch()
    return weights


def test_heads_of_the_data_package_are_found(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(registry, "weights_folder", lambda: zoo)
    monkeypatch.syspath_prepend(tmp_path / "site")
    weights = install_data_package(tmp_path / "site", "eagle", "medusa")
    assert find_head("eagle", "smollm2-135m") == weights / "eagle"
    assert find_head("medusa", "smollm2-135m") == zoo / "smollm2-135m" / "medusa"
    assert [head.method for head in zoo_heads() if head.base_name == "smollm2-135m"] == ["eagle", "hydra", "medusa"]


@pytest.mark.usefixtures("zoo")
def test_without_the_data_package_the_error_names_it() -> None:
    for method in registry.DATA_PACKAGE_HEADS:
        with pytest.raises(ModelNotFound, match=rf"{re.escape(repr(method))} for smollm2.* draftheads-zoo"):
            find_head(method, "smollm2-135m")


def test_a_method_is_found_for_its_base_whatever_the_working_directory(zoo: Path) -> None:
    Path("medusa").mkdir()
    assert find_head("medusa", "smollm2-135m") == zoo / "smollm2-135m" / "medusa"
    assert find_head("medusa", "other-1b") == zoo / "other-1b" / "medusa"
    assert find_head("./medusa", "smollm2-135m").resolve() == Path.cwd() / "medusa"
    assert find_head("medusa", "no-heads-1b").resolve() == Path.cwd() / "medusa"


@pytest.mark.usefixtures("zoo")
def test_a_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert find_head(str(tmp_path / "runs" / "mine"), "any") == tmp_path / "runs" / "mine"
    assert find_head("~/runs/mine", "any") == tmp_path / "runs" / "mine"
    monkeypatch.chdir(tmp_path)
    assert find_head("runs/mine", "any") == Path("runs/mine"), "the Hub comes later"
    (tmp_path / "smollm2-135m" / "medusa").mkdir(parents=True)
    assert find_head("smollm2-135m/medusa", "any") == Path("smollm2-135m/medusa"), "so do installed heads of a base"
    with pytest.raises(ModelNotFound, match="no such file or folder: /medusa"):
        find_head("/medusa", "smollm2-135m")


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("telepathy", "smollm2-135m", r"'telepathy': .*installed for smollm2-135m: hydra, medusa$"),
        ("hydar", "smollm2-135m", r"'hydar' \(did you mean hydra\?\)"),
        ("telepathy", "no-heads-1b", "for no-heads-1b; for a tuned copy of its base: other-1b/medusa, smollm"),
        ("hydra", "smollm2-153m", r"for smollm2-153m \(did you mean smollm2-135m\?\)"),
    ],
)
def test_an_unknown_name_lists_what_is_bundled(zoo: Path, name: str, model: str, words: str) -> None:
    with pytest.raises(ModelNotFound, match=words):
        find_head(name, model)
    shutil.rmtree(zoo)
    assert zoo_heads() == []
    with pytest.raises(ModelNotFound, match=f"none is installed for {model}"):
        find_head(name, model)


@pytest.mark.usefixtures("zoo")
@pytest.mark.parametrize("name", ["../head", "/no/such/head", "a/b/../c", "a/b/c/", "owner/", "a b/c"])
def test_a_name_that_is_not_a_hub_id_causes_no_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(ModelNotFound, match=r"Hub|no such file or folder"):
        find_head(name, "smollm2-135m")


@pytest.mark.usefixtures("zoo")
@pytest.mark.parametrize(
    ("name", "repo", "inside"),
    [("owner/a-head_1.0", "owner/a-head_1.0", ""), ("owner/heads/a/b++", "owner/heads", "a/b++")],
)
def test_only_the_files_of_a_head_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, repo: str, inside: str
) -> None:
    (tmp_path / inside).mkdir(parents=True, exist_ok=True)
    download = Mock(return_value=str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_head(name, "smollm2-135m") == tmp_path / inside
    download.assert_called_once()
    assert download.call_args.args == (repo,)
    files = ["README.md", "acceptance.json", "config.json", "model.safetensors"]
    assert sorted(download.call_args.kwargs["allow_patterns"]) == [f"{inside}/{file}".lstrip("/") for file in files]


@pytest.mark.usefixtures("zoo")
def test_a_missing_subfolder_of_a_repository_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"owner/heads .* medusa"):
        find_head("owner/heads/medusa", "smollm2-135m")


@pytest.mark.usefixtures("zoo")
def test_offline_the_error_comes_from_the_hubs_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # as it was read on import
    with pytest.raises(ModelNotFound, match=r"'owner/head': .* \(.+\); installed for"):
        find_head("owner/head", "smollm2-135m")
