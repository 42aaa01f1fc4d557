"""A head as a repository: its files, the code that transformers runs from it, and an upload to no real Hub."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from transformers import TextIteratorStreamer, dynamic_module_utils

from cli_world import letters_tokenizer
from draftheads.checkpoints.checkpoint import read_head, save_head
from draftheads.cli.main import main
from draftheads.decode.engine import Engine
from draftheads.errors import CheckpointCorrupt, EndpointError, InvalidSettings, ModelNotFound, StorageError
from draftheads.interop import hub
from draftheads.interop.hub import push_head, write_repository
from draftheads.interop.transformers import _of_head
from families import TREES, tiny_head, tiny_model, tiny_profile

REPO = "someone/a-head"
FILES = {
    *("README.md", "acceptance.json", "config.json", "model.safetensors"),
    *("custom_generate/generate.py", "custom_generate/requirements.txt"),
}


@pytest.fixture(autouse=True)
def _costs(cheap_nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model, in a folder with its tokenizer, and a head for it."""
    folder = tmp_path_factory.mktemp("hub")
    base = replace(tiny_model("llama"), tokenizer=letters_tokenizer(), model_id="someone/tiny-llama")
    base.model.save_pretrained(folder / "model")
    letters_tokenizer().save_pretrained(str(folder / "model"))
    base.model.config._name_or_path = str(folder / "model")
    profile = tiny_profile(TREES["ragged"])
    head = tiny_head("hydra", base)
    save_head(head, folder / "head", base=base, dtype=torch.float32, profile=profile, card="# My head")
    return base.model, folder / "head"


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# --- the folder ---


def test_the_folder_has_the_head_and_the_code(world: tuple[Any, Path], tmp_path: Path) -> None:
    folder = write_repository(world[1], tmp_path / "repo", repository=REPO)
    assert files_in(folder) == FILES
    assert read_head(folder).profile == read_head(world[1]).profile
    for name in ("config.json", "model.safetensors", "acceptance.json"):
        assert (folder / name).read_bytes() == (world[1] / name).read_bytes()
    requirement = (folder / "custom_generate/requirements.txt").read_text()
    assert requirement.startswith("draftheads>=0.")
    assert f'HEAD = "{REPO}"' in (folder / "custom_generate/generate.py").read_text()


def test_the_card_has_the_tag_and_names_the_base_model(world: tuple[Any, Path], tmp_path: Path) -> None:
    card = ModelCard((write_repository(world[1], tmp_path / "repo", repository=REPO) / "README.md").read_text())
    assert card.data.tags == ["custom_generate", "draftheads", "speculative-decoding", "hydra"]
    assert card.data.base_model == "someone/tiny-llama"
    assert card.data.library_name == "draftheads"
    assert card.text.strip().startswith("# My head\n\n## With transformers")
    assert f'custom_generate="{REPO}", trust_remote_code=True' in card.text


def test_a_card_keeps_its_own_metadata_and_is_not_extended_twice(world: tuple[Any, Path], tmp_path: Path) -> None:
    first = write_repository(world[1], tmp_path / "first", repository=REPO)
    text = (first / "README.md").read_text().replace("tags:\n", "license: mit\ntags:\n- mine\n")
    (first / "README.md").write_text(text)
    second = write_repository(first, tmp_path / "second", repository=REPO)
    card = ModelCard((second / "README.md").read_text())
    assert card.data.license == "mit"
    assert card.data.tags == ["mine", "custom_generate", "draftheads", "speculative-decoding", "hydra"]
    assert card.text.count("## With transformers") == 1
    (first / "README.md").write_text("---\ntags: [a\n---\n# broken\n")
    with pytest.raises(CheckpointCorrupt, match=r"README.md: "):
        write_repository(first, tmp_path / "third", repository=REPO)
    assert not (tmp_path / "third").exists()


