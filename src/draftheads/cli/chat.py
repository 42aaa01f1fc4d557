"""``draftheads chat``: a conversation on the terminal, or line by line from a pipe.

Standard output gets the answers only. Everything else is written to standard error.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from rich.console import Console
from rich.text import Text

from draftheads.cli.chat_history import Conversation
from draftheads.cli.generate import load_engine, no_draft_sentence
from draftheads.cli.options.chat import ChatOptions
from draftheads.cli.progress_display import ProgressDisplay, error_console
from draftheads.cli.show import DRAFTED, quiet_transformers, show_stream, speed_words
from draftheads.data.corpus_files import load_corpus
from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.engine import Engine
from draftheads.decode.request import Request, StreamEvent
from draftheads.decode.waiting import Lane
from draftheads.errors import DraftHeadsError, InvalidPrompt, InvalidSettings, no_such
from draftheads.loading import UNTRAINED, engine_on, find_template, name_of
from draftheads.settings import SamplingSettings
from draftheads.utils.counts import counted
from draftheads.utils.files import check_writable, write_atomic

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
        self._head = options.head or options.draft.draft_model  # what drafts; None: nothing
        self._is_plain = False  # whether the user has switched drafting off
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

        Raises:
            DraftHeadsError: it cannot; on a terminal the error is printed, and the chat goes on.
            KeyboardInterrupt: Ctrl-C, where no person types.
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
        self._commands[name](argument)

    def _answer(self, conversation: Conversation) -> None:
        """Answers the last question of a conversation, which becomes the chat's once there is an answer."""
        engine = self._engine
        request = engine.request(conversation.messages, SamplingSettings(**vars(self._options.settings)))
        start = time.perf_counter()
        try:
            show_stream(
                self._events(request),
                request,
                engine.model.tokenizer,
                self._console,
                colour=not self._options.plain_text,
            )
        except KeyboardInterrupt:
            self._core.clear()
            if not self.is_terminal or not request.text:
                raise
            self._console.print()
        conversation.answer(request.text, finished=request.finish_reason == "stop")
        self.conversation = conversation
        self._note(speed_words(request, time.perf_counter() - start))

    @property
    def _engine(self) -> Engine:
        """The one that answers."""
        return self._core.engines[self._name]

    @property
    def _name(self) -> str:
        return "plain" if self._is_plain or self._head is None else "drafting"

    def _events(self, request: Request) -> Iterator[StreamEvent]:
        """Decodes a request."""
        self._core.add(request, Lane(self._name))
        yield from self._engine.events(self._core)

    def _change_head(self, name: str) -> None:
        if not name:
            self._note(self._mode())
            return
        options, target = self._options, self._engine.model
        if name == NO_HEAD:
            self._head = None
        else:
            template = find_template(options.load.chat_template, (name,), options.model)
            if name not in UNTRAINED and template != target.chat_template:
                raise InvalidSettings(
                    f"{name} was trained with another chat template: start a new chat with --head {name}"
                )
            corpus = None if name in UNTRAINED else options.draft.corpus
            with ProgressDisplay(error_console(), transient=True) as progress:
                progress.stage(f"loading {name}")
                index = None
                if corpus is not None:
                    index = load_corpus(corpus, target.tokenizer, vocab_size=target.vocab_size, progress=progress)
                self._core.engines["drafting"] = engine_on(
                    target,
                    name,
                    model=name_of(options.model),
                    tree=options.draft.shape(),
                    profile=None if options.draft.profile == "none" else options.draft.profile,
                    copy=options.draft.copy,
                    corpus=index,
                    max_batch_size=1,
                    fast=options.load.fast,
                )
            self._head = name
        self._is_plain = False
        self._note(self._mode())

    def _switch(self, argument: str) -> None:
        _refuse(argument, "/plain")
        if self._head is None:
            raise InvalidSettings("nothing drafts: /head NAME loads a draft head")
        self._is_plain = not self._is_plain
        self._note(self._mode())

    def _retry(self, argument: str) -> None:
        _refuse(argument, "/retry")
        conversation = self.conversation.copy()
        question = conversation.take_back()
        if question is None:
            raise InvalidPrompt("there is no question to answer again")
        conversation.ask(question)
        self._answer(conversation)

    def _set_system(self, text: str) -> None:
        self.conversation.system = text
        self._note("system prompt set" if text else "no system prompt")

    def _clear(self, argument: str) -> None:
        _refuse(argument, "/clear")
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

    def _show_help(self, argument: str) -> None:
        _refuse(argument, "/help")
        self._note("\n".join(f"{words:<14} {text}" for words, text in HELP.items()))
        if self.is_terminal:
            self._note("Ctrl-C stops an answer, Ctrl-D ends the chat.")

    def _mode(self) -> str:
        if self._head is None:
            return "plain decoding"
        return f"plain decoding ({self._head} is off)" if self._is_plain else f"drafting with {self._head}"

    def _note(self, text: str | Text) -> None:
        self._notes.print(text, soft_wrap=True, markup=False)


def _refuse(argument: str, command: str) -> None:
    """Raises where a command that takes nothing is given something."""
    if argument:
        raise InvalidSettings(f"{command} takes nothing after it, and {argument!r} was given")
