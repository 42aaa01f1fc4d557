"""Options of commands that import something slow, apart from it: ``--help`` and wrong options answer at once.

The first sentence under a field is its line in ``--help``; ``--help-verbose`` shows all sentences. Options of other
jobs are in their rooms.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from draftheads.errors import InvalidSettings
from draftheads.settings import (
    Effort,
    GenerateSampling,
    Grammar,
    LoadSettings,
    SamplingOptions,
    SamplingSettings,
    TemplateSettings,
)
from draftheads.speculation.shapes import Drafting
from draftheads.utils.files import user_path


@dataclass(frozen=True)
class GrammarOptions:
    """What an answer may be."""

    json_schema: str | None = None
    """Answer with JSON of this schema. A file, or the schema itself; '{"type": "object"}' is any JSON object."""
    regex: str | None = None
    """Answer with a text that this regular expression matches."""

    def __post_init__(self) -> None:
        if self.json_schema and self.regex:
            raise InvalidSettings("--json-schema and --regex: give one of them")

    def grammar(self) -> Grammar | None:
        """The grammar; None if answers are free."""
        if self.regex is not None:
            return Grammar.regex(self.regex)
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

    prompt: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Prompts to answer. Several are decoded together. Without one, standard input is the prompt."""
    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    prompts: Path | None = None
    """A file or folder of prompts in place of PROMPT. "prompt", "messages" or "turns" in each line."""
    out: Path | None = None
    """Write the answers to this file. One JSON object per line."""
    batch_size: int = 16
    """Prompts that are decoded together."""
    sampling: tyro.conf.OmitArgPrefixes[GenerateSampling] = field(default_factory=GenerateSampling)
    grammar: tyro.conf.OmitArgPrefixes[GrammarOptions] = field(default_factory=GrammarOptions)
    drafting: tyro.conf.OmitArgPrefixes[Drafting] = field(default_factory=Drafting)
    load: tyro.conf.OmitArgPrefixes[TemplateSettings] = field(default_factory=TemplateSettings)

    def __post_init__(self) -> None:
        if self.prompts is not None and self.prompt:
            raise InvalidSettings(f"a prompt on the command line and --prompts {self.prompts}: give one of them")
        _ = self.settings()  # raises what is impossible

    def settings(self) -> SamplingSettings:
        return SamplingSettings(**vars(self.sampling), grammar=self.grammar.grammar())


@dataclass(frozen=True)
class ChatOptions:
    """Chat with a model on the terminal."""

    model: str = "smollm2-135m"
    """The model: a name, a folder or a Hugging Face id."""
    system: str | None = None
    """System prompt: what the model is told before the conversation."""
    reasoning_effort: Effort | None = None
    """How much the model thinks before it answers, as far as its chat template knows it. none: not at all."""
    sampling: tyro.conf.OmitArgPrefixes[SamplingOptions] = field(
        default_factory=lambda: SamplingOptions(max_new_tokens=512)
    )
    drafting: tyro.conf.OmitArgPrefixes[Drafting] = field(default_factory=Drafting)
    load: tyro.conf.OmitArgPrefixes[LoadSettings] = field(default_factory=LoadSettings)


@dataclass(frozen=True)
class ExportOptions:
    """Write a head in the layout that another engine reads, in bf16, and print the engine's command.

    Engines take the embedding from the model, and the lm_head where the head shares it.
    """

    head: str
    """A head. A name, a folder or a Hugging Face id."""
    out: Path
    """Folder to make."""
    to: str | None = None
    """The layout, or an engine that reads it (vllm, sglang); by default that of the head's own project. For eagle3
    heads eagle3 (vLLM, SGLang, llama.cpp, OpenVINO) or speculators; for dflash and dspark heads the same name,
    speculators, or gguf (llama.cpp); for eagle heads eagle (vLLM), or eagle-sglang, which those with a bias of fc get;
    for p-eagle heads speculators; for medusa heads medusa; for MLP speculators mlp-speculator (IBM's); for small-llama
    heads small-llama, an ordinary Llama."""
    with_embedding: bool = False
    """Write the model's embedding into eagle3 and eagle heads. vllm-project/speculators trains them further from it."""
    model: str = "smollm2-135m"
    """The model of the head. A name, a folder or a Hugging Face id."""


@dataclass(frozen=True)
class ImportOptions:
    """Read a head of another project: Medusa, Hydra, Hydra++, an MLP speculator, EAGLE or EAGLE-3.

    The file's tensors decide which format it is. Nothing in the file is executed. The head is then used as any other:
    `draftheads tune` measures its acceptance, `draftheads train --start-from` trains it further.
    """

    source: tyro.conf.Positional[str]
    """The head. A folder, a file (.safetensors, .bin, .pt) or a Hugging Face id."""
    out: Path
    """Folder to make."""
    model: str = "smollm2-135m"
    """The model that the head was trained for. A name, a folder or a Hugging Face id."""


@dataclass(frozen=True)
class CacheOptions:
    """Show what is in the cache, or clear it.

    The cache has what draftheads measured, converted and packed. Models from the Hugging Face Hub are in another cache.
    """

    action: tyro.conf.Positional[Literal["show", "clear"]] = "show"
    """What to do. show lists the parts and their sizes; clear deletes them."""
    part: tyro.conf.Positional[str | None] = None
    """Only this part: a name that show lists."""
