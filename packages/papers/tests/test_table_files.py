"""The tables of papers that the package has: each can be measured, and has the numbers of its paper."""

import re
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from draftheads import heads
from draftheads.bench.contenders import DRAFT_MODEL
from draftheads.bench.quality import Agreement, Perplexity
from draftheads.bench.settings import MIN_PROMPTS, Point, Variant
from draftheads.bench.table import ALL, COLUMNS, Row
from draftheads.bench.timing import PLAIN
from draftheads.checkpoints.registry import zoo_heads
from draftheads.data.records import Record, read_suite, select
from draftheads.speculation.shapes import UNTRAINED_HEADS
from draftheads_papers.measures import Rouge
from draftheads_papers.options import table_names
from draftheads_papers.paper_tables import Cells, PaperTable, blocks_of, cells_of, drafting_cells, read_table
from draftheads_papers.reproduce import _MT_BENCH, _with_our_category
from draftheads_papers.studies import folder_name, options_of, planned

EXPECTED = {
    *(f"medusa-{part}" for part in ("table-1", "table-2", "figure-4b", "figure-6", "figure-7")),
    *(f"hydra-figure-{number}" for number in range(2, 10)),
    *(f"hydra-{part}" for part in ("table-1", "table-2", "section-3-1", "section-6-3", "appendix-d")),
    *(f"amphista-table-{number}" for number in range(1, 11)),
    *(f"amphista-figure-{number}" for number in (1, 3)),
    *(
        f"ibm-{part}"
        for part in ("table-1", "table-2", "figure-2", "figure-3", "figure-4", "section-3-1", "two-stages")
    ),
    "equal-budget",
}
TABLES = sorted(EXPECTED)
MEASURES = (*Agreement.names, Perplexity.name, "judge", *Rouge.names)
KNOWN_FACETS = {"name", "part", "run", *(field.name for kind in (Point, Variant) for field in fields(kind))}
# rows and columns of papers that ours have no number for: other variants, ratios to another row, and words
ONLY_PUBLISHED: set[tuple[str, str]] = set()
NO_CELL_IN_COMMON = {("ibm-figure-4", "homogeneous, mlp-speculator, k = 5")}


def test_all_tables_are_there():
    assert set(table_names()) == EXPECTED


def heads_of(table: PaperTable) -> list[str]:
    """Names of rows besides plain decoding."""
    published = {name.partition(",")[0] for rows in table.published.values() for name in rows}
    return [*table.variants, *table.heads, *({DRAFT_MODEL} & published)]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_can_be_measured(name: str):
    table = read_table(name)
    assert table.name == name
    assert table.heads or table.variants
    assert set(table.heads) <= {head.method for head in zoo_heads()} | set(UNTRAINED_HEADS)
    assert {*table.rows, *({table.columns} - {"values"})} <= KNOWN_FACETS
    known = {*MEASURES, *(one.name for one in COLUMNS), *Row.__dataclass_fields__}
    assert set(table.values) <= known
    assert len(select(read_suite(table.prompts), table.categories)) >= MIN_PROMPTS
    for run in table.runs:
        table.settings(run)
    assert len(table.title) < 80
    assert not table.title.endswith(".")
    assert table.needs
    assert table.note.endswith(".")


@pytest.mark.parametrize("name", [name for name in TABLES if read_table(name).variants])
def test_variants_have_possible_settings(name: str, tmp_path: Path):
    table = read_table(name)
    folders = {folder_name(variant) for variant in table.variants}
    assert len(folders) == len(table.variants)
    seen: set[str] = set()
    settings: list[dict[str, Any]] = []
    for variant, changes in table.variants.items():
        budget: dict[str, Any] = {"data": (Path("chats.jsonl"),), "max_tokens": 1000}
        budget |= {"text": (Path("text.jsonl"),)} if table.has_text_stage else {}
        options = options_of({**table.shared, **changes}, "smollm2-135m", tmp_path, budget)
        assert options.joint == changes.get("joint")
        if "after" in changes:
            assert changes["after"] in seen, "the other variant is trained before"
            replace(options, start_from="medusa")
        seen.add(variant)
        settings.append({**vars(options), "recipe": None})
    assert all(one != other for i, one in enumerate(settings) for other in settings[:i]), "variants differ"


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        *((f"amphista-table-{n}", {"loss": "amphista", "epochs": 4, "num_heads": 4}) for n in (4, 5)),
        *((f"hydra-{part}", {"epochs": 1, "depth_decay": 1.0}) for part in ("figure-5", "figure-6", "section-3-1")),
    ],
)
def test_variants_of_an_ablation_are_trained_alike(name: str, shared: dict[str, Any], tmp_path: Path):
    table = read_table(name)
    for changes in table.variants.values():
        budget = {"data": (Path("chats.jsonl"),)}
        settings = options_of({**table.shared, **changes}, "smollm2-135m", tmp_path, budget)
        assert shared.items() <= vars(settings).items()


