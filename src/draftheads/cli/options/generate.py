"""Options of ``draftheads generate``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from draftheads.errors import DraftHeadsError, InvalidSettings, InvalidTree
from draftheads.settings import Grammar, LoadSettings, SamplingOptions, SamplingSettings
from draftheads.speculation.acceptance_profile import DEFAULT_NODES, read_profile
from draftheads.speculation.shapes import BestFirst, BestPaths, Sampled
from draftheads.speculation.tree import Tree
from draftheads.utils.files import user_path


@dataclass(frozen=True)
class DraftOptions:
    """What is drafted."""

    draft_model: str | None = None
    """A smaller model drafts in place of a head. With the same tokenizer: a folder or a Hugging Face id."""
    tree: str | None = None
    """Always draft on this tree. A JSON list of rank paths such as '[[0],[1],[0,0]]', or a file that has one."""
    grow: int | None = None
    """Draft on growing trees of this many nodes. Each step chooses them by the head's confidence."""
    threshold: float = 0.0
    """With --grow: least probability of a draft token. Others are left out."""
    draw: int | None = None
    """Draft chains of this many sampled tokens. For --acceptance rejection or block."""
    paths: int | None = None
    """Draft on this many best paths of a full tree. As the MLP Speculator does."""
    widths: tuple[int, ...] = BestPaths().widths
    """With --paths: children of each node, depth by depth."""
    profile: str = "auto"
    """Acceptance profile that decides the size of drafts. auto: the one of `draftheads tune` if there is one, else the
    head's own; none: always a fixed tree of 10 nodes; or an acceptance.json."""
    copy: bool = True
    """Also draft copies from the text so far. That is what followed an earlier occurrence of its last tokens."""

    def __post_init__(self) -> None:
        ways = {name: getattr(self, name) for name in ("tree", "grow", "draw", "paths")}
        given = [f"--{name} {value}" for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise InvalidSettings(f"{' and '.join(given)}: give one of them")
        if self.threshold and self.grow is None:
            raise InvalidSettings(f"--threshold {self.threshold} is for growing trees: give --grow, too")
        if self.widths != BestPaths().widths and self.paths is None:
            raise InvalidSettings(f"--widths {' '.join(map(str, self.widths))} is for paths: give --paths, too")
        if self.draw is not None and self.draw < 1:
            raise InvalidSettings(f"--draw is {self.draw}; it must be at least 1")

    def shape(self) -> Tree | BestFirst | BestPaths | Sampled | None:
        """The rule for trees; None if the profile decides."""
        if self.draw is not None:
            return Sampled(Tree.chain(self.draw))
        if self.paths is not None:
            return BestPaths(self.widths, self.paths)
        if self.grow is not None:
            return BestFirst(self.grow, threshold=self.threshold)
        return None if self.tree is None else read_tree(self.tree)


@dataclass(frozen=True)
class GrammarOptions:
    """What an answer may be."""

    json_schema: str | None = None
    """Answer with JSON of this schema. A file, or the schema itself."""
    json: bool = False
    """Answer with a JSON object."""
    regex: str | None = None
    """Answer with a text that this regular expression matches."""

    def __post_init__(self) -> None:
        names = {"json_schema": "--json-schema", "json": "--json", "regex": "--regex"}
        given = [option for name, option in names.items() if getattr(self, name)]
        if len(given) > 1:
            raise InvalidSettings(f"{' and '.join(given)}: give one of them")

    def grammar(self) -> Grammar | None:
        """The grammar; None if answers are free."""
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.json:
            return Grammar.json_object()
        if self.json_schema is None:
            return None
        is_text = self.json_schema.lstrip().startswith("{")
        return Grammar.json_schema(
            self.json_schema if is_text else _file_text(self.json_schema, "a JSON schema", option="--json-schema ")
        )


@dataclass(frozen=True)
class GenerateOptions:
    """Answer prompts with a model and an optional draft head."""

    BASIC: ClassVar = ("model", "head", "prompts", "out", "max_new_tokens", "temperature", "seed", "precision")

    prompt: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Prompts to answer. Several are decoded together. Without one, standard input is the prompt."""
    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    head: str | None = None
    """The draft head: a name, a folder or a Hugging Face id. `draftheads info` lists the installed ones. prompt-lookup
    copies from the text so far; lookahead refines draft tokens of the model itself. Plain decoding when left out."""
    prompts: Path | None = None
    """A JSONL file of prompts in place of PROMPT. "prompt", "messages" or "turns" in each line; .gz, too."""
    out: Path | None = None
    """Write the answers to this file. One JSON object per line."""
    sampling: tyro.conf.OmitArgPrefixes[SamplingOptions] = field(default_factory=SamplingOptions)
    grammar: tyro.conf.OmitArgPrefixes[GrammarOptions] = field(default_factory=GrammarOptions)
    draft: tyro.conf.OmitArgPrefixes[DraftOptions] = field(default_factory=DraftOptions)
    load: tyro.conf.OmitArgPrefixes[LoadSettings] = field(default_factory=LoadSettings)
    batch_size: int = 16
    """Prompts that are decoded together."""
    plain_text: bool = False
    """Do not colour draft tokens."""

    def __post_init__(self) -> None:
        if self.prompts is not None and self.prompt:
            raise InvalidSettings(f"a prompt on the command line and --prompts {self.prompts}: give one of them")
        _ = self.settings(), self.draft.shape()  # raise what is impossible

    def settings(self) -> SamplingSettings:
        return SamplingSettings(**vars(self.sampling), grammar=self.grammar.grammar())


def read_tree(text_or_path: str) -> Tree:
    """From the JSON itself, a file of it, or a head's ``acceptance.json``."""
    if text_or_path.lstrip().startswith(("[", "{")):
        return Tree.from_json(text_or_path)
    text = _file_text(text_or_path, "a JSON list of rank paths", problem=InvalidTree)
    if text.lstrip().startswith("{"):
        return read_profile(user_path(text_or_path)).tree(DEFAULT_NODES)
    return Tree.from_json(text)


def _file_text(path: str, what: str, *, option: str = "", problem: type[DraftHeadsError] = InvalidSettings) -> str:
    try:
        return user_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise problem(f"{option}{path} cannot be read: give {what} or a file with one ({error})") from None
