"""Where an artefact comes from: the command, the code and the machine that made it.

Model cards are published, so nothing here adds a name of a user, host or folder.
"""

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from draftheads.utils.counts import counted

_GIT_TIMEOUT_SECONDS = 5.0


def provenance(argv: Sequence[str] | None = None) -> dict[str, str | int | bool | None]:
    """The facts that are needed to make an artefact again, as plain JSON values; ``argv`` is the command.

    ``git_commit`` and ``git_dirty`` are of this package's own source; None where it is not run from a checkout.
    """
    import torch  # noqa: PLC0415 - slow, and `--help` does not need it

    command = list(sys.argv if argv is None else argv)
    commit, dirty = _git_state(Path(__file__).resolve())
    return {
        "command": shlex.join([*(Path(program).name for program in command[:1]), *command[1:]]),
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
    if _git(source, "ls-files", "--error-unmatch", source.name) is None:
        return None, None
    commit = _git(source, "rev-parse", "HEAD")
    status = _git(source, "status", "--porcelain", "--untracked-files=no")
    return (commit, bool(status)) if commit else (None, None)


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