SIZES = {  # method, heads, layers: what the papers compare; then loss and rate, of Hydra++ its code's
    "medusa": ("medusa", 4, 1, "hard", 2e-3),
    "hydra": ("hydra", 4, 1, "hard", 1e-3),
    "hydra++": ("hydra++", 4, 4, "teacher", 5e-4),
    "amphista": ("amphista", 4, 1, "amphista", 1e-3),
    "mlp-speculator": ("mlp-speculator", 3, 1, "hard", 1e-3),
}
PAPER_HEADS = [name for name in TABLES if read_table(name).training]


def test_tables_that_compare_the_papers_heads_train_these():
    assert {name for name in TABLES if set(read_table(name).heads) - set(UNTRAINED_HEADS)} == {
        *(f"medusa-figure-{number}" for number in (6, 7)),
    }, "tables of bundled heads"
    for name in ("medusa-figure-6", "medusa-figure-7"):
        assert "The bundled heads are others than the paper's" in " ".join(read_table(name).note.split())
    assert {f"hydra-figure-{number}" for number in (2, 3, 4, 7, 8, 9)} < set(PAPER_HEADS)
    assert "lm_head=own draft_vocab_size=0" in read_table("ibm-table-1").training


@pytest.mark.parametrize("name", PAPER_HEADS)
def test_heads_of_the_papers_have_their_sizes_and_an_equal_budget(name: str, tmp_path: Path):
    stages = {"ibm-table-2": 7, "ibm-figure-4": 5}.get(name)
    found = planned(read_table(name), "smollm2-135m", tmp_path, {"data": (Path("chats.jsonl"),)})
    for variant, options in found.items():
        method, heads, layers, *learned = SIZES[variant]
        assert (options.method, options.num_heads, options.num_layers) == (method, stages or heads, layers)
        assert [options.loss, options.learning_rate] == learned
        assert (options.epochs, options.warmup, options.batch_tokens, options.text) == (2, 0.05, 1024, ())
        assert (options.lm_head, options.draft_vocab_size, options.max_tokens) == ("shared", 8192, None)
    assert len({options.out for options in found.values()}) == len(found)


def test_tables_of_the_papers_heads_share_them(tmp_path: Path):
    budget = {"data": (Path("chats.jsonl"),), "max_tokens": 1000}
    plans = [planned(read_table(name), "smollm2-135m", tmp_path, budget) for name in PAPER_HEADS]
    assert len({options.out for plan in plans for options in plan.values()}) == len(SIZES) + 2, "and 5 and 7 stages"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("medusa-figure-6", {"trees": ("static", "dense"), "num_nodes": (16, 32, 64, 128, 256)}),
        ("medusa-figure-7", {"temperatures": (0.0, 0.7), "acceptance": ("exact", "typical")}),
        ("hydra-table-1", {"num_nodes": (64,)}),
        ("hydra-figure-3", {"batch_sizes": (1, 2, 4, 8)}),
        *((f"hydra-figure-{n}", {"batch_sizes": (1, 2, 4, 8)}) for n in (7, 8, 9)),
        ("hydra-section-6-3", {"temperatures": (0.7,), "epsilons": (0.15,)}),
        ("amphista-figure-3", {"temperatures": (0.0, 0.7)}),
        ("amphista-table-2", {"temperatures": (0.7,), "acceptance": ("exact", "typical")}),
        ("amphista-table-6", {"batch_sizes": (1, 2, 4, 6, 8)}),
        ("ibm-table-1", {"num_nodes": (1, 2, 4, 8, 16, 32), "batch_sizes": (1, 2, 4), "prompt_tokens": (64, 2048)}),
        ("ibm-figure-3", {"num_nodes": (1, 5), "prompt_tokens": (49,), "max_new_tokens": 100}),
        ("ibm-figure-4", {"num_nodes": (1, 5), "prompt_tokens": (50,), "max_new_tokens": 100}),
        *((f"ibm-{part}", {"trees": ("paths",), "num_nodes": (10,)}) for part in ("section-3-1", "two-stages")),
    ],
)
def test_tables_measure_what_their_papers_did(name: str, settings: dict[str, Any]):
    table = read_table(name)
    assert settings.items() <= vars(table.settings(next(iter(table.runs)))).items()


