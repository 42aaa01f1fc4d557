"""Drafters side by side: what is counted, on which trees, what goes on after a stop, and what people see."""

import json
import math
import shlex
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tests.search.test_tune import world

from draftheads.bench import drafters
from draftheads.bench.drafters import Bench, BenchRow, BenchSettings, Contender, Counted, Timed, markdown
from draftheads.checkpoint import read_head, save_head
from draftheads.cli.bench import show
from draftheads.cli.main import main
from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.decode.plain import NoDraft
from draftheads.draft import Drafter
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.prompt_lookup import PromptLookup
from draftheads.errors import DataError, InvalidSettings
from draftheads.heads.base import DraftHead, HeadSession
from draftheads.loading import load_target
from draftheads.models.model import TargetModel
from draftheads.progress import NoProgress
from draftheads.search.replay import Rehearsal
from draftheads.search.workbook import Workbook
from draftheads.shapes import BestFirst, BestPaths
from draftheads.tree import Tree
from families import tiny_head, tiny_model

__all__ = ["world"]  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[3 + row, 4, 5 + row % 7, 6] for row in range(6)]
OTHERS = [[9, 3 + row, 8] for row in range(8)]
SETTINGS = BenchSettings(
    num_nodes=6,
    max_new_tokens=10,
    num_speed_prompts=3,
    num_sampled_prompts=4,
    batch_size=4,
    num_calibration_prompts=8,
    temperature=0.7,
)
SAMPLED = [PROMPTS[row] for row in (0, 1, 3, 4)]


@pytest.fixture(scope="module")
def model() -> TargetModel:
    return tiny_model("llama")


def contenders(model: TargetModel) -> list[Contender]:
    heads = [Contender(method, tiny_head(method, model), f"{method}-1") for method in ("medusa", "hydra")]
    small = DraftModel(tiny_model("llama", seed=5), model)
    return [*heads, Contender("draft-model", small, "small-1"), Contender("prompt-lookup", PromptLookup(), "lookup-1")]


def bench(
    model: TargetModel, folder: Path, each: list[Contender] | None = None, settings: BenchSettings = SETTINGS
) -> Bench:
    book = Workbook(folder, {"model": model.model_id})
    each = contenders(model) if each is None else each
    return Bench(model, each, PROMPTS, OTHERS, settings, book=book, progress=NoProgress())


@pytest.fixture(scope="module")
def compared(model: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Contender], list[BenchRow]]:
    each = contenders(model)
    return each, bench(model, tmp_path_factory.mktemp("bench"), each).run()


@pytest.mark.parametrize("sampling", [{}, {"acceptance": "exact"}, {"acceptance": "typical"}])
def test_tokens_per_step_are_those_of_decoding(
    model: TargetModel, compared: tuple[list[Contender], list[BenchRow]], sampling: dict[str, Any]
) -> None:
    each, rows = compared
    assert [row.name for row in rows] == ["medusa", "hydra", "draft-model", "prompt-lookup"]
    for contender, row in zip(each, rows, strict=True):
        engine = Engine(model, contender.drafter, max_batch_size=1)
        tokens = steps = 0
        for number, prompt in enumerate(SAMPLED if sampling else PROMPTS):
            options = {"temperature": 0.7, "seed": drafters._SEED + number, **sampling} if sampling else {}
            (result,) = engine.generate([prompt], max_new_tokens=10, **options)
            tokens, steps = tokens + len(result.token_ids) - 1, steps + result.num_steps
        found = {
            None: row.tokens_per_step,
            "exact": row.sampled_tokens_per_step,
            "typical": row.typical_tokens_per_step,
        }
        assert found[sampling.get("acceptance")] == tokens / steps, contender.name


