"""Options of ``reproduce``, and where the tables are. The sentence under a field is its help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from draftheads.errors import InvalidSettings, close_name
from draftheads.utils.files import user_path

MeasureName = Literal["agreement", "perplexity", "rouge", "gsm8k", "judge"]
_FOLDER = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class ReproduceOptions:
    """Rebuild tables or figures of papers for a model and its heads, beside the published numbers.

    Without a table, all of them are listed with what they need. Heads of several tables are trained first, and those of
    the same name and settings once. An interrupted run continues with the same command. A
    file of your own (.toml) can extend a table and change any of its fields.
    """

    tables: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of tables, or your own files (.toml); without any, all tables are listed."""
    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ()
    """Draft heads in place of the table's. Then nothing is trained."""
    quick: bool = False
    """A short run. One question of each category, short answers, at most three values of each setting, and training on
    3,000 tokens of the model's own answers if there is no --data."""
    prompts: str | None = None
    """Questions in place of our own, as for `bench`. The papers use MT-Bench and Spec-Bench."""
    limit: int | None = None
    """Use only the first LIMIT questions of each category."""
    data: tuple[Path, ...] = ()
    """Chats to train on, for tables that train heads."""
    train: tuple[str, ...] = ()
    """Settings of training for all heads, NAME=VALUE. Such as max_tokens=100000, epochs=2 or text=FILE."""
    quality: tuple[MeasureName, ...] = ()
    """Measures of the answers in place of the table's."""
    out: Path = Path("reproduced")
    """Folder for the results. TABLE.md and TABLE.json of each table, and the trained heads, which tables share."""

    def __post_init__(self) -> None:
        names = [table_path(name).stem for name in self.tables]  # raises before anything slow is imported
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InvalidSettings(f"{twice} is given twice, but its result has one place: {twice}.md in --out")


def table_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("[!_]*.toml"))


def table_path(name: str) -> Path:
    """The file of a table by its name, or one's own; InvalidSettings if there is none. Files with _ are not listed."""
    path = _FOLDER / f"{name}.toml"
    if not path.is_file() and not (path := user_path(name)).is_file():
        close = close_name(name, table_names())
        hint = f"did you mean {close}?" if close else "`draftheads reproduce` lists them"
        raise InvalidSettings(f"no table {name!r}; {hint}")
    return path
