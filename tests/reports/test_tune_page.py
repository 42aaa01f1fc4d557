"""The page of a search for trees: everything in it comes from ``tune.json``."""

import copy
import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from draftheads.errors import DataError, MissingDependency
from draftheads.reports.tune_page import render, write_page

Record = dict[str, Any]


def _record(
    *, num_heads: int = 4, num_ranks: int = 10, num_nodes: int = 64, batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
) -> Record:
    """What ``tune`` might find: smooth accuracies, steps that grow dearer with nodes and batch."""
    accuracy = [[0.62 * 0.72**head * (1 + rank) ** -1.9 for rank in range(num_ranks)] for head in range(num_heads)]
    shares = {
        path: math.prod(accuracy[depth][rank] ** 0.8 for depth, rank in enumerate(path))
        for length in range(num_heads + 1)
        for path in itertools.product(range(num_ranks if length < 3 else 2), repeat=length)
    }
    paths = sorted(shares, key=lambda path: (-shares[path], len(path), path))[:num_nodes]
    expected = list(itertools.accumulate(shares[path] for path in paths))
    error = [0.015 * (value - 1) for value in expected]
    gains = {"static": expected, "dynamic": [1 + 1.12 * (value - 1) for value in expected]}
    dense = [
        {"widths": list(widths), "num_nodes": 1 + widths[0] + math.prod(widths[:2]) * (len(widths) > 1)}
        for widths in [(1,), (2,), (4,), (2, 2), (4, 2), (3, 3), (5, 4), (7, 6)]
        if len(widths) <= num_heads
    ]
    for tree in dense:
        within = (
            path
            for path in shares
            if len(path) <= len(tree["widths"]) and all(r < w for r, w in zip(path, tree["widths"], strict=False))
        )
        tree["expected"] = sum(shares[path] for path in within)

    def cost(batch_size: int, kind: str, size: int) -> Record:
        draft = 0.0 if kind == "none" else 2.0 + 0.02 * size * (3 if kind == "dynamic" else 1)
        verify = 17.5 + 0.06 * size * batch_size
        return {
            "batch_size": batch_size,
            "kind": kind,
            "num_nodes": size,
            "draft": draft,
            "verify": verify,
        }

    def speed(batch_size: int, kind: str, size: int, gain: float) -> float:
        row = cost(batch_size, kind, size)
        return 1e3 * batch_size * gain / (row["draft"] + row["verify"])

    sizes = [size for size in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) if size <= num_nodes]
    costs, rates, batches = [], [], []
    for batch_size in batch_sizes:
        plain = speed(batch_size, "none", 1, 1.0)
        best = {"kind": "none", "num_nodes": 1, "tokens_per_second": plain}
        costs.append(cost(batch_size, "none", 1))
        for kind, gain in gains.items():
            costs += [cost(batch_size, kind, size) for size in sizes]
            speeds = [speed(batch_size, kind, size, gain[size - 1]) for size in range(1, num_nodes + 1)]
            rates.append(
                {
                    "batch_size": batch_size,
                    "kind": kind,
                    "num_nodes": list(range(1, num_nodes + 1)),
                    "tokens_per_second": speeds,
                }
            )
            top = max(range(num_nodes), key=speeds.__getitem__)
            if speeds[top] > best["tokens_per_second"]:
                best = {"kind": kind, "num_nodes": top + 1, "tokens_per_second": speeds[top]}
        rates.append(
            {
                "batch_size": batch_size,
                "kind": "dense",
                "num_nodes": [tree["num_nodes"] for tree in dense],
                "tokens_per_second": [
                    speed(batch_size, "static", tree["num_nodes"], tree["expected"]) for tree in dense
                ],
            }
        )
        batches.append(
            {
                "batch_size": batch_size,
                **best,
                "plain_tokens_per_second": plain,
                "speedup": best["tokens_per_second"] / plain,
            }
        )
    bins = [
        ((2 * i + 1) / 20, count) for i, count in enumerate((30000, 9000, 4200, 2600, 1900, 1500, 1200, 1100, 1400, 0))
    ]
    return {
        "format_version": 2,
        "method": "hydra",
        "model_id": "smollm2-135m",
        "head": "hydra",
        "dtype": "bfloat16",
        "temperature": 0.0,
        "num_texts": 64,
        "num_tokens": 7800,
        "accuracy": accuracy,
        "confidence": {
            "temperatures": [1.31 + 0.11 * head for head in range(num_heads)],
            "before": [[sure, sure**1.25, count] for sure, count in bins],
            "after": [[sure, sure**1.03, count] for sure, count in bins],
        },
        "static": {
            "paths": [list(path) for path in paths[1:]],
            "shares": [shares[path] for path in paths],
            "expected": expected,
            "error": error,
        },
        "marginal": {"expected": [1 + 0.95 * (value - 1) for value in expected], "error": error},
        "dynamic": {"expected": gains["dynamic"], "error": error},
        "dense": dense,
        "cost": costs,
        "rates": rates,
        "batches": batches,
        "provenance": {"command": "draftheads tune", "torch": "2.13.0"},
    }


