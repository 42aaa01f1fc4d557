"""``draftheads generate``: answers one prompt as a stream, or several in a batch."""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from draftheads.cli.info import read_tree
from draftheads.cli.show import quiet_transformers, show_stream
from draftheads.data.records import prompts_in
from draftheads.decode.engine import Engine, Prompt
from draftheads.errors import InvalidPrompt, InvalidSettings
from draftheads.files import write_atomic
from draftheads.loading import Precision, load
from draftheads.sampling import SamplingSettings
from draftheads.shapes import BestFirst, BestPaths, Sampled, Shape
from draftheads.tree import Tree


@dataclass(frozen=True)
class GenerateOptions:
    """Answer prompts with a model and an optional draft head."""

    prompt: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Prompts to answer; several are decoded together. Without one, standard input is the prompt."""
    model: str = "smollm2-135m"
    """A model: a name, a folder or a Hugging Face id."""
    chat_template: str | None = None
    """Chat template in place of the head's or the tokenizer's own: a Jinja file, or chatml, llama-2 or vicuna."""
    head: str | None = None
    """A draft head: a bundled one's name (`draftheads info` lists them), a folder or a Hugging Face id; prompt-lookup
    copies from the text so far, lookahead refines draft tokens of the model itself. Plain decoding when left out."""
    draft_model: str | None = None
    """A smaller model with the same tokenizer that drafts in place of a head: a folder or a Hugging Face id."""
    tree: str | None = None
    """Always draft on this tree: a JSON list of rank paths such as '[[0],[1],[0,0]]', or a file that has one."""
    grow: int | None = None
    """Draft on trees of this many nodes that are chosen at each step by the head's confidence."""
    threshold: float = 0.0
    """With --grow: leave out draft tokens that are accepted with less than this probability."""
    draw: int | None = None
    """Draft chains of this many sampled tokens, not the most likely ones: for --acceptance rejection or block."""
    paths: int | None = None
    """Draft on this many of the most likely whole paths of a full tree, as the MLP Speculator does."""
    widths: tuple[int, ...] = BestPaths().widths
    """With --paths: how many children each node of the full tree has, depth by depth."""
    profile: str = "auto"
    """Acceptance profile that decides the size of drafts. auto: the one of `draftheads tune` if there is one, else the
    head's own; none: always a fixed tree of 10 nodes; or an acceptance.json."""
    copy: bool = True
    """Also draft copies from the text so far: what followed an earlier occurrence of its last tokens."""
    prompts: Path | None = None
    """A JSONL file (.gz, too) of prompts ("prompt", "messages" or "turns" in each line), in place of PROMPT."""
    out: Path | None = None
    """Write the answers to this file, one JSON object per line, instead of showing them."""
    settings: tyro.conf.OmitArgPrefixes[SamplingSettings] = field(default_factory=SamplingSettings)
    batch_size: int = 16
    """Prompts that are decoded together."""
    precision: Precision = "auto"
    """auto is bf16 if the machine supports it, else fp32; int8 is faster on CPUs and changes the model a little."""
    exact_bits: bool = False
    """On a CPU: plain and speculative answers are bit-identical, also in bf16."""
    plain_text: bool = False
    """Do not colour draft tokens."""


def run(options: GenerateOptions) -> None:
    """Decodes and shows or writes the answers."""
    prompts = _prompts(options)
    quiet_transformers()
    engine = load(
        options.model,
        options.head,
        draft_model=options.draft_model,
        chat_template=options.chat_template,
        tree=_shape(options),
        profile=None if options.profile == "none" else options.profile,
        copy=options.copy,
        precision=options.precision,
        max_batch_size=options.batch_size,
        exact_bits=options.exact_bits,
    )
    if len(prompts) == 1 and options.out is None:
        _stream(engine, prompts[0], options.settings, colour=not options.plain_text)
    else:
        _batch(engine, prompts, options.settings, options.out)


def _prompts(options: GenerateOptions) -> list[Prompt]:
    if options.prompts is not None:
        if options.prompt:
            raise InvalidSettings(f"a prompt on the command line and --prompts {options.prompts}: give one of them")
        prompts: list[Prompt] = [*prompts_in(options.prompts)]
    elif options.prompt or sys.stdin.isatty():
        prompts = list(options.prompt)
    else:
        try:
            prompts = [sys.stdin.read()]
        except UnicodeDecodeError as error:
            raise InvalidPrompt(f"standard input is not text: {error}") from None
    if not prompts:
        raise InvalidPrompt("nothing to answer: give a prompt, --prompts FILE, or text on standard input")
    return prompts


def _shape(options: GenerateOptions) -> Shape | None:
    ways = {name: getattr(options, name) for name in ("tree", "grow", "draw", "paths")}
    given = [f"--{name} {value}" for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise InvalidSettings(f"{' and '.join(given)}: give one of them")
    if options.threshold and options.grow is None:
        raise InvalidSettings(f"--threshold {options.threshold} is for growing trees: give --grow, too")
    if options.widths != BestPaths().widths and options.paths is None:
        raise InvalidSettings(f"--widths {' '.join(map(str, options.widths))} is for paths: give --paths, too")
    if options.draw is not None:
        if options.draw < 1:
            raise InvalidSettings(f"--draw is {options.draw}; it must be at least 1")
        return Sampled(Tree.chain(options.draw))
    if options.paths is not None:
        return BestPaths(options.widths, options.paths)
    if options.grow is not None:
        return BestFirst(options.grow, threshold=options.threshold)
    return None if options.tree is None else read_tree(options.tree)


def _stream(engine: Engine, prompt: Prompt, settings: SamplingSettings, *, colour: bool) -> None:
    start = time.perf_counter()
    requests = engine.requests([prompt], settings)
    show_stream(engine, requests, Console(highlight=False), colour=colour)
    seconds = time.perf_counter() - start
    result = requests[0].result()
    copied = f", {result.num_copied} copied" if result.num_copied else ""
    print(
        f"{len(result.token_ids)} tokens in {seconds:.1f} s, {len(result.token_ids) / seconds:.1f} tokens/s, "
        f"{result.tokens_per_step:.2f} tokens/step{copied}, ended by {result.finish_reason}",
        file=sys.stderr,
    )


def _batch(engine: Engine, prompts: list[Prompt], settings: SamplingSettings, out: Path | None) -> None:
    start = time.perf_counter()
    results = engine.generate(prompts, settings)
    seconds = time.perf_counter() - start
    lines = [
        json.dumps(
            {
                "prompt": prompt,
                "text": result.text,
                "token_ids": result.token_ids,
                "num_steps": result.num_steps,
                "tokens_per_step": result.tokens_per_step,
                "num_copied": result.num_copied,
                "finish_reason": result.finish_reason,
            },
            ensure_ascii=False,
        )
        for prompt, result in zip(prompts, results, strict=True)
    ]
    if out is None:
        print("\n".join(lines))
    else:
        write_atomic(out, "".join(line + "\n" for line in lines).encode())
    tokens = sum(len(result.token_ids) for result in results)
    speed = f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s"
    print(f"{len(results)} answers, {speed}", file=sys.stderr)
