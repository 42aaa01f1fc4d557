"""Where an artefact comes from: the command, the code and the machine that made it; and what a result depends on.

A run that resumes or reuses results must depend on the same. Each result of long work is saved in a JSON file of its
own, so that a run that was stopped or killed continues. The digest of all that a run's results depend on names their
folder, so that another run has another folder.

Model cards are published, so nothing here adds a name of a user, host or folder.
"""

import hashlib
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from draftheads.errors import InvalidSettings
from draftheads.utils.counts import counted
from draftheads.utils.files import write_atomic

_GIT_TIMEOUT_SECONDS = 5.0


def provenance(argv: Sequence[str] | None = None) -> dict[str, str | int | bool | None]:
    """The facts that are needed to make an artefact again, as plain JSON values; ``argv`` is the command.

    ``git_commit`` and ``git_dirty`` are of this package's own source; None where it is not run from a checkout.
    """
    import torch  # noqa: PLC0415 - slow, and `--help` does not need it

    command = list(sys.argv if argv is None else argv)
    program = [path.parent.name if path.name == "__main__.py" else path.name for path in map(Path, command[:1])]
    commit, dirty = _git_state(Path(__file__).resolve())
    return {
        "command": shlex.join([*program, *command[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": commit,
        "git_dirty": dirty,
        "draftheads": installed_version("draftheads"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": installed_version("transformers"),
        "platform": platform.platform(),
        "processor": processor(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),  # within one operation
    }


def machine_in_words(facts: Mapping[str, Any]) -> str:
    """The accelerator, or the processor with its threads; older records can lack some.

    >>> machine_in_words({"device": "cpu", "processor": "A CPU", "threads": 2})
    'A CPU, 2 threads'
    """
    if (device := facts.get("device", "cpu")) != "cpu":
        return str(device)
    threads = counted(facts["threads"], "thread") if "threads" in facts else None
    return ", ".join(filter(None, [facts.get("processor"), threads]))


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state(source: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout that tracks ``source``, and whether files in it have changed since."""
    # a package that is installed inside another repository is not part of that repository
    is_tracked = _git(source, "ls-files", "--error-unmatch", source.name) is not None
    commit = _git(source, "rev-parse", "HEAD") if is_tracked else None
    return commit, bool(_git(source, "status", "--porcelain", "--untracked-files=no")) if commit else None


def _git(source: Path, *arguments: str) -> str | None:
    """The output of git in the folder of ``source``; None if git is missing or fails."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed words, no shell
            ["git", *arguments],  # noqa: S607 - the user's git, from their PATH
            cwd=source.parent,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def processor() -> str:
    """The name of the processor; its architecture if the system does not give the name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def as_json_values(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as they are read back from a file: tuples become lists, paths become text."""
    values: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return values


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, names: Collection[str] | None = None) -> list[str]:
    """Differences for a message, one by one; of these names, or of all that either has.

    >>> changes({"seed": 0, "epochs": 2}, {"seed": 1, "epochs": 2})
    ['seed was 0 and is 1']
    """
    compared = {**before, **now} if names is None else names
    return [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in compared
        if before.get(name) != now.get(name)
    ]


def require_same(
    before: Mapping[str, Any], now: Mapping[str, Any], *, problem: str, fix: str, names: Collection[str] | None = None
) -> None:
    """Raises :class:`InvalidSettings` with the :func:`changes` between ``problem`` and ``fix``, if there are any."""
    if differences := changes(before, now, names=names):
        raise InvalidSettings(f"{problem}: {', '.join(differences)}. {fix}")


def identity_digest(identity: Any) -> str:
    """16 hexadecimal digits for JSON values.

    >>> identity_digest({"prompts": [[5, 6]]})
    '83e043214dc2ced8'
    """
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def saved_json(path: Path, find: Callable[[], Any]) -> Any:
    """The JSON value in a file. Where it is missing or damaged, ``find`` is called and its result is saved first."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    found = json.dumps(find())
    write_atomic(path, found.encode())
    return json.loads(found)  # JSON's own types (lists, not tuples), as the next time
