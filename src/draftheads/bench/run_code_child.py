"""Runs one program within limits: a script of its own process, which imports only the standard library.

It protects against mistakes, and not against code that attacks the machine on purpose.
"""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

STARTED = b"started "
# Python's audit events that are refused, by their beginnings, and those that are refused outside of the folder
_REFUSED = (
    *("socket.", "subprocess.", "os.system", "os.kill", "os.fork", "os.exec", "os.posix_spawn", "os.spawn"),
    *("os.rename", "os.truncate", "os.link", "os.symlink", "os.ch"),  # os.chdir, os.chmod, os.chown
)
_CHANGES = ("os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def run(path: Path, channel: int, seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Runs the program, and then sends back a token from the channel."""
    import resource  # noqa: PLC0415 - the parent imports this module on Windows, too

    allowed = os.path.realpath(path.parent) + os.sep, os.devnull + os.sep

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        is_refused = event.startswith(_REFUSED)
        if event in _CHANGES or (event == "open" and arguments[2] & _WRITES and not isinstance(arguments[0], int)):
            is_refused = not f"{os.path.realpath(os.fsdecode(arguments[0]))}{os.sep}".startswith(allowed)
        if is_refused:
            raise PermissionError(f"{event} {arguments[:1]} is not allowed here")

    for name, value in (("CPU", seconds), ("AS", memory_bytes), ("FSIZE", file_bytes), ("NPROC", 1), ("CORE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    module = sys.modules["answer"] = ModuleType("answer")  # dataclasses look there
    text = path.read_bytes()
    os.write(channel, STARTED)
    sys.addaudithook(refuse)
    exec(compile(text, "answer.py", "exec"), module.__dict__)  # noqa: S102 - what this file is for
    os.write(channel, os.read(channel, 64))
    os._exit(0)


if __name__ == "__main__":
    place, *numbers = sys.argv[1:]
    del sys.argv[1:]
    run(Path(place), *map(int, numbers))
