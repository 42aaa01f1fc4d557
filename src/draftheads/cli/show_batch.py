"""``draftheads show-batch``: a batch as training sees it, with what is learned in colour.

Loads the model's tokenizer only.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, TerminalTheme
from rich.text import Text

from draftheads.chat_template import ChatReader, read_template
from draftheads.cli.show import quiet_transformers
from draftheads.data.batches import choose_texts, plan_batches
from draftheads.data.chat import EncodedChat
from draftheads.data.extract import load_and_count
from draftheads.data.show import Counts, Span, num_read, padding_share, spans
from draftheads.errors import InvalidSettings
from draftheads.files import write_atomic
from draftheads.models.pretrained import load_tokenizer
from draftheads.train.options import TrainOptions

_HTML_WIDTH = 110
_HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="UTF-8">
<title>draftheads show-batch</title>
<style>
{stylesheet}
body {{ color: {foreground}; background-color: {background}; margin: 1.5em; }}
pre {{ font-family: Menlo, 'DejaVu Sans Mono', Consolas, 'Courier New', monospace; line-height: 1.25; }}
</style>
</head>
<body>
<pre>{code}</pre>
</body>
</html>
"""
_STYLES = {  # by Span.is_learned, Span.is_special
    (False, False): "dim",
    (False, True): "bold magenta",
    (True, False): "black on green",
    (True, True): "bold bright_white on green",
}
_HTML_THEME = TerminalTheme(  # on a green that both black and white can be read on
    DEFAULT_TERMINAL_THEME.background_color,
    DEFAULT_TERMINAL_THEME.foreground_color,
    [(0, 0, 0), (190, 0, 0), (55, 165, 90), (150, 110, 0), (0, 0, 190), (160, 0, 160), (0, 130, 130), (190, 190, 190)],
    [(128, 128, 128), *[(0, 0, 0)] * 6, (255, 255, 255)],
)
_LEARNED, _SPECIAL = "⟦⟧", "‹›"  # where there is no colour
_VISIBLE = str.maketrans(  # what a terminal would act on instead of showing it
    {
        **{chr(code): chr(0x2400 + code) for code in range(32)},
        "\x7f": "␡",
        **{chr(code): f"\\x{code:x}" for code in range(0x80, 0xA0)},
        "\n": "↵\n",
        "\t": "⇥   ",
    }
)


