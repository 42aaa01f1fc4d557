"""``draftheads audit``: lossless servers pass, broken ones are found, and what cannot be checked is not a pass."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai._base_client
import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

import draftheads
from byte_tokenizers import TOKENIZERS
from cli_world import PROMPTS, TEMPLATE, write_model
from draftheads.cli.main import COMMANDS, main
from draftheads.decode import batch
from draftheads.decode.engine import Engine
from draftheads.models.chat_template import TokenBytes
from draftheads.models.model import TargetModel
from draftheads.settings import Grammar
from draftheads_audit import COMMAND, command, run
from draftheads_audit import server as servers
from draftheads_audit.compare import Score, Scorer, are_equal, compare, gap_by_logprobs
from draftheads_audit.model import ModelReference
from draftheads_audit.options import CHECKS, SCHEMA, AuditOptions
from draftheads_audit.report import Pass, SampledSide, SeededRow
from draftheads_audit.run import json_problem, smaller_gap
from draftheads_audit.server import (
    Answer,
    DraftCounts,
    Drafting,
    Place,
    counts_of,
    drafting_between,
    drafting_in,
    places_of,
)
from fake_openai import FakeServer, Fields, asked, completion
from families import tiny_model
from serve_world import Running, running
from structured_world import json_model
from target_rows import Target

NEW_TOKENS = 24
PLAIN = '{"model": "tiny:plain"}'
Audit = Callable[..., dict[str, Any]]


class World:
    """The model in a folder, and the answers of its plain decoding."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.engine: Engine = draftheads.load(self.model, precision="fp32")
        results = self.engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
        self.plain = {prompt: result.text for prompt, result in zip(PROMPTS, results, strict=True)}
        self.ids = {prompt: result.token_ids for prompt, result in zip(PROMPTS, results, strict=True)}
        (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n", encoding="utf-8")

    def scores(self, prompt: str, place: int) -> torch.Tensor:
        """(V,) log-probabilities after so many tokens of the plain answer."""
        context = [*self.engine.encode(prompt), *self.ids[prompt][:place]]
        logits, _ = Target(self.engine.model).prefill([context])
        return logits[0].log_softmax(-1)

    def answer(self, fields: Fields, changed: Mapping[str, str] | None = None) -> tuple[int, Fields]:
        """The plain answer to a request, or the one to which it was changed."""
        prompt = asked(fields)
        return 200, completion({**self.plain, **(changed or {})}[prompt])

    def changed(self, *, is_tie: bool) -> tuple[str, int, float, str]:
        """The place where another letter is least unlikely, or one where it is very unlikely.

        Returns the prompt, the place, the gap in nats, and the changed answer.
        """
        found = []
        for prompt, ids in self.ids.items():
            for place in range(4, NEW_TOKENS - 4):
                scores = self.scores(prompt, place)
                others = scores.clone()
                others[ids[place]] = others[:4] = -torch.inf  # special tokens are no letters
                best = int(others.argmax())
                gap = float(scores[ids[place]] - scores[best])
                text = self.plain[prompt]
                letter = self.engine.model.tokenizer.decode([best])
                found.append((prompt, place, gap, text[:place] + letter + "mob" * 8))
        found = [(prompt, place, gap, text[:NEW_TOKENS]) for prompt, place, gap, text in found]
        choose = min if is_tie else max
        return choose(found, key=lambda one: one[2])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(write_model(tmp_path_factory.mktemp("audit")))


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Running]:
    """Our own, with a head."""
    drafting = draftheads.load(
        world.model, world.folder / "hydra", precision="fp32", tree=[[0], [1], [0, 0], [0, 0, 0]]
    )
    with running({"tiny": drafting, "tiny:plain": world.engine}) as one:
        yield one


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "audit", COMMAND)  # also where the package is not installed
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr(command, "load", lambda name, **given: draftheads.load(name, **{**given, "precision": "fp32"}))
    monkeypatch.setattr(command, "quiet_transformers", lambda: None)  # for the whole process, and later tests
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "AUDIT_API_KEY", "AUDIT_BASELINE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def audit(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Audit:
    """Runs the command, which must end with a code; its JSON, with what it printed as ``shown`` and ``errors``."""

    def run(url: str, *arguments: str, code: int = 0, prompts: Path | None = None) -> dict[str, Any]:
        path = tmp_path / "audit.json"
        path.unlink(missing_ok=True)
        given = ["--prompts", str(prompts or world.folder / "prompts.txt"), "--max-new-tokens", str(NEW_TOKENS)]
        found = main(["audit", url, *given, "--json", str(path), *arguments])
        shown = capsys.readouterr()
        assert found == code, shown
        record = json.loads(path.read_text()) if path.exists() else {}
        return {**record, "shown": shown.out, "errors": shown.err}

    return run


def of_model(world: World, *checks: str) -> list[str]:
    return ["--model", str(world.model), "--checks", *(checks or ["greedy"])]


# --- our own server ---


def test_our_server_is_lossless_beside_the_model(server: Running, world: World, audit: Audit):
    record = audit(server.url, *of_model(world, "greedy", "greedy-parallel", "seeded", "seeded-parallel"))
    assert record["verdict"] == "lossless"
    assert [row["counts"]["equal"] for row in record["checks"]] == [len(PROMPTS)] * 2
    for row in record["checks"]:
        assert row["server"]["drafting"]["tokens_per_step"] > 1.1, "it must draft, else nothing is tested"
        assert 0 < row["server"]["drafting"]["accepted_share"] < 1
        assert row["server"]["tokens_per_second"] > 0
        assert row["num_compared_characters"] == row["num_characters"] == sum(map(len, world.plain.values()))
    for row in record["sampled"]:
        assert row["server"]["num_equal"] == row["server"]["num_repeated"] == len(PROMPTS)
        assert row["server"]["num_tokens"] > 0.8 * len(PROMPTS) * NEW_TOKENS
    assert record["servers"]["server"] == {"url": f"{server.url}/v1", "model": "tiny"}
    assert "several models; asked was tiny, not tiny:plain" in record["shown"]
    assert (
        "LOSSLESS, as far as was compared. Of 16 compared texts 16 are equal and 0 have a near-tie." in record["shown"]
    )
    assert max(map(len, record["shown"].splitlines()[:18])) <= 80


def test_our_server_is_lossless_beside_itself_without_drafts(server: Running, audit: Audit):
    """The same address with another name, or with a field that switches drafting off; no model is needed."""
    for given in (PLAIN, '{"draft_nodes": 0}'):
        beside = ["--baseline", server.url, "--baseline-fields", given, "--checks", "greedy", "greedy-parallel"]
        record = audit(server.url, *beside, "--fields", '{"model": "tiny"}')
        rows = record["checks"]
        assert [(row["check"], row["is_baseline"]) for row in rows] == [
            *(("greedy", False), ("greedy-parallel", False), ("greedy-parallel", True))
        ]
        assert all(row["counts"]["equal"] == len(PROMPTS) for row in rows)
        assert rows[0]["server"]["drafting"]["tokens_per_step"] > 1.1
        assert rows[0]["baseline"]["drafting"]["tokens_per_step"] == 1.0
        assert "baseline itself, greedy-parallel" in record["shown"]
        assert "The baseline drafts" not in record["shown"]


