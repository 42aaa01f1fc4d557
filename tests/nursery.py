"""Real processes that run ``draftheads`` commands and can be killed: they start quickly, from one that has imported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

# forks one process per line: only the first one pays for the imports
PROGRAM = """
import json, os, sys
import matplotlib.figure
from draftheads.cli import bench, distill, main
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
print("ready", flush=True)
for line in sys.stdin:
    arguments, folder, shown = json.loads(line)
    process = os.fork()
    if process == 0:
        os.chdir(folder)
        os.dup2(os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        code = 1
        try:
            code = main.main(arguments)
        finally:
            os._exit(code)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


class Nursery:
    """Starts processes of one command, one after the other; what they print is added to a file. A context manager."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.parent = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._line() == "ready"

    def start(self, arguments: list[str], *, folder: Path, shown: Path = Path(os.devnull)) -> int:
        """The process's number; it works in ``folder``."""
        assert self.parent.stdin
        self.parent.stdin.write(json.dumps([[self.command, *arguments], str(folder), str(shown)]) + "\n")
        self.parent.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        """The exit code of the process that was started last; negative where a signal ended it."""
        return int(self._line())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.parent.kill()  # torch takes seconds to say goodbye
        self.parent.communicate(timeout=600)

    def _line(self) -> str:
        assert self.parent.stdout
        return self.parent.stdout.readline().strip()
