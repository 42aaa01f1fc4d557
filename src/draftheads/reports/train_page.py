"""``report.html``: a finished training run as pictures and tables, from the files in its folder alone.

Knows the names in ``metrics.json``, ``log.jsonl`` and ``validation.jsonl``; knows nothing of models. One file of HTML,
its pictures inside, that opens anywhere.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftheads.errors import DataError
from draftheads.files import write_atomic
from draftheads.reports.plots import finish, page, picture

PAGE = "report.html"
_SMOOTHING = 20  # log lines in a moving mean
_BODY = """<h2>Accuracy on text kept apart</h2>
<table class="numbers"><tr>{% for name in heads.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in heads.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% for picture in pictures %}<figure>{{ picture.svg | safe }}<figcaption>{{ picture.caption }}</figcaption></figure>
{% endfor %}
{% for table in tables %}<h2>{{ table.title }}</h2>
<table>{% for name, value in table.rows %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
{% endfor %}"""


def has_run(folder: Path) -> bool:
    """Whether there is a finished training run in the folder."""
    return (folder / "metrics.json").is_file()


def write_page(folder: Path) -> Path:
    """Writes ``report.html`` into the folder of a finished run.

    Raises:
        DataError: the folder holds no finished run, or its files are damaged.
        MissingDependency: matplotlib or jinja2 is not installed.
    """
    path = folder / "metrics.json"
    if not has_run(folder):
        raise DataError(f"{folder} holds no finished training run: there is no metrics.json in it")
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
        html = render(metrics, _lines(folder / "log.jsonl"), _lines(folder / "validation.jsonl"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder} holds no training run that can be read: {error!r}") from error
    write_atomic(folder / PAGE, html.encode())
    return folder / PAGE


def render(metrics: dict[str, Any], log: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> str:
    """The page's HTML from what the files hold."""
    pictures = [
        (
            "Loss per head: a moving mean of training, dots on text kept apart.",
            lambda figure: _draw_losses(figure.add_subplot(), log, validation),
        ),
        (
            "How often the true token is among a head's best guesses, by how many are looked at.",
            lambda figure: _draw_ranks(figure.add_subplot(), metrics["accuracy_by_rank"]),
        ),
        (
            "Expected tokens per step on text kept apart while training.",
            lambda figure: _draw_tokens_per_step(figure.add_subplot(), validation),
        ),
    ]
    return page(
        _BODY,
        title=f"{metrics['method']} heads for {metrics['model_id']}",
        summary=_summary(metrics),
        heads=_heads(metrics),
        pictures=[{"caption": caption, "svg": picture(draw)} for caption, draw in pictures],
        tables=[
            {"title": "Settings", "rows": list(metrics["options"].items())},
            {"title": "Where it comes from", "rows": list(metrics["provenance"].items())},
        ],
    )


def _summary(metrics: dict[str, Any]) -> str:
    return (
        "Trained on {num_training_texts:,} texts in {num_steps:,} steps, {training_seconds:,.0f} seconds, "
        "{tokens_per_second:,.0f} tokens a second. Expected tokens per step on {num_held_out_texts:,} texts kept "
        "apart: {tokens_per_step_chain:.2f} with a chain, {tokens_per_step_tree:.2f} with a tree of {num_nodes} nodes."
    ).format(num_nodes=len(metrics["tree"]) + 1, **metrics)


def _heads(metrics: dict[str, Any]) -> dict[str, Any]:
    shares = zip(*(metrics[name] for name in ("top1", "top3", "top10")), strict=True)
    rows = [
        [f"{number}", f"{loss:.3f}", *(f"{share:.1%}" for share in row)]
        for number, (loss, row) in enumerate(zip(metrics["losses"], shares, strict=True), 1)
    ]
    return {"columns": ["head", "loss", "top-1", "top-3", "top-10"], "rows": rows}


def _draw_losses(ax: Any, log: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> None:
    steps = [line["step"] for line in log]
    for head in range(len(log[0]["head_losses"]) if log else 0):
        (line,) = ax.plot(
            steps, _smoothed([entry["head_losses"][head] for entry in log]), label=f"head {head + 1}", linewidth=1.4
        )
        ax.plot(
            [entry["step"] for entry in validation],
            [entry["losses"][head] for entry in validation],
            "o",
            markersize=4,
            color=line.get_color(),
        )
    finish(ax, "step", "loss")


def _draw_ranks(ax: Any, accuracy_by_rank: Sequence[Sequence[float]]) -> None:
    for head, shares in enumerate(accuracy_by_rank, 1):
        ax.plot(range(1, len(shares) + 1), [100 * share for share in shares], "o-", markersize=4, label=f"head {head}")
    ax.set_ylim(0, 100)
    finish(ax, "best guesses looked at", "true token among them, %")


def _draw_tokens_per_step(ax: Any, validation: Sequence[dict[str, Any]]) -> None:
    steps = [line["step"] for line in validation]
    for name, label in (("tokens_per_step_chain", "chain"), ("tokens_per_step_tree", "tree")):
        ax.plot(steps, [line[name] for line in validation], "o-", markersize=4, label=label)
    finish(ax, "step", "expected tokens per step")


def _smoothed(values: Sequence[float]) -> list[float]:
    """Moving mean over the last lines.

    >>> _smoothed([1.0, 2.0, 3.0])
    [1.0, 1.5, 2.0]
    """
    windows = (values[max(0, end - _SMOOTHING) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
