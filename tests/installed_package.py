"""A package of packages/ as if it were installed, so that its commands are found."""

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftheads.cli.main import all_commands


@contextmanager
def installed(package: Path, place: Path) -> Iterator[None]:
    """Writes the package's entry points to a folder that is in Python's path, as an installation would."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = place / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    sys.path.insert(0, str(place))
    all_commands.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(place))
        all_commands.cache_clear()
