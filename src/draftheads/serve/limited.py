"""Work of requests that may never end, in processes that end: grammars are compiled, chat templates are rendered.

As a program, this file is the host of such processes. It needs neither torch nor our own modules. It loads what jobs
need, and forks for each connection. The system keeps the limits of the copy, which does one job after another.
"""

import faulthandler
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from draftheads.decode.grammar import GrammarCompiler

TRIAL_BYTES = 1 << 30  # of memory for a grammar, with those of the tokens, or a chat template
_TEXT = 1 << 26  # characters of a chat template's text: the server needs several times as much for it
T = TypeVar("T")


class TrialFailed(Exception):
    """Raised with the reason if a job has no result."""


class OverLimit(TrialFailed):
    """Raised with the limit if a job exceeds it."""


class Trials:
    """Processes for jobs of requests: for grammars a host for each tokenizer, and one for all chat templates."""

    def __init__(self) -> None:
        self._hosts: dict[GrammarCompiler | None, tuple[subprocess.Popen[bytes], socket.socket]] = {}
        self._starting = Lock()
        self._idle: list[socket.socket] = []  # of chat templates, for the next one: a fork takes milliseconds

    def connect(self, compiler: "GrammarCompiler | None") -> socket.socket:
        """The connection to a new process for grammars of a tokenizer, else for chat templates. It ends with it."""
        own, other = socket.socketpair()
        with other, self._starting, suppress(ConnectionError):  # a host that ends now
            socket.send_fds(self._host(compiler), [b"."], [other.fileno()])
        return own

    def rendered(self, call: dict[str, Any], seconds: float) -> Any:
        """The text of a chat template, or what a ``response_template`` makes of an answer; and the error, if any.

        From a process that may have done others before.
        """
        with self._idle.pop() if self._idle else self.connect(None) as connection:
            result = result_of(connection, call, seconds)
            self._idle.append(connection.dup())
        return result

    def _host(self, compiler: "GrammarCompiler | None") -> socket.socket:
        """The way to the process that forks, which is started if there is none."""
        host = self._hosts.get(compiler)
        if host is None or host[0].poll() is not None:
            if host is not None:
                host[1].close()
            control, other = socket.socketpair()
            with other:  # in a session of its own: Ctrl-C is for the server
                options: dict[str, Any] = {"stdin": other, "stderr": subprocess.DEVNULL, "start_new_session": True}
                process = subprocess.Popen([sys.executable, "-P", __file__], **options)  # noqa: S603
            host = self._hosts[compiler] = process, control
            parts = pickle.dumps((compiler and compiler.parts, TRIAL_BYTES))
            control.sendall(len(parts).to_bytes(8, "big") + parts)
        return host[1]

    def close(self) -> None:
        """Ends the processes, and those that they forked."""
        with self._starting:
            for process, control in self._hosts.values():
                control.close()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._hosts.clear()
        while self._idle:
            self._idle.pop().close()


def result_of(connection: socket.socket, job: Any, seconds: float) -> Any:
    """Whether a grammar compiles, or the text of a chat template, or its error.

    No compiled grammar can be handed over, but what finishes there finishes here.

    Raises:
        OverLimit: a limit was exceeded.
        TrialFailed: there is no result for another reason.
    """
    reason = ""
    with suppress(ConnectionError), connection.makefile("rb") as lines:
        connection.sendall(json.dumps([job, seconds]).encode() + b"\n")
        for line in lines:
            if line.startswith(b"["):  # other lines say why the process ends
                return json.loads(line)[0]
            reason = reason or line.decode(errors="replace").strip()
    if reason.startswith("Timeout"):
        raise OverLimit(f"{seconds:g} s (--schema-seconds)")
    if reason.lower().startswith("memory"):  # of Python, and of Rust, which then aborts
        raise OverLimit(f"{TRIAL_BYTES >> 30} GiB of memory")
    raise TrialFailed(reason or "its process was killed")


def in_thread(function: Callable[[], T]) -> tuple[Thread, "Future[T]"]:
    """Runs a function in a thread that does not hold up the end of the process."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            future.set_exception(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread, future


# --- in the process of trials ---


class _Tokens(SimpleNamespace):
    """A tokenizer as llguidance reads it."""

    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self.split(text.decode())
        return ids


def _grammars(
    tokens: dict[str, Any], vocab_size: int, end_ids: list[int], limits: dict[str, Any]
) -> Callable[..., Any]:
    """Does what the server does with a grammar before its first answer."""
    import llguidance  # noqa: PLC0415 - in the process of trials

    vocabulary = _Tokens(split=lambda _: [], **tokens)
    table = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=end_ids)
    vocabulary.split = table.greedy_tokenize
    compiled = partial(llguidance.LLMatcher, table, log_level=0, limits=llguidance.LLParserLimits(**limits))

    def try_grammar(text: str) -> None:
        with suppress(ValueError):
            matcher = compiled(text)
            trial = matcher.deep_copy()
            for each in (trial, trial, matcher):
                mask = b"" if each.is_error() else each.compute_logit_bias()  # a byte for each token
                each.consume_tokens([i for i, allowed in enumerate(mask) if allowed and i not in end_ids][:1])

    return try_grammar


def _templates() -> Callable[..., Any]:
    """Renders with the module of transformers that its tokenizers use, but without their package, which is large."""
    from importlib.util import find_spec  # noqa: PLC0415 - in the process of trials

    folder = find_spec("transformers").submodule_search_locations[0]  # type: ignore[union-attr,index]
    for name, path in (("transformers", folder), ("transformers.utils", f"{folder}/utils")):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [path]
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

    def parsed(text: str, **call: Any) -> Any:
        from transformers.utils.chat_parsing import ResponseParser  # noqa: PLC0415 - since 5.13

        parser = ResponseParser(**call)
        events = parser.feed(text)
        return *parser.finalize(), events

    def render(call: dict[str, Any]) -> tuple[Any, str | None]:
        try:
            if "conversations" not in call:
                return parsed(**call), None
            text = render_jinja_template(**call)[0][0]
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program of the model's author
            return None, str(error).strip() or type(error).__name__
        if len(text) > _TEXT:
            raise MemoryError
        return text, None

    return render


def _host(server: socket.socket) -> None:
    """Forks for each connection that comes, until the server ends."""
    size = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big")
    parts, num_bytes = pickle.loads(server.recv(size, socket.MSG_WAITALL))  # noqa: S301 - from the server
    thread, ready = in_thread(lambda: _templates() if parts is None else _grammars(*parts))
    thread.join()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing stays of those that ended
    while files := socket.recv_fds(server, 1, 1)[1]:
        if os.fork() == 0:
            server.close()
            os.dup2(files[0], 2)  # for errors that end the process
            try:
                resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
                _work(ready, socket.socket(fileno=files[0]))
            except BaseException as error:  # noqa: BLE001 - the server raises it
                os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
            os._exit(0)
        os.close(files[0])


def _work(ready: "Future[Callable[..., Any]]", request: socket.socket) -> None:
    """Does the jobs that come, until the client or the server has gone."""
    faulthandler.enable(2)
    jobs: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        for line in request.makefile("rb"):
            jobs.put(line)
        os._exit(0)

    in_thread(read)
    while True:
        job, seconds = json.loads(jobs.get())
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # by a thread that needs no lock of Python
        result = json.dumps([ready.result()(job)]).encode()
        faulthandler.cancel_dump_traceback_later()
        request.sendall(result + b"\n")


if __name__ == "__main__":
    _host(socket.socket(fileno=0))