@pytest.mark.parametrize(("number", "head"), [(7, "medusa"), (8, "hydra"), (9, "hydra++")])
def test_hydra_s_figures_of_sizes_have_a_head_each(number: int, head: str):
    assert list(read_table(f"hydra-figure-{number}").variants) == [head]


def test_hydra_plus_plus_is_built_step_by_step_up_to_five_layers():
    variants = read_table("hydra-section-3-1").variants
    assert [changes.get("num_layers", 1) for changes in variants.values()] == [1, 1, 4, 1, 4, 5]
    assert [changes.get("method", "hydra") for changes in variants.values()] == ["hydra"] * 3 + ["hydra++"] * 3


def test_one_of_ibm_s_heads_reads_no_tokens():
    variants = read_table("ibm-section-3-1").variants
    assert variants == {"without tokens": {"method": "medusa"}, "with tokens": {"method": "mlp-speculator"}}


def test_medusa_s_self_distillation_has_one_stage():
    """Section 4.2: a sine schedule instead of two stages."""
    variants = read_table("medusa-table-1").variants
    assert [variants[name].get("after") for name in ("medusa-2", "medusa-2-self")] == ["medusa-1", None]


def test_an_equal_budget_is_for_all_architectures_also_those_of_other_packages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heads, "HEADS", {**heads.HEADS, "mine": "mine.Mine"})
    assert list(read_table("equal-budget").variants) == heads.head_methods()
    assert {"mine", "amphista"} < set(heads.head_methods())


def test_tables_4_and_5_of_amphista_have_the_same_variants():
    first, second = (read_table(f"amphista-table-{number}") for number in (4, 5))
    assert (first.shared, first.variants) == (second.shared, second.variants)


# --- published numbers are where ours will be ---


def possible_rows(table: PaperTable) -> Iterator[Row]:
    """A row of each kind that a comparison can have, with all numbers."""
    numbers: dict[str, Any] = {"tokens_per_step": 2.0, "tokens_per_second": 3.0, "speedup": 4.0, "overhead": 1.5}
    numbers |= {
        "decode_tokens_per_second": 5.0,
        "quality": dict.fromkeys(MEASURES, 6.0),
        "num_parameters": 7,
        "numbers": {one.name: 9.0 for one in COLUMNS if one.compute},
    }
    mt_bench = [Record((), labels={"category": name}) for name in _MT_BENCH]
    asked = [*read_suite(table.prompts), *mt_bench]
    categories = dict.fromkeys(_with_our_category(record, table).category for record in asked)
    tuned = [name for name, changes in table.variants.items() if changes.get("joint")]
    plains = [PLAIN, *(f"{name}, {PLAIN}" for name in tuned)]
    for run in table.runs:
        settings = table.settings(run)
        for point in settings.points():
            for part in (ALL, *categories):
                common = {**asdict(point), "run": run}
                for name in plains:
                    yield Row(name=name, part=part, settings=common, **numbers)
                for name in heads_of(table):
                    for variant in settings.variants(point.temperature):
                        yield Row(name=name, part=part, settings={**common, **asdict(variant)}, **numbers)


def possible_cells(table: PaperTable) -> Cells:
    if table.measured == "drafting":
        return drafting_cells({name: {"prefix": 1.0, "heads": [0.5] * 4} for name in table.variants})
    return cells_of(table, list(possible_rows(table)))


