"""``draftheads demo``: one answer as it comes, then the same prompts answered in several ways, and a table."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from draftheads.bench.compare import BASELINE, STOCK, Extent, Row, Way, compare, engine_way, rows, stock_way
from draftheads.bench.margins import Scorer
from draftheads.bench.step_parts import step_parts
from draftheads.cli.show import DRAFTED, quiet_transformers, show_stream
from draftheads.cli.show_comparison import (
    copies_sentence,
    explain_texts,
    print_parts,
    print_table,
    slower_sentences,
    tree_sentence,
)
from draftheads.data.records import TextPrompt, own_prompts, prompts_in
from draftheads.decode.engine import Engine
from draftheads.errors import DataError, InvalidSettings, StorageError
from draftheads.files import user_path, write_atomic
from draftheads.loading import Precision, find_template, head_engine, kernels_folder, load_drafter, load_target
from draftheads.models.fast import rows_keep_their_bits
from draftheads.models.model import TargetModel
from draftheads.provenance import provenance

_PARTS_TOKENS = 24  # of the answers whose steps are shown part by part


@dataclass(frozen=True)
class DemoOptions:
    """Answer prompts in several ways: transformers, our plain decoding, and draft heads; compare speed and text."""

    model: str = "smollm2-135m"
    """A model: a name, a folder or a Hugging Face id."""
    chat_template: str | None = None
    """Chat template in place of the heads' or the tokenizer's own: a Jinja file, or chatml, llama-2 or vicuna."""
    heads: tuple[str, ...] = ("hydra", "medusa")
    """Draft heads to compare, the best one first: bundled ones' names, folders or Hugging Face ids."""
    prompts: Path | None = None
    """A JSONL file of prompts ("prompt", "messages" or "turns" in each line) instead of a handful of our own."""
    limit: int | None = None
    """Use the first so many prompts only."""
    max_new_tokens: int = 128
    """Stop an answer after this many tokens."""
    seconds: float = 100.0
    """Time for all answers together. On a slow machine they get shorter (down to 32 tokens), then fewer; inf sets no
    limit."""
    precision: Precision = "auto"
    """What the model computes in; auto is bf16 where the machine has it, else fp32. int8 is for CPUs; transformers
    then computes as with auto."""
    copy: bool = True
    """Drafts also hold copies from the text so far, where its last tokens stood before."""
    exact_bits: bool = False
    """Heads decode with steps padded so that their text equals plain's to the bit, also in bf16 (CPU)."""
    transformers: bool = True
    """Measure transformers' own generate, too."""
    stream: bool = True
    """Show one answer as it comes."""
    json: str | None = None
    """Write everything that was measured as one JSON object to this file; - writes it to standard output."""


def run(options: DemoOptions) -> None:
    """Measures and prints."""
    _check(options)
    console = Console(highlight=False)
    labels = _labels(options.heads)
    prompts = _prompts(options)
    quiet_transformers()
    stock, plain, drafted = _models(options)
    engines = {label: _engine(drafted, name, options) for label, name in zip(labels, options.heads, strict=True)}
    encoded = [Engine(plain).encode(prompt) for prompt in prompts]
    start = time.perf_counter()
    if options.stream and engines:
        _show_one(prompts[0], labels[0], engines[labels[0]], options.max_new_tokens, console)
    ways = [stock_way(stock)] if options.transformers else []
    ways += [engine_way(name, engine) for name, engine in {BASELINE: Engine(plain), **engines}.items()]
    extent = _compare(ways, encoded, options, start)
    encoded = encoded[: extent.num_prompts]
    references = _references(plain, drafted, encoded, labels, extent.max_new_tokens)
    scorer = None if options.precision == "int8" else Scorer(stock)
    table = rows(ways, encoded, scorer, references=references)
    print_table(table, extent, console)
    if not options.exact_bits:
        explain_texts(table, console, precision=plain.precision, stock_precision=stock.precision)
    parts, sentences = _details(table, Engine(plain), engines, encoded[0])
    print_parts(parts, console)
    sentences += slower_sentences(table, precision=options.precision, copy=options.copy, model=options.model)
    for sentence in sentences:
        console.print(sentence, markup=False)
    _save(options.json, _record(stock, options, table, extent, parts=parts, sentences=sentences))


def _check(options: DemoOptions) -> None:
    """Says now what would fail after minutes."""
    if not options.seconds > 0:
        raise InvalidSettings(f"--seconds is {options.seconds:g}; it must be above 0")
    if options.json not in (None, "-") and not user_path(options.json).parent.is_dir():
        raise StorageError(f"--json {options.json}: there is no folder {user_path(options.json).parent}")