def test_rows_say_what_was_compared(model: TargetModel, compared: tuple[list[Contender], list[BenchRow]]) -> None:
    each, rows = compared
    for contender, row in zip(each, rows, strict=True):
        assert row.num_different == 0, "fp32"
        assert row.over_first == pytest.approx(row.tokens_per_step / rows[0].tokens_per_step)
        assert 0 < row.draft_milliseconds < row.step_milliseconds
        assert row.tokens_per_second > 0
        assert (row.predicted_tokens_per_step is not None) == isinstance(contender.drafter, DraftHead)
    assert rows[0].over_first_error == 0 < rows[1].over_first_error
    heads = [contender.drafter for contender in each[:2]]
    own = [sum(tensor.numel() for tensor in head.parameters()) for head in heads]
    small = each[2].drafter
    assert isinstance(small, DraftModel)
    own += [sum(tensor.numel() for tensor in small.model.model.parameters()), 0]
    assert [row.num_parameters for row in rows] == own
    assert rows[2].tree == "growing, 6"
    assert rows[3].tree == "its own, up to 9"


@pytest.mark.parametrize("grows", [True, False])
def test_a_head_drafts_on_the_tree_that_promises_most(
    model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, grows: bool
) -> None:
    run = Rehearsal.run

    def swayed(self: Rehearsal, answers: Any) -> dict[str, Any]:
        found = run(self, answers)
        found["dynamic"]["expected"][-1] = found["static"]["expected"][-1] + (0.1 if grows else -0.1)
        found["confidence"]["temperatures"] = [1.5, 1.25, 0.75]
        return found

    monkeypatch.setattr(Rehearsal, "run", swayed)
    head = tiny_head("hydra", model)
    one = bench(model, tmp_path, [Contender("hydra", head, "1")])
    found = one._prepare(one.contenders[0])
    shape = one._shapes["hydra"]
    if grows:
        assert shape == BestFirst(6, num_ranks=10, beam=6, confidence=(1.5, 1.25, 0.75))
        assert found["predicted"] == found["growing"]
    else:
        assert isinstance(shape, Tree)
        assert shape.num_nodes == 6
        assert found["predicted"] == found["static"]
    again = tiny_head("hydra", model)
    monkeypatch.setattr(Rehearsal, "run", None)
    two = bench(model, tmp_path, [Contender("hydra", again, "1")])
    two._prepare(two.contenders[0])
    assert two._shapes["hydra"] == shape, "found once"


