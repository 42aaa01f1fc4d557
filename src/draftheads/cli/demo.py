"""``draftheads demo``: the same prompts answered four ways, one of them before your eyes, and a table."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from draftheads.bench.compare import BASELINE, Row, Way, compare, engine_way, rows, stock_way
from draftheads.bench.margins import Scorer
from draftheads.cli.prompts import TextPrompt, read_prompts
from draftheads.cli.show import DRAFTED, quiet_transformers, show_stream
from draftheads.decode.engine import Engine
from draftheads.errors import DataError, InvalidSettings
from draftheads.loading import Precision, head_engine, kernels_folder, load_drafter, load_target
from draftheads.provenance import provenance
from draftheads.target.fast import rows_keep_their_bits
from draftheads.target.model import TargetModel

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short email asking a colleague to review my report by Friday.",
    "List five tips for learning a new language.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that returns the largest number in a list.",
    "Tell a short story about a lighthouse keeper and a lost whale.",
)
NEAR_TIES = """
In bf16 a sum taken in another order differs in its last bits, so two tokens
that are nearly as likely can change places, with heads as between
transformers and plain. "worst margin" is the largest such gap (in logits of
fp32); --exact-bits rules it out, at some cost."""
DIFFERENT = "\nTexts differ, which they should not in this precision: please report it."


@dataclass(frozen=True)
class DemoOptions:
    """Answer prompts in several ways: transformers, our plain decoding, and draft heads; compare speed and text."""

    model: str = "smollm2-135m"
    """A model: a name, a folder or a Hugging Face id."""
    heads: tuple[str, ...] = ("medusa", "hydra")
    """Draft heads to compare: bundled ones' names, folders or Hugging Face ids."""
    prompts: Path | None = None
    """A JSONL file of prompts ("prompt", "messages" or "turns" in each line) instead of a handful of our own."""
    limit: int | None = None
    """Use the first so many prompts only."""
    max_new_tokens: int = 128
    """Stop an answer after this many tokens."""
    precision: Precision = "auto"
    """What the model computes in; auto is bf16 where the machine has it, else fp32."""
    exact_bits: bool = False
    """Heads decode with steps padded so that their text equals plain's to the bit, also in bf16 (CPU)."""
    transformers: bool = True
    """Measure transformers' own generate, too."""
    stream: bool = True
    """Show one answer as it comes."""


def run(options: DemoOptions) -> None:
    """Measures and prints; the last line is one JSON object."""
    console = Console(highlight=False)
    labels = _labels(options.heads)
    prompts = _prompts(options)
    quiet_transformers()
    stock = load_target(options.model, precision=options.precision, fast=False, exact_bits=False)
    plain = _faster(stock, exact_bits=False)
    drafted = _for_heads(stock, plain, exact_bits=options.exact_bits)
    engines = {label: _engine(drafted, name, options.model) for label, name in zip(labels, options.heads, strict=True)}
    encoded = [Engine(plain).encode(prompt) for prompt in prompts]
    if options.stream and engines:
        _show_one(prompts[0], labels[-1], engines[labels[-1]], options.max_new_tokens, console)
    ways = [stock_way(stock, options.max_new_tokens)] if options.transformers else []
    ways += [engine_way("plain", Engine(plain), options.max_new_tokens)]
    ways += [engine_way(name, engine, options.max_new_tokens) for name, engine in engines.items()]
    _compare(ways, encoded)
    references = _references(plain, drafted, encoded, labels, options.max_new_tokens)
    table = rows(ways, encoded, Scorer(stock), references=references)
    _print_table(table, console)
    if not options.exact_bits and not all(row.identical for row in table):
        console.print(NEAR_TIES if stock.dtype == torch.bfloat16 else DIFFERENT, highlight=False)
    print(json.dumps(_record(stock, options, table, exact_bits=drafted is not plain)))


def _engine(target: TargetModel, head: str, model: str) -> Engine:
    drafter = load_drafter(head, model, target)
    return head_engine(target, drafter, head=head, model=model)


def _labels(heads: Sequence[str]) -> list[str]:
    """What to call each head: the last part of its name where that is enough to tell it from the others."""
    short = [Path(name).name for name in heads]
    taken = {"", "transformers", BASELINE}
    labels = [
        name if short.count(label) > 1 or label in taken else label for name, label in zip(heads, short, strict=True)
    ]
    if len(set(labels)) < len(labels) or taken & set(labels):
        raise InvalidSettings(f"heads are {', '.join(heads)}: each must have a name of its own")
    return labels


def _show_one(prompt: TextPrompt, name: str, engine: Engine, max_new_tokens: int, console: Console) -> None:
    said = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    title = Text.assemble((said, "bold"), f"   ({name}; what it guessed is ", ("green", DRAFTED), ")\n")
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
    found: list[TextPrompt] = list(read_prompts(options.prompts)) if options.prompts else list(PROMPTS)
    found = found[: options.limit]
    if not found:
        raise DataError("holds no prompt", path=options.prompts)
    return found


def _compare(ways: Sequence[Way], prompts: Sequence[list[int]]) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("answering", total=len(ways) * len(prompts))
        compare(ways, prompts, on_answer=lambda: progress.advance(task))


def _print_table(table: Sequence[Row], console: Console) -> None:
    """Narrow enough for 80 columns."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    shown.add_column("method", overflow="fold")
    for heading in (
        "tokens\n/s",
        "tokens\n/step",
        "speed-up\n(quartiles)",
        "× trans-\nformers",
        "same\ntext",
        "worst\nmargin",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in table:
        low, high = row.speedup_quartiles
        over_stock = row.speedup_over_transformers
        shown.add_row(
            Text(row.method),
            f"{row.tokens_per_second:.1f}",
            f"{row.tokens_per_step:.2f}",
            f"{row.speedup:.2f} ({low:.2f}-{high:.2f})",
            "" if over_stock is None else f"{over_stock:.2f}",
            "yes" if row.identical else f"no ({row.num_different})",
            f"{row.worst_margin:.1g}",
        )
    console.print(shown)


def _record(stock: TargetModel, options: DemoOptions, table: Sequence[Row], *, exact_bits: bool) -> dict[str, object]:
    return {
        "model": options.model,
        "dtype": str(stock.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "exact_bits": exact_bits,
        "max_new_tokens": options.max_new_tokens,
        "rows": [asdict(row) for row in table],
        "provenance": provenance(),
    }