def test_a_model_that_only_scores_does_so_in_fp32(world: World, audit: Audit, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    quick = command.load

    def load(name: str, **given: Any) -> Engine:
        seen.append(given["precision"])
        return quick(name, **given)

    monkeypatch.setattr(command, "load", load)
    with FakeServer(world.answer) as fake:
        audit(fake.url, *of_model(world))
        audit(fake.url, *of_model(world), "--baseline", fake.url)
    assert seen == ["auto", "fp32"]


def test_a_baseline_that_drafts_is_noted(server: Running, audit: Audit):
    record = audit(server.url, "--baseline", server.url, "--checks", "greedy")
    assert "The baseline drafts, too" in record["shown"]


def accept_everything(*arguments: Any, **more: Any) -> Any:
    """Acceptance that accepts the first draft token of each step, unverified."""
    draft, logits, *others = arguments
    if draft.num_nodes > 1:
        first = draft.token_ids[:, 1:2, None].expand(-1, logits.shape[1], -1)
        logits = logits.clone().scatter_(2, first, 1e4)
    return REAL_ACCEPT(draft, logits, *others, **more)


def follow_everything(draft: Any, best: Any) -> Any:
    """The same of most likely tokens."""
    return REAL_GREEDY(draft, draft.token_ids[:, 1:2].expand_as(best) if draft.num_nodes > 1 else best)


REAL_ACCEPT, REAL_GREEDY = batch.accept, batch.accept_greedy


@pytest.mark.parametrize("check", ["greedy", "greedy-parallel"])
def test_a_broken_acceptance_is_found(
    server: Running, world: World, audit: Audit, monkeypatch: pytest.MonkeyPatch, check: str
):
    monkeypatch.setattr(batch, "accept", accept_everything)
    monkeypatch.setattr(batch, "accept_greedy", follow_everything)
    record = audit(server.url, *of_model(world, check), code=1)
    assert record["verdict"] == "wrong"
    assert "NOT LOSSLESS" in record["shown"]
    wrong = [one for one in record["checks"][0]["comparisons"] if one["kind"] == "wrong"]
    assert len(wrong) >= 5, "a random head is nearly never right"
    assert record["shown"].count(" characters: WRONG, gap") == 3, "three examples are shown"
    for one in wrong:
        plain = world.plain[PROMPTS[one["index"]]]
        place = next(place for place in range(NEW_TOKENS) if one["answer"][place] != plain[place])
        assert (one["place"], one["reference"]) == (place, plain)
        scores = world.scores(PROMPTS[one["index"]], place)
        emitted = world.engine.model.tokenizer(one["answer"][place])["input_ids"][0]
        assert one["gap"] == pytest.approx(float(scores.max() - scores[emitted]), abs=1e-4)


def test_sampled_answers_of_a_broken_acceptance_have_another_distribution(
    server: Running, world: World, audit: Audit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It is no proof without a baseline, because servers may have other defaults for sampling."""
    prompts = tmp_path / "more.txt"
    prompts.write_text("\n".join(f"{prompt} {letter}" for prompt in PROMPTS for letter in "ab"), encoding="utf-8")
    monkeypatch.setattr(batch, "accept", accept_everything)
    given = of_model(world, "seeded-parallel")
    record = audit(server.url, *given, code=2, prompts=prompts)
    assert record["sampled"][0]["deviations"] > 4.5
    assert "do not have the distribution of --model" in record["shown"]
    beside = ["--baseline", server.url, "--baseline-fields", PLAIN]
    record = audit(server.url, *given, *beside, code=1, prompts=prompts)
    assert record["sampled"][0]["is_off"]
    assert abs(record["sampled"][0]["deviations"]) > 4.5
    assert "sampled tokens have another distribution than the baseline's" in record["shown"]
    monkeypatch.setattr(batch, "accept", REAL_ACCEPT)
    record = audit(server.url, *given, *beside, prompts=prompts)
    assert abs(record["sampled"][0]["deviations"]) < 4.5
    assert record["sampled"][0]["server"]["num_tokens"] > 0.8 * 16 * NEW_TOKENS


def test_a_model_without_a_chat_template_is_asked_for_texts(world: World, audit: Audit, tmp_path: Path):
    shutil.copytree(world.model, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.chat_template = None
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(str(tmp_path / "base"))
    model = ["--model", str(tmp_path / "base"), "--checks", "greedy", "seeded"]
    with running({"tiny": draftheads.load(tmp_path / "base", "prompt-lookup", precision="fp32")}) as own:
        record = audit(own.url, *model)
        assert record["checks"][0]["counts"]["equal"] == len(PROMPTS)
        assert "without a chat template" in record["shown"]
        chats = tmp_path / "chats.jsonl"
        chats.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
        assert "use a chat model" in audit(own.url, *model, prompts=chats, code=2)["errors"]


def test_json_answers(audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model that can spell JSON: its texts are compared with the model's, as the server is ours, and are valid."""
    target = json_model()
    target.model.save_pretrained(tmp_path / "model")
    target.tokenizer.chat_template = TEMPLATE
    target.tokenizer.save_pretrained(str(tmp_path / "model"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["yes indeed", "no"]}\n{"messages": [{"role": "user", "content": "12"}]}\n')
    schema = {"type": "object", "properties": {"a": {"enum": ["red", "green"]}}, "required": ["a"]}
    for module in (run, servers):
        monkeypatch.setattr(module, "SCHEMA", {**schema, "additionalProperties": False})
    arguments = ["--model", str(tmp_path / "model"), "--checks", "json", "json-parallel"]
    engine = draftheads.load(tmp_path / "model", "prompt-lookup", precision="fp32")
    with running({"tiny": engine}) as own:
        record = audit(own.url, *arguments, prompts=prompts)
    for row in record["checks"]:
        assert (row["counts"]["equal"], row["num_finished"], row["json_problems"]) == (2, 2, [])
        assert row["server"]["drafting"]["tokens_per_step"] >= 1
    assert "2/2" in record["shown"]


@pytest.mark.real
def test_the_real_model_with_a_head_is_lossless(
    audit: Audit, tmp_path: Path, cheap_nodes: None, monkeypatch: pytest.MonkeyPatch
):
    """In the type in which it is served; in JSON, too."""
    monkeypatch.setattr(command, "load", draftheads.load)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Why is the sky blue?\nName three fruits.\n")
    with running({"tiny": draftheads.load("smollm2-135m", "hydra")}) as own:
        checks = ["--checks", "greedy-parallel", "json", "--max-new-tokens", "48"]
        record = audit(own.url, "--model", "smollm2-135m", *checks, prompts=prompts)
    assert [row["counts"]["equal"] for row in record["checks"]] == [2, 2]
    assert all(row["server"]["drafting"]["tokens_per_step"] > 1.3 for row in record["checks"])
    assert record["checks"][0]["num_finished"] is None


# --- near-ties and bugs ---


def test_a_near_tie_is_no_bug(world: World, audit: Audit):
    prompt, place, gap, text = world.changed(is_tie=True)
    assert gap < 0.05, "else the tiny model has no near-tie to test with"
    with FakeServer(lambda fields: world.answer(fields, {prompt: text})) as fake:
        record = audit(fake.url, *of_model(world))
        (one,) = record["checks"][0]["comparisons"]
        assert (one["kind"], one["index"], one["place"]) == ("near-tie", PROMPTS.index(prompt), place)
        assert one["gap"] == pytest.approx(gap, abs=1e-5)
        assert record["checks"][0]["counts"]["equal"] == len(PROMPTS) - 1
        assert f"1 has a near-tie; the largest gap is {gap:.3f} nats" in record["shown"]
        # a smaller tolerance makes it a bug
        audit(fake.url, *of_model(world), "--tolerance", str(gap / 2), code=1)


def test_a_wrong_word_is_a_bug(world: World, audit: Audit):
    prompt, place, gap, text = world.changed(is_tie=False)
    assert gap > 1
    with FakeServer(lambda fields: world.answer(fields, {prompt: text})) as fake:
        record = audit(fake.url, *of_model(world), code=1)
    (one,) = record["checks"][0]["comparisons"]
    assert (one["kind"], one["index"], one["place"]) == ("wrong", PROMPTS.index(prompt), place)
    assert one["gap"] == pytest.approx(gap, abs=1e-4)
    common, rest = text[:place], text[place:]
    for line in (f"common end {common[-40:]}", f"answer     {rest}", f"reference  {world.plain[prompt][place:]}"):
        assert " ".join(line.split()) in " ".join(record["shown"].split())


def test_an_answer_that_ends_early_is_a_bug(world: World, audit: Audit):
    text = world.plain[PROMPTS[2]]

    def behave(fields: Fields) -> tuple[int, Fields]:
        if asked(fields) == PROMPTS[2]:
            return 200, completion(text[:9], finish="stop", num_tokens=10)
        return world.answer(fields)

    with FakeServer(behave) as fake:
        record = audit(fake.url, *of_model(world), code=1)
        (one,) = record["checks"][0]["comparisons"]
        scores = world.scores(PROMPTS[2], 9)
        assert (one["kind"], one["place"]) == ("wrong", 9)
        assert one["gap"] == pytest.approx(float(scores.max() - scores[2]), abs=1e-4)
        assert "(it ends here)" in record["shown"]


@pytest.mark.parametrize(("num_tokens", "is_fine"), [(NEW_TOKENS, True), (NEW_TOKENS - 1, True), (9, False)])
def test_a_text_that_was_cut_is_compared_as_far_as_it_goes(num_tokens: int, is_fine: bool):
    short, long = Answer("abcdefghi", is_cut=True, num_tokens=num_tokens), Answer("abcdefghijk", is_cut=True)
    assert are_equal(short, long, max_tokens=NEW_TOKENS) == is_fine
    assert are_equal(long, short, max_tokens=NEW_TOKENS) == is_fine
    half = replace(short, text="abcdefghi\ufffd")
    assert are_equal(half, long, max_tokens=NEW_TOKENS) == is_fine
    assert not are_equal(replace(short, text="abcdefghx"), long, max_tokens=NEW_TOKENS)
    assert not are_equal(replace(short, is_cut=False), long, max_tokens=NEW_TOKENS)


def test_a_reference_that_is_the_less_likely_one_is_no_bug_of_the_server(world: World, audit: Audit):
    prompt, last = PROMPTS[0], NEW_TOKENS - 1
    unlikely = world.engine.model.tokenizer.decode([int(world.scores(prompt, last)[4:].argmin()) + 4])
    text = world.plain[prompt][:last] + unlikely
    with FakeServer(world.answer) as right, FakeServer(lambda fields: world.answer(fields, {prompt: text})) as wrong:
        record = audit(right.url, "--baseline", wrong.url, *of_model(world), code=2)
        assert record["checks"][0]["counts"]["reference-wrong"] == 1
        assert "is the reference decoded greedily?" in record["shown"]
        assert audit(wrong.url, "--baseline", right.url, *of_model(world), code=1)["checks"][0]["counts"]["wrong"] == 1


def test_a_prompt_that_the_server_reads_otherwise_is_not_scored(world: World, audit: Audit):
    """Then chat templates differ, and no text is wrong because of drafting."""
    prompt, _, _, text = world.changed(is_tie=False)

    def behave(fields: Fields) -> tuple[int, Fields]:
        _, body = world.answer(fields, {prompt: text})
        return 200, {**body, "usage": {**body["usage"], "prompt_tokens": 99}}

    with FakeServer(behave) as fake:
        record = audit(fake.url, *of_model(world), code=2)
    assert record["checks"][0]["counts"]["unscored"] == 1
    assert "the server read a prompt of 99 tokens, --model reads" in record["shown"]


def test_a_baseline_that_is_not_the_models_greedy_text_is_no_reference(world: World, audit: Audit):
    """As one with a repetition penalty; then a difference says nothing about drafting."""
    prompt, _, _, text = world.changed(is_tie=False)
    others = {each: plain[:12] + "mobmobmob" for each, plain in world.plain.items()}
    with (
        FakeServer(lambda fields: world.answer(fields, others)) as penalised,
        FakeServer(lambda fields: world.answer(fields, {**others, prompt: text})) as fake,
    ):
        record = audit(fake.url, "--baseline", penalised.url, *of_model(world), code=2)
    assert record["checks"][0]["counts"]["unscored"] == 1
    assert "% of the baseline's own tokens are not --model's greedy ones" in record["shown"]
    assert "tokens of the server, " in record["shown"]


def test_tokens_that_are_off_are_counted(world: World, audit: Audit):
    """Also beyond the first difference."""
    prompt, place, _, text = world.changed(is_tie=False)
    with FakeServer(world.answer) as plain, FakeServer(lambda fields: world.answer(fields, {prompt: text})) as fake:
        record = audit(fake.url, "--baseline", plain.url, *of_model(world), code=1)
    model = ModelReference(world.engine, PROMPTS)
    margins = model.margins(PROMPTS.index(prompt), Answer(text, is_cut=True))
    assert len(margins) == NEW_TOKENS
    assert max(margins[:place]) < 1e-4
    num_off = sum(margin > 0.25 for margin in margins)
    total = len(PROMPTS) * NEW_TOKENS
    counts = f"{num_off} of {total} tokens of the server, 0 of {total} tokens of the baseline"
    assert f"Less likely than the model's best token by more than 0.25 nats: {counts}." in record["notes"]


# --- without a model ---


@pytest.mark.parametrize(("is_tie", "code"), [(True, 0), (False, 1)])
def test_the_baselines_log_probabilities_score_where_there_is_no_model(
    server: Running, world: World, audit: Audit, is_tie: bool, code: int
):
    prompt, place, gap, text = world.changed(is_tie=is_tie)
    with FakeServer(lambda fields: world.answer(fields, {prompt: text})) as fake:
        beside = ["--baseline", server.url, "--baseline-fields", PLAIN, "--checks", "greedy"]
        record = audit(fake.url, *beside, code=code)
    (one,) = record["checks"][0]["comparisons"]
    assert one["place"] == place
    assert one["gap"] == pytest.approx(gap, abs=1e-4)


def test_differences_without_any_score_are_not_decided(world: World, audit: Audit):
    prompt, _, _, text = world.changed(is_tie=True)
    with FakeServer(world.answer) as plain, FakeServer(lambda fields: world.answer(fields, {prompt: text})) as fake:
        record = audit(fake.url, "--baseline", plain.url, "--checks", "greedy", code=2)
        assert record["checks"][0]["counts"]["unscored"] == 1
        assert "gives no log-probabilities, and there is no --model to score with" in record["shown"]
        audit(plain.url, "--baseline", plain.url, "--checks", "greedy")


def test_gaps_by_log_probabilities():
    places = [
        Place(b"the", -0.1, {b"the": -0.1, b"a": -2.0}),
        Place(b" cat", -0.5, {b" cat": -0.5, b" cats": -0.6, b" dog": -0.75}),
        Place(b" sat", -0.2, {b" sat": -0.2, b" is": -1.5}),
    ]
    reference = "the cat sat"
    assert gap_by_logprobs(places, "the dog", reference).gap == pytest.approx(0.25)
    assert gap_by_logprobs(places, "a dog", reference).gap == pytest.approx(1.9)
    assert gap_by_logprobs(places, "the cat is", reference).gap == pytest.approx(1.3)
    # it was " cats", and not an unlikely "s" after " cat"
    assert gap_by_logprobs(places, "the cats", reference).gap == pytest.approx(0.1)
    # a shorter token of the answer, which the reference also begins with
    longer = [Place(b'"]', -1.4, {b'"]': -1.4, b'"': -1.7, b",": -2.0})]
    assert gap_by_logprobs(longer, '" ,', '"]').gap == pytest.approx(0.3)
    penalised = [*places[:2], replace(places[2], logprob=-1.6, tops={b" sat": -1.6, b" is": -1.5})]
    assert "a penalty" in gap_by_logprobs(penalised, "the cat is", reference, is_greedy=True).reason
    assert gap_by_logprobs(penalised, "the cat is", reference).gap == pytest.approx(-0.1)
    least = gap_by_logprobs(places, "the cat ran", reference)
    assert (least.gap, least.is_least) == (pytest.approx(1.3), True)
    assert gap_by_logprobs(places, "the cat", reference).gap is None
    assert gap_by_logprobs(places, "the cat sat down", reference).gap is None
    assert "of another text" in gap_by_logprobs(places, "the dog", "the bird").reason
    tails = [Answer("the cat ran", is_cut=True), Answer(reference, is_cut=True)]

    def by_places(index: int, answer: Answer, other: Answer) -> Score:
        return gap_by_logprobs(places, answer.text, other.text)

    kinds = [compare(0, *tails, by_places, tolerance=t, max_tokens=9).kind for t in (0.25, 2.0)]
    assert kinds == ["wrong", "unscored"], "at least 1.3: more than 0.25, but perhaps less than 2"


@pytest.mark.parametrize(
    ("of_model", "of_baseline", "found", "num_asked"),
    [
        (0.1, 3.0, 0.1, 0),
        (3.0, 0.1, 0.1, 1),
        (3.0, 2.0, 2.0, 1),
        (-3.0, 4.0, -3.0, 1),
        (None, 2.0, 2.0, 1),
        (3.0, None, 3.0, 1),
    ],
)
def test_the_smaller_gap_of_model_and_baseline_counts(
    of_model: float | None, of_baseline: float | None, found: float, num_asked: int
):
    """The baseline is asked only where the model finds no near-tie."""
    asked: list[int] = []

    def fixed(gap: float | None) -> Scorer:
        def score(index: int, answer: Answer, reference: Answer) -> Score:
            asked.append(index)
            return Score(gap)

        return score

    answers = Answer("a", is_cut=True), Answer("b", is_cut=True)
    score = smaller_gap(fixed(of_model), fixed(of_baseline), 0.25, 0, *answers)
    assert (score.gap, len(asked)) == (found, 1 + num_asked)


def test_json_is_scored_by_the_baseline(world: World, audit: Audit):
    """Under a schema the model cannot know the tokens of a text."""
    other = VALID.replace('"a"', '"b"')
    places = [{"token": VALID[:11]}, {"token": "a"}, {"token": VALID[12:]}]
    tops = {"a": -0.5, "b": -0.6, "c": -0.4}  # the most likely one may be forbidden

    def with_logprobs(fields: Fields) -> tuple[int, Any]:
        if "response_format" not in fields:
            return world.answer(fields)
        _, body = 200, completion(VALID, finish="stop")
        likely = [{"token": token, "logprob": tops[token]} for token in tops]
        content = [
            {
                **place,
                "logprob": tops.get(place["token"], 0.0),
                "top_logprobs": likely if place["token"] in tops else [],
            }
            for place in places
        ]
        if fields.get("logprobs"):
            body["choices"][0]["logprobs"] = {"content": content}
        return 200, body

    def behave(fields: Fields) -> tuple[int, Any]:
        return (200, completion(other, finish="stop")) if "response_format" in fields else world.answer(fields)

    with FakeServer(with_logprobs) as baseline, FakeServer(behave) as fake:
        record = audit(fake.url, "--baseline", baseline.url, *of_model(world, "json"))
        assert record["checks"][0]["counts"]["near-tie"] == len(PROMPTS)
        assert record["checks"][0]["comparisons"][0]["gap"] == pytest.approx(0.1)
        tops["b"] = -3.0
        assert audit(fake.url, "--baseline", baseline.url, *of_model(world, "json"), code=1)["verdict"] == "wrong"
        del places[1:]
        record = audit(fake.url, "--baseline", baseline.url, *of_model(world, "json"), code=2)
        assert "under a schema, --model cannot know" in record["shown"]


# --- tokens of texts ---


class Spelling:
    """A model whose next tokens are given by the text so far; its tokenizer takes the longest token."""

    tokens = ("<eos>", "a", "c", "t", "s", " ", "o", "n", "cat", "cats", "on")

    def __init__(self, odds: dict[str, dict[str, float]]) -> None:
        self.odds, self.model, self.tokenizer, self.eos_ids = odds, self, self, frozenset({0})
        self.max_positions = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        ids = []
        while text:
            token = max((token for token in self.tokens[1:] if text.startswith(token)), key=len)
            ids.append(self.tokens.index(token))
            text = text[len(token) :]
        return {"input_ids": ids}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(self.tokens[token] for token in ids)

    def encode(self, _: object) -> list[int]:
        return [5]  # a space

    def next_scores(self, context: list[int]) -> torch.Tensor:
        scores = torch.full((len(self.tokens),), -20.0)
        for token, score in self.odds[self.decode(context[1:])].items():
            scores[self.tokens.index(token)] = score
        return scores


@pytest.mark.parametrize(
    ("odds", "gap"),
    [
        ({"": {"cat": -0.5, "cats": -0.6}, "cat": {" ": -0.1}}, 0.1),  # one token beside the other
        ({"": {"cat": -0.5, "cats": -9.0}, "cat": {" ": -0.7, "s": -0.8}}, 0.1),  # parted after a common one
        ({"": {"cat": -0.1, "cats": -3.0}, "cat": {" ": -0.1, "s": -4.0}}, 2.9),  # unlikely in both ways
        (
            {"": {"c": -0.1}, "c": {"a": -0.1}, "ca": {"t": -0.1}, "cat": {" ": -0.6, "s": -0.8}},
            0.2,
        ),  # letter by letter
        ({"": {"cats": -0.1, "cat": -4.0}}, -3.9),  # the reference is the less likely one
    ],
)
def test_a_text_can_be_written_with_several_sequences_of_tokens(odds: dict[str, dict[str, float]], gap: float):
    spelling: Any = Spelling(odds)
    model = ModelReference(spelling, ["x"])
    model.next_scores = spelling.next_scores  # type: ignore[method-assign]
    score = model.score(0, Answer("cats on", is_cut=True), Answer("cat on", is_cut=True))
    assert score.gap == pytest.approx(gap)


def test_an_end_is_a_token_too():
    spelling: Any = Spelling({"": {"cat": 0.0}, "cat": {"<eos>": -1.0, "s": -1.25}})
    model = ModelReference(spelling, ["x"])
    model.next_scores = spelling.next_scores  # type: ignore[method-assign]
    ended, longer = Answer("cat", is_cut=False), Answer("cats", is_cut=True)
    assert model.score(0, longer, ended).gap == pytest.approx(0.25)
    assert model.score(0, ended, longer).gap == pytest.approx(-0.25)


@pytest.fixture(scope="module")
def spelt() -> tuple[ModelReference, Answer]:
    """A random model with a tokenizer of pieces of words, and what it says: letters in tokens that no one would use."""
    engine = Engine(json_model())
    model = ModelReference(engine, [[{"role": "user", "content": "yes"}]])
    (result,) = engine.generate([model.prompt_ids[0]], grammar=Grammar.regex("[a-z, ]{80}"), max_new_tokens=40)
    assert model.usual_ids(result.text) != list(result.token_ids)
    return model, model._answer(result)


def test_a_reference_with_known_tokens_is_scored_by_them(spelt: tuple[ModelReference, Answer]):
    model, reference = spelt
    assert reference.token_ids is not None
    decode, score_of = model.engine.model.tokenizer.decode, partial(model.score, by_text=False)
    for place in range(2, len(reference.token_ids), 4):
        scores = model.next_scores([*model.prompt_ids[0], *reference.token_ids[:place]])
        before, right = decode(reference.token_ids[:place]), decode([reference.token_ids[place]])
        letters = [token for token in range(256) if decode([token]) in "abcdefghijklmnopqrstuvwxyz" and decode([token])]
        wrong = max((token for token in letters if decode([token]) != right[0]), key=lambda token: float(scores[token]))
        answer = Answer(f"{before}{decode([wrong])}~~~", is_cut=True)
        gap = float(scores[reference.token_ids[place]] - scores[wrong])
        score = score_of(0, answer, reference)
        if wrong in scores.topk(64).indices:
            assert score.gap == pytest.approx(gap, abs=1e-4)
        else:
            assert score.is_least
            assert score.gap is not None
            assert 0 < score.gap < gap
    unknown = score_of(0, Answer("abc", is_cut=True), replace(reference, token_ids=None))
    assert "under a schema" in unknown.reason


def test_the_end_of_an_answer_beside_known_tokens(spelt: tuple[ModelReference, Answer]):
    model, reference = spelt
    assert reference.token_ids is not None
    decode = model.engine.model.tokenizer.decode
    ended = Answer(decode(reference.token_ids[:7]), is_cut=False)
    scores = model.next_scores([*model.prompt_ids[0], *reference.token_ids[:7]])
    assert model.score(0, ended, reference).gap == pytest.approx(
        float(scores[reference.token_ids[7]] - scores[0]), abs=1e-4
    )
    first = replace(reference, token_ids=reference.token_ids[:7], text=ended.text, is_cut=False)
    longer = Answer(f"{ended.text}{decode([reference.token_ids[7]])}~", is_cut=True)
    gap = float(scores[0] - scores[reference.token_ids[7]])
    assert model.score(0, longer, first).gap == pytest.approx(gap, abs=1e-4)


def test_the_end_is_no_token_of_the_text():
    spelling: Any = Spelling({})
    assert ModelReference(spelling, ["x"]).token_ids(Answer("cats", is_cut=False, token_ids=(9, 0))) == [9]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str):
    tokenizer = TOKENIZERS[kind]
    known = TokenBytes(tokenizer)
    for text in (" the cat", " Привет", "日本", " cat 🙂"):
        ids = tokenizer(text)["input_ids"]
        assert b"".join(map(known.of, ids)).lstrip() == text.strip().encode()
    assert known.of(tokenizer.eos_token_id) == b"<eos>"


@pytest.mark.parametrize("given", [10**18, True, "abc", [256], [0.5], {"a": 1}])
def test_bytes_of_a_token_are_a_list_of_them(given: object):
    """A number would be so many zeros."""
    content = [{"token": "a", "logprob": -1.0, "top_logprobs": [], "bytes": given}]
    with pytest.raises((TypeError, ValueError)):
        places_of({"content": content})


def test_reasoning_that_the_server_took_out_is_compared_and_not_scored(world: World, audit: Audit):
    prompt, place, _, text = world.changed(is_tie=False)

    def behave(fields: Fields) -> tuple[int, Fields]:
        _, body = world.answer(fields, {prompt: text})
        message = body["choices"][0]["message"]
        content = message["content"]
        return 200, {**body, "choices": [{"message": {"content": content[3:], "reasoning_content": content[:3]}}]}

    with FakeServer(behave) as fake:
        record = audit(fake.url, *of_model(world), code=2)
    assert record["checks"][0]["counts"]["equal"] == len(PROMPTS) - 1
    (one,) = record["checks"][0]["comparisons"]
    assert (one["kind"], one["place"]) == ("unscored", place)
    assert "separates reasoning" in one["reason"]


def test_answers_are_read_under_the_generation_configuration():
    """The most likely tokens are those of the model with its rules: own answers have no margin."""
    model = tiny_model("llama")
    rules = {"no_repeat_ngram_size": 2, "sequence_bias": [[[7, 8], 4.0]], "repetition_penalty": 1.2, "min_length": 9}
    model.model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0, **rules)
    engine = Engine(TargetModel(model.model, model.tokenizer, model.model_id))
    reference = ModelReference(engine, ["abc", "de"], max_new_tokens=16, is_chat=False)
    for index, answer in enumerate(reference.answers(None, lambda: None)):
        assert max(reference.margins(index, answer)) < 1e-4
        assert answer.token_ids is not None
        context = [*reference.prompt_ids[index], *answer.token_ids[:4]]
        assert int(reference.next_scores(context).argmax()) == answer.token_ids[4]


# --- JSON ---

VALID = '{"topic": "a", "words": [], "number": 1, "is_question": true}'


def json_server(text: str, *, form: str = "json_schema") -> FakeServer:
    """Answers each JSON request with a text, if the request is of its form."""

    def behave(fields: Fields) -> tuple[int, Any]:
        if "response_format" not in fields:
            return 200, completion("hello", finish="stop")
        if fields["response_format"]["type"] != form:
            return 422, {"detail": [{"msg": "Input should be 'text' or 'json_object'"}]}
        return 200, completion(text, finish="stop")

    return FakeServer(behave)


def test_json_that_breaks_the_schema_is_a_bug_where_the_baselines_is_valid(audit: Audit):
    checks = ["--checks", "json", "json-parallel"]
    with json_server(VALID) as right, json_server(VALID.replace("1", '"1"')) as wrong:
        assert audit(right.url, "--baseline", right.url, *checks)["checks"][0]["num_finished"] == len(PROMPTS)
        record = audit(wrong.url, "--baseline", right.url, *checks, code=1)
        assert record["checks"][0]["num_broken_json"] == len(PROMPTS)
        assert record["checks"][0]["json_problems"][0] == [0, 'number: "1" is not of type "integer"']
        assert "16 answers not JSON of the schema, where the reference's JSON is valid" in record["shown"]
        assert "0/8" in record["shown"]
        # where both are wrong, drafting is not the reason
        assert audit(wrong.url, "--baseline", wrong.url, *checks)["verdict"] == "lossless"


def test_json_of_other_engines_is_not_compared_with_the_models(world: World, audit: Audit):
    """They may write spaces elsewhere."""
    with json_server(VALID) as fake:
        record = audit(fake.url, *of_model(world, "json"), code=2)
    assert record["checks"][0]["comparisons"] == []
    assert (record["checks"][0]["num_finished"], record["checks"][0]["json_problems"]) == (len(PROMPTS), [])
    assert "JSON texts were checked, but not compared" in record["shown"]


def test_the_schema_is_sent_in_the_form_that_the_server_takes(audit: Audit):
    for form in ("json_schema", "json_object"):
        with json_server(VALID, form=form) as fake:
            audit(fake.url, "--baseline", fake.url, "--checks", "json")
            last = fake.requests[-1]["response_format"]
            assert last["type"] == form
            assert (last.get("schema") or last["json_schema"]["schema"]) == SCHEMA
            refused = [one for one in fake.requests if one.get("response_format", {}).get("type") not in (form, None)]
            assert len(refused) == 2 * (form == "json_object"), "once for each of the two servers"


def test_a_server_without_schemas_is_not_decided(audit: Audit):
    with json_server(VALID, form="none") as fake:
        record = audit(fake.url, "--baseline", fake.url, "--checks", "json", code=2)
    assert record["checks"][0]["num_failed"] == len(PROMPTS)
    assert "json: 8 requests failed; status 422" in record["shown"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (VALID, None),
        (VALID + " ", None),
        (VALID[:-1], "not JSON"),
        (VALID.replace('"a"', "2"), 'topic: 2 is not of type "string"'),
        (VALID.replace('"a"', f'"{"a" * 41}"'), "topic: "),
        (VALID.replace("[]", '["a", "b", "c", "d"]'), "words: "),
        (VALID.replace("[]", '["a", 1]'), "words.1: 1"),
        (VALID.replace("1", "true"), "number: true"),
        (VALID.replace("1", "1001"), "number: 1001"),
        (VALID.replace("1,", "1.0,"), None),  # JSON knows no other kind of 1
        (VALID.replace(', "is_question": true', ""), 'the text: "is_question"'),
        (VALID.replace("}", ', "more": 1}'), "the text: "),
        ("[]", "the text: []"),
    ],
)
def test_json_is_checked(text: str, problem: str | None):
    found = json_problem(text)
    assert (found or "").startswith(problem or "")
    assert (found is None) == (problem is None)


