"""HumanEval: runs the code of answers with their tests. What the code can do there is in ``run_code_child.py``."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from secrets import token_bytes
from tempfile import TemporaryDirectory

from draftheads.bench import run_code_child
from draftheads.bench.quality import Item, Measure, Outcome

_BLOCK = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_COMPLETION_ENDS = re.compile(r"\n(?=class |def |#|if |print\(|```)")  # as in the paper of HumanEval
# no network, and all processes end with the first one
_NAMESPACES = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True)
class PassAt1(Measure):
    """Whether the code of a last answer passes its tests: 100 or 0. It needs Linux or macOS."""

    seconds: float = 10.0  # of wall-clock time for each answer
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20  # of the largest file
    parallel: int = 2
    name = "pass@1"

    def score(self, item: Item) -> Outcome:  # noqa: D102 - as in the base
        prompt, entry_point, test = (item.reference[name] for name in ("prompt", "entry_point", "test"))
        program = program_of(item.answers[-1], prompt, entry_point)
        passed = self.passes(f"{program}\n\n{test}\n\ncheck({entry_point})\n")
        return "the code could not be started" if passed is None else (100.0 * passed,)

    def passes(self, program: str) -> bool | None:
        """Whether a program runs to its end, within the limits; None if it could not be started.

        The program has reached its end if its process returns a random token, which it reads only then.
        """
        token = token_bytes(16)
        ours, theirs = socket.socketpair()
        with ours, theirs, TemporaryDirectory(prefix="draftheads-code-", ignore_cleanup_errors=True) as folder:
            path = Path(folder, "program.py")
            path.write_text(program, encoding="utf-8", errors="replace")
            numbers = (theirs.fileno(), int(self.seconds) + 1, self.memory_bytes, self.file_bytes)
            child = (sys.executable, "-I", "-B", run_code_child.__file__, str(path), *map(str, numbers))
            ours.sendall(token)
            process = subprocess.Popen(  # noqa: S603 - no shell
                (*_namespaces(), *child),
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(self.seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what it started
                process.wait()
            with suppress(BlockingIOError):
                return ours.recv(1024, socket.MSG_DONTWAIT) == run_code_child.STARTED + token
        return None


@cache
def _namespaces() -> tuple[str, ...]:
    """The beginning of a command that is run in namespaces of its own; empty where that is not allowed."""
    with suppress(OSError, subprocess.CalledProcessError):
        subprocess.run((*_NAMESPACES, "true"), check=True, capture_output=True)  # noqa: S603 - fixed words
        return _NAMESPACES
    return ()


def program_of(answer: str, prompt: str, entry_point: str) -> str:
    r"""The program of an answer: the first code block that defines the function, else what completes the prompt.

    >>> program_of("Sure:\n```python\ndef two():\n    return 2\n```\nDone.", "import math\n\ndef two():\n", "two")
    'import math\n\ndef two():\n    return 2\n'
    """
    blocks = [str(block) for block in _BLOCK.findall(answer)]
    defines = re.compile(rf"^(?:async )?def {re.escape(entry_point)}\b", re.MULTILINE)
    for code in blocks or [answer]:
        if defines.search(code):
            return defines.split(prompt)[0] + code  # imports and other functions of the prompt stay
    return prompt + (blocks[0] if blocks else _COMPLETION_ENDS.split(answer)[0])
