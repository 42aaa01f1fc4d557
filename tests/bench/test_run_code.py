"""Code of answers is run with its tests, within limits, and passes only if it comes to its end."""

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftheads.bench import run_code
from draftheads.bench.quality import Item
from draftheads.bench.run_code import PassAt1, program_of
from draftheads.utils.progress import NoProgress

PROMPT = '''from typing import List


def helper(x: int) -> int:
    return x + 1


def add_one(values: List[int]) -> List[int]:
    """Adds one to each."""
'''
TEST = "def check(candidate):\n    assert candidate([1, 2]) == [2, 3]\n"
REFERENCE = {"prompt": PROMPT, "entry_point": "add_one", "test": TEST}
RIGHT = "    return [helper(value) for value in values]\n"


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on machines that allow no namespaces."""
    monkeypatch.setattr(run_code, "_namespaces", tuple)


def passes(answer: str, **settings: Any) -> float | str:
    [found] = PassAt1(**{"seconds": 5.0, **settings})([Item("a", "code", ("?",), (answer,), REFERENCE)], NoProgress())
    return found.values["a"] if found.values else found.problems["a"]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        pytest.param(RIGHT, 100, id="completion"),
        pytest.param(f"{RIGHT}\nprint(1 / 0)\n", 100, id="a completion ends with its function"),
        pytest.param("def add_one(values: List[int]):\n" + RIGHT, 100, id="whole function"),
        pytest.param(f"Here it is:\n```python\ndef add_one(values):\n{RIGHT}```\nEnjoy!", 100, id="block"),
        pytest.param("```\nx = 1\n```\n```python\ndef add_one(values):\n" + RIGHT, 100, id="second block, not closed"),
        pytest.param(f"```python\n{RIGHT}```", 100, id="completion in a block"),
        pytest.param("    return [value for value in values]\n", 0, id="wrong"),
        pytest.param("I cannot do that.", 0, id="no code"),
        pytest.param("", 0, id="empty"),
        pytest.param("    return 'a\ud800'\0\n", 0, id="no text"),
    ],
)
def test_answers(answer: str, value: float):
    assert passes(answer) == value


CHEATS = {
    "exit": "    raise SystemExit(0)\n",
    "os._exit": "    import os\n    os._exit(0)\n",
    "exit before the tests": f"{RIGHT}```\n",
    "reads the input": "    print(input())\n",
    "writes to all channels": (
        "    import os\n    for fd in range(3, 64):\n        try:\n            os.write(fd, b'started passed')\n"
        "        except OSError:\n            pass\n    os._exit(0)\n"
    ),
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS)
def test_a_program_that_ends_before_its_tests_does_not_pass(code: str):
    assert passes(code) == 0


def test_code_that_exits_while_it_is_read_does_not_pass():
    assert passes(f"```python\ndef add_one(values):\n{RIGHT}\nimport sys\nsys.exit(0)\n```") == 0


REFUSED = {
    "network": "socket.socket()",
    "address": "socket.getaddrinfo('localhost', 80)",
    "process": "subprocess.run(['true'])",
    "shell": "os.system('true')",
    "fork": "os.fork()",
    "kill": "os.kill(os.getppid(), 0)",
    "other file": "open(OUTSIDE, 'w')",
    "appended": "open(OUTSIDE, 'a')",
    "by descriptor": "os.open(OUTSIDE, os.O_WRONLY | os.O_CREAT)",
    "removed": "os.remove(OUTSIDE)",
    "removed by another name": "os.remove(os.path.relpath(OUTSIDE))",
    "moved": "os.rename(OUTSIDE, 'here')",
    "another folder": "os.chdir('/')",
    "tree": "__import__('shutil').rmtree(os.path.dirname(OUTSIDE))",
    "memory": "bytearray(2 << 30)",
    "big file": "open('big', 'wb').write(bytes(4 << 20))",
}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("code", REFUSED.values(), ids=REFUSED)
def test_limits(code: str, tmp_path: Path):
    """Each is an error in the program, which it can catch; without the error the program would not pass."""
    outside = tmp_path / "precious.txt"
    outside.write_text("kept")
    program = f"""