# --- in parallel, and speed ---


def test_requests_run_at_the_same_time_only_in_parallel_checks(world: World, audit: Audit):
    met = threading.Event()

    def behave(fields: Fields) -> tuple[int, Fields]:
        if fake.now >= 3:
            met.set()
        met.wait(0.05)
        return world.answer(fields)

    with FakeServer(behave) as fake:
        audit(fake.url, *of_model(world))
        assert fake.most == 1
        audit(fake.url, *of_model(world, "greedy-parallel"))
        assert 3 <= fake.most <= 4


def test_a_server_that_mixes_up_answers_in_parallel_is_found(world: World, audit: Audit):
    def behave(fields: Fields) -> tuple[int, Fields]:
        time.sleep(0.02)
        return world.answer(fields) if fake.now < 2 else world.answer({"prompt": PROMPTS[0]})

    with FakeServer(behave) as fake:
        assert audit(fake.url, *of_model(world))["verdict"] == "lossless"
        assert audit(fake.url, *of_model(world, "greedy-parallel"), code=1)["checks"][0]["counts"]["wrong"] >= 4


def test_what_the_baseline_changes_in_parallel_is_shown_and_is_no_reference(world: World, audit: Audit):
    def behave(fields: Fields) -> tuple[int, Fields]:
        time.sleep(0.02)
        return world.answer(fields) if mixed.now < 2 else world.answer({"prompt": PROMPTS[0]})

    with FakeServer(world.answer) as right, FakeServer(behave) as mixed:
        record = audit(right.url, "--baseline", mixed.url, *of_model(world, "greedy-parallel"))
    own, baseline = record["checks"]
    assert own["counts"]["equal"] == len(PROMPTS)
    assert baseline["is_baseline"]
    assert baseline["counts"]["wrong"] >= 4
    assert record["verdict"] == "lossless"


