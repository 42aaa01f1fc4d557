"""``draftheads chat``: in a pipe, and on a terminal with a person who types."""

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import draftheads
from cli_world import on_terminal, without_colours
from draftheads import loading
from draftheads.cli.chat import Chat
from draftheads.cli.main import main
from draftheads.cli.options import ChatOptions
from draftheads.data.records import read_chats
from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.errors import InvalidSettings
from draftheads.settings import SamplingOptions
from serve_world import tiny_engines

BASE = ["chat", "model", "--precision", "fp32", "--max-new-tokens", "12"]
GREEN = "\x1b[1;32m"
Typed = Callable[..., tuple[str, str]]


@pytest.fixture
def typed(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Runs a chat on the given lines; what it prints and notes."""

    def run(*lines: str, arguments: tuple[str, ...] = ("--head", "medusa"), code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main([*BASE, *arguments]) == code
        return capsys.readouterr()

    return run


def offline(engine: Engine, *questions: str, system: str = "") -> list[str]:
    """Plain answers, each after all turns before it."""
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answers.append(engine.generate([messages], max_new_tokens=12)[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def speeds_in(notes: str) -> list[float]:
    """Tokens per step of each answer."""
    return [float(number) for number in re.findall(r"([\d.]+) tokens/step", notes)]


def test_thoughts_are_kept_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "template.jinja"
    turns = "{% for m in messages %}{{ m.role }} {{ m.content }};{{ m.reasoning_content }};{% endfor %}"
    path.write_text(turns + "{% if thinking is false %}</think>{% else %}<think>\n{% endif %}")
    engine = tiny_engines(str(path))["tiny:plain"]
    for effort, names in ((None, ("content", "reasoning_content")), ("none", ("reasoning_content", "content"))):
        options = ChatOptions(settings=SamplingOptions(max_new_tokens=8), reasoning_effort=effort)
        chat = Chat(options, engine, is_terminal=False)
        chat.take("the cat")
        chat.take("the mat")
        out, err = capsys.readouterr()
        answers = [message for message in chat.conversation.messages if message["role"] == "assistant"]
        assert [message.get(names[0], "") for message in answers] == ["", ""]
        assert all(message[names[1]].strip() in out for message in answers)
        assert ("<think>" in err) == (effort is None)
    never = tiny_engines("chatml")["tiny:plain"]
    with pytest.raises(InvalidSettings, match="--reasoning-effort high"):
        Chat(ChatOptions(reasoning_effort="high"), never, is_terminal=False)


def printed(*answers: str) -> str:
    return "".join(f"{answer}\n" for answer in answers)


def test_each_answer_follows_all_turns_before_it(typed: Typed, engine: Engine):
    out, err = typed("dead cab", "", "  a dog ", "hello")
    answers = offline(engine, "dead cab", "a dog", "hello")
    assert out == printed(*answers)
    assert answers[1:] != [offline(engine, question)[0] for question in ("a dog", "hello")], "history must matter here"
    counts = err.splitlines()
    assert len(counts) == 3
    assert all(re.fullmatch(r"12 tokens in .* s, .* tokens/s, .* tokens/step.*, cut off at its .*", c) for c in counts)


def test_earlier_turns_are_not_read_again(typed: Typed, engine: Engine, monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []
    passes = Batch.read
    monkeypatch.setattr(Batch, "read", lambda batch, counts: read.extend(counts.values()) or passes(batch, counts))
    out, _ = typed("dead cab", "a dog", "/plain", "/retry", "/head ./hydra", "hello")
    in_chat = list(read)
    first, second, third = offline(engine, "dead cab", "a dog", "hello")
    assert out == printed(first, second, second, third)
    # the model has not read the last token of an answer, and the end of its turn is new; blocks of eight are known
    one, two = 9 + 12 - 1, 9 + 12 + 1 + 6 + 12 - 1
    assert in_chat == [9, len("x\na dog\n") + one % 8, (two - 11) % 8, len("x\nhello\n") + two % 8]


def test_system_clear_and_retry(typed: Typed, engine: Engine):
    lines = ("dead cab", "/clear", "a dog", "/retry", "/system hello", "/retry", "/system", "/retry")
    out, _ = typed(*lines, arguments=("--system", "fog"))
    first, second = offline(engine, "dead cab", system="fog") + offline(engine, "a dog", system="fog")
    third, fourth = offline(engine, "a dog", system="hello") + offline(engine, "a dog")
    assert len({second, third, fourth}) == 3
    assert out == printed(first, second, second, third, fourth)


def test_heads_change_and_drafting_is_switched_off_and_on(
    typed: Typed, engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    loads = []
    whole = loading.load_target
    monkeypatch.setattr(loading, "load_target", lambda *names, **how: loads.append(names) or whole(*names, **how))
    lines = ["a dog", "/plain", "/retry", "/plain", "/retry", "/head ./hydra", "/retry", "/head none", "/retry"]
    out, err = typed(*lines, "/head prompt-lookup", "/retry", "/head")
    assert out == printed(*offline(engine, "a dog") * 6)
    assert len(loads) == 1, "the model is loaded once"
    notes = err.splitlines()
    modes = [note for note in notes if "tokens/s" not in note]
    assert modes == [
        "plain decoding (medusa is off)",
        "drafting with medusa",
        "drafting with ./hydra",
        "plain decoding",
        *["drafting with prompt-lookup"] * 2,
    ]
    speeds = speeds_in(err)
    assert speeds[1] == speeds[4] == 1.0
    assert min(speeds[0], speeds[2], speeds[3]) > 1.0, "the heads were not used"
    assert speeds[0] == speeds[2]


def test_save_writes_a_chat_that_can_be_read(typed: Typed, engine: Engine, here: Path):
    _, err = typed("dead cab", "é", "/save new/chat.jsonl", arguments=("--system", "fog"))
    [record] = read_chats(here / "new" / "chat.jsonl")
    first, second = offline(engine, "dead cab", "é", system="fog")
    assert [(message["role"], message["content"]) for message in record.messages] == [
        ("system", "fog"),
        ("user", "dead cab"),
        ("assistant", first),
        ("user", "é"),
        ("assistant", second),
    ]
    assert not record.finished, "12 tokens are no whole answer"
    assert "saved 5 messages to new/chat.jsonl\n" in err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["/sav x"], r"no command '/sav'; did you mean /save\?"),
        (["/save x"], "there is nothing to save yet"),
        (["/retry"], "there is no question to answer again"),
        (["/head nowhere"], "nowhere"),
        (["/head none", "/plain"], "nothing drafts: /head NAME loads a draft head"),
        (["/clear all"], "/clear takes nothing after it, and 'all' was given"),
        (["ab" * 400], r"the prompt has \d+ tokens"),
        (["a", "/save ."], "cannot save .: it is a folder"),
    ],
)
def test_errors_end_a_chat_in_a_pipe(lines: list[str], words: str, typed: Typed):
    out, err = typed(*lines, "dead cab", code=1)
    assert re.match(rf"error: .*{words}", err.splitlines()[-1])
    assert len(out.splitlines()) == (lines[0] == "a")


def test_a_failed_answer_leaves_the_conversation_as_it_was(here: Path, capsys: pytest.CaptureFixture[str]):
    options = ChatOptions(model="model")
    chat = Chat(options, draftheads.load("model", precision="fp32", max_batch_size=1), is_terminal=True)
    assert chat.take("dead cab")
    before = list(chat.conversation.turns)
    assert [message["role"] for message in before] == ["user", "assistant"]
    too_long = "ab" * 400
    assert all(chat.take(line) for line in (too_long, f"/system {too_long}", "/retry"))
    assert chat.conversation.turns == before
    assert not chat.conversation.finished
    out, err = capsys.readouterr()
    assert err.count("error: the prompt has ") == 2
    assert out == printed(before[1]["content"])


def test_quit_help_and_lines_that_only_look_like_commands(typed: Typed, engine: Engine):
    out, err = typed("/help", "/abc/def", " /head", "/quit", "dead cab")
    assert out == printed(*offline(engine, "/abc/def", "/head"))
    assert all(command in err for command in ("/head NAME", "/plain", "/save FILE", "/quit"))


def test_a_head_with_a_template_of_its_own_is_refused_later(typed: Typed, here: Path, tmp_path: Path):
    head = Path(shutil.copytree(here / "medusa", tmp_path / "head"))
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "chat_template": "{{ messages[0]['content'] }}"}))
    _, err = typed(f"/head {head}", code=1)
    assert f"start a new chat with --head {head}" in err
    typed("a dog", "/head prompt-lookup", "a dog", arguments=("--head", str(head)))


def test_options_that_a_chat_cannot_use(typed: Typed):
    _, err = typed(arguments=("--logprobs", "1"), code=1)
    assert "draftheads generate" in err


def test_input_that_is_not_text_is_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(BASE) == 1
    assert capsys.readouterr().err.startswith("error: standard input is not text")


@pytest.mark.thorough
@pytest.mark.real
def test_a_chat_with_the_real_model_is_the_offline_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lines = ["Name three fruits.\n", "Now three colours.\n", "/plain\n", "/retry\n", "/head medusa\n", "/retry\n"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(lines)))
    options = ["--head", "hydra", "--tree", "8", "--precision", "fp32", "--max-new-tokens", "12"]
    assert main(["chat", "smollm2-135m", *options]) == 0
    out, err = capsys.readouterr()
    plain = draftheads.load("smollm2-135m", precision="fp32")
    first, second = offline(plain, "Name three fruits.", "Now three colours.")
    assert out == printed(first, second, second, second)
    speeds = speeds_in(err)
    assert speeds[2] == 1.0
    assert min(speeds[0], speeds[1], speeds[3]) > 1.0


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.keys, end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "draftheads", *arguments],
            cwd=folder,
            stdin=end,
            stdout=end,
            stderr=end,
            env=on_terminal(),
            start_new_session=True,
            # background jobs of a shell ignore it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
        )
        os.close(end)
        self.seen = ""

    def until(self, words: str, *, seconds: float = 600.0) -> str:
        """Reads until the words come; returns what came before them since the last time."""
        end = time.monotonic() + seconds
        while words not in self.seen:
            ready, _, _ = select.select([self.keys], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {words!r} in {self.seen!r}"
            self.seen += os.read(self.keys, 1 << 16).decode()
        found, _, self.seen = self.seen.partition(words)
        return found

    def write(self, text: str) -> None:
        os.write(self.keys, text.encode())

    def stop(self) -> None:
        """What the terminal does at Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)


