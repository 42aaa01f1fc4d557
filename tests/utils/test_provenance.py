import json
import subprocess
from pathlib import Path

import torch

from draftheads.utils import provenance as module
from draftheads.utils.provenance import provenance


def test_it_is_json_and_names_command_versions_and_threads() -> None:
    made = provenance(["/somebody/bin/draftheads", "train", "--out", "my heads"])
    assert json.loads(json.dumps(made)) == made
    assert made["command"] == "draftheads train --out 'my heads'"
    assert made["torch"] == torch.__version__
    assert made["threads"] == torch.get_num_threads()
    assert str(made["time"]).endswith("+00:00")


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_git_state_follows_the_checkout_that_tracks_the_source(tmp_path: Path) -> None:
    source = tmp_path / "code.py"
    source.write_text("1\n")
    assert module._git_state(source) == (None, None)
    _git(tmp_path, "init")
    assert module._git_state(source) == (None, None)  # in a repository, but not of it
    _git(tmp_path, "add", "code.py")
    assert module._git_state(source) == (None, None)  # no commit yet
    _git(tmp_path, "commit", "-m", "one")
    (tmp_path / "notes").touch()  # of no matter
    commit, dirty = module._git_state(source)
    assert commit is not None
    assert (len(commit), dirty) == (40, False)
    source.write_text("2\n")
    assert module._git_state(source) == (commit, True)
