"""Answers in JSON: checked against the schema, and compared where engines write alike."""

from pathlib import Path
from typing import Any

import pytest

import draftheads
from audit_world import Audit, World, of_model
from cli_world import PROMPTS, TEMPLATE
from draftheads_audit import run
from draftheads_audit import server as servers
from draftheads_audit.options import SCHEMA
from draftheads_audit.run import json_problem
from fake_openai import FakeServer, Fields, completion
from serve_world import running
from structured_world import json_model

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