@pytest.mark.parametrize("name", [name for name in TABLES if read_table(name).published])
def test_published_numbers_meet_ours(name: str):
    table = read_table(name)
    ours = possible_cells(table)
    for rows in table.published.values():
        for label, row in rows.items():
            assert row
            assert all(isinstance(number, int | float | str) for number in row.values())
            assert (label in ours) != ((name, label) in ONLY_PUBLISHED), label
            if label in ours:
                meets = bool(row.keys() & ours[label].keys())
                assert meets != ((name, label) in NO_CELL_IN_COMMON), (label, row.keys(), ours[label].keys())


# --- the numbers themselves, written down from the papers a second time ---

TASKS = ("chat", "translation", "summarisation", "question_answering", "maths", "retrieval")
SPEC_BENCH = (*TASKS, "all but chat")  # MT-Bench, five tasks, and their average


@pytest.mark.parametrize(
    ("table", "model", "row", "columns", "numbers"),
    [
        ("medusa-table-1", "Vicuna 7B", "medusa-2", ("tokens/step", "overhead", "judge"), (3.47, 1.22, "6.18 (+0.01)")),
        ("medusa-table-1", "Vicuna 33B", "medusa-2-self", ("tokens/step", "overhead"), (3.01, 1.27)),
        ("medusa-table-2", "Vicuna 7B", "direct fine-tuning", ("× plain", "judge"), ("N/A", 5.925)),
        ("medusa-table-2", "Vicuna 7B", "medusa-1", ("× plain", "judge"), (2.18, 6.23)),
        ("medusa-figure-4b", "Vicuna 7B", "medusa-2", ("coding × plain", "extraction × plain"), (3.29, 3.62)),
        ("hydra-figure-2", "Vicuna 33B", "hydra++", ("× plain", "× plain ÷ medusa"), (2.53, 1.31)),
        ("hydra-figure-2", "Vicuna 13B", "hydra", ("× plain", "× plain ÷ medusa"), (2.17, 1.10)),
        ("hydra-figure-3", "Vicuna 7B", "hydra++", ("batch 1 × plain", "batch 8 × plain"), (2.70, 1.63)),
        ("hydra-figure-5", "Vicuna 7B", "hydra, teacher", ("× plain ÷ hydra",), (1.04,)),
        (
            "hydra-table-1",
            "8B",
            "hydra++",
            ("prefix", "head 1", "head 2", "head 3", "head 4"),
            (1.2, 0.6, 1.4, 1.2, 0.7),
        ),
        ("hydra-table-2", "8B", "medusa", (*TASKS, "all"), (2.00, 1.68, 1.59, 1.67, 1.98, 1.54, 1.75)),
        ("hydra-table-2", "8B", "hydra++", (*TASKS, "all"), (2.52, 2.02, 1.89, 2.08, 2.59, 1.87, 2.17)),
        ("hydra-appendix-d", "8B", "plain", ("step ms",), (28,)),
        ("amphista-figure-3", "Vicuna 7B", "amphista, T 0", ("tokens/s",), ("about 120",)),
        ("amphista-figure-3", "Vicuna 13B", "amphista, T 0.7", ("tokens/s",), ("about 80",)),
        ("amphista-table-1", "Vicuna 7B", "lookahead", SPEC_BENCH, (1.44, 1.15, 1.26, 1.25, 1.56, 1.13, 1.27)),
        ("amphista-table-1", "Vicuna 33B", "amphista", SPEC_BENCH, (2.75, 2.11, 2.49, 2.12, 2.83, 2.44, 2.40)),
        (
            "amphista-table-2",
            "Vicuna 13B",
            "draft-model, exact",
            SPEC_BENCH,
            (1.52, 1.08, 1.57, 1.33, 1.42, 1.46, 1.37),
        ),
        (
            "amphista-table-3",
            "Vicuna 7B on XSUM",
            "amphista, T 0.7",
            ("ROUGE-1", "ROUGE-2", "ROUGE-L", "× plain"),
            (15.96, 4.43, 11.40, 2.10),
        ),
        (
            "amphista-table-4",
            "Vicuna 7B",
            "amphista without staged adaptation",
            SPEC_BENCH,
            (2.14, 1.85, 1.75, 1.78, 2.10, 1.91, 1.88),
        ),
        ("amphista-table-5", "Vicuna 7B", "hydra++", SPEC_BENCH, (3.58, 2.80, 2.70, 2.91, 3.61, 2.90, 2.98)),
        ("amphista-table-6", "Vicuna", "amphista", ("batch 1", "batch 6", "batch 8"), (2.32, 2.11, 2.06)),
        ("amphista-table-7", "Vicuna 7B", "hydra++", ("nodes 22", "nodes 35", "nodes 64"), (2.17, 2.26, 2.37)),
        ("amphista-table-8", "Vicuna 7B on GSM8K", "medusa", ("× plain",), (1.87,)),
        ("amphista-table-8", "Vicuna 7B on HumanEval", "amphista", ("× plain",), (3.02,)),
        ("amphista-table-8", "Vicuna 13B on GSM8K", "amphista", ("× plain",), (2.68,)),
        ("amphista-table-8", "Vicuna 13B on HumanEval", "hydra++", ("× plain",), (2.75,)),
        (
            "amphista-table-9",
            "Vicuna 7B",
            "amphista-α",
            ("chat × plain", "all but chat × plain", "chat tokens/step", "retrieval tokens/step"),
            (2.63, 2.27, 3.58, 3.08),
        ),
        (
            "amphista-table-10",
            "Vicuna 7B",
            "rank 256",
            ("chat × plain ÷ full rank", "all but chat × plain ÷ full rank"),
            (1.02, 1.01),
        ),
        (
            "ibm-table-1",
            "Llama 2 7B",
            "mlp-speculator, k = 4, prompt 64",
            ("batch 1 ms/token", "batch 2 ms/token", "batch 4 ms/token", "tokens/step"),
            (5.50, 5.91, 6.95, 2.67),
        ),
        (
            "ibm-table-1",
            "Llama 2 7B",
            "plain, prompt 2048",
            ("batch 1 ms/token", "batch 2 ms/token", "batch 4 ms/token"),
            (12.87, 14.98, 19.62),
        ),
        (
            "ibm-table-2",
            "Code Llama 13B Instruct",
            "mlp-speculator, k = 1, prompt 512",
            ("batch 1 ms/token", "batch 2 ms/token", "batch 4 ms/token", "tokens/step"),
            (6.46, 6.25, 6.71, 5.49),
        ),
        ("ibm-two-stages", "Llama 2 13B", "two stages", ("tokens/step",), (2.63,)),
        ("ibm-section-3-1", "Llama 2 13B", "without tokens", ("tokens/step",), (2.28,)),
        ("ibm-section-3-1", "Llama 2 13B", "with tokens", ("tokens/step",), (2.63,)),
    ],
)
def test_numbers_are_those_of_the_paper(
    table: str, model: str, row: str, columns: tuple[str, ...], numbers: tuple[Any, ...]
):
    published = read_table(table).published[model][row]
    assert tuple(published[column] for column in columns) == numbers


