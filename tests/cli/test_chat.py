"""``draftheads chat``: in a pipe, and on a terminal with a person who types."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import draftheads
from cli_world import conversation, on_terminal, without_colours
from draftheads.cli.chat import Chat
from draftheads.cli.main import main
from draftheads.cli.options import ChatOptions
from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.errors import InvalidPrompt, InvalidSettings
from draftheads.settings import SamplingOptions
from serve_world import tiny_engines

BASE = ["chat", "model", "--precision", "fp32", "--max-new-tokens", "12"]
GREEN = "\x1b[1;32m"
Typed = Callable[..., tuple[str, str]]


@pytest.fixture
def typed(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Runs a chat on the given lines; what it prints and notes."""

    def run(*lines: str, arguments: tuple[str, ...] = ("--head", "medusa"), code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(printed(*lines)))
        assert main([*BASE, *arguments]) == code
        return capsys.readouterr()

    return run


def printed(*answers: str) -> str:
    return "".join(f"{answer}\n" for answer in answers)


def offline(engine: Engine, *questions: str, system: str = "") -> list[str]:
    return [result.text for result in conversation(engine, *questions, system=system)]


def test_thoughts_are_kept_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "template.jinja"
    turns = "{% for m in messages %}{{ m.role }} {{ m.content }};{{ m.reasoning_content }};{% endfor %}"
    path.write_text(turns + "{% if thinking is false %}</think>{% else %}<think>\n{% endif %}")
    engine = tiny_engines(str(path))["tiny:plain"]
    for effort, names in ((None, ("content", "reasoning_content")), ("none", ("reasoning_content", "content"))):
        chat = Chat(ChatOptions(sampling=SamplingOptions(max_new_tokens=8), reasoning_effort=effort), engine)
        chat.take("the cat")
        chat.take("the mat")
        out, err = capsys.readouterr()
        answers = [message for message in chat.messages if message["role"] == "assistant"]
        assert [message.get(names[0], "") for message in answers] == ["", ""]
        assert all(message[names[1]].strip() in out for message in answers)
        assert ("<think>" in err) == (effort is None)
    with pytest.raises(InvalidSettings, match="--reasoning-effort high"):
        Chat(ChatOptions(reasoning_effort="high"), tiny_engines("chatml")["tiny:plain"])


def test_each_answer_follows_all_turns_before_it(typed: Typed, engine: Engine):
    out, err = typed("dead cab", "", "  a dog ", "/abc/def", "/quit", "hello")
    answers = offline(engine, "dead cab", "a dog", "/abc/def")
    assert out == printed(*answers)
    assert answers[1] != offline(engine, "a dog")[0], "history must matter here"
    counts = err.splitlines()
    assert len(counts) == 3
    assert all(re.fullmatch(r"12 tokens in .* s, .* tokens/s, .* tokens/step.*, cut off at its .*", c) for c in counts)


def test_earlier_turns_are_not_read_again(typed: Typed, engine: Engine, monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []
    passes = Batch.read
    monkeypatch.setattr(Batch, "read", lambda batch, counts: read.extend(counts.values()) or passes(batch, counts))
    out, _ = typed("dead cab", "a dog", "/plain", "/retry")
    in_chat = list(read)
    first, second = offline(engine, "dead cab", "a dog")
    assert out == printed(first, second, second)
    # the model has not read the last token of an answer, and the end of its turn is new; blocks of eight are known
    one, two = 9 + 12 - 1, 9 + 12 + 1 + 6 + 12 - 1
    assert in_chat == [9, len("x\na dog\n") + one % 8, (two - 11) % 8]


def test_clear_retry_and_plain(typed: Typed, engine: Engine):
    lines = ("dead cab", "/clear", "a dog", "/retry", "/plain", "/retry", "/plain", "/retry")
    out, err = typed(*lines, arguments=("--system", "fog", "--head", "medusa"))
    first, second = offline(engine, "dead cab", system="fog") + offline(engine, "a dog", system="fog")
    assert out == printed(first, *[second] * 4)
    speeds = [float(number) for number in re.findall(r"([\d.]+) tokens/step", err)]
    assert speeds[3] == 1.0
    assert speeds[1] == speeds[4] > 1.0, "the head was not used"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["/retyr x"], None),
        (["/retyr"], r"no command '/retyr'; did you mean /retry\?"),
        (["ab" * 400], r"the prompt has \d+ tokens"),
        (["a", "/clear", "/retry"], "there is no question to answer again"),
    ],
)
def test_errors_end_a_chat_in_a_pipe(lines: list[str], words: str | None, typed: Typed):
    _, err = typed(*lines, "dead cab", code=int(words is not None))
    assert words is None or re.match(rf"error: .*{words}", err.splitlines()[-1])


def test_a_failed_answer_leaves_the_conversation_as_it_was(here: Path):
    chat = Chat(ChatOptions(model="model"), draftheads.load("model", precision="fp32", max_batch_size=1))
    chat.take("dead cab")
    before = list(chat.messages)
    with pytest.raises(InvalidPrompt):
        chat.take("ab" * 400)
    assert chat.messages == before
    assert [message["role"] for message in before] == ["user", "assistant"]


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
        assert self.comes(words, seconds), f"no {words!r} in {self.seen!r}"
        found, _, self.seen = self.seen.partition(words)
        return found

    def comes(self, words: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while words not in self.seen:
            ready, _, _ = select.select([self.keys], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return False
            self.seen += os.read(self.keys, 1 << 16).decode()
        return True

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
    """Colours, line editing, an error and Ctrl-C, which do not end the chat, and Ctrl-D."""
    chat = terminal("chat", "model", "--precision", "fp32", "--max-new-tokens", "4000", "--head", "hydra")
    assert "/retry answers the last question again" in chat.until("> ")
    chat.write("dead cax\x7fb\r")
    chat.until("\r\n")
    while len(chat.seen) < 60:  # the answer runs
        chat.seen += os.read(chat.keys, 1 << 16).decode()
    chat.stop()
    answer = chat.until("tokens/step")
    [first] = offline(engine, "dead cab")
    words = first.split()[:2]  # a terminal shows spaces in place of a tab
    assert without_colours(answer).split()[: len(words)] == words
    assert GREEN in answer
    chat.until("stopped")
    chat.until("> ")
    chat.write("/retyr\r")
    chat.until("error: no command '/retyr'; did you mean /retry?")
    chat.until("> ")
    for _ in range(60):  # readline overlooks a signal that comes after its prompt and before it waits for keys
        chat.stop()
        if chat.comes("Ctrl-D ends the chat", 10.0):
            break
    chat.until("Ctrl-D ends the chat")
    chat.until("> ")
    chat.write("\x04")
    assert chat.process.wait(600) == 0
