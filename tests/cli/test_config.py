"""``--config`` and ``--print-config``: a flag goes before the file, the file before the default."""

from pathlib import Path

import pytest

from cli_world import Run
from draftheads.cli import help  # noqa: A004
from draftheads.cli.config import as_yaml, flat, in_order
from draftheads.cli.main import COMMANDS, main, options_of, read_options
from draftheads.train.options import TrainOptions

DATA = ["--data", __file__]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    lines = "method: hydra\nout: ~/heads\nepochs: 7\nlearning_rate: 1e-4\nbetas: [0.9, 0.95]\nresume: true\ntext: null"
    path.write_text(lines, encoding="utf-8")
    return path


def test_flag_before_file_before_recipe_and_default(file: Path):
    options = read_options("train", [f"--config={file}", "--epochs", "9", "--no-resume", *DATA])
    assert (options.method, options.out, options.learning_rate) == ("hydra", Path("~/heads").expanduser(), 1e-4)
    assert (options.betas, options.epochs, options.resume) == ((0.9, 0.95), 9, False)
    assert options.batch_tokens == TrainOptions.batch_tokens
    file.write_text("recipe: medusa-1\nnum_heads: 2\nout: out", encoding="utf-8")
    options = read_options("train", ["--config", str(file), *DATA])
    assert (options.method, options.num_heads, options.lm_head) == ("medusa", 2, "own")


def test_the_model_may_come_first_or_be_in_the_file(tmp_path: Path):
    (tmp_path / "s.yaml").write_text("model: there\nport: 9", encoding="utf-8")
    words = ["--config", str(tmp_path / "s.yaml")]
    assert read_options("serve", words).model == "there"
    assert (read_options("serve", ["here", *words]).model, read_options("serve", words).port) == ("here", 9)


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("train", ["--recipe", "eagle3", "--out", "a b", *DATA, "--head-options", "layers=[2,15,27]"]),
        ("distill", ["--prompts", "a.jsonl", "b.jsonl", "--out", "c.jsonl", "--temperature", "0", "1"]),
        ("serve", ["model", "--head", "medusa", "--kv-gib", "1.5"]),
    ],
)
def test_what_is_printed_is_read_back(command: str, more: list[str], tmp_path: Path, run: Run):
    (tmp_path / "c.yaml").write_text(run([command, *more, "--print-config"]).out, encoding="utf-8")
    options = read_options(command, ["--config", str(tmp_path / "c.yaml")])
    assert options == read_options(command, more)
    assert (tmp_path / "c.yaml").read_text(encoding="utf-8") == as_yaml(options)
    assert len(dict(flat(options))) >= 15


SEVERAL = [
    (command, option.name)
    for command in COMMANDS
    for option in help.options_of(options_of(command)[0])
    if "tuple" in str(option.hint)
]


@pytest.mark.parametrize(("command", "name"), SEVERAL)
def test_an_option_that_is_given_twice_has_all_values(command: str, name: str):
    flag = f"--{name.replace('_', '-')}"
    words = ["a", flag, "1", "2", "--other", f"{flag}=3", "--last=4", f"--{name}", "5"]
    expected = ["a", flag, "1", "2", "3", "5", "--other", "--last=4"]
    assert in_order(options_of(command)[0], words) == expected


def test_values_of_flags_that_are_given_twice_come_in_their_order(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abcde":
        Path(name).touch()
    more = ["--config", str(file), "--text", "a", "--data", "b", "c", "--epochs", "2", "--data=d", "--text", "e"]
    options = read_options("train", more)
    assert options.epochs == 2
    assert (options.data, options.text) == ((Path("b"), Path("c"), Path("d")), (Path("a"), Path("e")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epohs: 3", "no option 'epohs'; did you mean epochs?"),
        ("- 3", "must have lines such as learning_rate: 0.001"),
        ("a: [", "cannot be read: while parsing"),
        (None, "cannot be read: "),
    ],
)
def test_what_cannot_be_read_is_named(text: str | None, message: str, tmp_path: Path, run: Run):
    if text is not None:
        (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    assert f"{tmp_path / 'c.yaml'}: {message}" in run(["train", "--config", str(tmp_path / "c.yaml")], code=1).err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "--config", "run.yaml", "--method", "hydra", "--out", "x", *DATA], "--epochs"),
        (["chat", "./a", "--model", "./b"], "model is ./a and --model is given, too"),
    ],
)
def test_what_is_invalid_is_named(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("epochs: many", encoding="utf-8")
    with pytest.raises(SystemExit):
        main(words)
    assert named in capsys.readouterr().err