def test_speed_is_compared_with_the_baselines(world: World, audit: Audit):
    def slow(fields: Fields) -> tuple[int, Fields]:
        time.sleep(0.05)
        return world.answer(fields)

    with FakeServer(world.answer) as fast, FakeServer(slow) as slower:
        record = audit(fast.url, "--baseline", slower.url, "--checks", "greedy")
    row = record["checks"][0]
    assert 100 < row["baseline"]["tokens_per_second"] < NEW_TOKENS / 0.05
    assert row["server"]["tokens_per_second"] > 2 * row["baseline"]["tokens_per_second"]
    ratio = row["server"]["tokens_per_second"] / row["baseline"]["tokens_per_second"]
    assert f"{ratio:.2f}" in record["shown"]


def test_acceptance_of_other_servers():
    ours = {
        "usage": {
            "draft": {"steps": 4, "tokens_per_step": 2.5, "drafted_by_depth": [8, 4], "accepted_by_depth": [4, 2]}
        }
    }
    llama = {"timings": {"draft_n": 20, "draft_n_accepted": 10, "predicted_n": 40}}
    assert counts_of(ours) == DraftCounts(4, 10, 12, 6)
    assert counts_of(llama) == DraftCounts(30, 40, 20, 10)
    for unknown in ({}, {"usage": None}, {"timings": {"predicted_n": 3}}, {"usage": {"draft": 3}}, {"timings": []}):
        assert counts_of(unknown) is None
    assert drafting_in([counts_of(ours), None, counts_of(llama)]) == Drafting(50 / 34, 0.5)
    assert drafting_in([None]) is None
    assert drafting_in([DraftCounts(9, 9, 0, 0)]) == Drafting(1.0, None)
    assert drafting_between({}, {"sglang:spec_accept_length": 2.5}) == Drafting(2.5, None)
    assert drafting_between({}, {"other": 1.0}) is None