@dataclass(frozen=True, kw_only=True)
class ShowBatchOptions:
    """Show a batch of `draftheads train` with what is learned in colour, so that a wrong chat template is seen."""

    data: tuple[Path, ...]
    """Chat files (.jsonl, .jsonl.gz), one {"messages": [...]} a line."""
    model: str = TrainOptions.model
    """The model whose tokenizer and chat template count: a name, a folder or a Hugging Face id."""
    chat_template: str | None = TrainOptions.chat_template
    """Chat template in place of the tokenizer's own: a Jinja file, or chatml, llama-2 or vicuna."""
    index: int = 0
    """Which batch: a training run with the same settings takes batch 0 in its first step."""
    max_texts: int = 3
    """Show so many texts of the batch; 0 for all."""
    html: Path | None = None
    """Write the same view there, as a page for a browser."""
    plain_text: bool = False
    """Mark what is learned with brackets instead of colours; so it is wherever there are no colours."""
    batch_tokens: int = TrainOptions.batch_tokens
    """Tokens in a batch, padding included."""
    max_length: int = TrainOptions.max_length
    """Texts are cut after that many tokens."""
    max_tokens: int | None = TrainOptions.max_tokens
    """Stop reading data after that many tokens."""
    epochs: int = TrainOptions.epochs
    """Passes over the training text."""
    held_out: float = TrainOptions.held_out
    """Part of the texts kept for measuring, at most 200 texts."""
    seed: int = TrainOptions.seed
    """Decides batches and their order."""

    def __post_init__(self) -> None:
        for name, least in (("batch_tokens", 1), ("max_length", 1), ("epochs", 1), ("index", 0), ("max_texts", 0)):
            if getattr(self, name) < least:
                raise InvalidSettings(f"--{name.replace('_', '-')} is {getattr(self, name)}: must be at least {least}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidSettings(f"--max-tokens is {self.max_tokens}: must be at least 1")
        if not 0 <= self.held_out < 1:
            raise InvalidSettings(f"--held-out is {self.held_out}: must be at least 0 and below 1")


@dataclass(frozen=True)
class _Plan:
    """What a training run with these settings would do with the data."""

    texts: list[EncodedChat]
    num_left_out: int  # texts without anything learned
    num_too_short: int  # texts kept for training, but without two learned tokens in a row
    num_held_out: int
    batches: list[list[int]]  # of indices of texts

    def padding(self, batches: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Parts of these batches that are padding: of whole texts, and of what heads are fed of them."""
        whole = padding_share([[len(self.texts[i].token_ids) for i in batch] for batch in batches])
        fed = padding_share([[num_read(self.texts[i]) for i in batch] for batch in batches])
        return whole, fed


def run(options: ShowBatchOptions) -> None:
    """Shows the batch, and writes the page if one is asked for.

    Raises:
        ModelNotFound, UnsupportedModel: the model.
        DataError: data that cannot be trained on, or whose chats the template hides or changes.
        InvalidSettings: a run with these settings has no such batch.
        StorageError: the page cannot be written.
    """
    quiet_transformers()
    model = load_tokenizer(options.model, chat_template=read_template(options.chat_template))
    plan = _plan(model, options)
    if options.index >= len(plan.batches):
        raise InvalidSettings(f"--index is {options.index}: the run's batches are 0 to {len(plan.batches) - 1}")
    console = Console(highlight=False)
    has_colours = console.color_system is not None and not console.no_color and not options.plain_text
    _print_all(console, model, plan, options, has_colours=has_colours)
    if options.html is not None:
        write_atomic(options.html, _page(model, plan, options).encode())
        console.print(Text(f"wrote {options.html}"), soft_wrap=True)


def _plan(model: ChatReader, options: ShowBatchOptions) -> _Plan:
    texts, num_left_out = load_and_count(
        model, options.data, max_length=options.max_length, max_tokens=options.max_tokens
    )
    loss_masks = [torch.tensor(text.loss_mask) for text in texts]
    token_ids = [torch.tensor(text.token_ids) for text in texts]
    training, held_out = choose_texts(token_ids, loss_masks, held_out=options.held_out, seed=options.seed)
    batches = plan_batches(
        training,
        [len(text.token_ids) for text in texts],
        max_tokens=options.batch_tokens,
        num_epochs=options.epochs,
        seed=options.seed,
    )
    return _Plan(texts, num_left_out, len(texts) - len(training) - len(held_out), len(held_out), batches)


def _page(model: ChatReader, plan: _Plan, options: ShowBatchOptions) -> str:
    # the screen's own size and abilities do not matter
    console = Console(
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        color_system="truecolor",
        width=_HTML_WIDTH,
        highlight=False,
        _environ={},
    )
    _print_all(console, model, plan, options, has_colours=True)
    return console.export_html(theme=_HTML_THEME, code_format=_HTML)


def _print_all(
    console: Console, model: ChatReader, plan: _Plan, options: ShowBatchOptions, *, has_colours: bool
) -> None:
    batch = plan.batches[options.index]
    shown = batch[: options.max_texts or None]
    for i in shown:
        text = plan.texts[i]
        pieces = spans(model.tokenizer, text)
        title = f"text {i}: {len(text.token_ids)} tokens, {sum(text.loss_mask)} learned"
        title += f", cut off at {options.max_length}" if text.is_cut else ""
        console.print(Text(title, style="bold"))
        # without colours a line of the text is a line, however long
        console.print(coloured(pieces) if has_colours else Text(bracketed(pieces)), soft_wrap=not has_colours)
        console.print()
    if len(shown) < len(batch):
        console.print(f"… texts not shown: {len(batch) - len(shown)}; --max-texts 0 shows all\n")
    console.print(_legend(has_colours=has_colours))
    console.print()
    console.print(_table(plan, options))


def coloured(pieces: Sequence[Span]) -> Text:
    """The pieces side by side, each in the style of its kind."""
    return Text.assemble(
        *((piece.text.translate(_VISIBLE), _STYLES[piece.is_learned, piece.is_special]) for piece in pieces)
    )


def bracketed(pieces: Sequence[Span]) -> str:
    """The same without styles: what is learned is in brackets."""
    words = ""
    was_learned = False
    for piece in pieces:
        if piece.is_learned != was_learned:
            words += _LEARNED[was_learned]
        was_learned = piece.is_learned
        shown = piece.text.translate(_VISIBLE)
        words += f"{_SPECIAL[0]}{shown}{_SPECIAL[1]}" if piece.is_special else shown
    return words + (_LEARNED[1] if was_learned else "")


def _legend(*, has_colours: bool) -> Text:
    """One line of 80 columns."""
    kinds = [
        Span("learned", is_learned=True, is_special=False),
        Span("special token", is_learned=False, is_special=True),
        Span("learned special token", is_learned=True, is_special=True),
        Span("only read", is_learned=False, is_special=False),
        Span("↵ line break", is_learned=False, is_special=False),
    ]
    return Text("  ").join(coloured([kind]) if has_colours else Text(bracketed([kind])) for kind in kinds)


def _table(plan: _Plan, options: ShowBatchOptions) -> Table:
    batch = plan.batches[options.index]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("")
    for heading in (f"batch {options.index}", "all the data"):
        table.add_column(heading, justify="right")
    counts = [Counts.of([plan.texts[i] for i in batch]), Counts.of(plan.texts)]
    padding = [plan.padding([batch]), plan.padding(plan.batches)]
    num_training = len(plan.texts) - plan.num_too_short - plan.num_held_out
    rows = {
        "texts": [f"{count.num_texts:,}" for count in counts],
        "tokens": [f"{count.num_tokens:,}" for count in counts],
        "learned tokens": [f"{count.num_learned:,} ({count.num_learned / count.num_tokens:.1%})" for count in counts],
        "tokens per text": [
            f"{count.shortest:,} to {count.longest:,}, mean {count.num_tokens / count.num_texts:,.0f}"
            for count in counts
        ],
        f"texts cut off at {options.max_length:,} tokens": [f"{count.num_cut:,}" for count in counts],
        "padding beside whole texts": [f"{whole:.1%}" for whole, _ in padding],
        "padding once prompts are skipped": [f"{fed:.1%}" for _, fed in padding],
        "batches": ["", f"{len(plan.batches):,}"],
        "texts trained on": ["", f"{num_training:,}"],
        "texts kept apart to measure on": ["", f"{plan.num_held_out:,}"],
        "left out: no learned token": ["", f"{plan.num_left_out:,}"],
        "left out: no two learned in a row": ["", f"{plan.num_too_short:,}"],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table
