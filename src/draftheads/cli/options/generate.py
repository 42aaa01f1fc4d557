"""Options of ``draftheads generate``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from draftheads.errors import InvalidSettings
from draftheads.settings import Grammar, LoadSettings, SamplingOptions, SamplingSettings
from draftheads.speculation.tree_choice import read_tree
from draftheads.utils.files import user_path


@dataclass(frozen=True)
class DraftOptions:
    """What is drafted."""

    draft_model: str | None = None
    """A smaller model drafts in place of a head. With the same tokenizer: a folder or a Hugging Face id."""
    tree: str = "auto"
    """What is drafted. auto: as many nodes as pay, by the head's acceptance profile and the costs here; plain: nothing;
    24: growing trees of so many nodes; static:24: the head's best fixed tree; paths:5: the best paths of a full tree;
    drawn:3: chains of sampled tokens, for --acceptance rejection or block; JSON such as '[[0],[1],[0,0]]' or a file of
    it: this tree; or an acceptance.json, as auto."""
    copy: bool = True
    """Also draft copies from the text so far. That is what followed an earlier occurrence of its last tokens."""

    def __post_init__(self) -> None:
        _ = read_tree(self.tree)  # raises what is impossible


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
        if self.json_schema.lstrip().startswith("{"):
            return Grammar.json_schema(self.json_schema)
        try:
            return Grammar.json_schema(user_path(self.json_schema).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            fix = "give a JSON schema or a file with one"
            raise InvalidSettings(f"--json-schema {self.json_schema} cannot be read: {fix} ({error})") from None


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
        _ = self.settings()  # raises what is impossible

    def settings(self) -> SamplingSettings:
        return SamplingSettings(**vars(self.sampling), grammar=self.grammar.grammar())
