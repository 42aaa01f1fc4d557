"""Saving over a head: after a kill, and to a reader at the same time, the folder holds the old head or the new one."""

import os
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from draftheads.checkpoints.checkpoint import load_head, read_head, save_head
from draftheads.models.model import TargetModel
from draftheads.speculation.tree import Tree
from families import tiny_head, tiny_model, tiny_profile

VALUES = {"old": 2.0, "new": 4.0}  # of all weights and in the profile; names, shapes and sizes are the same
TREES = {"old": Tree.chain(2), "new": Tree.from_paths([(0,), (1,)])}


@pytest.fixture(scope="module")
def base() -> TargetModel:
    return tiny_model("llama")


def save(kind: str, folder: Path, base: TargetModel) -> None:
    """A head each of whose four files shows its kind."""
    head = tiny_head("medusa", base, num_heads=2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(VALUES[kind])
    named = TargetModel(base.model, base.tokenizer, kind)
    profile = tiny_profile(TREES[kind], temperatures=[VALUES[kind]] * 2)
    save_head(head, folder, base=named, profile=profile, card=kind)


def kinds_of(folder: Path, base: TargetModel) -> tuple[str, str]:
    """Of the head that each way to read it finds, in files of one kind."""
    saved = read_head(folder)
    assert saved.profile.temperatures == [VALUES[saved.model_id]] * 2
    head = load_head(folder, base)
    (value,) = {float(value) for parameter in head.parameters() for value in parameter.flatten()}
    (kind,) = (kind for kind in VALUES if VALUES[kind] == value)
    assert head.default_shape == TREES[kind]
    return saved.model_id, kind


KILLED = """
import os, signal, sys
from pathlib import Path
from test_head_files import kinds_of, read_head, save, tiny_model

CHANGES = {"open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}
base, folder = tiny_model("llama"), Path(sys.argv[1])

def save_and_be_killed(left):
    def count(event, arguments):
        nonlocal left
        if event in CHANGES and str(folder) in str(arguments[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    save("new", folder, base)

code = None
save("old", folder, base)
(folder / "notes").write_text("mine")
for operation in range(1000):
    if code == 0:
        break
    if (child := os.fork()) == 0:
        save_and_be_killed(operation)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    kind, tensors = kinds_of(folder, base)
    assert read_head(folder).card.strip() == kind == tensors
    assert (folder / "notes").read_text() == "mine"
    print(kind)
    save("old", folder, base)
    assert kinds_of(folder, base) == ("old", "old")
    assert len(os.listdir(folder)) == 5 + len(list(folder.glob(".*.tmp"))), "all is in its place"
"""


def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new_head(tmp_path: Path) -> None:
    program = [sys.executable, "-c", KILLED, str(tmp_path / "head")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    found = run.stdout.split()
    assert found == sorted(found, reverse=True), "the old one up to a moment, and the new one from then on"
    assert found.count("old") > 5
    assert found.count("new") > 3


def test_a_reader_never_sees_files_of_two_heads(base: TargetModel, tmp_path: Path) -> None:
    folder, stop = tmp_path / "head", Event()
    save("old", folder, base)

    def save_in_a_loop() -> None:
        for kind in cycle(("new", "old")):
            if stop.is_set():
                return
            save(kind, folder, base)

    writer = Thread(target=save_in_a_loop)
    writer.start()
    try:
        found = [kind for _ in range(100) for kind in kinds_of(folder, base)]
    finally:
        stop.set()
        writer.join()
    assert set(found) == {"old", "new"}