@pytest.fixture
def terminal(folder: Path) -> Iterator[Callable[..., Terminal]]:
    started = []

    def start(*arguments: str) -> Terminal:
        started.append(Terminal(folder, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.keys)


def test_a_chat_on_a_terminal(terminal: Callable[..., Terminal], engine: Engine):
    """Colours, line editing, an error that does not end the chat, and Ctrl-D."""
    chat = terminal(*BASE, "--head", "hydra", "--tree", "chain.json")
    assert "/help lists the commands" in chat.until("> ")
    chat.write("dead cax\x7fb\r")
    chat.until("\n")
    answer = chat.until("\n\x1b[2m")  # the count is dim
    [first] = offline(engine, "dead cab")
    assert re.search(r"reading \d+ tokens", answer)
    words = first.split()  # a terminal shows spaces in place of a tab
    assert without_colours(answer).split()[-len(words) :] == words
    assert GREEN in answer
    chat.until("> ")
    chat.write("/retyr\r")
    chat.until("error: no command '/retyr'; did you mean /retry?")
    chat.until("> ")
    chat.stop()
    chat.until("Ctrl-D ends the chat")
    chat.until("> ")
    chat.write("\x04")
    assert chat.process.wait(600) == 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(terminal: Callable[..., Terminal], folder: Path):
    chat = terminal("chat", "model", "--precision", "fp32", "--max-new-tokens", "400", "--head", "hydra")
    chat.until("> ")
    chat.write("a\r")
    chat.until("\r\n")
    while len(chat.seen) < 20:  # the answer runs
        chat.seen += os.read(chat.keys, 1 << 16).decode()
    chat.stop()
    chat.until("tokens/step")
    chat.until("stopped")
    chat.until("> ")
    chat.write("/save stopped.jsonl\r")
    chat.until("saved 2 messages")
    [record] = read_chats(folder / "stopped.jsonl")
    assert 1 <= len(record.messages[1]["content"]) < 400
    assert not record.finished
    chat.until("> ")
    chat.write("/quit\r")
    assert chat.process.wait(600) == 0
