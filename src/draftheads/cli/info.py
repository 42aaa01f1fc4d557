"""``draftheads info``: describes a saved head, lists the bundled heads, or draws a tree.

Reads configurations and headers only; no model is loaded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftheads.checkpoints.head_files import HeadFiles, read_head_files
from draftheads.checkpoints.profile_store import cached_profile
from draftheads.checkpoints.registry import DATA_PACKAGE_HEADS, DATA_PACKAGE_INSTALL, ZooHead, find_head, zoo_heads
from draftheads.errors import InvalidSettings, InvalidTree
from draftheads.heads import head_methods
from draftheads.models.gguf_models import SMOLLM2_135M
from draftheads.speculation.acceptance_profile import (
    DEFAULT_NODES,
    KINDS,
    PROFILE_FILE,
    AcceptanceProfile,
    read_profile,
)
from draftheads.speculation.shapes import ByProfile, as_shape
from draftheads.speculation.tree import Tree
from draftheads.utils.counts import byte_size, counted
from draftheads.utils.files import user_path

_KIND_WORDS = {"static": "static", "dynamic": "growing"}
_SIZES = (2, 4, 8, 16, 32, 64)  # of the trees whose tokens per step are shown


@dataclass(frozen=True)
class InfoOptions:
    """Show a draft head, the bundled heads, or a tree."""

    head: str | None = None
    """A draft head: a name, a folder or a Hugging Face id. All installed heads when left out."""
    model: str = "smollm2-135m"
    """The base model of the installed head."""
    tree: str | None = None
    """Draw this tree instead. A JSON list of rank paths such as '[[0],[1],[0,0]]', or a file that has one."""

    def __post_init__(self) -> None:
        if self.head is not None and self.tree is not None:
            raise InvalidSettings(f"head is {self.head!r} and tree is {self.tree!r}: give one of them")


def run(options: InfoOptions) -> None:
    """Prints what the options ask for."""
    console = Console()
    if options.tree is not None:
        _print_tree(console, _tree_of(options.tree))
    elif options.head is not None:
        _print_head(console, read_head_files(find_head(options.head, options.model)))
    else:
        _print_zoo(console)


def _print_zoo(console: Console) -> None:
    heads = zoo_heads()
    if not heads:
        console.print("No heads are installed. Train one with `draftheads train`.", markup=False)
    else:
        console.print(_zoo_table(heads))
    if not {head.method for head in heads if head.base_name == SMOLLM2_135M}.issuperset(DATA_PACKAGE_HEADS):
        console.print(f"More heads for {SMOLLM2_135M}: {DATA_PACKAGE_INSTALL}", markup=False)
    console.print(f"Methods that can be trained: {', '.join(head_methods())}", markup=False, soft_wrap=True)


def _zoo_table(heads: Sequence[ZooHead]) -> Table:
    table = Table("base", "method", "heads", "parameters", "size", "tokens/step")
    for base_name, method, folder in heads:
        saved = read_head_files(folder)
        gain = max(_at(saved.profile, DEFAULT_NODES).values())
        sizes = (saved.options["num_heads"], f"{saved.num_parameters:,}", byte_size(saved.num_bytes), f"{gain:.2f}")
        table.add_row(base_name, method, *map(str, sizes))
    return table


def _print_head(console: Console, saved: HeadFiles) -> None:
    facts = {
        "method": saved.method,
        "folder": str(saved.folder),
        **saved.options,
        "parameters": f"{saved.num_parameters:,}",
        "size": byte_size(saved.num_bytes),
        "base": saved.model_id,
        **({"chat template": saved.chat_template} if saved.chat_template else {}),
    }
    _print_section(console, "Head", facts)
    _print_section(
        console,
        "Fingerprints of the base",
        {name: digits[:16] for name, digits in saved.base_prints.items() if digits},
    )
    _print_section(console, "Made by", saved.provenance)
    _print_section(console, "Acceptance profile", _described(saved.profile))
    if (cached := cached_profile(saved)) is not None:
        tuned = read_profile(cached)
        _print_section(console, "Acceptance profile by `draftheads tune`", {"file": str(cached), **_described(tuned)})
    console.print(Text("\nTree", style="bold"))
    _print_tree(console, saved.profile.tree(DEFAULT_NODES))


def _described(profile: AcceptanceProfile) -> dict[str, object]:
    """What the profile was measured on, and tokens per step by tree size."""
    if not profile.num_tokens:
        return {"measured on": "nothing: assumed"}
    where = f"{counted(profile.num_texts, 'text')}, " if profile.num_texts else ""
    shown: dict[str, object] = {
        "measured on": f"{where}{counted(profile.num_tokens, 'token')} at temperature {profile.temperature:g}"
    }
    for nodes in _SIZES:
        gains = _at(profile, nodes)
        if any(nodes <= len(profile.tokens(kind)) for kind in KINDS):
            words = ", ".join(f"{_KIND_WORDS[kind]} {tokens:.2f}" for kind, tokens in gains.items())
            shown[f"tokens/step, {counted(nodes, 'node')}"] = words
    return shown


def _at(profile: AcceptanceProfile, nodes: int) -> dict[str, float]:
    """Tokens per step of each kind of tree with at most this many nodes."""
    return {kind: tokens[min(nodes, len(tokens)) - 1] for kind in KINDS if (tokens := profile.tokens(kind))}


def _print_section(console: Console, title: str, facts: Mapping[str, object]) -> None:
    """A heading and a line for each fact; nothing without facts."""
    if not facts:
        return
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value is None:
            words = "-"
        else:
            words = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        table.add_row(Text(f"  {name.replace('_', ' ')}"), Text(words, overflow="fold"))
    console.print(Text(f"\n{title}", style="bold"))
    console.print(table)


def _tree_of(text_or_path: str) -> Tree:
    shape = as_shape(text_or_path)
    if isinstance(shape, ByProfile) and shape.profile != "auto":
        place = user_path(shape.profile)
        place = place / PROFILE_FILE if place.is_dir() else place
        if place.is_file():
            return read_profile(place).tree(DEFAULT_NODES)
    if not isinstance(shape, Tree):
        raise InvalidTree(f"tree {text_or_path}: give rank paths such as [[0],[1],[0,0]], or a file that has them")
    return shape


def _print_tree(console: Console, tree: Tree) -> None:
    console.print(Text(f"{counted(tree.num_nodes, 'node')}, root included; depth {tree.max_depth}"))
    console.print(Text(tree.draw()), soft_wrap=True)
