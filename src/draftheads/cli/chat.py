"""``draftheads chat``: a conversation on the terminal, or line by line from a pipe.

Standard output gets the answers only. Everything else is written to standard error.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from rich.console import Console
from rich.text import Text

from draftheads.cli.generate import load_engine, no_draft_sentence
from draftheads.cli.options import ChatOptions
from draftheads.cli.progress_display import ProgressDisplay, error_console
from draftheads.cli.show import DRAFTED, quiet_transformers, show_stream, speed_words
from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.engine import Engine
from draftheads.decode.request import Lane
from draftheads.errors import DraftHeadsError, InvalidPrompt, InvalidSettings, no_such
from draftheads.loading import UNTRAINED, engine_on, name_of, resolve, template_of
from draftheads.models.chat_template import effort_variables, thinking_tags
from draftheads.serve.tagged_text import TaggedText
from draftheads.settings import SamplingSettings
from draftheads.utils.counts import counted
from draftheads.utils.files import check_writable, write_atomic
from draftheads.utils.messages import Message

NO_HEAD = "none"  # in place of a head's name
_CHUNK_TOKENS = 8192  # of a prompt that are read between two looks at the keyboard
HELP = {
    "/head NAME": "draft with this head; none: decode plainly",
    "/plain": "switch drafting off, or on again",
    "/retry": "answer the last question again",
    "/system TEXT": "set the system prompt; without TEXT: remove it",
    "/clear": "forget the conversation, but not the system prompt",
    "/save FILE": "write the conversation to a file, as one JSON line",
    "/help": "list these commands",
    "/quit": "end the chat",
}


def run(options: ChatOptions) -> None:
    """Answers what is typed, until the end of the input."""
    quiet_transformers()
    with ProgressDisplay(error_console(), transient=True) as progress:
        engine = load_engine(options, progress, max_batch_size=1)
    chat = Chat(options, engine, is_terminal=sys.stdin.isatty() and sys.stdout.isatty())
    chat.greet()
    for line in _typed_lines() if chat.is_terminal else _piped_lines():
        if not chat.take(line):
            break


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


def _piped_lines() -> Iterator[str]:
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"standard input is not text: {error}") from None


@dataclass
class Conversation:
    """What the user and the model wrote, in turns.

    >>> chat = Conversation(system="Be brief.")
    >>> chat.ask("Why is the sky blue?")
    >>> chat.answer("Because of", finished=False)
    >>> [message["role"] for message in chat.messages]
    ['system', 'user', 'assistant']
    >>> chat.take_back()
    'Why is the sky blue?'
    >>> chat.turns
    []
    """

    system: str = ""  # the system prompt; empty: none
    turns: list[Message] = field(default_factory=list)  # of the user and the assistant
    finished: bool = True  # False if the last answer was cut off

    @property
    def messages(self) -> list[Message]:
        """The system prompt, if there is one, and all turns."""
        return [{"role": "system", "content": self.system}] * bool(self.system) + self.turns

    def copy(self) -> "Conversation":
        """The same, to go on with."""
        return replace(self, turns=list(self.turns))

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str, *, thought: str = "", finished: bool) -> None:
        """Adds what the model wrote; ``finished`` is False if it was cut off."""
        thoughts = {"reasoning_content": thought} if thought else {}
        self.turns.append({"role": "assistant", "content": text, **thoughts})
        self.finished = finished

    def take_back(self) -> str | None:
        """Removes the last question and its answer, if there is one; returns the question, None if there is none."""
        while self.turns:
            message = self.turns.pop()
            if message["role"] == "user":
                self.finished = True
                return str(message["content"])
        return None

    def record(self) -> dict[str, Any]:
        """The chat as one line of a chat file; see :mod:`draftheads.data.records`."""
        return {"messages": self.messages} | ({} if self.finished else {"finished": False})


class Chat:
    """A conversation and the engine that goes on with it.

    Args:
        options: of the command.
        engine: answers; it may draft.
        is_terminal: whether a person types. Then an error or Ctrl-C ends an answer, and not the chat.
    """

    def __init__(self, options: ChatOptions, engine: Engine, *, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self.conversation = Conversation(options.system or "")
        self._options = options
        self._console = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False, style="dim")
        # what heads that read the same layers have read is not read again
        self._core = EngineCore(
            {"plain": Engine(engine.model, max_batch_size=1), "drafting": engine},
            CoreLimits(max_rows=1, chunk_tokens=_CHUNK_TOKENS),
            keeps_answers=True,
        )
        self._head = options.drafting.head or options.drafting.draft_model  # what drafts; None: nothing
        self._is_plain = False  # whether the user has switched drafting off
        effort = options.reasoning_effort
        self._variables = effort_variables(engine.model, effort) if effort else {}
        if self._variables is None:
            raise InvalidSettings(f"--reasoning-effort {effort}: the model's chat template has none; leave it out")
        self._commands: dict[str, Callable[[str], None]] = {
            "head": self._change_head,
            "plain": self._switch,
            "retry": self._retry,
            "system": self._set_system,
            "clear": self._clear,
            "save": self._save,
            "help": self._show_help,
        }

    def greet(self) -> None:
        """On a terminal: what answers, and how to go on."""
        if not self.is_terminal:
            return
        colour = not self._options.plain_text and self._console.color_system is not None and self._head
        legend = Text.assemble("; draft tokens are ", ("green", f"not dim {DRAFTED}")) if colour else ""
        self._note(Text.assemble(f"{self._options.model}, {self._mode()}", legend, ". /help lists the commands."))
        if sentence := no_draft_sentence(self._engine, self._options):
            self._note(sentence)

    def take(self, line: str) -> bool:
        """Runs a command or answers a message; returns whether the chat goes on.

        On a terminal, errors are printed and Ctrl-C stops the answer; elsewhere both are raised.
        """
        # a path, as in "/etc/fstab is gone", is no command
        command = re.fullmatch(r"/(\w*)(?:\s+(.*?))?\s*", line, re.DOTALL)
        if command and command[1] in ("quit", "exit"):
            return False
        try:
            if command:
                self._run(command[1], command[2] or "")
            elif line.strip():
                conversation = self.conversation.copy()
                conversation.ask(line.strip())
                self._answer(conversation)
        except DraftHeadsError as error:
            if not self.is_terminal:
                raise
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
            self._note("\nstopped")
        return True

    def _run(self, name: str, argument: str) -> None:
        if name not in self._commands:
            raise no_such("command", f"/{name}", [word.split()[0] for word in HELP], other_names={})
        if argument and f"/{name}" in HELP:
            raise InvalidSettings(f"/{name} takes nothing after it, and {argument!r} was given")
        self._commands[name](argument)

    def _answer(self, conversation: Conversation) -> None:
        """Answers the last question of a conversation, which becomes the chat's once there is an answer."""
        engine = self._engine
        settings = SamplingSettings(**vars(self._options.settings))
        request = engine.request(conversation.messages, settings, variables=self._variables)
        tags = thinking_tags(engine.model) or ("", "")
        prompt_end = engine.model.tokenizer.decode(request.prompt_ids[-16:]).rstrip()
        if has_begun := bool(tags[0]) and prompt_end.endswith(tags[0]):  # by the prompt
            self._note(tags[0])
        start = time.perf_counter()
        try:
            self._core.add(request, Lane(self._name))
            events, colour = engine.events(self._core), not self._options.plain_text
            if self.is_terminal:
                with self._notes.status(f"reading {counted(len(request.prompt_ids), 'token')}"):
                    first = list(islice(events, 1))
                events = chain(first, events)
            show_stream(events, request, engine.model.tokenizer, self._console, colour=colour)
        except KeyboardInterrupt:
            self._core.clear()
            if not self.is_terminal or not request.text:
                raise
            self._console.print()
        text, thought = request.text, ""
        if tags[0]:
            parts = TaggedText({"thought": tags}, "thought" if has_begun else "text").push(text, is_end=True)
            text, thought = ("".join(part for kind, part in parts if kind == of) for of in ("text", "thought"))
        text = text.lstrip() if thought else text
        conversation.answer(text, thought=thought.strip(), finished=request.finish_reason == "stop")
        self.conversation = conversation
        self._note(speed_words(request, time.perf_counter() - start))

    @property
    def _name(self) -> str:
        return "plain" if self._is_plain or self._head is None else "drafting"

    @property
    def _engine(self) -> Engine:
        return self._core.engines[self._name]

    def _change_head(self, name: str) -> None:
        if not name:
            self._note(self._mode())
            return
        options, target = self._options, self._engine.model
        if name == NO_HEAD:
            self._head = None
        else:
            drafts = resolve(name, name_of(options.model))
            template = template_of(options.load.chat_template, drafts)
            if name not in UNTRAINED and template != target.chat_template:
                raise InvalidSettings(
                    f"{name} was trained with another chat template: start a new chat with --head {name}"
                )
            with ProgressDisplay(error_console(), transient=True) as progress:
                progress.stage(f"loading {name}")
                drafting = replace(options.drafting, head=name, draft_model=None)
                self._core.engines["drafting"] = engine_on(
                    target, drafts, drafting, max_batch_size=1, fast=options.load.fast
                )
            self._head = name
        self._is_plain = False
        self._note(self._mode())

    def _switch(self, _: str) -> None:
        if self._head is None:
            raise InvalidSettings("nothing drafts: /head NAME loads a draft head")
        self._is_plain = not self._is_plain
        self._note(self._mode())

    def _retry(self, _: str) -> None:
        conversation = self.conversation.copy()
        question = conversation.take_back()
        if question is None:
            raise InvalidPrompt("there is no question to answer again")
        conversation.ask(question)
        self._answer(conversation)

    def _set_system(self, text: str) -> None:
        self.conversation.system = text
        self._note("system prompt set" if text else "no system prompt")

    def _clear(self, _: str) -> None:
        self.conversation = Conversation(self.conversation.system)
        self._note("conversation cleared")

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidSettings("/save needs the name of a file, such as /save chat.jsonl")
        if not self.conversation.turns:
            raise InvalidPrompt("there is nothing to save yet")
        path = check_writable(name)
        line = json.dumps(self.conversation.record(), ensure_ascii=False)
        write_atomic(path, f"{line}\n".encode())
        self._note(f"saved {counted(len(self.conversation.messages), 'message')} to {path}")

    def _show_help(self, _: str) -> None:
        self._note("\n".join(f"{words:<14} {text}" for words, text in HELP.items()))
        if self.is_terminal:
            self._note("Ctrl-C stops an answer, Ctrl-D ends the chat.")

    def _mode(self) -> str:
        if self._head is None:
            return "plain decoding"
        return f"plain decoding ({self._head} is off)" if self._is_plain else f"drafting with {self._head}"

    def _note(self, text: str | Text) -> None:
        self._notes.print(text, soft_wrap=True, markup=False)