def published_beside(page: str, section: str, row: str) -> list[float]:
    """The numbers in round brackets of a row of the page with results."""
    part = page.partition(f"\n**{section}")[2].partition("\n**")[0]
    (line,) = re.findall(rf"^\| (?:\*[^|]*\* )?{re.escape(row)} \|(.*)$", part, re.MULTILINE)
    return [float(number) for number in re.findall(r" \(([\d.]+)\)", line)]


def test_the_page_with_results_has_the_papers_numbers_in_brackets():
    page = (Path(__file__).parents[3] / "docs" / "results" / "papers.md").read_text(encoding="utf-8")
    for table, rows in (
        ("amphista-table-1", ("lookahead", "medusa", "hydra++", "amphista")),
        ("amphista-table-2", ("medusa, typical", "hydra++, typical", "amphista, typical")),
    ):
        published = read_table(table).published["Vicuna 7B"]
        for row in rows:
            assert published_beside(page, "Amphista, tables 1", row) == [published[row][task] for task in TASKS], row
    published = read_table("ibm-table-1").published["Llama 2 7B"]
    for row, label in (("plain", "plain"), *((f"k = {k}", f"mlp-speculator, k = {k}") for k in (1, 4, 32))):
        expected = [*published[f"{label}, prompt 64"].values(), *published[f"{label}, prompt 2048"].values()]
        assert published_beside(page, "MLP Speculator", row) == expected, row
    (sizes,) = read_table("amphista-table-6").published["Vicuna"].values()
    assert ", ".join(f"{number:.2f}" for number in sizes.values()) in page


