"""``draftheads info``: describes a saved head, or lists the bundled heads.

Reads configurations and headers only; no model is loaded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftheads.checkpoints.head_files import HeadFiles, read_head_files
from draftheads.checkpoints.registry import (
    DATA_PACKAGE_HEADS,
    DATA_PACKAGE_INSTALL,
    cached_profile,
    find_head,
    gain_of,
    is_model,
    zoo_heads,
)
from draftheads.heads import head_methods
from draftheads.models.gguf_models import SMOLLM2_135M
from draftheads.speculation.acceptance_profile import (
    DEFAULT_NODES,
    KINDS,
    AcceptanceProfile,
    read_profile,
)
from draftheads.utils.counts import byte_size, counted

_WORDS = {"static": "static", "dynamic": "growing"}
_SIZES = (2, 4, 8, 16, 32, 64)  # of the trees whose tokens per step are shown


@dataclass(frozen=True)
class InfoOptions:
    """Show a draft head, the heads for a model, or the bundled heads."""

    head: str | None = None
    """A draft head: a name, a folder or a Hugging Face id. Of a model, the heads that are made for it. All installed
    heads when left out."""
    model: str = "smollm2-135m"
    """The base model of the installed head."""


def run(options: InfoOptions) -> None:
    """Prints what the options ask for."""
    console = Console()
    if options.head is not None and is_model(options.head):
        _print_fitting(console, options.head)
    elif options.head is not None:
        _print_head(console, read_head_files(find_head(options.head, options.model)))
    else:
        _print_zoo(console)


def _print_fitting(console: Console, model: str) -> None:
    """The heads for a model, in the order in which ``--head auto`` tries them."""
    from draftheads.loading import search_heads  # noqa: PLC0415 - slow to import

    found, notes = search_heads(model, asks_hub=True)
    none = f"No head for {model} was found: `--head auto` drafts copies from the text."
    lines = [f"Heads for {model}; `--head auto` takes the first one that fits:"] if found else [none]
    for line in (*lines, *(f"  {head}" for head in found), *notes):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_zoo(console: Console) -> None:
    heads, table = zoo_heads(), Table("base", "method", "heads", "parameters", "size", "tokens/step")
    for base_name, method, folder in heads:
        saved = read_head_files(folder)
        sizes = (f"{saved.num_parameters:,}", byte_size(saved.num_bytes), f"{gain_of(saved.profile):.2f}")
        table.add_row(base_name, method, str(saved.options["num_heads"]), *sizes)
    if heads:
        console.print(table)
    else:
        console.print("No heads are installed. Train one with `draftheads train`.", markup=False)
    if not {head.method for head in heads if head.base_name == SMOLLM2_135M}.issuperset(DATA_PACKAGE_HEADS):
        console.print(f"More heads for {SMOLLM2_135M}: {DATA_PACKAGE_INSTALL}", markup=False)
    console.print(f"Methods that can be trained: {', '.join(head_methods())}", markup=False, soft_wrap=True)


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
    sections: dict[str, Mapping[str, object]] = {
        "Head": facts,
        "Fingerprints of the base": {name: digits[:16] for name, digits in saved.base_prints.items() if digits},
        "Made by": saved.provenance,
        "Acceptance profile": _described(saved.profile),
    }
    if (cached := cached_profile(saved)) is not None:
        own = {"file": str(cached), **_described(read_profile(cached))}
        sections["Acceptance profile by `draftheads tune`"] = own
    for title, lines in sections.items():
        table = Table.grid(padding=(0, 2))
        for name, value in lines.items():
            words = "-" if value is None else json.dumps(value, default=str, ensure_ascii=False)
            words = value if isinstance(value, str) else words
            table.add_row(Text(f"  {name.replace('_', ' ')}"), Text(words, overflow="fold"))
        if lines:
            console.print(Text(f"\n{title}", style="bold"))
            console.print(table)
    tree = saved.profile.tree(DEFAULT_NODES)
    console.print(Text("\nTree", style="bold"))
    console.print(Text(f"{counted(tree.num_nodes, 'node')}, root included; depth {tree.max_depth}"))
    console.print(Text(tree.draw()), soft_wrap=True)


def _described(profile: AcceptanceProfile) -> dict[str, object]:
    """What the profile was measured on, and tokens per step by tree size."""
    if not profile.num_tokens:
        return {"measured on": "nothing: assumed"}
    texts = f"{counted(profile.num_texts, 'text')}, " if profile.num_texts else ""
    tokens = counted(profile.num_tokens, "token")
    shown: dict[str, object] = {"measured on": f"{texts}{tokens} at temperature {profile.temperature:g}"}
    for nodes in _SIZES:
        if any(nodes <= len(profile.tokens(kind)) for kind in KINDS):
            gains = (f"{_WORDS[kind]} {gain:.2f}" for kind, gain in _at(profile, nodes).items())
            shown[f"tokens/step, {counted(nodes, 'node')}"] = ", ".join(gains)
    return shown


def _at(profile: AcceptanceProfile, nodes: int) -> dict[str, float]:
    """Tokens per step of each kind of tree with at most this many nodes."""
    return {kind: tokens[min(nodes, len(tokens)) - 1] for kind in KINDS if (tokens := profile.tokens(kind))}
