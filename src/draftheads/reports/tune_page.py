"""``tune.html``: what a search for trees found, as pictures and tables, from ``tune.json`` alone.

Knows the names in that record; knows nothing of models. One file of HTML, its pictures inside, that opens anywhere.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from draftheads.errors import DataError, InvalidTree
from draftheads.files import write_atomic
from draftheads.reports import tune_plots as drawings
from draftheads.reports.plots import page, picture
from draftheads.reports.tune_plots import Record, batch_sizes, drawn_tree, winner_of

RECORD = "tune.json"
PAGE = "tune.html"
_FORMAT_VERSION = 2
_SETTINGS = ("method", "model_id", "head", "dtype", "temperature", "num_texts", "num_tokens", "format_version")
_BODY = """<p>A tree holds guesses for the tokens to come: its root is the token just chosen, each level below it the
guesses of one head, and the model checks all nodes in one pass. A <em>static</em> tree has the same shape in every
step; a <em>dynamic</em> tree is grown anew in each step where the heads are surest; a <em>dense</em> tree makes equally
many guesses at all nodes of a level.</p>
<h2>Predicted speed on this machine</h2>
{{ numbers(winners) }}
<h2>Why</h2>
{% for picture in pictures %}<figure>{{ picture.svg | safe }}<figcaption>{{ picture.caption }}</figcaption></figure>
{% endfor %}
{% for table in tables %}<h2>{{ table.title }}</h2>
<table>{% for name, value in table.rows %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
{% endfor %}"""
_NUMBERS = """{% macro numbers(table) %}<table class="numbers"><tr>
{%- for name in table.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endmacro %}"""


def write_page(folder: Path) -> Path:
    """Writes ``tune.html`` into the folder that ``tune`` left.

    Raises:
        DataError: there is no ``tune.json`` in the folder, or it is damaged.
        MissingDependency: matplotlib or jinja2 is not installed.
    """
    path = folder / RECORD
    if not path.is_file():
        raise DataError(f"{folder} holds no finished search for trees: there is no {RECORD} in it")
    try:
        html = render(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, InvalidTree) as error:
        raise DataError(f"not a search for trees that can be read: {error!r}", path=path) from error
    write_atomic(folder / PAGE, html.encode())
    return folder / PAGE


def render(record: Record) -> str:
    """The page's HTML from what ``tune.json`` holds."""
    if record["format_version"] != _FORMAT_VERSION:
        raise ValueError(f"its format version is {record['format_version']}; this release reads {_FORMAT_VERSION}")
    return page(
        _NUMBERS + _BODY,
        title=f"Trees for {record['head']} ({record['method']}) on {record['model_id']}",
        summary=_summary(record),
        winners=_winners(record),
        pictures=[
            {"caption": caption, "svg": picture(partial(draw, record=record), height=height)}
            for caption, draw, height in _pictures(record)
        ],
        tables=[
            {"title": "Settings", "rows": _settings(record)},
            {"title": "Where it comes from", "rows": list(record["provenance"].items())},
        ],
    )


def _summary(record: Record) -> str:
    parts = [
        f"plain decoding at batch size {winner['batch_size']} (no tree is faster)"
        if winner["kind"] == "none"
        else f"a {_tree(winner)} at batch size {winner['batch_size']} ({winner['speedup']:.2f} times plain speed)"
        for winner in map(partial(winner_of, record), batch_sizes(record))
    ]
    return f"Predicted to be fastest on this machine: {'; '.join(parts)}."


def _tree(winner: dict[str, Any]) -> str:
    return f"{winner['kind']} tree of {winner['num_nodes']} node{'s' if winner['num_nodes'] > 1 else ''}"


def _winners(record: Record) -> dict[str, Any]:
    rows = [
        [
            winner["batch_size"],
            "plain" if winner["kind"] == "none" else winner["kind"],
            winner["num_nodes"],
            f"{winner['tokens_per_second']:,.1f}",
            f"{winner['plain_tokens_per_second']:,.1f}",
            f"{winner['speedup']:.2f}×",
        ]
        for winner in map(partial(winner_of, record), batch_sizes(record))
    ]
    columns = ["batch size", "tree", "nodes", "tokens a second", "plain decoding", "speed-up"]
    return {"columns": columns, "rows": rows}


def _settings(record: Record) -> list[tuple[str, Any]]:
    return [
        *((name, record[name]) for name in _SETTINGS),
        ("confidence temperatures", ", ".join(f"{value:.2f}" for value in record["confidence"]["temperatures"])),
    ]


def _pictures(record: Record) -> list[tuple[str, Callable[..., None], float]]:
    """Caption, drawing and height in inches of every picture, top to bottom."""
    num_others = len(batch_sizes(record)) - 1
    tree, _ = drawn_tree(record)
    pictures: list[tuple[str, Callable[..., None], float]] = [
        (
            (
                "How often a head's guess is the true token, by the guess's rank. As a rule the first guess is right "
                "far more often than the next ones, and heads that look further ahead are right less often."
            ),
            drawings.draw_accuracy,
            3.6,
        ),
        (_tree_caption(record), drawings.draw_tree, 1.2 + 0.75 * tree.max_depth),
        (
            (
                "Tokens that a step is expected to gain, by the tree's size; bands are one standard error. A good "
                "shape gains more from the same number of nodes, and each further node gains less than the one before."
            ),
            drawings.draw_expected,
            3.6,
        ),
        (
            (
                "Speed predicted from the gain above and the cost below, on this machine. The star is the fastest; to "
                "its right, verifying more nodes costs more than they gain."
            ),
            drawings.draw_speed,
            4.2,
        ),
        (
            (
                "Where a step's time goes, by the tree's size: drafting and verifying. Round dots are static trees, "
                "squares dynamic ones, the diamond plain decoding."
            ),
            drawings.draw_cost,
            3.6,
        ),
        (
            (
                "How sure the heads are of a guess against how often such guesses are right; larger dots stand for "
                "more guesses. On the dashed line confidence can be taken at its word, which a dynamic tree relies on."
            ),
            drawings.draw_confidence,
            4.8,
        ),
    ]
    if num_others:
        speedups = (
            (
                "The same at larger batches, as multiples of plain decoding's speed. The more texts share a step, the "
                "less idle the hardware is and, as a rule, the smaller the trees that pay."
            ),
            drawings.draw_speedups,
            0.8 + 2.6 * drawings.speedup_rows(num_others),
        )
        pictures.insert(4, speedups)
    return pictures


def _tree_caption(record: Record) -> str:
    tree, _ = drawn_tree(record)
    winner = winner_of(record, batch_sizes(record)[0])
    shown = (
        f"The static tree of {tree.num_nodes} node{'s' if tree.num_nodes > 1 else ''}, as many as the fastest at batch "
        f"size {winner['batch_size']} has"
        if tree.num_nodes == winner["num_nodes"]
        else f"The first {tree.num_nodes} nodes of the static tree"
    )
    return (
        f"{shown}. A node's number is the rank of its guess, its colour how often it and all above it are the true "
        "tokens: the tree is wide and deep where the heads are mostly right."
    )