def test_acceptance_by_metrics_is_of_the_time_of_the_check(world: World, audit: Audit):
    """As vLLM counts it."""

    def metrics() -> str:
        number = len(fake.requests)
        lines = [f'vllm:spec_decode_num_{name}_total{{model="m"}} {100 + number * count}' for name, count in COUNTS]
        return "\n".join(["# HELP x", *lines])

    COUNTS = [("drafts", 10), ("draft_tokens", 30), ("accepted_tokens", 12)]
    with FakeServer(world.answer, metrics=metrics) as fake:
        record = audit(fake.url, *of_model(world))
    assert record["checks"][0]["server"]["drafting"] == {"tokens_per_step": 2.2, "accepted_share": 0.4}
    assert "2.20" in record["shown"]
    assert "40.0%" in record["shown"]


# --- sampled answers ---


def test_requests_that_are_not_repeated_are_counted_and_are_no_bug(world: World, audit: Audit):
    numbers = iter(range(1000))
    with FakeServer(lambda fields: (200, completion(f"abc {next(numbers)}"))) as fake:
        record = audit(fake.url, "--baseline", fake.url, "--checks", "seeded", "seeded-parallel", code=2)
    for row in record["sampled"]:
        assert row["server"]["num_repeated"] == len(PROMPTS)
        assert row["server"]["num_equal"] == 0
        assert row["deviations"] is None
    first, second = fake.requests[2:4]  # after the first request to each server
    assert first == second
    assert (first["temperature"], first["top_p"], first["seed"]) == (0.8, 1.0, 0)
    assert fake.requests[4]["seed"] == 1


