"""``draftheads audit``: checks a server, and prints what was found."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftheads.cli.progress_display import ProgressDisplay, error_console
from draftheads.cli.show import check_json_path, quiet_transformers, write_json
from draftheads.data.records import TextPrompt, prompts_in
from draftheads.errors import DataError
from draftheads.interop.audit.client import Server, ServerAddress
from draftheads.interop.audit.compare import Comparison
from draftheads.interop.audit.drafting import Drafting
from draftheads.interop.audit.json_check import json_problem
from draftheads.interop.audit.model_reference import ModelReference, text_of
from draftheads.interop.audit.report import GreedyRow, Pass, Report, SeededRow
from draftheads.interop.audit.run import Audit
from draftheads.interop.audit.settings import DEFAULT_SCHEMA, AuditOptions, AuditSettings
from draftheads.loading import load
from draftheads.settings import Grammar
from draftheads.utils.api_keys import api_key, origin
from draftheads.utils.provenance import provenance

_BEFORE, _AFTER = 40, 60  # characters that are shown around a difference


def run(options: AuditOptions) -> int:
    """Audits and prints; returns the exit status of the verdict."""
    check_json_path(options.json)
    prompts, schema, key = _prompts(options), _schema(options.json_schema), api_key(options.api_key_env)
    addresses = [ServerAddress(options.url, "URL", options.server_name, options.server_values, key)]
    if options.baseline is not None:
        name, values = options.baseline_name, options.baseline_values
        key_option = "--baseline-key-env"
        if options.baseline_key_env is not None or origin(options.baseline, "--baseline") != origin(options.url):
            key = api_key(options.baseline_key_env, key_option)  # the other key is for the other server
        addresses.append(ServerAddress(options.baseline, "--baseline", name, values, key, key_option))
    servers = [Server(address, options.settings, schema) for address in addresses]
    load_model = None if options.model is None else partial(_model, options, prompts)
    quiet_transformers()
    try:
        with ProgressDisplay(error_console(), transient=True) as progress:
            baseline = servers[1] if len(servers) > 1 else None
            report = Audit(
                servers[0],
                baseline,
                load_model,
                prompts,
                settings=options.settings,
                schema=schema,
                progress=progress,
            ).run()
    finally:
        for server in servers:
            server.close()
    if options.json != "-":
        show(Console(highlight=False), report, prompts, num_examples=options.examples)
    write_json(options.json, {**report.record(), "num_prompts": len(prompts), "provenance": provenance()})
    return report.exit_code


def _prompts(options: AuditOptions) -> list[TextPrompt]:
    path = options.prompts
    prompts = _lines(path) if path.suffix == ".txt" else prompts_in(path)
    if not prompts:
        raise DataError("holds no prompt", path=path)
    prompts = prompts[: options.limit]
    if options.settings.route == "completions":
        return [text_of(prompt) for prompt in prompts]
    return prompts


def _lines(path: Path) -> list[TextPrompt]:
    try:
        return [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", path=path) from None


def _schema(path: Path | None) -> dict[str, Any]:
    if path is None:
        return DEFAULT_SCHEMA
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", path=path) from None
    Grammar.json_schema(text)  # raises where it is none
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise DataError(f"a schema for servers is a JSON object, not {schema!r}", path=path)
    json_problem("null", schema)  # raises where it is none
    return schema


def _model(options: AuditOptions, prompts: list[TextPrompt], settings: AuditSettings) -> ModelReference:
    assert options.model is not None
    given = options.load.given()
    if options.baseline is not None:  # it only scores: in bf16, logits above 16 are multiples of 0.125
        given = {"precision": "fp32", **given}
    engine = load(options.model, max_batch_size=options.settings.parallel, **given)
    return ModelReference(engine, prompts, settings)


def show(console: Console, report: Report, prompts: list[TextPrompt], *, num_examples: int) -> None:
    """The tables, examples of differences, and the verdict."""
    tables = [*([_texts(report)] if report.rows else []), *([_sampled(report)] if report.sampled else [])]
    for table in (*tables, _speeds(report)):
        console.print(table)
        console.print()
    for row, comparison in report.examples(num_examples):
        _show_example(console, row, comparison, prompts)
    for sentence in (*report.notes, *report.sentences()):
        console.print(sentence, markup=False, soft_wrap=True)


def _table(first: str, *headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, vertical="bottom")
    for heading in headings:
        table.add_column(heading.replace(" ", "\n"), justify="right", vertical="bottom")
    return table


def _texts(report: Report) -> Table:
    has_json = any(row.num_finished is not None for row in report.rows)
    optional = {
        "reference wrong": any(row.count("reference-wrong") for row in report.rows),
        "not scored": any(row.count("unscored") for row in report.rows),
    }
    shown = [heading for heading, is_there in optional.items() if is_there]
    headings = ["answers", "equal", "near- ties", "WRONG", *shown, "failed", "compared"]
    table = _table("check", *headings, *(["valid JSON"] if has_json else []))
    for row in report.rows:
        cells = [str(row.num_answers)]
        if row.comparisons:
            compared, characters = row.num_characters
            kinds = {"reference wrong": "reference-wrong", "not scored": "unscored"}
            counts = [row.count("equal"), row.count("near-tie"), row.num_wrong]
            counts += [row.count(kinds[heading]) for heading in shown]  # type: ignore[arg-type]
            cells += [*map(str, counts), str(row.num_without_pair), _share(compared, characters)]
        else:
            cells += ["–"] * (3 + len(shown)) + [str(row.num_failed), "–"]
        if has_json:
            finished = row.num_finished
            valid = "" if finished is None else f"{finished - len(row.json_problems)}/{finished}"
            cells.append(valid)
        table.add_row(*map(Text, (_name(row), *cells)))
    return table


def _name(row: GreedyRow) -> str:
    return f"baseline itself, {row.check}" if row.is_baseline else row.check


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def _sampled(report: Report) -> Table:
    """Sampled answers: repeated requests, and how surprising the tokens are."""
    table = _table(
        "check", "repeated equal", "baseline equal", "scored tokens", "excess surprise", "baseline surprise", "z"
    )
    for row in report.sampled:
        sides = (row.server, row.baseline)
        repeated = ["–" if side is None else f"{side.num_equal}/{side.num_repeated}" for side in sides]
        excess = ["–" if side is None or side.mean_excess is None else f"{side.mean_excess:+.4f}" for side in sides]
        z = "–" if row.deviations is None else f"{row.deviations:+.1f}"
        tokens = f"{row.server.num_tokens:,}" if row.server.num_tokens else "–"
        table.add_row(*map(Text, (row.check, *repeated, tokens, *excess, z)))
    return table


def _speeds(report: Report) -> Table:
    table = _table("check", "tokens/s", "baseline tokens/s", "ratio", "tokens/ step", "accepted drafts")
    rows: list[GreedyRow | SeededRow] = [row for row in report.rows if not row.is_baseline]
    for row in [*rows, *report.sampled]:
        server, baseline = _passes(row)
        speeds = [None if one is None else one.tokens_per_second for one in (server, baseline)]
        ratio = None if None in speeds or not speeds[1] else speeds[0] / speeds[1]  # type: ignore[operator]
        drafting = server.drafting or Drafting(None, None)
        cells = [
            *(_number(speed, ".1f") for speed in speeds),
            _number(ratio, ".2f"),
            _number(drafting.tokens_per_step, ".2f"),
            _number(drafting.accepted_share, ".1%"),
        ]
        table.add_row(*map(Text, (row.check, *cells)))
    return table


def _passes(row: GreedyRow | SeededRow) -> tuple[Pass, Pass | None]:
    if isinstance(row, GreedyRow):
        return row.server, row.baseline
    return row.server.run, None if row.baseline is None else row.baseline.run


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _show_example(console: Console, row: GreedyRow, one: Comparison, prompts: list[TextPrompt]) -> None:
    """One difference: where it is, and how both texts go on."""
    kinds = {"wrong": "WRONG", "near-tie": "near-tie", "unscored": "not scored", "reference-wrong": "reference wrong"}
    gap = ""
    if one.gap is not None:
        gap = f", gap {'at least ' * one.is_least}{one.gap:.3f} nats"
    prompt = prompts[one.index]
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    common = one.answer[: one.place]
    console.print(
        f"{row.check}, prompt {one.index + 1} ({_short(asked, _BEFORE)}), after {one.place} characters: "
        f"{kinds[one.kind]}{gap}{', ' * bool(one.reason)}{one.reason}",
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
