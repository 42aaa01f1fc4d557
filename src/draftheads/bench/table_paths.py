"""Where the papers' tables are, told without reading them."""

from pathlib import Path

from draftheads.errors import InvalidSettings, close_name
from draftheads.utils.files import user_path

_FOLDER = Path(__file__).parent.parent / "assets" / "tables"


def table_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def table_path(name: str) -> Path:
    """The file of a table by its name, or one's own; InvalidSettings if there is none."""
    path = _FOLDER / f"{name}.toml" if name in table_names() else user_path(name)
    if not path.is_file():
        close = close_name(name, table_names())
        hint = f"did you mean {close}?" if close else "`draftheads reproduce` lists them"
        raise InvalidSettings(f"no table {name!r}; {hint}")
    return path
