"""``draftheads audit``: checks a server, and prints what was found."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from draftheads import load
from draftheads.cli.show import check_json_path, quiet_transformers, write_json
from draftheads.data.records import TextPrompt, prompts_in
from draftheads.errors import DataError
from draftheads.utils.provenance import provenance
from draftheads_audit.compare import Comparison, Kind
from draftheads_audit.model import ModelReference
from draftheads_audit.options import NUM_EXAMPLES, NUM_PARALLEL, AuditOptions
from draftheads_audit.report import GreedyRow, Report, SampledSide, SeededRow
from draftheads_audit.run import Audit
from draftheads_audit.server import Drafting, Server, origin

_BEFORE, _AFTER = 40, 60  # characters that are shown around a difference
_EXIT_CODES = {"lossless": 0, "wrong": 1, "undecided": 2}


def run(options: AuditOptions) -> int:
    """Audits and prints; returns the exit status of the verdict."""
    check_json_path(options.json)
    prompts = _prompts(options.prompts)
    quiet_transformers()
    with (
        ExitStack() as stack,
        Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars,
    ):
        servers = [stack.enter_context(closing(server)) for server in _servers(options)]

        def stage(what: str, total: int) -> Callable[[], object]:
            return partial(bars.advance, bars.add_task(what, total=total))

        load_model = None if options.model is None else partial(_model, options, options.model)
        report = Audit(servers, load_model, prompts, options, stage).run()
    if options.json != "-":
        _show(Console(highlight=False), report, prompts)
    write_json(options.json, {**report.record(), "num_prompts": len(prompts), "provenance": provenance()})
    return _EXIT_CODES[report.conclusion()[0]]


def _servers(options: AuditOptions) -> list[Server]:
    """The one with drafting, and the baseline. One at another address gets no key but its own."""
    own, other = "AUDIT_API_KEY", "AUDIT_BASELINE_API_KEY"
    most = options.max_new_tokens
    servers = [Server(options.url, "URL", key_variable=own, fields=options.server_values, max_new_tokens=most)]
    if (url := options.baseline) is not None:
        is_same = origin(url, "--baseline") == origin(options.url) and other not in os.environ
        key, fields = own if is_same else other, options.baseline_values
        servers.append(Server(url, "--baseline", key_variable=key, fields=fields, max_new_tokens=most))
    return servers


def _model(options: AuditOptions, name: str, prompts: Sequence[TextPrompt], *, is_chat: bool) -> ModelReference:
    # one that only scores is in fp32: in bf16, logits above 16 are multiples of 0.125
    engine = load(name, max_batch_size=NUM_PARALLEL, precision="auto" if options.baseline is None else "fp32")
    return ModelReference(engine, prompts, max_new_tokens=options.max_new_tokens, is_chat=is_chat)


def _prompts(path: Path) -> list[TextPrompt]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines() if path.suffix == ".txt" else prompts_in(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", path=path) from None
    prompts = [line for line in lines if not isinstance(line, str) or line.strip()]
    if not prompts:
        raise DataError("holds no prompt", path=path)
    return prompts


def _show(console: Console, report: Report, prompts: Sequence[TextPrompt]) -> None:
    """The tables, examples of differences, and the verdict."""
    if report.rows:
        _show_texts(console, report.rows)
    own: list[GreedyRow | SeededRow] = [*(row for row in report.rows if not row.is_baseline), *report.sampled]
    sampled, speeds = [], []
    for row in own:
        if isinstance(row, SeededRow):
            sides = (row.server, row.baseline)
            repeated = ["–" if side is None else f"{side.num_equal}/{side.num_repeated}" for side in sides]
            excess = [_number(None if side is None else side.mean_excess, "+.4f") for side in sides]
            tokens = _number(row.server.num_tokens or None, ",")
            sampled.append([row.check, *repeated, tokens, *excess, _number(row.deviations, "+.1f")])
        runs = [side.run if isinstance(side, SampledSide) else side for side in (row.server, row.baseline)]
        speed, other = (None if run is None else run.tokens_per_second for run in runs)
        drafting = (runs[0] and runs[0].drafting) or Drafting(None, None)
        numbers = [(speed, ".1f"), (other, ".1f"), (speed / other if speed is not None and other else None, ".2f")]
        numbers += [(drafting.tokens_per_step, ".2f"), (drafting.accepted_share, ".1%")]
        speeds.append([row.check, *(_number(*each) for each in numbers)])
    if sampled:
        headings = ("repeated equal", "baseline equal", "scored tokens", "excess surprise", "baseline surprise", "z")
        _show_table(console, headings, sampled)
    _show_table(console, ("tokens/s", "baseline tokens/s", "ratio", "tokens/ step", "accepted drafts"), speeds)
    for greedy, comparison in report.examples(NUM_EXAMPLES):
        _show_example(console, greedy, comparison, prompts)
    for sentence in (*report.notes, *report.conclusion()[1]):
        console.print(sentence, markup=False, soft_wrap=True)


def _show_texts(console: Console, rows: Sequence[GreedyRow]) -> None:
    kinds: dict[str, Kind] = {"equal": "equal", "near- ties": "near-tie", "WRONG": "wrong"}
    rare: dict[str, Kind] = {"reference wrong": "reference-wrong", "not scored": "unscored"}
    kinds |= {heading: kind for heading, kind in rare.items() if any(row.count(kind) for row in rows)}
    has_json = any(row.num_finished is not None for row in rows)
    lines = []
    for row in rows:
        name = f"baseline itself, {row.check}" if row.is_baseline else row.check
        counts = [str(row.count(kind)) if row.comparisons else "–" for kind in kinds.values()]
        compared, characters = row.num_characters
        share = f"{100 * compared / characters:.0f} %" if characters else "–"
        valid = "" if row.num_finished is None else f"{row.num_finished - len(row.json_problems)}/{row.num_finished}"
        lines.append([name, str(row.num_answers), *counts, str(row.num_without_pair), share, *[valid] * has_json])
    _show_table(console, ("answers", *kinds, "failed", "compared", *["valid JSON"] * has_json), lines)


def _show_table(console: Console, headings: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("check", vertical="bottom")
    for heading in headings:
        table.add_column(heading.replace(" ", "\n"), justify="right", vertical="bottom")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    console.print()


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _show_example(console: Console, row: GreedyRow, one: Comparison, prompts: Sequence[TextPrompt]) -> None:
    """One difference: where it is, and how both texts go on."""
    kind = {"wrong": "WRONG", "unscored": "not scored", "reference-wrong": "reference wrong"}.get(one.kind, one.kind)
    gap = "" if one.gap is None else f", gap {'at least ' * one.is_least}{one.gap:.3f} nats"
    prompt, common = prompts[one.index], one.answer[: one.place]
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    console.print(
        f"{row.check}, prompt {one.index + 1} ({_short(asked, _BEFORE)}), after {one.place} characters: "
        f"{kind}{gap}{', ' * bool(one.reason)}{one.reason}",
        markup=False,
        soft_wrap=True,
    )
    for name, text in (
        ("common end", f"…{common[-_BEFORE:]}" if len(common) > _BEFORE else common),
        ("answer", _short(one.answer[one.place :], _AFTER) or "(it ends here)"),
        ("reference", _short(one.reference[one.place :], _AFTER) or "(it ends here)"),
    ):
        console.print(Text(f"  {name:<11}{' '.join(text.splitlines())}"), soft_wrap=True)
    console.print()


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
