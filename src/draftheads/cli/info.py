"""``draftheads info``: what a saved head is, which heads are bundled, what a tree looks like.

Reads configurations and headers only; no model is loaded.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import tyro
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from draftheads.checkpoint import SavedHead, read_head
from draftheads.errors import CheckpointError, InvalidSettings, InvalidTree
from draftheads.files import user_path
from draftheads.loading import kept_plans
from draftheads.plan import Tuned, read_plan
from draftheads.tree import Tree
from draftheads.zoo.registry import find_head, zoo_heads


@dataclass(frozen=True)
class InfoOptions:
    """Show a draft head, the bundled heads, or a tree."""

    head: tyro.conf.Positional[str | None] = None
    """A bundled head (medusa, hydra, …), a folder, or a Hugging Face Hub id; all bundled heads when left out."""
    model: str = "smollm2-135m"
    """Which base model's bundled head."""
    tree: str | None = None
    """Draw this tree instead: a JSON list of rank paths such as '[[0],[1],[0,0]]', or a file that has one."""

    def __post_init__(self) -> None:
        if self.head is not None and self.tree is not None:
            raise InvalidSettings(f"head is {self.head!r} and tree is {self.tree!r}: give one of them")


def run(options: InfoOptions) -> None:
    """Prints what the options ask for.

    Raises:
        ModelNotFound: no such head.
        CheckpointError: there is something, but no head that this version reads.
        InvalidTree: not a tree, or no such file.
    """
    console = Console()
    if options.tree is not None:
        _print_tree(console, _read_tree(options.tree))
    elif options.head is not None:
        _print_head(console, read_head(find_head(options.head, options.model)))
    else:
        _print_zoo(console)


def _read_tree(text_or_path: str) -> Tree:
    """From the JSON itself, a file of it, or a head's ``plan.json``."""
    if text_or_path.lstrip().startswith("["):
        return Tree.from_json(text_or_path)
    path = user_path(text_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidTree(f"{text_or_path} is no JSON list of rank paths, nor a file of one: {error}") from None
    if text.lstrip().startswith("{"):
        return read_plan(path).tree
    return Tree.from_json(text)


def _print_zoo(console: Console) -> None:
    heads = zoo_heads()
    if not heads:
        console.print("No heads are bundled. Train one with `draftheads train`.", markup=False)
        return
    table = Table("base", "method", "heads", "parameters", "size", "tree nodes")
    for base_name, method, folder in heads:
        saved = read_head(folder)
        sizes = (saved.config.num_heads, f"{saved.num_parameters:,}", _megabytes(saved.num_bytes), saved.tree.num_nodes)
        table.add_row(base_name, method, *map(str, sizes))
    console.print(table)


def _print_head(console: Console, saved: SavedHead) -> None:
    facts = {
        "method": saved.method,
        "folder": str(saved.folder),
        **asdict(saved.config),
        "parameters": f"{saved.num_parameters:,}",
        "size": _megabytes(saved.num_bytes),
        "base": saved.model_id,
    }
    _print_section(console, "Head", facts)
    _print_section(
        console, "Fingerprints of the base", {name: digits[:16] for name, digits in asdict(saved.fingerprints).items()}
    )
    _print_section(console, "Made by", saved.provenance)
    _print_section(console, "Measured", saved.measured)
    if figures := _figures(saved.card):
        console.print(Text("\nFrom its card", style="bold"))
        console.print(Markdown(figures))
    if saved.plan.tuned is not None:
        _print_section(console, "Tuned", _choices(saved.plan.tuned))
    for path in kept_plans(saved.digest):
        with contextlib.suppress(CheckpointError, InvalidTree):  # a broken one is said when it is used
            if (tuned := read_plan(path).tuned) is not None:
                _print_section(console, "Tuned, in the cache", {"plan": str(path), **_choices(tuned)})
    console.print(Text("\nTree", style="bold"))
    _print_tree(console, saved.tree)


def _choices(tuned: Tuned) -> dict[str, object]:
    """What is drafted with how many rows."""
    shown: dict[str, object] = {"processor": tuned.conditions.processor, "dtype": tuned.conditions.dtype}
    for choice in tuned.choices:
        what = "no guesses" if choice.kind == "none" else f"{choice.kind} tree of {choice.num_nodes} nodes"
        rows = "1 row" if choice.batch_size == 1 else f"{choice.batch_size} rows"
        shown[rows] = f"{what}, {choice.tokens_per_second:.1f} tokens/s, {choice.speedup:.2f} x plain"
    return shown


def _print_section(console: Console, title: str, facts: Mapping[str, object]) -> None:
    """A heading and a line a fact; nothing where there is no fact."""
    if not facts:
        return
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        words = value if isinstance(value, str) else _as_text(value)
        table.add_row(Text(f"  {name.replace('_', ' ')}"), Text(words, overflow="fold"))
    console.print(Text(f"\n{title}", style="bold"))
    console.print(table)


def _as_text(value: object) -> str:
    return "-" if value is None else json.dumps(value, default=str, ensure_ascii=False)


def _print_tree(console: Console, tree: Tree) -> None:
    console.print(Text(f"{tree.num_nodes} nodes, root included; depth {tree.max_depth}"))
    console.print(Text(tree.draw()), soft_wrap=True)


def _figures(card: str) -> str:
    r"""The tables of a Markdown text, each with the heading above it.

    >>> _figures("# A\nwords\n## B\n| x |\n|---|\n| 1 |\nwords")
    '## B\n\n| x |\n|---|\n| 1 |'
    """
    lines: list[str] = []
    heading = ""
    for line in card.splitlines():
        if line.startswith("#"):
            heading = line
        elif line.startswith("|"):
            if heading:
                lines += [*([""] if lines else []), heading, ""]
                heading = ""
            lines.append(line)
    return "\n".join(lines)


def _megabytes(num_bytes: int) -> str:
    """A size for people.

    >>> _megabytes(18_590_208)
    '18.6 MB'
    """
    return f"{num_bytes / 1e6:.1f} MB"