def test_the_surprise_of_the_models_own_samples_is_the_expected_one(world: World):
    """Special tokens and ends included; and at another temperature it is not."""
    prompts = [f"{prompt} {letter}" for prompt in PROMPTS for letter in "abcdefghijkl"]
    model = ModelReference(world.engine, prompts, temperature=0.8)
    for temperature, is_fine in ((0.8, True), (1.0, False)):
        results = model.engine.generate(prompts, temperature=temperature, seed=1, max_new_tokens=NEW_TOKENS)
        found = [model.surprise(i, model._answer(result)) for i, result in enumerate(results)]
        side = SampledSide(
            *(0, 0, 0),
            Pass(None, None),
            sum(one.num_tokens for one in found if one),
            sum(one.excess for one in found if one),
            sum(one.variance for one in found if one),
        )
        assert side.num_tokens == sum(len(result.token_ids) for result in results)
        deviations = SeededRow("seeded", side).deviations
        assert deviations is not None
        assert (abs(deviations) < 4.5) == is_fine, deviations  # by chance 1 of 150,000 seeds has more


def test_the_surprise_of_an_answer_by_hand(world: World):
    """Token by token, by the definition of mean and variance."""
    model = ModelReference(world.engine, PROMPTS, temperature=0.5)
    text = world.plain[PROMPTS[1]][:5]
    excess = variance = 0.0
    ids = [*world.ids[PROMPTS[1]][:5], 2]  # and the end
    for place, token in enumerate(ids):
        scores = (world.scores(PROMPTS[1], place).double() / 0.5).log_softmax(-1)
        probs = scores.exp()
        entropy = -(probs * scores).sum()
        excess += float(-scores[token] - entropy)
        variance += float((probs * (-scores - entropy) ** 2).sum())
    found = model.surprise(1, Answer(text, is_cut=False))
    assert found is not None
    assert (found.num_tokens, found.excess) == (6, pytest.approx(excess, rel=1e-4))
    assert found.variance == pytest.approx(variance, rel=1e-4)
    cut = model.surprise(1, Answer(text, is_cut=True))
    assert cut is not None
    assert cut.num_tokens == 5
    assert model.surprise(1, Answer("", is_cut=True)) is None


