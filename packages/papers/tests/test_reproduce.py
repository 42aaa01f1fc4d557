"""Tables of papers: read from data, measured, and shown beside the published numbers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import Row
from draftheads.data.records import Record
from draftheads.data.texts import read_texts
from draftheads.errors import DataError, InvalidSettings, ModelNotFound, StorageError, UnknownMethod
from draftheads.utils.files import locked
from draftheads.utils.progress import NoProgress
from draftheads_papers import reproduce as reproduce_module
from draftheads_papers.measures import measures_of
from draftheads_papers.options import table_names
from draftheads_papers.paper_tables import PaperTable, blocks_of, cells_of, intervals_of, markdown_of, read_table
from draftheads_papers.reproduce import (
    _top,
    _with_our_category,
    losses_of,
    questions_of,
    quick_settings,
    reproduce,
    trained_for,
)
from draftheads_papers.studies import Variant, options_of, planned
from fake_progress import FakeProgress
from families import saved_model
from training_world import chat_model, counting_chats, write_chats

pytestmark = pytest.mark.usefixtures("one_thread")
TABLE = PaperTable(name="mine", title="Mine", source="Nobody, table 0", needs="nothing")
ROW = Row(
    name="medusa", tokens_per_step=1.5, tokens_per_second=20.0, speedup=1.25, numbers={"token_milliseconds": 100.0},
    settings={"batch_size": 4, "epsilon": 0.1, "tree": "static", "run": "warm"}, quality={"agreement": 90.0},
)  # fmt: skip


# --- how numbers are arranged ---


def test_values_are_columns_and_names_rows():
    table = replace(TABLE, values=("speedup", "tokens_per_step", "agreement", "token_milliseconds"))
    expected = {"× plain": 1.25, "tokens/step": 1.5, "agreement": 90.0, "ms/token": 100.0}
    assert cells_of(table, [ROW, replace(ROW, part="maths")]) == {"medusa": expected}


def test_a_setting_or_a_part_can_be_columns():
    other = replace(ROW, settings={**ROW.settings, "epsilon": 0.25}, speedup=2.0)
    table = replace(TABLE, columns="epsilon", rows=("name", "run", "tree"))
    assert cells_of(table, [ROW, other]) == {"medusa, warm, static": {"ε 0.1": 1.25, "ε 0.25": 2.0}}
    table = replace(TABLE, columns="part", values=("speedup", "tokens_per_step"))
    assert cells_of(table, [ROW, replace(ROW, part="maths", speedup=3.0)]) == {
        "medusa": {"all × plain": 1.25, "all tokens/step": 1.5, "maths × plain": 3.0, "maths tokens/step": 1.5}
    }


def test_a_column_can_be_the_mean_of_others():
    table = replace(TABLE, columns="part", means={"a and b": ["a", "b"], "a and c": ["a", "c"]})
    rows = [replace(ROW, part=part, speedup=speedup) for part, speedup in (("a", 1.0), ("b", 2.0))]
    assert cells_of(table, rows) == {"medusa": {"a": 1.0, "b": 2.0, "a and b": 1.5}}
    both = cells_of(replace(table, values=("speedup", "tokens_per_step")), rows)["medusa"]
    assert (both["a and b × plain"], both["a and b tokens/step"]) == (1.5, 1.5)


def test_a_value_can_be_a_mean_over_the_columns():
    rows = [
        replace(ROW, settings={**ROW.settings, "batch_size": size}, speedup=size / 4, tokens_per_step=tokens)
        for size, tokens in ((1, 1.5), (4, 1.5), (8, 3.0))
    ]
    table = replace(TABLE, columns="batch_size", values=("speedup", "tokens_per_step"))
    cells = cells_of(replace(table, over_columns=("tokens_per_step",)), rows)
    parts = replace(table, columns="part", over_columns=("tokens_per_step",))
    found = cells_of(parts, [ROW, replace(ROW, part="maths", speedup=2.0, tokens_per_step=9.0)])
    assert found == {"medusa": {"all × plain": 1.25, "maths × plain": 2.0, "tokens/step": 1.5}}
    speeds = {"batch 1 × plain": 0.25, "batch 4 × plain": 1.0, "batch 8 × plain": 2.0}
    assert cells == {"medusa": {**speeds, "tokens/step": 2.0}}


def test_a_column_can_have_its_ratio_to_a_row_beside_it():
    table = replace(TABLE, values=("speedup", "tokens_per_step"), relative=("× plain",), relative_to="medusa")
    cells = cells_of(table, [ROW, replace(ROW, name="hydra", speedup=2.5)])
    assert [line["× plain ÷ medusa"] for line in cells.values()] == [1.0, 2.0]
    assert cells["hydra"].keys() == {"× plain", "tokens/step", "× plain ÷ medusa"}


def test_accuracy_is_summed_over_ranks():
    shares = [[0.4, 0.2, 0.1, 0.1, 0.05, 0.05]]
    assert _top(shares) == {"top-1": [40.0], "top-5": [pytest.approx(85.0)]}


def test_losses_are_of_five_steps_with_both_ends_and_of_held_out_text(tmp_path: Path):
    log = [{"step": step, "head_losses": [10.0 - step, 20.0 - step]} for step in range(1, 10)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    report = SimpleNamespace(losses=[0.5, 0.75])
    options: Any = SimpleNamespace(out=tmp_path, joint=None)
    cells = losses_of(Variant("mine", options, report))  # type: ignore[arg-type]
    assert list(cells) == [*(f"mine, step {step}" for step in (1, 2, 4, 6, 9)), "mine, held-out"]
    assert cells["mine, step 9"] == {"loss head 1": 1.0, "loss head 2": 11.0}
    assert cells["mine, held-out"] == {"loss head 1": 0.5, "loss head 2": 0.75}


def test_published_numbers_stand_in_brackets_and_those_of_other_models_below():
    published = {
        "A": {"medusa": {"× plain": 2}, "eagle": {"× plain": "2.5 to 3"}},
        "B": {"medusa": {"speed": 3.25}},
    }
    table, cells = replace(TABLE, published=published, note="A note."), {"medusa": {"× plain": 1.25}}
    intervals = {"medusa": {"× plain": (1.0, 1.5)}}
    assert list(markdown_of(blocks_of(table, cells, intervals))) == [
        "|  | × plain |", "| --- | --- |", "| medusa | 1.25 [1.00-1.50] (2) |", "| eagle | (2.5 to 3) |", "",
        "In brackets: Nobody, table 0, A.", "", "The paper, B:", "", "|  | speed |", "| --- | --- |",
        "| medusa | 3.25 |", "", "A note.", "",
    ]  # fmt: skip
    (headings, rows), *sentences = blocks_of(table, cells, only_measured=True)
    assert (headings, rows) == (["", "× plain"], [["medusa", "1.25 (2)"]]), "no row of the paper alone"
    assert sentences == ["In brackets: Nobody, table 0, A.", "A note."]


def test_columns_have_the_paper_s_order_as_far_as_it_has_them():
    published = {"A": {"medusa": {"b": 2.0, "a": 3.0, "z": 4.0}}}
    cells = {"medusa": {"all": 1.0, "a": 1.0, "c": 1.0, "b": 1.0}}
    table = replace(TABLE, published=published, columns="part")
    (headings, _), *_ = blocks_of(table, cells)
    assert headings == ["× plain", "all", "b", "c", "a", "z"]
    (headings, _), *_ = blocks_of(table, cells, only_measured=True)
    assert headings == ["× plain", "all", "b", "c", "a"]


def test_intervals_stand_where_their_numbers_do():
    row = replace(ROW, speedup_interval=(1.0, 1.5), quality_intervals={"agreement": (80.0, 95.0)})
    table = replace(TABLE, values=("speedup", "agreement", "tokens_per_step"), means={"mean": ["a"]})
    assert intervals_of(table, [row]) == {"medusa": {"× plain": (1.0, 1.5), "agreement": (80.0, 95.0)}}
    parts = replace(table, columns="part", over_columns=("agreement",))
    assert intervals_of(parts, [row, replace(row, part="a")]) == {
        "medusa": {"a × plain": (1.0, 1.5), "all × plain": (1.0, 1.5), "agreement": (80.0, 95.0)}
    }
    sizes = replace(table, columns="batch_size", over_columns=("agreement",))
    assert "agreement" not in intervals_of(sizes, [row])["medusa"], "it is a mean over the columns"


def test_sampled_texts_have_no_agreement():
    table = replace(TABLE, values=("speedup", "agreement"))
    warm = replace(ROW, settings={**ROW.settings, "temperature": 0.5})
    assert cells_of(table, [warm]) == {"medusa": {"× plain": 1.25}}
    assert "agreement" in cells_of(table, [replace(ROW, settings={"temperature": 0.0})])["medusa"]


def test_quick_settings_keep_both_ends():
    settings = BenchSettings(
        trees=("best",), epsilons=(0.1, 0.2, 0.3, 0.4, 0.5), batch_sizes=(1, 2), max_new_tokens=256,
        prompt_tokens=(64, 512, 2048),
    )  # fmt: skip
    small = quick_settings(settings)
    assert (small.epsilons, small.batch_sizes, small.prompt_tokens) == ((0.1, 0.3, 0.5), (1, 2), (64, 256))
    assert (small.max_new_tokens, small.num_calibration_prompts) == (32, 8)


# --- files ---


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("nonsense", DataError, "is not a table"),
        ('title = "a"\ncolour = "red"', DataError, "unknown field 'colour'; a table has name, title"),
        ('title = "a"', DataError, "is not a table"),
        ('title = "a"\nsource = "b"\nneeds = "c"\nmeasured = "luck"', DataError, "measured is 'luck'; choose among"),
        ('title = "a"\nsource = "b"\nneeds = "c"\n[runs.x]\nnum_nodes = [1]', InvalidSettings, "--num-nodes"),
        ('title = "a"\nsource = "b"\nneeds = "c"\n[runs.x]\n[runs.y]', DataError, "rows are not named by run"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(tmp_path: Path, text: str, error: Any, words: str):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(error, match=words):
        read_table(str(tmp_path / "bad.toml"))


def test_a_table_of_ones_own_can_extend_another(tmp_path: Path):
    (tmp_path / "mine.toml").write_text('extends = "medusa-figure-7"\nquality = ["judge"]\njudge = {url = "http://x"}')
    mine, other = read_table(str(tmp_path / "mine.toml")), read_table("medusa-figure-7")
    assert mine == replace(other, name="mine", quality=("judge",), judge={"url": "http://x"})


def test_a_table_trains_the_variants_among_its_heads_and_no_others(tmp_path: Path):
    mine = 'extends = "amphista-table-1"\nheads = ["amphista", "lookahead", "./other"]'
    (tmp_path / "mine.toml").write_text(mine)
    table = read_table(str(tmp_path / "mine.toml"))
    assert (list(table.variants), table.heads) == (["amphista"], ("lookahead", "./other"))
    assert table.shared == read_table("hydra-figure-2").shared, "of the table that the extended one extends"


def test_a_misspelt_table_is_an_error_with_a_hint():
    with pytest.raises(InvalidSettings, match="no table 'hydra-tabel-2'; did you mean hydra-table-2"):
        read_table("hydra-tabel-2")
    assert "hydra-table-2" in table_names()


# --- whole runs ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, chats that it can learn from, and questions."""
    place = tmp_path_factory.mktemp("study")
    saved_model(chat_model(), place / "model")
    write_chats(place / "chats.jsonl", counting_chats(40))
    lines = [json.dumps({"prompt": f"w{n} w{n + 1}", "category": "ab"[n % 2]}) for n in range(4)]
    (place / "questions.jsonl").write_text("\n".join(lines))
    return place