def _models(options: DemoOptions) -> tuple[TargetModel, TargetModel, TargetModel]:
    """Transformers' model, ours for plain decoding, and ours that heads draft for."""
    template = find_template(options.chat_template, options.heads, options.model)
    if options.precision == "int8":
        plain = load_target(options.model, chat_template=template, precision="int8")
        return load_target(options.model, fast=False), plain, plain
    stock = load_target(
        options.model, chat_template=template, precision=options.precision, fast=False, exact_bits=False
    )
    plain = _faster(stock, exact_bits=False)
    return stock, plain, _for_heads(stock, plain, exact_bits=options.exact_bits)


def _engine(target: TargetModel, head: str, options: DemoOptions) -> Engine:
    drafter = load_drafter(head, options.model, target)
    return head_engine(target, drafter, head=head, model=options.model, copy=options.copy)


def _details(
    table: Sequence[Row], plain: Engine, engines: Mapping[str, Engine], prompt_ids: Sequence[int]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Parts of a step for plain decoding and the fastest head, and sentences about that head's drafts."""
    parts = {BASELINE: step_parts(plain, prompt_ids, max_new_tokens=_PARTS_TOKENS)}
    heads = [row for row in table if row.method in engines]
    if not heads:
        return parts, []
    best = max(heads, key=lambda row: row.tokens_per_second)
    engine = engines[best.method]
    parts[best.method] = step_parts(engine, prompt_ids, max_new_tokens=2 * _PARTS_TOKENS)
    return parts, [tree_sentence(best.method, engine), copies_sentence(best)]


def _labels(heads: Sequence[str]) -> list[str]:
    """What to call each head: the last part of its name where that is enough to tell it from the others."""
    short = [Path(name).name for name in heads]
    taken = {"", STOCK, BASELINE}
    labels = [
        name if short.count(label) > 1 or label in taken else label for name, label in zip(heads, short, strict=True)
    ]
    if len(set(labels)) < len(labels) or taken & set(labels):
        raise InvalidSettings(f"heads are {', '.join(heads)}: each must have a name of its own")
    return labels


def _show_one(prompt: TextPrompt, name: str, engine: Engine, max_new_tokens: int, console: Console) -> None:
    said = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    colours = Text.assemble("; draft tokens are ", ("green", DRAFTED)) if console.color_system else ""
    title = Text.assemble((said, "bold"), f"   ({name}", colours, ")\n")
    console.print(title, soft_wrap=True)
    show_stream(engine, engine.sequences([prompt], max_new_tokens=max_new_tokens), console)
    console.print()


def _faster(stock: TargetModel, *, exact_bits: bool) -> TargetModel:
    twin = stock.twin()
    twin.speed_up(exact_bits=exact_bits, folder=kernels_folder())
    return twin


def _for_heads(stock: TargetModel, plain: TargetModel, *, exact_bits: bool) -> TargetModel:
    """The model that heads draft for; with exact bits another one than the fastest."""
    if not exact_bits:
        return plain
    exact = _faster(stock, exact_bits=True)
    if not rows_keep_their_bits(exact.model):
        raise InvalidSettings("exact_bits: this machine's kernels change a row's bits with the number of rows")
    return exact


def _references(
    plain: TargetModel, drafted: TargetModel, prompts: Sequence[list[int]], heads: Sequence[str], max_new_tokens: int
) -> dict[str, list[tuple[int, ...]]]:
    """With exact bits, heads are to equal plain decoding with the same kernels."""
    if drafted is plain:
        return {}
    engine = Engine(drafted, max_batch_size=1)
    answers = [result.token_ids for result in engine.generate(prompts, max_new_tokens=max_new_tokens)]
    return dict.fromkeys(heads, answers)


def _prompts(options: DemoOptions) -> list[TextPrompt]:
    found = prompts_in(options.prompts or own_prompts("demo"))[: options.limit]
    if not found:
        raise DataError("holds no prompt", path=options.prompts)
    return found


def _compare(ways: Sequence[Way], prompts: Sequence[list[int]], options: DemoOptions, start: float) -> Extent:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("answering", total=len(ways) * len(prompts))
        return compare(
            ways,
            prompts,
            max_new_tokens=options.max_new_tokens,
            seconds=options.seconds - (time.perf_counter() - start),
            on_answer=lambda: progress.advance(task),
        )


def _record(
    stock: TargetModel,
    options: DemoOptions,
    table: Sequence[Row],
    extent: Extent,
    *,
    parts: Mapping[str, Mapping[str, float]],
    sentences: Sequence[str],
) -> dict[str, object]:
    int8 = options.precision == "int8"
    return {
        "model": options.model,
        "precision": "int8" if int8 else stock.precision,
        "threads": torch.get_num_threads(),
        "exact_bits": options.exact_bits or int8,
        "copy": options.copy,
        **asdict(extent),
        "rows": [asdict(row) for row in table],
        "step_milliseconds": parts,
        "sentences": sentences,
        "provenance": provenance(),
    }


def _save(place: str | None, record: dict[str, object]) -> None:
    if place == "-":
        print(json.dumps(record))
    elif place is not None:
        write_atomic(user_path(place), f"{json.dumps(record)}\n".encode())
