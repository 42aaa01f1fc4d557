"""Where results come from, and what they depend on."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from draftheads.errors import InvalidSettings
from draftheads.utils import provenance as module
from draftheads.utils.provenance import (
    as_json_values,
    changes,
    identity_digest,
    provenance,
    require_same,
    saved_json,
)


def test_it_is_json_and_names_command_versions_and_threads() -> None:
    made = provenance(["/somebody/bin/draftheads", "train", "--out", "my heads"])
    assert json.loads(json.dumps(made)) == made
    assert made["command"] == "draftheads train --out 'my heads'"
    by_module = provenance(["/lib/draftheads/__main__.py", "info"])  # python -m draftheads info
    assert by_module["command"] == "draftheads info"
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


def test_another_run_is_refused_with_its_differences() -> None:
    assert changes({"seed": 0}, {"rate": 0.1}) == ["seed was 0 and is None", "rate was None and is 0.1"]
    before = {"seed": 0, "old": 1}
    require_same(before, {"seed": 0}, names=["seed"], problem="", fix="")
    with pytest.raises(InvalidSettings, match=r"^another run: old was 1 and is None. Name it$"):
        require_same(before, {"seed": 0}, problem="another run", fix="Name it")


@pytest.mark.parametrize("damaged", [None, '{"a": ', "", "\x00\x00"])
@pytest.mark.parametrize("value", [{"error": 0.5}, [], {"ids": ((5, 6), (7,))}])
def test_a_saved_result_is_not_computed_again(tmp_path: Path, value: Any, damaged: str | None) -> None:
    """It has the same types the first time and later: JSON has no tuples. A damaged file is replaced."""
    path = tmp_path / "work" / "one.json"
    if damaged is not None:
        path.parent.mkdir()
        path.write_text(damaged)
    found = [saved_json(path, iter([value]).__next__) for _ in range(2)]
    assert found == [json.loads(json.dumps(value))] * 2


def test_runs_that_differ_have_different_digests() -> None:
    assert as_json_values({"betas": (0.9, 0.95), "out": Path("out")}) == {"betas": [0.9, 0.95], "out": "out"}
    identity = {"settings": {"sizes": [1, 2]}, "prompts": [[5, 6], [7]]}
    others: list[Any] = [{**identity, "prompts": [[5, 6, 7]]}, {**identity, "settings": {}}, {**identity, "model": "m"}]
    assert len({identity_digest(one) for one in [identity, *others]}) == 4
    assert identity_digest(identity) == identity_digest({**identity, "settings": {"sizes": (1, 2)}})