@pytest.fixture(scope="module")
def record() -> Record:
    return _record()


@pytest.fixture(scope="module")
def html(record: Record) -> str:
    return render(record)


def _drawn_nodes(html: str) -> tuple[int, list[str]]:
    """How many circles the drawn tree has, and the paths of those with a rank in them."""
    circles = html[(start := html.index('<g id="nodes">')) : html.index("</g>\n   <g id", start)]
    return circles.count("<use"), re.findall(r'id="node-([-\d]+)"', html)


def test_every_winner_is_in_the_table_and_in_the_summary(record: Record, html: str):
    kinds = {winner["kind"] for winner in record["batches"]}
    assert kinds == {"dynamic"}, "the record's own doing"
    changed = copy.deepcopy(record)
    changed["batches"][1] |= {"kind": "static", "num_nodes": 1}
    changed["batches"][4] |= {"kind": "none", "num_nodes": 1, "speedup": 1.0}
    changed["batches"].reverse()
    page = render(changed)
    rows = re.findall(r"<tr>(?:<td>[^<]*</td>){6}</tr>", page)[:5]
    for winner, row in zip(reversed(changed["batches"]), rows, strict=True):
        assert re.findall("<td>([^<]*)", row) == [
            str(winner["batch_size"]),
            "plain" if winner["kind"] == "none" else winner["kind"],
            str(winner["num_nodes"]),
            f"{winner['tokens_per_second']:,.1f}",
            f"{winner['plain_tokens_per_second']:,.1f}",
            f"{winner['speedup']:.2f}×",
        ]
    first = record["batches"][0]
    assert (
        f"on this machine: a dynamic tree of {first['num_nodes']} nodes at batch size 1 ({first['speedup']:.2f} times"
        in page
    )
    assert "a static tree of 1 node at batch size 2 (" in page
    assert "plain decoding at batch size 16 (no tree is faster)." in page


@pytest.mark.parametrize(("winner", "size"), [({"num_nodes": 7}, 7), ({"num_nodes": 60}, 40), ({"kind": "none"}, 40)])
def test_the_drawn_tree_is_the_winners_as_far_as_it_can_be_read(record: Record, winner: Record, size: int):
    page = render({**record, "batches": [{**record["batches"][0], **winner}]})
    paths = ["-".join(map(str, path)) for path in record["static"]["paths"][: size - 1]]
    num_circles, drawn = _drawn_nodes(page)
    assert num_circles == size
    assert sorted(drawn) == sorted(paths)
    how = "The static tree of 7 nodes, as many as the fastest" if size == 7 else "The first 40 nodes of the static tree"
    assert how in page


def test_the_same_record_gives_the_same_bytes_from_a_file(tmp_path: Path, record: Record, html: str):
    (tmp_path / "tune.json").write_text(json.dumps(record))
    assert write_page(tmp_path) == tmp_path / "tune.html"
    assert (tmp_path / "tune.html").read_bytes() == html.encode()
    assert "src=" not in html, "nothing is fetched from elsewhere"
    assert 'href="http' not in html


def test_pictures_have_captions_and_words_that_can_be_searched(html: str):
    assert html.count("<svg") == html.count("</svg>") == html.count("<figcaption>") == 7
    labels = ("head 4", "static, heads taken as independent", "fastest", "batch size 16", "verify")
    for label in (*labels, "expected tokens per step", "times plain speed", "milliseconds"):
        assert f">{label}</text>" in html


