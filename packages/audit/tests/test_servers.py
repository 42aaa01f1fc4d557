"""Servers that are asked in parallel, at other addresses, with keys, or that fail; and options."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from audit_world import NEW_TOKENS, Audit, World, of_model
from cli_world import PROMPTS
from draftheads_audit import server as servers
from draftheads_audit.options import CHECKS, AuditOptions
from draftheads_audit.server import (
    DraftCounts,
    Drafting,
    counts_of,
    drafting_between,
    drafting_in,
)
from fake_openai import FakeServer, Fields, asked

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