def test_a_folder_of_this_machine_is_no_base_model(world: tuple[Any, Path], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "acceptance.json"):
        (tmp_path / name).write_bytes((world[1] / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["base"]["model_id"] = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = write_repository(tmp_path, tmp_path / "repo", repository=REPO)
    assert ModelCard((folder / "README.md").read_text()).data.base_model is None


def test_what_cannot_be_written_is_an_error(world: tuple[Any, Path], tmp_path: Path) -> None:
    for name in ("a-head", "someone/", "https://huggingface.co/someone/a-head", ""):
        with pytest.raises(InvalidSettings, match=r"it must be an id on the Hugging Face Hub: owner/name"):
            write_repository(world[1], tmp_path / "repo", repository=name)
    with pytest.raises(ModelNotFound, match="nowhere"):
        write_repository(tmp_path / "nowhere", tmp_path / "repo", repository=REPO)
    (tmp_path / "repo").mkdir()
    with pytest.raises(StorageError, match="it already exists"):
        write_repository(world[1], tmp_path / "repo", repository=REPO)


# --- transformers decodes from the folder ---


@pytest.fixture
def repository(world: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The folder as transformers loads it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    _of_head.cache_clear()
    yield str(write_repository(world[1], tmp_path / "repo", repository=REPO))
    _of_head.cache_clear()


def test_generate_decodes_with_the_head_of_the_folder(
    world: tuple[Any, Path], repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = world
    rows: list[list[int]] = []
    batch = Engine.batch
    monkeypatch.setattr(Engine, "batch", lambda self, **options: rows.append([1]) or batch(self, **options))
    inputs = letters_tokenizer()(["a dog", "hello"], padding=True, padding_side="left", return_tensors="pt")
    options = {**inputs, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.2}
    expected = model.generate(**options)
    for _ in range(2):
        found = model.generate(**options, custom_generate=repository, trust_remote_code=True)
        assert torch.equal(found, expected)
    assert len(rows) == 2
    assert _of_head.cache_info().misses == 1


def test_the_folder_takes_stop_strings_and_a_streamer(world: tuple[Any, Path], repository: str) -> None:
    model, _ = world
    tokenizer = letters_tokenizer()
    inputs = tokenizer(["hello"], return_tensors="pt")
    options = {**inputs, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "tokenizer": tokenizer}
    whole = tokenizer.decode(model.generate(**options)[0, 5:])
    options["stop_strings"] = [whole[12:14]]
    expected = model.generate(**options)
    assert expected.shape[1] < 5 + 30
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    found = model.generate(**options, streamer=streamer, custom_generate=repository, trust_remote_code=True)
    assert torch.equal(found, expected)
    assert "".join(streamer) == tokenizer.decode(expected[0, 5:])


# --- the upload ---


class FakeHub:
    """Takes an upload, or fails."""

    def __init__(self, *, error: Exception | None = None, is_private: bool = True) -> None:
        self.error, self.is_private = error, is_private
        self.made: list[tuple[str, bool]] = []
        self.uploaded: dict[str, set[str]] = {}

    def __call__(self) -> "FakeHub":
        return self

    def create_repo(self, repository: str, *, private: bool, exist_ok: bool) -> str:
        assert exist_ok
        if self.error is not None:
            raise self.error
        self.made.append((repository, private))
        return f"https://huggingface.co/{repository}"

    def model_info(self, repository: str) -> Any:
        return SimpleNamespace(private=self.is_private)

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        assert commit_message
        self.uploaded[repo_id] = files_in(folder_path)


def refusal(status: int) -> HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"{status} from the Hub\nwith details", response=response)


def test_a_head_is_uploaded_with_its_code(world: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", fake := FakeHub())
    assert push_head(world[1], REPO) == f"https://huggingface.co/{REPO}"
    assert push_head(world[1], "someone/secret", private=True).endswith("/secret")
    assert fake.made == [(REPO, False), ("someone/secret", True)]
    assert fake.uploaded == {REPO: FILES, "someone/secret": FILES}


def test_nothing_private_goes_to_a_public_repository(world: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", fake := FakeHub(is_private=False))
    with pytest.raises(InvalidSettings, match=f"{REPO} is there and public, and private was asked for: nothing"):
        push_head(world[1], REPO, private=True)
    assert not fake.uploaded
    push_head(world[1], REPO)
    assert fake.uploaded


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalTokenNotFoundError("Token is required\nmore"), "there is no valid login .*: run `hf auth login`, or set"),
        (refusal(401), "there is no valid login for the Hugging Face Hub"),
        (refusal(403), "the login for the Hugging Face Hub may not write there"),
        (refusal(404), "the login for the Hugging Face Hub may not write there"),
        (refusal(500), r"cannot be reached or refused it \(500 from the Hub\): try again"),
        (ConnectionError("no route"), r"cannot be reached or refused it \(no route\): try again"),
        (OfflineModeIsEnabled("offline"), r"cannot be reached or refused it \(offline\): try again"),
    ],
)
def test_a_hub_that_does_not_take_it_is_one_sentence(
    world: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    monkeypatch.setattr(hub, "HfApi", FakeHub(error=error))
    with pytest.raises(EndpointError, match=f"^{REPO} was not uploaded: .*{message}") as found:
        push_head(world[1], REPO)
    assert "\n" not in str(found.value)


# --- the command ---


def test_the_command_uploads(
    world: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "HfApi", fake := FakeHub())
    assert main(["push", str(world[1]), REPO, "--private"]) == 0
    address, usage = capsys.readouterr().out.splitlines()
    assert address == f"uploaded to https://huggingface.co/{REPO}"
    assert usage == f'model.generate(**inputs, custom_generate="{REPO}", trust_remote_code=True)'
    assert fake.made == [(REPO, True)]
    fake.error = LocalTokenNotFoundError("no")
    assert main(["push", str(world[1]), REPO]) == 1
    assert capsys.readouterr().err.startswith(f"error: {REPO} was not uploaded: there is no valid login")


def test_the_command_writes_a_folder_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a head that is installed."""
    monkeypatch.setattr(hub, "HfApi", None)
    monkeypatch.chdir(tmp_path)
    assert main(["push", "medusa", REPO, "--to-folder", "repo"]) == 0
    saved, usage = capsys.readouterr().out.splitlines()
    assert saved == "saved in repo; nothing was uploaded"
    assert usage == 'model.generate(**inputs, custom_generate="repo", trust_remote_code=True)'
    assert files_in(tmp_path / "repo") == FILES
    card = ModelCard((tmp_path / "repo" / "README.md").read_text())
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