def test_pictures_follow_their_numbers():
    """Every number that a picture is drawn from changes that picture, and no other."""
    record = _record(num_heads=2, num_ranks=3, num_nodes=8, batch_sizes=(1, 4))
    pictures = _pictures_of(render(record))
    rates = [row["kind"] for row in record["rates"]].index("dynamic")

    def changed(*keys: str | int) -> set[int]:
        other = copy.deepcopy(record)
        place: Any = other
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] *= 0.9
        return {number for number, svg in enumerate(_pictures_of(render(other))) if svg != pictures[number]}

    assert changed("accuracy", 1, 2) == {0}
    assert changed("static", "shares", 3) == {1}
    assert changed("static", "expected", 5) == {2}
    assert changed("marginal", "error", 7) == {2}
    assert changed("dynamic", "expected", 7) == {2}
    assert changed("dense", 2, "expected") == {2}
    assert changed("batches", 0, "tokens_per_second") == {3}
    assert changed("batches", 1, "plain_tokens_per_second") == {4}
    assert changed("rates", rates, "tokens_per_second", 0) == {3}
    assert changed("rates", -1, "tokens_per_second", 1) == {4}
    assert changed("cost", 3, "draft") == {5}
    assert changed("cost", -1, "verify") == {5}
    assert changed("confidence", "before", 4, 1) == {6}
    assert changed("confidence", "after", 4, 2) == {6}


def _pictures_of(html: str) -> list[str]:
    return re.findall("<svg.*?</svg>", html, re.DOTALL)


def test_tables_hold_settings_and_where_it_comes_from(html: str):
    for name, value in (("dtype", "bfloat16"), ("num_tokens", 7800), ("torch", "2.13.0")):
        assert f"<th>{name}</th><td>{value}</td>" in html
    assert "<th>confidence temperatures</th><td>1.31, 1.42, 1.53, 1.64</td>" in html


def test_names_are_text_not_html(record: Record):
    strange = "<script>a & b</script>"
    page = render({**record, "model_id": strange, "head": strange, "provenance": {strange: strange}})
    assert "<script" not in page
    assert page.count("&lt;script&gt;a &amp; b&lt;/script&gt;") == 8, "title twice, its parts in the settings"


def test_a_small_record_has_a_page():
    record = _record(num_heads=1, num_ranks=1, num_nodes=2, batch_sizes=(4,))
    page = render({**record, "dynamic": None, "dense": [], "rates": record["rates"][:1]})
    assert _drawn_nodes(page) == (2, ["0"])
    assert page.count("<svg") == 6, "no other batch sizes to compare"
    assert "tokens a second at batch size 4" in page


def test_a_record_of_the_root_alone_has_a_page():
    record = _record(num_heads=1, num_ranks=1, num_nodes=1, batch_sizes=(1, 2))
    record["batches"] = [{**winner, "kind": "none", "num_nodes": 1} for winner in record["batches"]]
    page = render(record)
    assert _drawn_nodes(page) == (1, [])
    assert page.count("<svg") == 7


def test_a_record_where_nothing_was_ever_right_has_a_page():
    record = _record(num_heads=2, num_ranks=2, num_nodes=4, batch_sizes=(1, 2))
    record["accuracy"] = [[0.0, 0.0], [0.0, 0.0]]
    record["static"] |= {"shares": [1.0, 0.0, 0.0, 0.0], "expected": [1.0] * 4, "error": [0.0] * 4}
    record["confidence"] |= {"before": [], "after": [[0.5, 0.0, 0]]}
    assert _drawn_nodes(render(record))[0] == record["batches"][0]["num_nodes"]


def test_a_folder_without_a_search(tmp_path: Path):
    with pytest.raises(DataError, match=r"holds no finished search for trees: there is no tune\.json"):
        write_page(tmp_path)


@pytest.mark.parametrize(
    "content", ["{", "{}", "[]", '"text"', "\xff", '{"format_version": 3}', '{"format_version": 2}']
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str):
    (tmp_path / "tune.json").write_bytes(content.encode("latin-1"))
    _check_damage(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        {"batches": []},
        {"rates": [{"batch_size": 1, "kind": "static", "num_nodes": [1, 2], "tokens_per_second": [1.0]}]},
        {"static": {"paths": [[0, 0]], "shares": [1.0, 0.5], "expected": [1.0, 1.5], "error": [0.0, 0.0]}},
        {"marginal": {"expected": [1.0], "error": []}},
        {"confidence": None},
    ],
)
def test_a_file_with_a_wrong_part_is_named(tmp_path: Path, record: Record, damage: Record):
    (tmp_path / "tune.json").write_text(json.dumps({**record, **damage}))
    _check_damage(tmp_path)


def _check_damage(folder: Path) -> None:
    with pytest.raises(DataError, match="not a search for trees that can be read") as caught:
        write_page(folder)
    assert caught.value.path == str(folder / "tune.json")
    assert not (folder / "tune.html").exists()


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named(tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch, package: str):
    (tmp_path / "tune.json").write_text(json.dumps(record))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=r"pip install 'draftheads\[report\]'"):
        write_page(tmp_path)
