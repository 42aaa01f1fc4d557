"""The pictures of the manual, written to docs/pictures by `python tools/pictures.py tree` (`speed`, `text`, `chat`).

`tree` is one step of the real model, `speed` and `text` draw tables of docs/results/heads.md, `chat` is a screenshot of
the page of a server with that model.
"""

import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal
from unittest import mock
from urllib.request import urlopen

import matplotlib as mpl
import tyro
from matplotlib.figure import Figure

import draftheads
from draftheads.decode.batch import Batch, Verified
from draftheads.models.pretrained import load_tokenizer

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
QUESTION = "Why is the sky blue?"
ACCEPTED, REJECTED, OWN = "#1b7f4b", "#9aa0a6", "#1f4e9c"
# the numbers of a row of the table, in their order
PROGRAMS = {
    "draftheads bf16": OWN,
    "draftheads int8": OWN,
    "draftheads bf16, hydra": ACCEPTED,
    "draftheads int8, hydra": ACCEPTED,
    "llama.cpp Q4_1": REJECTED,
    "OpenVINO int8": REJECTED,
    "OpenVINO int4": REJECTED,
    "OpenVINO int8, prompt lookup": REJECTED,
    "OpenVINO int4, prompt lookup": REJECTED,
}


def save(figure: Figure, name: str) -> None:
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name}  # text as text: small files
    with mpl.rc_context(style):
        figure.savefig(PICTURES / f"{name}.svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})


def best_step() -> tuple[list[int], list[int], list[int]]:
    """Token ids and parents of a draft's nodes, and the tokens of its step: of the step that got the most tokens."""
    engine = draftheads.load("smollm2-135m", head="hydra", tree=draftheads.BestFirst(12), copy=False, precision="fp32")
    steps: list[tuple[list[int], list[int], list[int]]] = []
    note = Batch.note

    def recorded(batch: Batch, found: Verified, counts: list[int], *others: Any) -> None:
        draft = found.draft
        steps.append(
            (draft.token_ids[0].tolist(), draft.parents[0].tolist(), batch.requests[0].token_ids[-counts[0] :])
        )
        note(batch, found, counts, *others)

    with mock.patch.object(Batch, "note", recorded):
        engine.generate([QUESTION], max_new_tokens=64)
    return max(steps, key=lambda step: (len(step[2]), len(step[0])))


def draw_tree() -> None:
    tokens, parents, new = best_step()
    words = load_tokenizer("smollm2-135m").tokenizer
    children: dict[int, list[int]] = {}
    for node in range(1, len(tokens)):
        children.setdefault(parents[node], []).append(node)
    path = [0]
    for token in new[:-1]:
        path.append(next(node for node in children[path[-1]] if tokens[node] == token))
    tokens.append(new[-1])  # the model's own next token
    own = len(tokens) - 1
    children.setdefault(path[-1], []).insert(0, own)
    places: dict[int, tuple[float, float]] = {}
    rows = iter(range(len(tokens)))

    def place(node: int, depth: int) -> float:
        heights = [place(child, depth + 1) for child in children.get(node, ())]
        places[node] = (depth, heights[0] if heights else float(next(rows)))
        return places[node][1]

    place(0, 0)
    figure = Figure(figsize=(8.5, 3.6))
    axes = figure.subplots()
    axes.axis("off")
    axes.invert_yaxis()
    for parent, nodes in children.items():
        for node in nodes:
            (x0, y0), (x1, y1) = places[parent], places[node]
            kept = node in path
            colour = ACCEPTED if kept else OWN if node == own else REJECTED
            style: dict[str, Any] = {
                "color": colour,
                "linewidth": 2.4 if kept else 1.2,
                "linestyle": ":" if node == own else "-",
            }
            axes.plot([x0, x0 + 0.45, x0 + 0.6, x1], [y0, y0, y1, y1], zorder=2 if kept else 1, **style)
    for node, (x, y) in places.items():
        colour = ACCEPTED if node in path and node else OWN if node in (0, own) else REJECTED
        box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": colour, "linewidth": 1.6}
        word = repr(words.decode([tokens[node]]))[1:-1]
        axes.text(x, y, word, ha="center", va="center", color=colour, bbox=box)
    title = f"One step of hydra, {len(new)} tokens: green is accepted, grey rejected, blue the model's own tokens"
    figure.suptitle(title, fontsize=10)
    save(figure, "tree")


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, row by row, with those of its own head."""
    text = (ROOT / "docs/results/heads.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    return [line.split("|")[1:-1] for line in text.split("\n## ")[0].splitlines() if re.match(r"\| +[\w|]", line)]


def draw_speed() -> None:
    rows = rows_below("Beside other programs")[1:]
    figure = Figure(figsize=(8.5, 3.4))
    for axes, (machine, *cells) in zip(figure.subplots(1, len(rows), sharey=True), rows, strict=True):
        numbers = [float(number) for number in re.findall(r"\d+\.\d+", " ".join(cells))]
        bars = axes.barh(list(PROGRAMS), numbers, color=list(PROGRAMS.values()))
        assert len(bars) == len(numbers) == len(PROGRAMS)
        axes.bar_label(bars, fmt="%.0f", padding=2)
        axes.set_title(machine.strip(), fontsize=10)
        axes.set_xlabel("tokens per second")
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()  # of both
    save(figure, "speed")


def draw_text() -> None:
    (_, *sizes), *rows = rows_below("Tokens per step by text")
    places = [float(size.split()[0]) for size in sizes]
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    for number, axes in enumerate(figure.subplots(1, 2)):
        for name, *cells in rows:
            points = [re.findall(r"\d\.\d+", cell) for cell in cells]
            known = [(at, float(point[number])) for at, point in zip(places, points, strict=True) if point[number:]]
            axes.plot(*zip(*known, strict=True), marker="o", label=name.strip(" `"))
        axes.set_xticks(places)
        axes.set_xlabel("million tokens of text")
        axes.set_title(("MT-Bench, 24 nodes", "six tasks, ten nodes")[number], fontsize=10)
        axes.set_ylabel("tokens per step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    save(figure, "text")


def take_chat() -> None:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - one picture needs it

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "draftheads", "serve", "smollm2-135m", "--head", "hydra", "--port", str(port)]
    with subprocess.Popen(command) as server, sync_playwright() as started:  # noqa: S603 - ourselves
        try:
            while True:
                try:
                    urlopen(f"{url}/health")  # noqa: S310 - our own server
                    break
                except OSError:
                    assert server.poll() is None, "the server ended"
                    time.sleep(1)
            browser = started.chromium.launch(executable_path=shutil.which("chromium"))
            page = browser.new_page(viewport={"width": 820, "height": 640})
            page.set_default_timeout(300_000)
            page.goto(url)
            page.wait_for_selector("#send:enabled")
            page.evaluate("document.getElementById('settings').open = true")
            page.fill("#max-tokens", "80")
            page.evaluate("document.getElementById('settings').open = false")
            page.fill("#question", QUESTION)
            page.press("#question", "Enter")
            page.wait_for_selector(".turn .tools", state="attached")
            page.wait_for_selector("#log[aria-busy=false]")
            page.screenshot(path=PICTURES / "chat.png")
            browser.close()
        finally:
            server.terminate()


def main(picture: Literal["tree", "speed", "text", "chat"], /) -> None:
    PICTURES.mkdir(exist_ok=True)
    {"tree": draw_tree, "speed": draw_speed, "text": draw_text, "chat": take_chat}[picture]()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