def test_few_tokens_give_no_verdict_on_a_distribution():
    side = SampledSide(8, 8, 0, Pass(None, None), num_tokens=199, excess=500.0, variance=1.0)
    assert SeededRow("seeded", side).deviations is None
    assert not SeededRow("seeded", side).is_off
    many = replace(side, num_tokens=200)
    assert SeededRow("seeded", many).is_off
    assert not SeededRow("seeded", many, many).is_off
    assert SeededRow("seeded", many, side).deviations is None


# --- servers that cannot be asked ---


def test_a_server_that_is_down(world: World, audit: Audit):
    record = audit("http://127.0.0.1:1", *of_model(world), code=2)
    assert record["errors"].startswith("error: cannot reach http://127.0.0.1:1/v1/models: ")
    assert "is the server running, and is URL http://127.0.0.1:1 right?" in record["errors"]
    with FakeServer(world.answer) as fake:
        record = audit(fake.url, "--baseline", "http://127.0.0.1:1", code=2)
    assert "is --baseline http://127.0.0.1:1 right?" in record["errors"]


def test_a_server_that_goes_down_in_the_middle(world: World, audit: Audit):
    def behave(fields: Fields) -> tuple[int, Fields]:
        if len(fake.requests) == 4:
            fake.stop()
        return world.answer(fields)

    with FakeServer(behave) as fake:
        record = audit(fake.url, *of_model(world), code=2)
    assert "cannot reach" in record["errors"]
    assert len(fake.requests) == 4


@pytest.mark.parametrize("path", ["/v2", "/wrong/v1"])
def test_a_wrong_address(world: World, audit: Audit, path: str):
    with FakeServer(world.answer) as fake:
        record = audit(fake.url + path, *of_model(world), code=2)
    assert "lists no models: status 404: " in record["errors"]
    assert "is URL" in record["errors"]


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:y/v1", "http://[::1"])
def test_what_is_no_address(world: World, audit: Audit, url: str):
    record = audit(url, *of_model(world), code=2)
    assert f"URL is {url!r}; give an address such as http://127.0.0.1:8000/v1" in record["errors"]
    record = audit("http://127.0.0.1:1", "--baseline", url, code=2)
    assert f"--baseline is {url!r}; give an address such as http://127.0.0.1:8000/v1" in record["errors"]


def test_names_of_models(world: World, audit: Audit):
    models = [{"id": "small", "owned_by": "me"}, {"id": "large"}]
    with FakeServer(world.answer, models=models) as fake:
        assert "has several models; asked was small, not large" in audit(fake.url, *of_model(world))["shown"]
        assert {fields["model"] for fields in fake.requests} == {"small"}
        fake.requests.clear()
        assert "has several models" not in audit(fake.url, *of_model(world), "--fields", '{"model": "large"}')["shown"]
        assert {fields["model"] for fields in fake.requests} == {"large"}
        record = audit(fake.url, *of_model(world), "--fields", '{"model": "larg"}', code=2)
        assert "has no model 'larg'; did you mean large?" in record["errors"]
        fake.models = None
        assert "Else name the model by --fields" in audit(fake.url, *of_model(world), code=2)["errors"]
        assert audit(fake.url, *of_model(world), "--fields", '{"model": "other"}')["verdict"] == "lossless"