import os, socket, subprocess
OUTSIDE = {str(outside)!r}
try:
    {code}
except (OSError, MemoryError) as error:
    failed = True
assert failed
"""
    assert PassAt1(seconds=5.0).passes(program) is True
    assert PassAt1(seconds=5.0).passes(program.replace(code, "None")) is False
    assert outside.read_text() == "kept"


def test_what_is_allowed():
    program = """
import dataclasses, hashlib, math, os, random, re, tempfile
@dataclasses.dataclass
class Point:
    x: "int"
with open("small.txt", "w") as file:
    file.write("text")
assert open("small.txt").read() == "text"
with tempfile.TemporaryFile() as file:
    file.write(b"x")
with tempfile.TemporaryDirectory() as folder:
    open(os.path.join(folder, "inner"), "w").close()
open(os.devnull, "w").close()
os.remove("small.txt")
print(Point(1))
assert set(os.environ) <= {"PATH", "HOME", "TMPDIR", "OPENBLAS_NUM_THREADS", "LC_CTYPE"}, os.environ
assert __name__ != "__main__"
import sys
assert len(sys.argv) == 1
"""
    assert PassAt1().passes(program) is True


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"], ids=["busy", "asleep"])
def test_endless_code_is_ended(code: str):
    start = time.monotonic()
    assert PassAt1(seconds=0.8).passes(code) is False
    assert time.monotonic() - start < 5


def test_processes_of_the_code_are_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """C's fork goes around Python's events. The child would sleep on after its parent, which passes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "import ctypes, time\nif ctypes.CDLL(None).fork() == 0:\n    time.sleep(60)\n"
    for namespaces in (run_code._namespaces, tuple):
        monkeypatch.setattr(run_code, "_namespaces", namespaces)
        assert PassAt1(seconds=5.0).passes(program) is True
        left = [
            process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])
        ]
        _, alive = psutil.wait_procs(left, timeout=60)  # they are killed already, but may not be gone yet
        assert not alive
    assert not list(tmp_path.iterdir())


def test_namespaces_have_no_network():
    """Below Python's events, which refuse sockets everywhere."""
    if run_code._namespaces():
        assert PassAt1().passes("lines = open('/proc/net/dev').readlines()\nassert len(lines) == 3, 'only lo'") is True


def test_a_program_that_cannot_be_started_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_code, "_namespaces", lambda: ("false",))
    assert passes(RIGHT) == "the code could not be started"


def test_a_reference_without_tests_is_a_problem():
    items = [Item("a", "code", ("?",), ("x",), {"prompt": ""}), Item("b", "code", ("?",), ("x",))]
    [found] = PassAt1()(items, NoProgress())
    assert found.problems == {"a": "KeyError: 'entry_point'", "b": "TypeError: 'NoneType' object is not subscriptable"}


def test_names_are_whole():
    """add_one_more is not add_one, and methods are not functions."""
    prompt = "import math\n\ndef add_one(x):\n    '''Adds.'''\n"
    for code in ("def add_one_more(x):\n    return x\n", "class A:\n    def add_one(self): ...\n"):
        assert program_of(f"```\n{code}```", prompt, "add_one") == prompt + code
    assert program_of("```\ndef add_one(x): ...\n```", prompt, "add_one") == "import math\n\ndef add_one(x): ...\n"


def test_namespaces_are_left_out_where_they_are_not_allowed(monkeypatch: pytest.MonkeyPatch):
    for command in (("no-such-command",), ("false",)):
        monkeypatch.setattr(run_code, "_NAMESPACES", command)
        run_code._namespaces.cache_clear()
        assert run_code._namespaces() == ()
    monkeypatch.setattr(run_code, "_NAMESPACES", ("env",))
    run_code._namespaces.cache_clear()
    assert run_code._namespaces() == ("env",)
    run_code._namespaces.cache_clear()