def test_what_was_counted_stays_and_what_was_timed_does_not(
    model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    timed: list[str] = []
    answered, answer = Bench._answered, Bench._answer

    def counted(self: Bench, contender: Contender, prompts: Any, **sampling: Any) -> dict[str, Any]:
        asked.append(contender.name)
        return answered(self, contender, prompts, **sampling)

    def clocked(self: Bench, name: str, drafter: Drafter, prompt: Any, max_new_tokens: int) -> Timed:
        timed.append(type(drafter).__name__)
        if stop_at is not None and len(timed) > stop_at:
            raise KeyboardInterrupt
        return answer(self, name, drafter, prompt, max_new_tokens)

    monkeypatch.setattr(Bench, "_answered", counted)
    monkeypatch.setattr(Bench, "_answer", clocked)
    each = contenders(model)[:2]
    stop_at: int | None = 8  # in the second prompt
    with pytest.raises(KeyboardInterrupt):
        bench(model, tmp_path, each).run()
    assert len(asked) == 2 * 3 + 1
    stop_at = None
    asked.clear()
    timed.clear()
    rows = bench(model, tmp_path, each).run()
    assert asked == [], "all was counted before"
    assert len(timed) == 3 * 2 * 2, "the first prompt was timed before"
    timed.clear()
    more = bench(model, tmp_path, contenders(model)).run()
    assert len(asked) == 2 * 3, "only those that are new"
    assert len(timed) == 5 * 2 * 3
    assert [row.tokens_per_step for row in more[:2]] == [row.tokens_per_step for row in rows]
    timed.clear()
    bench(model, tmp_path).run()
    assert len(timed) == 5 * 2 * 3, "timed anew"
    asked.clear()
    bench(model, tmp_path, each, replace(SETTINGS, num_sampled_prompts=5)).run()
    assert len(asked) == 2 * 2, "sampled answers to other prompts"
    asked.clear()
    rows = bench(model, tmp_path, each, replace(SETTINGS, num_sampled_prompts=99)).run()
    assert len(asked) == 2 * 2
    assert all(row.sampled_tokens_per_step for row in rows)


def test_ways_take_turns(model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []
    warmed: list[str] = []

    def clocked(self: Bench, name: str, drafter: Drafter, prompt: list[int], max_new_tokens: int) -> Timed:
        if max_new_tokens < SETTINGS.max_new_tokens:
            warmed.append(type(drafter).__name__)
            return Timed(1, 0, 1e9, 1e9, 1e9)
        assert warmed[-1] == type(drafter).__name__
        order.append((type(drafter).__name__, PROMPTS.index(prompt)))
        slow = not isinstance(drafter, NoDraft)
        return Timed(10, 5, seconds=2.0 if slow else 1.0, step_seconds=1.0, draft_seconds=0.25)

    monkeypatch.setattr(Bench, "_answer", clocked)
    one = bench(model, tmp_path, contenders(model)[:2])
    found = one._timed()
    plain, medusa, hydra = "NoDraft", "MedusaHead", "HydraHead"
    assert order == [
        *((plain, 0), (medusa, 0), (hydra, 0)),
        *((hydra, 2), (medusa, 2), (plain, 2)),
        *((medusa, 4), (hydra, 4), (plain, 4)),
    ], "spread over the prompts, there and back"
    assert len(warmed) == len(order)
    assert [one.seconds for one in found["plain"]] == [1.0, 1.0, 1.0]
    assert [one.seconds for one in found["medusa"]] == [2.0, 2.0, 2.0]
    row = one.run()[0]
    assert (row.draft_milliseconds, row.step_milliseconds) == (50.0, 200.0)
    assert row.speedup == 0.5
    assert row.speedup_error == 0.0


def test_drafting_alone_is_timed_as_drafting(
    model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(drafters.Stopwatch, "now", property(lambda self: clock[0]))
    head = tiny_head("medusa", model)
    lap, join, propose = drafters.Stopwatch.lap, Batch.join, HeadSession.propose

    def late(self: Any, part: str) -> None:
        clock[0] += {"draft": 0.0, "verify": 2.0, "rest": 0.5}[part]
        lap(self, part)

    def reading(self: Batch, sequences: Any) -> Any:
        clock[0] += 100.0
        return join(self, sequences)

    def guessing(self: Any, *args: Any) -> Any:
        clock[0] += 1.0
        return propose(self, *args)

    monkeypatch.setattr(drafters.Stopwatch, "lap", late)
    monkeypatch.setattr(Batch, "join", reading)
    monkeypatch.setattr(HeadSession, "propose", guessing)
    found = bench(model, tmp_path, [Contender("medusa", head, "1")])._answer("medusa", head, PROMPTS[0], 10)
    assert found.tokens == 10
    assert 2 <= found.steps <= 8, "the first step, in which a drafter may read the prompt, left out"
    assert found.draft_seconds == found.steps
    assert found.step_seconds == 3.5 * found.steps
    assert found.seconds == 100.0 + 3.5 * (found.steps + 1)


def test_what_a_drafter_learns_from_a_step_is_drafting(
    model: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(drafters.Stopwatch, "now", property(lambda self: clock[0]))
    watch = Lookahead.watch

    def learning(self: Any, draft: Any, logits: Any) -> None:
        clock[0] += 1.0
        watch(self, draft, logits)

    monkeypatch.setattr(Lookahead, "watch", learning)
    found = bench(model, tmp_path, [Contender("lookahead", Lookahead(), "1")])._answer(Lookahead(), PROMPTS[0], 10)
    assert found.draft_seconds == found.step_seconds == found.steps > 1


def test_findings_of_other_code_are_found_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "draftheads"
    shutil.copytree(
        Path(drafters.__file__).parents[1], package, ignore=shutil.ignore_patterns("weights", "__pycache__")
    )
    found = [drafters.code_digest()]
    monkeypatch.setattr(drafters, "__file__", str(package / "bench" / "drafters.py"))
    alike = ("cli/bench.py", "train/losses.py", "bench/page.py", "pictures.py")
    for place in (None, *alike, "accept.py", "heads/medusa.py", "decode/batch.py"):
        if place:
            (package / place).write_text((package / place).read_text() + "\n# other")
        found.append(drafters.code_digest())
    assert len(set(found[: 2 + len(alike)])) == 1, "neither what is printed or drawn nor how heads are trained"
    assert len(set(found[1 + len(alike) :])) == 4


def test_errors_are_those_of_prompts_drawn_anew() -> None:
    chance = torch.Generator().manual_seed(1)
    steps = torch.randint(20, 60, (80,), generator=chance)
    tokens = (steps * (1.5 + torch.rand(80, generator=chance, dtype=torch.float64))).long()
    slower = (steps * (1.2 + torch.rand(80, generator=chance, dtype=torch.float64))).long()
    one, other = (Counted(tuple(t.tolist()), tuple(steps.tolist())) for t in (tokens, slower))
    drawn = torch.randint(0, 80, (4000, 80), generator=chance)
    ratios = tokens[drawn].sum(1) / steps[drawn].sum(1)
    assert one.tokens_per_step == int(tokens.sum()) / int(steps.sum())
    assert one.error == pytest.approx(float(ratios.std()), rel=0.08)
    assert one.over(other)[0] == pytest.approx(one.tokens_per_step / other.tokens_per_step)
    assert one.over(other)[1] == pytest.approx(
        float((ratios / (slower[drawn].sum(1) / steps[drawn].sum(1))).std()), rel=0.08
    )
    assert one.over(one) == (1.0, 0.0)


@pytest.mark.parametrize("steps", [(0, 0, 0), (0, 0, 9)])
def test_answers_that_end_at_once_divide_by_nothing(steps: tuple[int, ...]) -> None:
    one, other = Counted((0, 0, sum(steps)), steps), Counted((0, 0, 2 * sum(steps)), steps)
    assert one.tokens_per_step == 1.0
    assert one.error == 0.0
    assert other.over(one)[0] == other.tokens_per_step
    assert math.isfinite(other.over(one)[1])


def test_answers_that_differ_are_counted(model: TargetModel, tmp_path: Path) -> None:
    one = bench(model, tmp_path, [Contender("careless", PromptLookup(), "careless")])
    right = one._answered(NoDraft(), PROMPTS)
    wrong = {**right, "texts": [*right["texts"][:4], [1], [2, 3]]}
    (tmp_path / f"greedy-careless-{drafters._digest(PROMPTS)}.json").write_text(json.dumps(wrong))
    assert one.run()[0].num_different == 2


def test_the_paths_of_the_mlp_speculator_are_checked_as_they_are(model: TargetModel, tmp_path: Path) -> None:
    head = tiny_head("mlp-speculator", model)
    one = bench(model, tmp_path, [Contender("paths", head, "1", BestPaths((3, 2, 2), 2))])
    (row,) = one.run()
    assert head.shape == BestPaths((3, 2, 2), 2)
    assert row.tree == "best 2 of 3x2x2, up to 7"
    assert row.predicted_tokens_per_step is None
    results = [Engine(model, head).generate([prompt], max_new_tokens=10)[0] for prompt in PROMPTS]
    alone = sum(len(result.token_ids) - 1 for result in results) / sum(result.num_steps for result in results)
    assert row.tokens_per_step == alone, "as if each were answered alone"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_nodes": 1}, "num_nodes is 1; it must be at least 2"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"num_speed_prompts": 2}, "num_speed_prompts is 2; it must be at least 3"),
        ({"num_sampled_prompts": 0}, "num_sampled_prompts is 0; it must be at least 3"),
    ],
)
def test_impossible_settings(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSettings, match=told):
        replace(SETTINGS, **changes)


def test_names_must_differ_and_prompts_be_there(model: TargetModel, tmp_path: Path) -> None:
    twice = [replace(contender, name="medusa") for contender in contenders(model)[:2]]
    with pytest.raises(InvalidSettings, match="medusa, medusa: each needs a name of its own"):
        bench(model, tmp_path, twice)
    with pytest.raises(InvalidSettings, match="not 'plain'"):
        bench(model, tmp_path, [replace(twice[0], name="plain")])
    book = Workbook(tmp_path, {})
    with pytest.raises(DataError, match="2 prompts to answer: give at least 3"):
        Bench(model, twice[:1], PROMPTS[:2], OTHERS, SETTINGS, book=book, progress=NoProgress())


def test_without_a_temperature_nothing_is_sampled(model: TargetModel, tmp_path: Path) -> None:
    settings = replace(SETTINGS, temperature=0.0)
    rows = bench(model, tmp_path, contenders(model)[:1], settings).run()
    assert rows[0].sampled_tokens_per_step is rows[0].typical_tokens_per_step is None
    lines = list(markdown(rows, settings, 6))
    assert lines[-1] == "Greedy answers to all 6 prompts, speeds on 3. ± is one standard error."
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|") == 10


def test_the_table_shows_what_was_found(compared: tuple[list[Contender], list[BenchRow]]) -> None:
    rows = compared[1]
    lines = list(markdown(rows, SETTINGS, 6))
    assert len(lines) == 4 + len(rows)
    assert lines[-1].startswith("Greedy answers to all 6 prompts, sampled ones to 4 of them, speeds on 3. ±")
    for line, row in zip(lines[2:-2], rows, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] == row.name
        assert cells[3] == f"{row.tokens_per_step:.2f} ± {row.tokens_per_step_error:.2f}"
        assert cells[9] == f"{row.sampled_tokens_per_step:.2f} ± {row.sampled_error:.2f}"
    assert statistics.fmean(row.tokens_per_step for row in rows) > 1


def test_a_terminal_of_80_columns_shows_all_names_and_numbers(
    compared: tuple[list[Contender], list[BenchRow]], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["medusa", "mlp-speculator", "mlp-speculator, paths", "prompt-lookup", "x" * 40]
    trees = ["growing, 24", "static, 24", "best 8 of 6x3x2, up to 23", "its own, up to 9", "growing, 24"]
    rows = [replace(compared[1][0], name=name, tree=tree) for name, tree in zip(names, trees, strict=True)]
    show(Console(width=80), rows, SETTINGS)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in names[:-1]:
        assert sum(line.startswith(f"{name} ") for line in lines) == 2, "a table each for lengths and for speeds"
    first = next(line for line in lines if line.startswith("mlp-speculator, paths"))
    numbers = [
        getattr(rows[0], number)
        for number in ("tokens_per_step", "over_first", "sampled_tokens_per_step", "typical_tokens_per_step")
    ]
    assert first.split()[-4:] == [f"{number:.2f}" for number in numbers], "on the line of the name"
    assert sum("x" * 24 in line for line in lines) == 2
    show(Console(width=80), [replace(rows[0], name="eagle")], SETTINGS)
    assert sum(line.startswith("drafter ") for line in capsys.readouterr().out.splitlines()) == 2


def test_the_command_compares_writes_and_says_so(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    quick = ["--num-calibration-prompts", "4", "--max-new-tokens", "8", "--num-nodes", "5", "--num-speed-prompts", "3"]
    arguments = ["bench", "./model", *quick, "--prompts", "others.jsonl", "--limit", "3", "--draft-model", "./model"]
    assert main([*arguments, "--heads", "./hydra", "lookahead", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    record = json.loads(shown.splitlines()[-1])
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == record
    assert [row["name"] for row in record["rows"]] == ["hydra", "lookahead", "draft-model"]
    assert record["num_prompts"] == 3
    assert record["prompts"] == "others.jsonl"
    assert record["settings"]["num_nodes"] == 5
    assert record["rows"][2]["tokens_per_step"] > 2, "it drafts for itself"
    assert record["rows"][1]["tree"] == "its own, up to 6", "as few as there can be"
    assert record["drafters"].keys() == {"hydra", "lookahead", "draft-model"}
    assert read_head(world / "hydra").digest in record["drafters"]["hydra"]
    assert (tmp_path / "out" / "bench.md").read_text().startswith("| drafter |")
    assert f"wrote {tmp_path / 'out' / 'bench.html'}" in shown
    assert all(len(line) <= 80 for line in shown.splitlines()[:-1] if "wrote" not in line)
    counted: list[str] = []
    answered = Bench._answered

    def noted(self: Bench, drafter: Drafter, prompts: Any, **sampling: Any) -> dict[str, Any]:
        counted.append(type(drafter).__name__)
        return answered(self, drafter, prompts, **sampling)

    monkeypatch.setattr(Bench, "_answered", noted)
    assert main([*arguments, "--heads", "lookahead", "./hydra"]) == 0
    assert "hydra: exact-at-0.7 answers to 3 prompts" in capsys.readouterr().out
    assert counted == [], "nothing is counted twice"
    assert main([*arguments, "--heads", "./hydra", "--num-nodes", "4", "--temperature", "0"]) == 0
    assert counted == ["HydraHead", "DraftModel", "NoDraft"], "other settings have other findings"
    assert "growing, 4" in capsys.readouterr().out
    shutil.copytree(world / "hydra", tmp_path / "b" / "hydra")
    config = json.loads((tmp_path / "b" / "hydra" / "config.json").read_text())
    config["head"]["embedding_scale"] = 1.25
    (tmp_path / "b" / "hydra" / "config.json").write_text(json.dumps(config))
    counted.clear()
    both = ["--heads", "./hydra", str(tmp_path / "b" / "hydra"), "--num-nodes", "4", "--temperature", "0"]
    assert main([*arguments, *both]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["name"] for row in rows] == ["./hydra", str(tmp_path / "b" / "hydra"), "draft-model"]
    assert counted == ["HydraHead"], "another configuration is another head"
    before = (tmp_path / "out" / "bench.html").read_bytes()
    (tmp_path / "out" / "bench.html").unlink()
    assert main(["report", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "bench.html").read_bytes() == before


def test_the_papers_way_of_an_mlp_speculator_keeps_to_the_budget(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    target = load_target(str(world / "model"))
    save_head(tiny_head("mlp-speculator", target, num_heads=4), tmp_path / "mlp", base=target)
    quick = shlex.split(
        "--num-calibration-prompts 4 --max-new-tokens 5 --num-speed-prompts 3 --temperature 0 --limit 3"
    )
    files = ["--heads", str(tmp_path / "mlp"), "--prompts", str(world / "others.jsonl"), "--out", str(tmp_path / "out")]
    for num_nodes, paths in (("12", ["best 2 of 6x3x2x1, up to 9"]), ("4", [])):
        assert main(["bench", str(world / "model"), *quick, *files, "--num-nodes", num_nodes]) == 0
        rows = json.loads((tmp_path / "out" / "bench.json").read_text())["rows"]
        assert [row["tree"] for row in rows[1:]] == paths


def test_another_model_in_the_same_folder_is_asked_anew(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    shutil.copytree(world / "model", tmp_path / "model")
    options = ["--num-calibration-prompts", "2", "--max-new-tokens", "8", "--temperature", "0", "--limit", "3"]
    arguments = ["bench", str(tmp_path / "model"), "--heads", "lookahead", "--prompts", str(world / "others.jsonl")]
    asked: list[str] = []
    answered = Bench._answered

    def noted(self: Bench, drafter: Drafter, prompts: Any, **sampling: Any) -> dict[str, Any]:
        asked.append(type(drafter).__name__)
        return answered(self, drafter, prompts, **sampling)

    monkeypatch.setattr(Bench, "_answered", noted)
    for expected in (2, 2):
        assert main([*arguments, *options]) == 0
        assert len(asked) == expected
    weights = load_file(tmp_path / "model" / "model.safetensors")
    save_file(
        {name: 1.25 * tensor for name, tensor in weights.items()},
        tmp_path / "model" / "model.safetensors",
        {"format": "pt"},
    )
    assert main([*arguments, *options]) == 0
    assert len(asked) == 4
    capsys.readouterr()


def test_what_cannot_be_compared_is_said(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    for arguments, told in [
        (["bench", "./model", "--heads", "./hydra", "--limit", "2"], "--limit is 2; it must be at least 3"),
        (["bench", "./model", "--heads", "./hydra", "--prompts", "one.jsonl"], "one.jsonl: 1 prompts: give at least 3"),
        (["bench", "./model", "--heads", "./hydra", "./hydra"], "each needs a name of its own"),
        (["bench", "./model", "--heads", "nowhere"], "no head 'nowhere'"),
        (["bench", "./no-model", "--heads", "./hydra", "nowhere"], "no head 'nowhere'"),  # before the model is sought
        (
            ["bench", "./model", "--heads", "./hydra", "--out", str(tmp_path / "file")],
            "file: File exists; choose another",
        ),
    ]:
        assert main(arguments) == 1
        assert told in capsys.readouterr().err
