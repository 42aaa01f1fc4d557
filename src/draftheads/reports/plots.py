"""Pages of HTML with their pictures inside: the look that all reports share.

Knows jinja2 and matplotlib, which only reports need; knows nothing of what is shown. A page opens anywhere, and the
same content gives the same bytes.
"""

import io
from collections.abc import Callable
from typing import Any

from draftheads.errors import MissingDependency

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2530; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid #dde3ea; vertical-align: top }
table.numbers { display: block; overflow-x: auto; font-size: .8rem }
table.numbers :not(:first-child) { text-align: right }
td { overflow-wrap: anywhere } table.numbers td { overflow-wrap: normal }
table.numbers td:first-child { white-space: nowrap } table.numbers :is(th, td) { padding-right: .5rem }
figure { margin: 1rem 0 } figure svg { width: 100%; height: auto } figcaption { color: #55606e }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ summary }}</p>
"""
_TAIL = "</body></html>\n"


def page(body: str, **values: Any) -> str:
    """A whole page: the jinja2 template ``body`` below a heading; ``values`` has ``title`` and ``summary``, too."""
    try:
        from jinja2 import Environment  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise _missing(error) from error
    return Environment(autoescape=True).from_string(_HEAD + body + _TAIL).render(**values)


def picture(draw: Callable[[Any], None], *, height: float = 3.6) -> str:
    """What ``draw`` puts on a matplotlib figure 8 inches wide, as SVG that is the same each time."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise _missing(error) from error
    with mpl.rc_context({"svg.hashsalt": "draftheads", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(8, height), layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    svg = file.getvalue()
    return svg[svg.index("<svg") :]


def finish(ax: Any, x: str, y: str) -> None:
    """Label the axes and give them the common look; to be called when all is drawn."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(alpha=0.25)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False)


def _missing(error: ImportError) -> MissingDependency:
    return MissingDependency(f"the report needs {error.name}", pip_install="'draftheads[report]'")
