"""``draftheads chat``: a conversation on the terminal, or line by line from a pipe.

Standard output gets the answers only. Everything else is written to standard error.
"""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

from rich.console import Console

from draftheads.cli.generate import load_engine, no_draft_sentence, piped_lines
from draftheads.cli.options import ChatOptions
from draftheads.cli.show import ProgressDisplay, error_console, quiet_transformers, show_stream, speed_words
from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.engine import Engine
from draftheads.decode.request import Lane
from draftheads.decode.text import begins_thought, read_answer
from draftheads.errors import DraftHeadsError, InvalidPrompt, InvalidSettings, no_such
from draftheads.models.chat_template import effort_variables
from draftheads.settings import SamplingSettings
from draftheads.utils.messages import Message

COMMANDS = {
    "/plain": "switches drafting off, or on again",
    "/retry": "answers the last question again",
    "/clear": "forgets the conversation",
    "/quit": "ends the chat",
}
_CHUNK_TOKENS = 8192  # of a prompt that are read between two looks at the keyboard


def run(options: ChatOptions) -> None:
    """Answers what is typed, until the end of the input. On a terminal, an error or Ctrl-C ends an answer only."""
    quiet_transformers()
    with ProgressDisplay(error_console(), transient=True) as progress:
        engine = load_engine(options, progress, max_batch_size=1)
    chat, is_terminal = Chat(options, engine), sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        commands = ", ".join(f"{name} {what}" for name, what in COMMANDS.items())
        chat.note(f"{options.model}; accepted draft tokens are green. {commands}; Ctrl-C stops an answer.")
        chat.note(no_draft_sentence(engine, options) or "")
    for line in _typed_lines() if is_terminal else piped_lines():
        if line.strip() == "/quit":
            break
        try:
            chat.take(line.strip())
        except (DraftHeadsError, KeyboardInterrupt) as stop:
            if not is_terminal:
                raise
            chat.note("\nstopped" if isinstance(stop, KeyboardInterrupt) else f"error: {stop}")


def _typed_lines() -> Iterator[str]:
    """Lines from a terminal, with line editing where Python has it. Ctrl-C drops a line, Ctrl-D is the end."""
    with suppress(ImportError):  # not on Windows
        import readline  # noqa: F401, PLC0415 - input() uses it from now on
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\nCtrl-D ends the chat", file=sys.stderr)
        except EOFError:
            print()
            return


class Chat:
    """A conversation and the engine that goes on with it."""

    def __init__(self, options: ChatOptions, engine: Engine) -> None:
        self.messages: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
        self._settings = SamplingSettings(**vars(options.sampling))
        self._console = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False, style="dim")
        self._core = EngineCore(  # what was read before is not read again, with drafting or without
            {"plain": Engine(engine.model, max_batch_size=1), "drafting": engine},
            CoreLimits(max_rows=1, chunk_tokens=_CHUNK_TOKENS),
            keeps_answers=True,
        )
        self._way = "drafting"
        effort = options.reasoning_effort
        self._variables = effort_variables(engine.model, effort) if effort else {}
        if self._variables is None:
            raise InvalidSettings(f"--reasoning-effort {effort}: the model's chat template has none; leave it out")

    def note(self, text: str) -> None:
        """Prints something that is no answer."""
        if text:
            self._notes.print(text, soft_wrap=True, markup=False)

    def take(self, line: str) -> None:
        """Runs a command or answers a message."""
        if line == "/plain":
            self._way = "drafting" if self._way == "plain" else "plain"
            self.note(f"{self._way} from now on")
        elif line == "/clear":
            self.messages = [message for message in self.messages if message["role"] == "system"]
        elif line == "/retry":
            asked = [place for place, message in enumerate(self.messages, 1) if message["role"] == "user"]
            if not asked:
                raise InvalidPrompt("there is no question to answer again")
            self._answer(self.messages[: asked[-1]])
        elif re.fullmatch(r"/\w+", line):  # not a path, as in "/etc/fstab is gone"
            raise no_such("command", line, list(COMMANDS))
        elif line:
            self._answer([*self.messages, {"role": "user", "content": line}])

    def _answer(self, messages: list[Message]) -> None:
        """Answers the last of these messages; they become the chat's once there is an answer."""
        engine = self._core.engines[self._way]
        request = engine.request(messages, self._settings, variables=self._variables)
        if tag := begins_thought(engine.model, request.prompt_ids):
            self.note(tag)
        start = time.perf_counter()
        try:
            self._core.add(request, Lane(self._way))
            show_stream(engine.events(self._core), request, engine.model.tokenizer, self._console)
        except KeyboardInterrupt:
            self._core.clear()
            if not request.text:
                raise
            self._console.print()
        parts = read_answer(engine.model, request.prompt_ids, request.text)
        self.messages = [*messages, {"role": "assistant", "content": "", **parts.texts()}]
        self.note(speed_words(request, time.perf_counter() - start))