STUDY = replace(
    TABLE,
    values=("speedup", "tokens_per_step", "agreement"),
    quality=("agreement",),
    load={"precision": "fp32"},
    shared={"num_heads": 2, "draft_vocab_size": 0, "num_layers": 1},
    variants={
        "one": {"method": "medusa"},
        "tuned": {"method": "medusa", "joint": "text", "after": "one"},
    },
    runs={"": {"trees": ["chain"], "num_nodes": [3], "max_new_tokens": 6, "num_calibration_prompts": 2}},
    training="Small ones.",
)


BUDGET: dict[str, Any] = {"max_tokens": 600, "epochs": 1}


def rebuilt(
    table: PaperTable, folder: Path, out: Path, *, progress: Any = None, quick: bool = False, **budget: Any
) -> Any:
    """A table of the model in the folder: its variants are trained, and then it is measured."""
    model, shown = str(folder / "model"), progress or NoProgress()
    budget = {"data": () if quick else (folder / "chats.jsonl",), **budget}
    (variants,) = trained_for([table], model, out, budget, quick=quick, progress=shown)
    questions, measures = str(folder / "questions.jsonl"), measures_of(table.quality, {})
    return reproduce(table, model, (), variants, progress=shown, quick=quick, prompts=questions, quality=measures)


