"""``draftheads show-batch`` prints the batch that training reads, with the learned tokens marked."""

import re
import shlex
from html import escape
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from transformers import GenerationConfig

from cli_world import Run
from draftheads.cli.main import main
from draftheads.cli.show import bracketed
from draftheads.cli.train import planned_batch
from draftheads.cli.train_options import ShowBatchOptions
from draftheads.data.texts import EncodedChat, load_texts
from draftheads.models.model import TargetModel
from draftheads.models.pretrained import load_tokenizer
from draftheads.reports.page import Page
from draftheads.reports.record_pages import batch_page
from families import saved_model
from html_pages import check_page
from training_world import (
    EOS,
    KilledError,
    chat,
    chat_model,
    chat_tokenizer,
    counting_chats,
    train_for,
    train_options,
    write_chats,
)

MAX_LENGTH = 24
RECORDS = [
    *counting_chats(30),
    chat("w1", ""),  # its end alone: nothing to guess
    chat("w1 " * 30, "w2"),  # its answer lies behind the cut
    chat("w1", "w2 " * 30),  # cut
    chat("w3", "w4 w5", "w6", "w7"),
]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture(scope="module")
def folder(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that has no weights (``model``), and chats."""
    place = tmp_path_factory.mktemp("show")
    target.model.config.save_pretrained(place / "model")
    GenerationConfig(eos_token_id=EOS).save_pretrained(place / "model")
    target.tokenizer.save_pretrained(str(place / "model"))
    write_chats(place / "chats.jsonl", RECORDS)
    return place


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder is the working directory; no environment variable changes the colours."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    return folder


ARGUMENTS = f"show-batch --model model --data chats.jsonl --max-length {MAX_LENGTH} --batch-tokens 64 --held-out 0.2"


def shown(capsys: pytest.CaptureFixture[str], arguments: str = "") -> str:
    """What the command prints."""
    usual = ARGUMENTS.replace("--data chats.jsonl ", "") if "--data" in arguments else ARGUMENTS
    assert main(shlex.split(f"{usual} {arguments}")) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


# --- the model's tokenizer alone ---


def test_a_tokenizer_is_loaded_without_weights(target: TargetModel, folder: Path) -> None:
    assert not list((folder / "model").glob("*.safetensors"))
    model = load_tokenizer(str(folder / "model"))
    assert model.eos_ids == target.eos_ids == {EOS}
    texts, expected = (load_texts(of, [folder / "chats.jsonl"], max_length=MAX_LENGTH) for of in (model, target))
    assert texts == expected


def test_its_ends_of_text_are_the_models_also_without_a_generation_configuration(tmp_path: Path) -> None:
    saved_model(chat_model(eos_token_id=[EOS, 7]), tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert load_tokenizer(str(tmp_path)).eos_ids == {EOS, 7}


# --- the command ---


def options_of(**changes: Any) -> ShowBatchOptions:
    usual: dict[str, Any] = {"model": "model", "data": (Path("chats.jsonl"),), "max_length": MAX_LENGTH}
    usual |= {"batch_tokens": 64, "held_out": 0.2}
    return ShowBatchOptions(**{**usual, **changes})


def planned(**changes: Any) -> tuple[list[EncodedChat], list[list[int]], dict[str, int]]:
    return planned_batch(load_tokenizer("model"), options_of(**changes))


def page_of(**changes: Any) -> Page:
    return batch_page(chat_tokenizer(), *planned(**changes), settings=vars(options_of(**changes)), provenance={})


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("seed", [0, 1])
def test_batches_are_those_of_training(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    seen: list[Any] = []

    def fit(_learner: Any, _optimizer: Any, _steps: Any, batches: Any, *_: Any, **__: Any) -> None:
        seen.append(batches)
        raise KilledError

    monkeypatch.setattr("draftheads.train.training.fit", fit)
    chosen = train_options(
        tmp_path / "out", None, data=(Path("chats.jsonl"),), max_length=MAX_LENGTH, batch_tokens=64, seed=seed
    )
    with pytest.raises(KilledError):
        train_for(target, chosen)
    (batches,) = seen
    texts, plan, _ = planned(seed=seed)
    assert plan == batches.plan
    assert plan != planned(seed=seed + 7)[1]
    for batch in plan[:3]:
        for i in batch:
            assert texts[i].token_ids == tuple(batches.store.token_ids[i].tolist())
            assert texts[i].loss_mask == tuple(batches.store.loss_masks[i].tolist())


@pytest.mark.usefixtures("here")
def test_a_batch_is_shown_text_by_text_and_in_counts(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--index 5")
    page = page_of(index=5)
    expected = f"{page.verdict}\n{page.note}\n"
    for title, pieces in page.texts:
        expected += f"\n{title}\n{bracketed(pieces)}\n"
    assert out.startswith(expected)
    assert "\nLegend\n⟦learned⟧  ‹special token›  ⟦‹learned special token›⟧  only read" in expected
    assert out.count("⟧\n") == len(page.texts) - 1, "every text ends with what the assistant says"
    rest = out.removeprefix(expected)
    assert all(len(line) <= 80 for line in rest.splitlines())
    assert "\x1b" not in out
    rows = (re.split(r" {2,}", line.strip()) for line in rest.splitlines())
    found = {label: cells for label, *cells in rows if cells}
    assert all(found[label] == [cell for cell in cells if cell] for label, *cells in page.tables[0].rows)


@pytest.mark.usefixtures("here")
def test_every_text_is_trained_on_held_out_or_left_out() -> None:
    texts, batches, numbers = planned()
    trained = {i for indices in batches for i in indices}
    unlearned, short = "left out: no learned token", "left out: no two learned tokens in a row"
    assert (len(RECORDS), numbers[unlearned], numbers["held-out texts"]) == (34, 1, 9)  # a fifth, by a hash of each
    assert len(texts) == 33 == len(trained) + numbers["held-out texts"] + numbers[short]
    assert numbers["texts trained on"] == len(trained)
    # the one text with nothing to guess is held out or left out, by the seed
    assert {planned(seed=seed)[2][short] for seed in range(10)} == {0, 1}
    assert planned(max_length=99)[2][unlearned] == 0


@pytest.mark.usefixtures("here")
def test_colours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = shown(capsys, "--index 2")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    found = Text.from_ansi(shown(capsys, "--index 2"))
    assert "⟦" not in found.plain
    learned = "".join(
        found.plain[span.start : span.end]
        for span in found.spans
        if not isinstance(span.style, str) and span.style.bgcolor is not None
    )
    assert learned == "".join(re.findall(r"⟦(.*?)⟧", plain)).replace("‹", "").replace("›", "")
    monkeypatch.setenv("NO_COLOR", "1")
    without = shown(capsys, "--index 2")
    assert Text.from_ansi(without).plain.splitlines() == plain.splitlines()


@pytest.mark.usefixtures("here")
def test_the_page_is_of_the_same_batch_and_escapes_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    strange, path = tmp_path / "<script>.jsonl", tmp_path / "new" / "batch.html"
    write_chats(strange, [*RECORDS, *[chat("<script> w1", "</pre><script>x</script> w2")] * 3])
    assert shown(capsys, f"--data '{strange}' --html {path}").endswith(f"\nwrote {path}\n")
    page, same = path.read_text(encoding="utf-8"), page_of(data=(strange,))
    check_page(page)
    assert f"<h1>Training batch 0 of {tmp_path}/&lt;script&gt;.jsonl</h1>" in page
    assert all(escape(title) in page for title, _ in same.texts)
    assert all(f"<div>{label}</div></th><td>{here}</td>" in page for label, here, _ in same.tables[0].rows)


# --- what is refused ---


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--index 999", "--index is 999: the run's batches are 0 to "),
        ("--index -1", "--index is -1: must be at least 0"),
        ("--held-out 1", "--held-out is 1.0: must be at least 0 and below 1"),
        ("--max-length 3", "34 chats were left out: no answer within the first 3 tokens (the first is chats.jsonl:1)"),
        ("--model none/none/none", "no such file or folder: none/none/none"),
        ("--html chats.jsonl/page.html", "cannot save chats.jsonl/page.html"),
    ],
)
def test_errors_are_one_line(run: Run, arguments: str, message: str) -> None:
    err = run(shlex.split(f"{ARGUMENTS} {arguments}"), code=1).err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
