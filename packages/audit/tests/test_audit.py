"""``draftheads audit``: lossless servers pass, broken ones are found, and what cannot be checked is not a pass."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import draftheads
from audit_world import NEW_TOKENS, PLAIN, Audit, World, of_model
from cli_world import PROMPTS
from draftheads.decode import batch
from draftheads.decode.engine import Engine
from draftheads.serve.guard import HttpLimits
from draftheads_audit import command
from draftheads_audit.model import ModelReference
from draftheads_audit.report import Pass, SampledSide, SeededRow
from draftheads_audit.server import (
    Answer,
)
from fake_openai import FakeServer, Fields, asked, completion
from serve_world import Running, running

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


def test_typical_acceptance_has_another_distribution_than_the_baseline(world: World, audit: Audit, tmp_path: Path):
    """The command of docs/audit.md, with a model that counts; greedy answers are those of plain decoding."""
    prompts = tmp_path / "more.txt"
    prompts.write_text("\n".join(f"{prompt} {letter}" for prompt in PROMPTS for letter in "ab"), encoding="utf-8")
    drafting = draftheads.load(world.model, world.folder / "hydra", precision="fp32")
    with running({"tiny": drafting}, HttpLimits(allow_typical=True)) as one:
        fields = ["--fields", '{"acceptance": "typical"}', "--baseline-fields", '{"draft_nodes": 0}']
        given = [*of_model(world, "greedy", "seeded"), "--baseline", one.url, *fields]
        record = audit(one.url, *given, code=1, prompts=prompts)
    assert record["checks"][0]["counts"]["equal"] == 2 * len(PROMPTS)
    assert record["sampled"][0]["is_off"]
    assert "sampled tokens have another distribution than the baseline's" in record["shown"]