def test_variants_are_trained_on_the_budget_and_compared(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    progress = FakeProgress()

    def run() -> Any:
        return rebuilt(STUDY, folder, tmp_path, progress=progress, **BUDGET)

    originals: list[Any] = []
    compare = reproduce_module.compare_heads

    def noted(*arguments: Any, **options: Any) -> Any:
        originals.append(options["original_model"])
        return compare(*arguments, **options)

    monkeypatch.setattr(reproduce_module, "compare_heads", noted)
    found = run()
    words = " ".join(block for block in found.blocks if isinstance(block, str))
    assert re.search(
        r"A full run: 4 questions, answers of at most 6 tokens, fp32, .*, 1 thread, 20\d\d-\d\d-\d\d\.", words
    )
    assert "Heads draft alone, without copies from the text. Plain decoding is this package's own loop" in words
    assert "95 % bootstrap intervals" in words
    tokens = f"{found.record['variants']['one']['num_training_tokens']} tokens"
    assert f"Small ones. Trained here: one, tuned on {tokens} in 1 pass." in words
    assert ("A CPU computes longer for each node" in words) == (not torch.cuda.is_available())
    low, high = found.record["intervals"]["one"]["× plain"]
    assert low <= found.record["cells"]["one"]["× plain"] <= high
    assert f"[{low:.2f}-{high:.2f}]" in "".join(found.lines)
    assert [stage for stage in progress.stages if stage.startswith(("variant", "comparison"))] == [
        "variant 1 of 2: one",
        "variant 2 of 2: tuned",
        "comparison 1 of 2: the model itself",
        "comparison 2 of 2: tuned",
    ]
    assert originals == [None, str(folder / "model")], "a tuned model's answers are scored by what it was tuned from"
    (one,), (tuned,) = (list((tmp_path / "heads").glob(f"{name}-*")) for name in ("one", "tuned"))
    assert json.loads((tuned / "metrics.json").read_text())["options"]["start_from"] == str(one)
    assert list(found.record["cells"]) == ["plain", "one", "tuned, plain", "tuned"]
    assert found.record["cells"]["one"].keys() == {"× plain", "tokens/step", "agreement"}
    assert found.record["cells"]["tuned"]["agreement"] == 100.0
    assert (tuned / "adapter").is_dir()
    assert found.record["variants"].keys() == {"one", "tuned"}
    weights = (one / "model.safetensors").stat().st_mtime_ns
    run()
    assert (one / "model.safetensors").stat().st_mtime_ns == weights, "nothing is trained again"


def test_tables_in_one_folder_share_heads_of_the_same_name_and_settings(folder: Path, tmp_path: Path):
    medusa: dict[str, Any] = {"method": "medusa"}
    first = replace(STUDY, variants={"one": medusa})
    second = replace(STUDY, variants={"two": medusa, "one": {**medusa, "recipe": None}})  # a default is no difference
    third = replace(STUDY, variants={"one": {**medusa, "depth_decay": 0.5}})
    progress, budget = FakeProgress(), {**BUDGET, "data": (folder / "chats.jsonl",)}
    more: dict[str, Any] = {"quick": False, "progress": progress}
    (one,), (two, same), (other,) = trained_for([first, second, third], str(folder / "model"), tmp_path, budget, **more)
    trained = [stage for stage in progress.stages if stage.startswith("variant")]
    assert trained == ["variant 1 of 3: one", "variant 2 of 3: two", "variant 3 of 3: one"]
    assert one.head == same.head != other.head
    assert [each.options.depth_decay for each in (one, other)] == [0.8, 0.5]
    assert len({one.head, two.head, other.head}) == len([*(tmp_path / "heads").glob("*-*")]) == 3
    metrics = [json.loads((each.head / "metrics.json").read_text())["options"]["depth_decay"] for each in (one, other)]
    assert metrics == [0.8, 0.5], "each folder has the head of its settings"
    before = (one.head / "model.safetensors").stat().st_mtime_ns
    longer = {**budget, "epochs": 2, "save_steps": 7}
    ((again,),) = trained_for([first], str(folder / "model"), tmp_path, {**budget, "save_steps": 7}, **more)
    ((new,),) = trained_for([first], str(folder / "model"), tmp_path, longer, **more)
    assert again.head == one.head != new.head, "another budget is another head"
    assert (one.head / "model.safetensors").stat().st_mtime_ns == before


def test_variants_that_read_the_same_text_share_its_hidden_states(folder: Path, tmp_path: Path):
    stored: list[tuple[str, dict[str, int]]] = []

    class Watched(FakeProgress):
        def stage(self, text: str) -> None:
            files = (tmp_path / "states").rglob("*.bf16")
            stored.append((text, {path.name: path.stat().st_mtime_ns for path in files}))

    variants = {"one": {"method": "medusa"}, "two": {"method": "hydra"}, "all layers": {"method": "eagle3"}}
    budget = {**BUDGET, "data": (folder / "chats.jsonl",)}
    table, model = replace(STUDY, variants={**variants, "tuned": STUDY.variants["tuned"]}), str(folder / "model")
    own = [options.features for options in planned(table, model, tmp_path, budget).values()]
    assert own[0] == own[1] is not None
    assert own[2:] == [None, None], "they read other hidden states"
    (other, *_) = planned(table, model, tmp_path, {**budget, "max_tokens": 700}).values()
    assert other.features != own[0]
    trained_for([replace(table, variants=variants)], model, tmp_path, budget, quick=False, progress=Watched())
    (first,) = (files for text, files in stored if text == "variant 2 of 3: two")
    (second,) = (files for text, files in stored if text.startswith("training hydra"))
    assert first == second != {}, "the model reads the text once"
    assert not (tmp_path / "states").exists()
    with locked(tmp_path / "heads", ""), pytest.raises(StorageError, match="wait for it, or name another --out"):
        trained_for([table], model, tmp_path, budget, quick=False, progress=NoProgress())


def test_all_settings_are_checked_before_anything_is_trained(folder: Path, tmp_path: Path):
    tables = [replace(STUDY, variants={name: {"method": name}}) for name in ("medusa", "medussa")]
    budget = {**BUDGET, "data": (folder / "chats.jsonl",)}
    with pytest.raises(UnknownMethod, match="medussa"):
        trained_for(tables, str(folder / "model"), tmp_path, budget, quick=False, progress=NoProgress())
    assert not [*tmp_path.iterdir()]


def test_losses_and_accuracy_have_a_column_for_each_head(folder: Path, tmp_path: Path):
    budget = {"max_tokens": 600, "epochs": 2, "batch_tokens": 64}
    table = replace(STUDY, variants={"one": {"method": "medusa"}}, measured="losses")
    cells = rebuilt(table, folder, tmp_path, **budget).record["cells"]
    assert {name for row in cells.values() for name in row} == {"loss head 1", "loss head 2"}
    *during, last = cells
    assert last == "one, held-out"
    assert len(during) >= 3
    assert cells[during[0]]["loss head 1"] > cells[during[-1]]["loss head 1"]
    table = replace(table, runs={"": {**STUDY.runs[""], "trees": ["static"]}})
    cells = rebuilt(replace(table, measured="accuracy"), folder, tmp_path, **budget).record["cells"]
    assert cells["one"].keys() == {f"top-{k} head {head}" for k in (1, 5) for head in (1, 2)}
    assert cells["one"]["top-1 head 1"] <= cells["one"]["top-5 head 1"] <= 100
    cells = rebuilt(replace(table, measured="drafting"), folder, tmp_path, **budget).record["cells"]
    assert cells["one"].keys() == {"prefix", "head 1", "head 2"}


def test_losses_are_of_heads_that_are_trained():
    with pytest.raises(InvalidSettings, match="ibm-figure-2 has the losses of training: leave out --heads"):
        reproduce(read_table("ibm-figure-2"), "nowhere", ["medusa"], progress=NoProgress())


def test_a_quick_run_trains_on_the_model_s_own_answers(folder: Path, tmp_path: Path):
    table = replace(STUDY, variants={"one": {"method": "medusa"}})
    with pytest.raises(InvalidSettings, match="mine trains one: give --data FILE…, --quick, or your own --heads"):
        rebuilt(table, folder, tmp_path, data=())
    found = rebuilt(table, folder, tmp_path, quick=True)
    assert len([*tmp_path.glob("chats-*.jsonl")]) == 1
    assert found.record["cells"]["one"]["tokens/step"] >= 1
    assert found.record["quick"]


def test_a_quick_run_in_two_stages_begins_with_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chats = tmp_path / "chats.jsonl"
    chats.touch()
    monkeypatch.setattr(reproduce_module, "own_chats", lambda *_, **__: chats)
    found = [
        reproduce_module.quick_budget(read_table(name), "nowhere", tmp_path, {"data": (), **train}, NoProgress())
        for name, train in (("ibm-figure-2", {}), ("hydra-figure-5", {}), ("ibm-figure-2", {"text": (chats,)}))
    ]
    own = tmp_path / "text.jsonl"
    assert [each.get("text") for each in found] == [(own,), None, (chats,)]
    assert [each.get("max_length") for each in found] == [256, None, 256], "a few blocks, some of them held out"
    texts = [text for text, _ in read_texts(own)]
    assert len(texts) > 100
    assert all(texts)


def test_spec_bench_s_categories_have_our_names_unless_the_table_has_theirs():
    def named(table: PaperTable) -> list[str]:
        return [_with_our_category(Record((), labels={"category": name}), table).category for name in categories]

    categories = ("coding", "summarization", "qa", "math_reasoning", "rag", "translation", "")
    ours = ["chat", "summarisation", "question_answering", "maths", "retrieval", "translation", ""]
    assert named(TABLE) == named(read_table("hydra-table-2")) == ours
    assert named(read_table("medusa-figure-4b")) == ["coding", *ours[1:]]


def test_questions_of_some_categories():
    def asked(table: PaperTable, **more: Any) -> list[str]:
        found = questions_of(table, **{"prompts": None, "limit": 1, "quick": False, **more})
        return [question.category for question in found]

    maths = replace(TABLE, categories=("maths",))
    assert asked(maths) == ["maths"]
    assert len(asked(maths, prompts="tasks")) == 6, "of other prompts, all"
    assert len(asked(maths, limit=None, quick=True)) == 3, "for an interval"
    batches = replace(maths, runs={"": {"batch_sizes": [1, 2, 8]}})
    assert len(asked(batches, limit=None, quick=True)) == 8, "they fill the largest batch"


def test_a_model_without_bundled_heads_needs_heads(folder: Path):
    with pytest.raises(ModelNotFound, match=r"no head 'medusa': .*; none is installed for "):
        reproduce(replace(TABLE, heads=("medusa",)), str(folder / "model"), progress=NoProgress())


def test_options_of_a_variant_are_its_recipe_s_its_own_and_the_budget_s(tmp_path: Path):
    budget: dict[str, Any] = {"data": (Path("chats.jsonl"),), "max_tokens": 99, "batch_tokens": 512}
    changes = {"recipe": "medusa-2", "joint": "direct", "epochs": 7}
    options = options_of(changes, "smollm2-135m", tmp_path, budget)
    assert (options.joint, options.warmup, options.epochs) == ("direct", 40, 7)
    assert (options.max_tokens, options.batch_tokens, options.resume) == (99, 512, True)
    assert options_of(changes, "smollm2-135m", tmp_path, {**budget, "epochs": 2}).epochs == 2
    both = {**budget, "text": (Path("text.txt"),)}
    for only_text, data in ((True, ()), (False, budget["data"])):
        changes = {"recipe": "mlp-speculator", "only_text": only_text}
        flat = vars(options_of(changes, "smollm2-135m", tmp_path, both))
        assert (flat["text"], flat["data"]) == (both["text"], data)