@pytest.mark.parametrize("name", ["amphista-table-1", "amphista-table-2", "amphista-table-4", "amphista-table-5"])
def test_averages_of_the_paper_are_those_of_its_tasks(name: str):
    for model, rows in read_table(name).published.items():
        for label, row in rows.items():
            mean = sum(row[task] for task in TASKS[1:]) / 5
            assert row["all but chat"] == pytest.approx(mean, abs=0.015), (model, label)


def test_an_average_over_all_questions_is_not_the_mean_of_the_tasks():
    for row in read_table("hydra-table-2").published["8B"].values():
        assert row["all"] - sum(row[task] for task in TASKS) / 6 > 0.005


def test_a_row_that_the_paper_repeats_is_noted():
    """Medusa's row of table 4 is greedy, and has the numbers of table 2."""
    fourth, first, second = (read_table(f"amphista-table-{n}") for n in (4, 1, 2))
    assert fourth.published["Vicuna 7B"]["medusa"] == second.published["Vicuna 7B"]["medusa, typical"]
    numbers = " ".join(fourth.note.split())
    assert all(f"{number:.2f}" in numbers for number in first.published["Vicuna 7B"]["medusa"].values())


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_a_table_are_beside_the_plain_decoding_of_their_own_comparison(name: str):
    """Runs are comparisons of their own, whose rows have names of their own, plain decoding's too."""
    table = read_table(name)
    owners: dict[str, set[str]] = {}
    for row in possible_rows(table):
        for label in cells_of(table, [row]):
            owners.setdefault(label, set()).add(str(row.settings["run"]))
    assert all(len(runs) == 1 for runs in owners.values())
    if table.measured == "rows":
        assert {run for (run,) in map(tuple, owners.values())} == set(table.runs)


@pytest.mark.parametrize("name", [name for name in TABLES if "speedup" in read_table(name).values])
def test_tokens_per_step_and_overhead_stand_beside_speed(name: str):
    table = read_table(name)
    rows = [replace(row, overhead=1.5) for row in possible_rows(table)]
    for label, cells in cells_of(table, rows).items():
        if PLAIN not in label:
            columns = " ".join(cells)
            assert all(word in columns for word in ("tokens/step", "overhead")), label


def test_rows_have_the_papers_names_and_columns_their_order_and_unit():
    def table_of(name: str) -> tuple[list[str], list[str]]:
        table = read_table(name)
        _, (headings, lines), *_ = ("", *blocks_of(table, possible_cells(table)))
        return headings, [line[0] for line in lines]

    headings, names = table_of("ibm-table-1")
    assert headings == ["", "batch 1 ms/token", "batch 2 ms/token", "batch 4 ms/token", "tokens/step"]
    assert names == [f"k = {k}, prompt {length}" for length in (64, 2048) for k in (0, 1, 2, 4, 8, 16, 32)]
    headings, names = table_of("amphista-table-1")
    assert names == ["Vanilla", "Spec-decoding", "Lookahead", "Medusa", "Hydra++", "Amphista"]
    assert headings[:7] == ["× plain", *TASKS]
    headings, names = table_of("medusa-table-1")
    assert names == [
        *("Baseline", "Medusa-2, Baseline", "medusa-2-self, Baseline"),
        *("Medusa-1", "Medusa-2", "medusa-2-self"),
    ]
    assert headings[1:] == ["tokens/step", "overhead, ×", "× plain", "agreement, %", "perplexity", "judge, of 10"]
    assert table_of("hydra-table-1")[0] == ["ms", "prefix", "head 1", "head 2", "head 3", "head 4"]
