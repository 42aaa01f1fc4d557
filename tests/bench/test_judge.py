"""The judge's ratings, over HTTP on loopback: which prompts it gets, and what is a problem of which item."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from audit_world import FakeServer, Fields, asked, completion
from draftheads.bench.judge import DEFAULT_PROMPTS, Judge, rating_of, read_judge_prompts
from draftheads.bench.quality import Item, Scores
from draftheads.errors import DataError, InvalidSettings, MissingDependency
from draftheads.utils import openai_client
from fake_progress import FakeProgress

NO_RATING = "the judge's answer has no rating from 1 to 10: "


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def item(name: str, *answers: str, **fields: Any) -> Item:
    return Item(
        name, "writing", tuple(f"question {i} of {name}" for i in range(1, len(answers) + 1)), answers, **fields
    )


def judged(behave: Callable[[Fields], tuple[int, Any]], *items: Item, **options: Any) -> tuple[Scores, FakeServer]:
    with FakeServer(behave) as server:
        [scores] = Judge(server.url, **options)(items, FakeProgress())
        return scores, server


def says(text: str) -> Callable[[Fields], tuple[int, Any]]:
    return lambda _: (200, completion(text))


def test_ratings_of_two_turns():
    """The second turn is rated with the first, and the item has the mean."""

    def behave(fields: Fields) -> tuple[int, Any]:
        return 200, completion("[[4]]" if "question 2" in asked(fields) else "[[9]]")

    scores, server = judged(behave, item("a", "one", "two"), item("b", "three"), model="big")
    assert scores.values == {"a": 6.5, "b": 9}
    assert not scores.problems
    assert (scores.measure, scores.unit) == ("judge", "of 10")
    first, second = (fields for fields in server.requests if "of a" in asked(fields))
    assert all(text in asked(first) for text in ("question 1 of a", "one"))
    assert "two" not in asked(first)
    assert all(text in asked(second) for text in ("question 1 of a", "one", "question 2 of a", "two"))
    for fields in server.requests:
        assert fields["path"] == "/v1/chat/completions"
        assert (fields["model"], fields["temperature"]) == ("big", 0)
        assert [message["role"] for message in fields["messages"]] == ["system", "user"]
        assert "[[6]]" in fields["messages"][0]["content"]


def test_references_are_shown_where_there_are_some():
    scores, server = judged(
        says("[[5]]"),
        item("all", "x", "y", reference=["correct one", "correct two"]),
        item("first", "x", "y", reference=("only one",)),
        item("text", "x", reference="of another measure"),
    )
    assert len(scores.values) == 3
    texts = {name: [asked(f) for f in server.requests if f"of {name}" in asked(f)] for name in ("all", "first", "text")}
    assert "correct one" in texts["all"][0]
    assert "correct two" not in texts["all"][0]
    assert all(text in texts["all"][1] for text in ("correct one", "correct two", "question 2"))
    assert ["only one" in text for text in texts["first"]] == [True, False]
    assert "of another" not in texts["text"][0]


def test_braces_in_texts_are_no_fields():
    scores, server = judged(says("[[5]]"), item("a", "{question_9} {} {{"))
    assert scores.values == {"a": 5}
    assert "{question_9} {} {{" in asked(server.requests[0])


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def single(name: str, template: str) -> dict[str, str]:
    return {"name": name, "type": "single", "system_prompt": f"be {name}", "prompt_template": template}


def test_prompts_of_a_file(tmp_path: Path):
    """A prompt is chosen by its fields: the turn that it rates, and as many of the known ones as there are."""
    path = write(
        tmp_path / "judge_prompts.jsonl",
        {"name": "pair", "type": "pairwise", "prompt_template": "{question} {answer_a} {answer_b}"},
        single("plain", "P {question} / {answer} {{rate}}"),
        single("maths", "M {question} / {ref_answer_1} / {answer}"),
        single("turns", "T {question_1} {answer_1} {question_2} {answer_2}"),
    )
    items = [item("a", "one", "two"), item("b", "three", reference=["right"]), item("c", "4", "5", "6")]
    scores, server = judged(says("[[5]]"), *items, prompts=path, parallel=1)
    assert [(fields["messages"][0]["content"], asked(fields)) for fields in server.requests] == [
        ("be plain", "P question 1 of a / one {rate}"),
        ("be turns", "T question 1 of a one question 2 of a two"),
        ("be maths", "M question 1 of b / right / three"),
        ("be plain", "P question 1 of c / 4 {rate}"),
        ("be turns", "T question 1 of c 4 question 2 of c 5"),
    ]
    assert scores.problems == {"c": "the judge has no prompt for turn 3, or the turn has no answer"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"type": "pairwise"}, 'no prompt of "type": "single"'),
        ({"name": "x"}, "line 1: not a prompt of a judge .KeyError: 'type'"),
        ([1], "line 1: not a prompt"),
        ({"type": "single", "system_prompt": ""}, "'prompt_template'"),
        (single("x", "{question"), "line 1: .*expected '}'"),
        ({**single("x", ""), "prompt_template": 3}, "line 1: not a prompt"),
    ],
)
def test_files_that_are_wrong(record: Any, message: str, tmp_path: Path):
    with pytest.raises(DataError, match=message):
        read_judge_prompts(write(tmp_path / "prompts.jsonl", record))


def test_a_file_that_is_missing(tmp_path: Path):
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        Judge("http://127.0.0.1:1", prompts=tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("text", "rating"),
    [("[[7]]", 7), ("fine. Rating: [[7.5]].", 7.5), ("[7]", 7), ("[[3]] or rather [[8]]", 8), ("see [1]: [[10]]", 10)],
)
def test_ratings(text: str, rating: float):
    assert rating_of(text) == rating


@pytest.mark.parametrize("text", ["", "7/10", "[[seven]]", "[[11]]", "[[0]]", "[[-3]]", "[ 7 ]"])
def test_nonsense_is_a_problem_of_its_item(text: str):
    def behave(fields: Fields) -> tuple[int, Any]:
        return 200, completion(text if "of bad" in asked(fields) else "[[6]]")

    scores, _ = judged(behave, item("good", "x"), item("bad", "y"))
    assert scores.values == {"good": 6}
    assert scores.problems == {"bad": f"{NO_RATING}{text!r}"}


def test_a_busy_server_is_asked_again():
    """429 and 500, three times; the fourth attempt counts."""
    statuses = [429, 500, 503]

    def behave(fields: Fields) -> tuple[int, Any]:
        return (statuses.pop(), {"error": {"message": "busy"}}) if statuses else (200, completion("[[3]]"))

    scores, server = judged(behave, item("a", "x"))
    assert scores.values == {"a": 3}
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("status", "body", "problem", "attempts"),
    [
        (500, {"error": {"message": "boom"}}, "the judge did not answer: status 500: boom, in 4 attempts", 4),
        (400, {"error": {"message": "too long"}}, "the judge did not answer: status 400: too long", 1),
        (200, {"choices": []}, "the judge did not answer: not a valid completion", 1),
        (200, "no JSON", "the judge did not answer: not a valid completion", 1),
        (200, completion(""), NO_RATING, 1),
    ],
)
def test_an_error_for_one_item(status: int, body: Any, problem: str, attempts: int):
    def behave(fields: Fields) -> tuple[int, Any]:
        return (status, body) if "of bad" in asked(fields) else (200, completion("[[6]]"))

    scores, server = judged(behave, item("bad", "y"), item("good", "x"), parallel=1)
    assert scores.values == {"good": 6}
    assert scores.problems["bad"].startswith(problem)
    assert len(server.requests) == attempts + 1


def test_a_server_that_is_down():
    """All items have one sentence, also if there are more than are asked at the same time."""
    with FakeServer(says("[[5]]")) as server:
        url = server.url
    for model in ("big", None):
        judge, progress = Judge(url, model), FakeProgress()
        [scores] = judge([item(str(i), "x") for i in range(30)], progress)
        assert len(scores.problems) == 30
        [problem] = set(scores.problems.values())
        assert url in problem
        assert "--judge" in problem
        assert progress.last[:2] == (30, 30)


def test_a_server_that_stops_keeps_the_ratings_that_it_gave():
    def behave(fields: Fields) -> tuple[int, Any]:
        if "of 2" in asked(fields):
            server.stop()
            return 0, None
        return 200, completion("[[5]]")

    server = FakeServer(behave)
    with server:
        judge = Judge(server.url, "big", parallel=1)
        [scores] = judge([item(str(i), "x") for i in range(6)], FakeProgress())
    assert scores.values == {"0": 5, "1": 5}
    assert len(scores.problems) == 4
    assert len(set(scores.problems.values())) == 1
    with FakeServer(says("[[8]]")) as server:
        judge._client = replace(judge._client, url=server.url)
        [scores] = judge([item("again", "x")], FakeProgress())
    assert scores.values == {"again": 8}


def test_ratings_that_are_saved_are_not_asked_for_again(tmp_path: Path):
    def behave(fields: Fields) -> tuple[int, Any]:
        return 200, completion("no idea" if is_bad and "of b" in asked(fields) else "[[7]]")

    items, is_bad = [item("a", "one", "two"), item("b", "three")], True
    with FakeServer(behave) as server:
        judge = Judge(server.url, "big")
        judge.folder = tmp_path
        [scores] = judge(items, FakeProgress())
        assert (scores.values, list(scores.problems)) == ({"a": 7}, ["b"])
        is_bad, before = False, len(server.requests)
        [scores] = judge(items, FakeProgress())
        assert (scores.values, len(server.requests) - before) == ({"a": 7, "b": 7}, 1)
    [scores] = judge([*items, item("c", "four")], FakeProgress())
    assert (scores.values, list(scores.problems)) == ({"a": 7, "b": 7}, ["c"]), "the server has gone"


def test_ratings_of_another_model_at_the_same_address_are_not_used_again(tmp_path: Path):
    """Also where the model is the first one that the server lists."""
    with FakeServer(says("[[7]]"), models=[{"id": "small"}]) as server:
        for models, text, value in (("small", "[[7]]", 7), ("large", "[[3]]", 3), ("small", "[[9]]", 7)):
            server.models, server.behave = [{"id": models}], says(text)
            judge = Judge(server.url)
            judge.folder = tmp_path
            [scores] = judge([item("a", "one")], FakeProgress())
            assert (scores.values, judge.made_by) == ({"a": value}, models)
    [scores] = judge([item("a", "one")], FakeProgress())
    assert not scores.values, "the server has gone, and its model is unknown"


def test_a_refused_key_and_a_wrong_address():
    items = [item(str(i), "x") for i in range(20)]
    for status, words in ((401, "refuses the key"), (403, "--api-key-env"), (404, "was not found")):
        scores, server = judged(lambda _, status=status: (status, {}), *items, model="big", parallel=2)
        [problem] = set(scores.problems.values())
        assert words in problem
        assert len(scores.problems) == 20
        assert len(server.requests) <= 2
    with pytest.raises(InvalidSettings, match="--judge is 'nowhere'"):
        Judge("nowhere")


def test_a_key_goes_only_to_the_address_that_it_was_given_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    scores, server = judged(says("[[5]]"), item("a", "x"))
    assert scores.values == {"a": 5}
    assert server.keys == {None}
    assert server.requests[0]["model"] == "fake"
    monkeypatch.setenv("JUDGE_KEY", "its own")
    _, server = judged(says("[[5]]"), item("a", "x"), api_key_env="JUDGE_KEY")
    assert server.keys == {"Bearer its own"}
    with pytest.raises(InvalidSettings, match="--api-key-env is 'NO_KEY', but this environment variable is not set"):
        Judge("https://api.openai.com/v1", api_key_env="NO_KEY")


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("https://api.openai.com/v1", "secret"),
        ("https://API.OpenAI.com:443", "secret"),
        ("http://api.openai.com/v1", None),
        ("https://api.openai.com:8443/v1", None),
        ("https://api.openai.com.evil.org/v1", None),
        ("https://api.openai.com@evil.org/v1", None),
        ("https://evil.org/api.openai.com/v1", None),
        ("https://eu.api.openai.com/v1", None),
    ],
)
def test_by_default_only_openai_gets_its_key(url: str, key: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert Judge(url)._client.api_key == key
    monkeypatch.delenv("OPENAI_API_KEY")
    assert Judge(url)._client.api_key is None


def test_a_server_that_sends_elsewhere_is_not_followed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "its own")
    with FakeServer(says("[[5]]")) as other:
        for status in (301, 302, 307, 308):
            moved = f"{other.url}/v1/chat/completions"
            scores, _ = judged(lambda _, at=(status, moved): at, item("a", "x"), model="big", api_key_env="JUDGE_KEY")
            assert f"status {status}" in scores.problems["a"]
        assert not other.keys
        assert not other.requests


def test_requests_run_at_the_same_time():
    four = Barrier(4)  # nobody passes alone

    def behave(_: Fields) -> tuple[int, Any]:
        four.wait(60)
        return 200, completion("[[5]]")

    scores, server = judged(behave, *[item(str(i), "x") for i in range(24)])
    assert len(scores.values) == 24
    assert 4 <= server.most <= 8


def test_without_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(MissingDependency, match="httpx2"):
        Judge("http://127.0.0.1:1")


def test_turns_without_answers():
    odd = Item("a", "any", ("one", "two"), ("x",))
    scores, _ = judged(says("[[5]]"), odd, Item("b", "any", (), ()))
    assert "turn 2" in scores.problems["a"]
    assert "ZeroDivisionError" in scores.problems["b"]


def test_our_prompts_cover_two_turns_with_and_without_references():
    fields = [prompt.fields for prompt in DEFAULT_PROMPTS]
    assert len(fields) == len(set(map(frozenset, fields))) == 4
