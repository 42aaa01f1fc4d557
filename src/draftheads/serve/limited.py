"""Work of requests that may never end, and its end: grammars in a process, chat templates in a thread.

As a program, this file is the process in which grammars are tried. It needs neither torch nor our own modules. It has
the tokens of a tokenizer and waits. For each grammar it forks: the system keeps the limits of the copy, and ends it.
"""

import asyncio
import ctypes
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
from threading import Lock, Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from draftheads.decode.grammar import GrammarCompiler

TRIAL_BYTES = 1 << 30  # of memory for a grammar, with those of the tokens
T = TypeVar("T")


class Untried(Exception):
    """Raised while a request is read, if its grammar may take long: with the compiler, the grammar and its field."""


class TookTooLong(BaseException):
    """Not an Exception: Jinja and templates of models handle those."""


class GrammarTrials:
    """Compiles grammars in processes. No result can be handed over, but what finishes there finishes here."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._hosts: dict[GrammarCompiler, tuple[subprocess.Popen[bytes], socket.socket]] = {}
        self._starting = asyncio.Lock()

    async def finishes(self, compiler: "GrammarCompiler", text: str) -> bool:
        """Whether a grammar compiles within the limits. A task that is cancelled ends the trial."""
        async with self._starting:
            control = await asyncio.to_thread(self._host, compiler)
        own, other = socket.socketpair()
        with other:
            socket.send_fds(control, [b"."], [other.fileno()])
        reader, writer = await asyncio.open_connection(sock=own)
        try:
            writer.write(json.dumps(text).encode() + b"\n")
            return bool(await reader.read(1))
        except ConnectionError:
            return False
        finally:
            writer.close()

    def _host(self, compiler: "GrammarCompiler") -> socket.socket:
        """The way to the process of a tokenizer, which is started if there is none."""
        host = self._hosts.get(compiler)
        if host is None or host[0].poll() is not None:
            if host is not None:
                host[1].close()
            control, other = socket.socketpair()
            with other:  # in a session of its own: Ctrl-C is for the server
                options: dict[str, Any] = {"stdin": other, "stderr": subprocess.DEVNULL, "start_new_session": True}
                process = subprocess.Popen([sys.executable, "-P", __file__], **options)  # noqa: S603
            host = self._hosts[compiler] = process, control
            parts = pickle.dumps((*compiler.parts, self._seconds, TRIAL_BYTES))
            control.sendall(len(parts).to_bytes(8, "big") + parts)
        return host[1]

    def close(self) -> None:
        """Ends the processes, and those that they forked."""
        for process, control in self._hosts.values():
            control.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._hosts.clear()


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


def ended_after(seconds: float, function: Callable[[], T]) -> T:
    """The result of code in Python, such as a template. It raises ``TookTooLong`` after so many seconds.

    The interpreter raises the error in the code's thread at the next bytecode, and each round of a loop has some. So a
    loop without end ends. The thread is the code's own: the error cannot come later, in other code.
    """
    ending, running = Lock(), [function]

    def run() -> T:
        try:
            return function()
        finally:
            with ending:
                running.clear()

    thread, future = in_thread(run)
    with suppress(TimeoutError):
        return future.result(seconds)
    with ending:  # the thread waits for it: another cannot have its number yet
        if running and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TookTooLong))
            raise TookTooLong
    return future.result()


class _Tokens(SimpleNamespace):
    """A tokenizer as llguidance reads it."""

    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self.split(text.decode())
        return ids


def _host(server: socket.socket) -> None:
    """Forks for each connection that comes, until the server ends."""
    import llguidance  # noqa: PLC0415 - in the process of trials

    parts = server.recv(int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big"), socket.MSG_WAITALL)
    tokens, vocab_size, end_ids, limits, seconds, num_bytes = pickle.loads(parts)  # noqa: S301 - from the server
    vocabulary = _Tokens(split=lambda _: [], **tokens)
    table = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=end_ids)
    vocabulary.split = table.greedy_tokenize
    compiled = partial(llguidance.LLMatcher, table, log_level=0, limits=llguidance.LLParserLimits(**limits))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing stays of those that ended
    while files := socket.recv_fds(server, 1, 1)[1]:
        if os.fork() == 0:
            try:
                server.close()
                signal.setitimer(signal.ITIMER_REAL, seconds)  # its signal ends the process, wherever it is
                resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
                _try(compiled, socket.socket(fileno=files[0]), end_ids)
            finally:
                os._exit(0)
        os.close(files[0])


def _try(compiled: Callable[[str], Any], request: socket.socket, end_ids: list[int]) -> None:
    """Does what the server does with a grammar before its first answer, and tells the server that it ended."""
    text = json.loads(request.makefile("rb").readline())
    in_thread(lambda: (request.recv(1), os._exit(0)))  # its client or the server has gone
    with suppress(ValueError):
        matcher = compiled(text)
        trial = matcher.deep_copy()
        for each in (trial, trial, matcher):
            mask = b"" if each.is_error() else each.compute_logit_bias()  # a byte for each token
            each.consume_tokens([i for i, allowed in enumerate(mask) if allowed and i not in end_ids][:1])
    request.send(b".")


if __name__ == "__main__":
    _host(socket.socket(fileno=0))