def test_keys_come_from_the_environment(world: World, audit: Audit, monkeypatch: pytest.MonkeyPatch):
    """A baseline at another address gets only its own key."""
    monkeypatch.setenv("OPENAI_API_KEY", "of OpenAI")
    monkeypatch.setenv("AUDIT_API_KEY", "polly")
    with FakeServer(world.answer) as server, FakeServer(world.answer) as other:

        def keys(baseline: str) -> list[set[str | None]]:
            server.keys.clear()
            other.keys.clear()
            record = audit(server.url, "--baseline", baseline, "--checks", "greedy")
            assert "polly" not in json.dumps(record)
            return [server.keys, other.keys]

        assert keys(other.url) == [{"Bearer polly"}, {"Bearer EMPTY"}]
        assert keys(f"{server.url}/v1") == [{"Bearer polly"}, set()], "the same address"
        monkeypatch.setenv("AUDIT_BASELINE_API_KEY", "two")
        assert keys(other.url) == [{"Bearer polly"}, {"Bearer two"}]
        assert keys(server.url)[0] == {"Bearer polly", "Bearer two"}
        other.behave = lambda _: (401, {})
        record = audit(server.url, "--baseline", other.url, "--checks", "greedy", code=2)
        assert "refuses the key (401): it is in the variable AUDIT_BASELINE_API_KEY" in record["errors"]


def test_keys_follow_no_redirection(world: World, audit: Audit):
    with FakeServer(world.answer) as other, FakeServer(lambda _: (307, other.url)) as server:
        audit(server.url, "--baseline", server.url, "--checks", "greedy", code=2)
        assert not other.keys


def test_requests_that_failed_for_now_are_repeated(world: World, audit: Audit):
    troubles = iter([(503, "busy"), (429, {"error": {"message": "slow"}}), None, (500, "oh"), (0, "")])
    with FakeServer(lambda fields: next(troubles, None) or world.answer(fields)) as fake:
        assert audit(fake.url, *of_model(world))["verdict"] == "lossless"
        assert len(fake.requests) == 4 + 1 + len(PROMPTS)


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ((400, {"error": {"message": "too long"}}), "status 400: too long"),
        ((500, {"detail": "broken"}), "status 500: {'detail': 'broken'}"),
        ((200, "<html>"), "not a valid completion (JSONDecodeError"),
        ((200, {"choices": []}), "not a valid completion (IndexError"),
    ],
)
def test_failed_requests_are_counted_and_the_others_compared(
    world: World, audit: Audit, response: tuple[int, Any], words: str
):
    with FakeServer(lambda fields: response if asked(fields) == PROMPTS[3] else world.answer(fields)) as fake:
        record = audit(fake.url, *of_model(world), code=2)
        row = record["checks"][0]
        assert (row["num_failed"], row["num_answers"], row["counts"]["equal"]) == (1, 7, 7)
        assert words in row["failure"]
        assert "greedy: 1 request failed" in record["shown"]
        # of the baseline they are failures, too
        with FakeServer(world.answer) as fine:
            record = audit(fine.url, "--baseline", fake.url, *of_model(world), code=2)
            assert "greedy: 1 request failed; the reference: " in record["shown"]


def test_a_slow_answer_is_a_failure(world: World, audit: Audit, monkeypatch: pytest.MonkeyPatch):
    def behave(fields: Fields) -> tuple[int, Fields]:
        if asked(fields) == PROMPTS[3]:
            time.sleep(0.4)
        return world.answer(fields)

    monkeypatch.setattr(servers, "_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(servers, "_NUM_RETRIES", 0)
    with FakeServer(behave) as fake:
        record = audit(fake.url, *of_model(world), code=2)
    assert record["checks"][0]["failure"] == "no answer in 0.2 s"


def test_an_unknown_model_or_route_ends_the_audit(world: World, audit: Audit):
    with FakeServer(lambda _: (404, {"error": {"message": "no such model"}})) as fake:
        record = audit(fake.url, *of_model(world), code=2)
    assert "was not found: status 404: no such model" in record["errors"]


# --- options ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to compare with: give --baseline URL, --model MODEL, or both"),
        (["--model", "x", "--baseline-fields", "{}"], "--baseline-fields is '{}': give --baseline"),
        (["--model", "x", "--fields", "{"], "--fields '{' is not JSON"),
        (["--model", "x", "--fields", "[1]"], "is no JSON object"),
        (["--model", "x", "--tolerance", "0"], "--tolerance is 0.0: must be above 0"),
        (["--model", "no such model"], "no such model"),
    ],
)
def test_impossible_options_end_with_2(world: World, audit: Audit, arguments: list[str], words: str):
    with FakeServer(world.answer) as fake:
        assert words in audit(fake.url, *arguments, code=2)["errors"]


def test_further_fields_are_sent(world: World, audit: Audit):
    with FakeServer(world.answer) as fake, FakeServer(world.answer) as plain:
        given = ["--fields", '{"top_k": 1}', "--checks", "greedy", "--baseline", plain.url]
        audit(fake.url, *given)
        assert {fields["top_k"] for fields in (*fake.requests, *plain.requests)} == {1}
        plain.requests.clear()
        audit(fake.url, *given, "--baseline-fields", '{"n": 1}')
        assert {(fields.get("top_k"), fields["n"]) for fields in plain.requests} == {(None, 1)}


def test_prompts_of_all_kinds(world: World, audit: Audit, tmp_path: Path):
    files = {
        "a.txt": f"{PROMPTS[0]}\n\n{PROMPTS[1]}\n",
        "b.jsonl": "".join(json.dumps({"question_id": 81, "turns": [prompt, "x"]}) + "\n" for prompt in PROMPTS[:2]),
        "c.jsonl": json.dumps([{"prompt": PROMPTS[0]}, {"messages": [{"role": "user", "content": PROMPTS[1]}]}]),
    }
    with FakeServer(world.answer) as fake:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            assert audit(fake.url, *of_model(world), prompts=tmp_path / name)["num_prompts"] == 2
        (tmp_path / "none.txt").write_text("\n")
        assert "holds no prompt" in audit(fake.url, *of_model(world), prompts=tmp_path / "none.txt", code=2)["errors"]


def test_json_on_standard_output_is_alone_there(world: World, audit: Audit, capsys: pytest.CaptureFixture[str]):
    with FakeServer(world.answer) as fake:
        shown = audit(fake.url, *of_model(world), "--json", "-")["shown"]
    assert json.loads(shown)["verdict"] == "lossless"


def test_all_checks_are_the_default():
    needed: Any = {"url": "http://127.0.0.1", "prompts": Path("a"), "model": "b"}
    assert AuditOptions(**needed).chosen == CHECKS
    assert AuditOptions(**needed, checks=("json", "greedy", "json")).chosen == ("greedy", "json")
