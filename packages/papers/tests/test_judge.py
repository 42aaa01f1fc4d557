"""The judge's ratings: which prompts it gets, and what is a problem of which item. No server is asked."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx2 as httpx
import openai
import pytest

from draftheads.bench.quality import Item, Scores
from draftheads.errors import DataError, InvalidSettings
from draftheads_papers import judge as judge_module
from draftheads_papers.judge import DEFAULT_PROMPTS, Judge, rating_of, read_judge_prompts
from fake_progress import FakeProgress

URL = "http://127.0.0.1:1"
Reply = tuple[int, Any]


class FakeServer:
    """Answers in place of the network, and notes what it was asked."""

    def __init__(self) -> None:
        self.behave: Callable[[str], Reply] = lambda _: (200, "[[5]]")
        self.models = ["fake"]
        self.is_down = False
        self.requests: list[dict[str, Any]] = []
        self.addresses: list[str] = []
        self.keys: set[str] = set()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("nobody listens")
        self.addresses.append(str(request.url))
        self.keys.add(request.headers["authorization"])
        if request.method == "GET":
            return httpx.Response(200, json={"object": "list", "data": [{"id": name} for name in self.models]})
        self.requests.append(json.loads(request.content))
        status, found = self.behave(self.asked[-1])
        if isinstance(found, str) and status == 200:
            found = {"choices": [{"index": 0, "message": {"role": "assistant", "content": found}}]}
        if status == 302:
            return httpx.Response(status, headers={"location": found})
        return httpx.Response(status, **({"text": found[0]} if isinstance(found, list) else {"json": found}))

    @property
    def asked(self) -> list[str]:
        """What the user says in each request."""
        return [request["messages"][-1]["content"] for request in self.requests]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    fake = FakeServer()

    def client(**options: Any) -> Any:
        return openai.DefaultHttpxClient(transport=httpx.MockTransport(fake), **options)

    monkeypatch.setattr(judge_module, "DefaultHttpxClient", client)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return fake


def item(name: str, *answers: str, **fields: Any) -> Item:
    turns = tuple(f"question {i} of {name}" for i in range(1, len(answers) + 1))
    return Item(name, "writing", turns, answers, **fields)


def judged(*items: Item, **options: Any) -> Scores:
    [scores] = Judge(**{"url": URL, **options})(items, FakeProgress())
    return scores


def test_the_second_turn_is_rated_with_the_first_and_the_item_has_the_mean(server: FakeServer):
    server.behave = lambda asked: (200, "[[4]]" if "question 2" in asked else "[[9]]")
    scores = judged(item("a", "one", "two"), item("b", "three"), model="big")
    assert scores.values == {"a": 6.5, "b": 9}
    assert (scores.problems, scores.measure) == ({}, "judge")
    first, second = (asked for asked in server.asked if "of a" in asked)
    assert "two" not in first
    assert all(text in second for text in ("question 1 of a", "one", "question 2 of a", "two"))
    for request in server.requests:
        assert (request["model"], request["temperature"]) == ("big", 0)
        assert [message["role"] for message in request["messages"]] == ["system", "user"]
        assert "[[6]]" in request["messages"][0]["content"]
    assert set(server.addresses) == {f"{URL}/v1/chat/completions"}


def test_references_are_shown_where_there_are_some(server: FakeServer):
    scores = judged(
        item("all", "x", "y", reference=["correct one", "correct two"]),
        item("first", "x", "y", reference=("only one",)),
        item("text", "{question_9} {} {{", reference="of another measure"),
    )
    assert len(scores.values) == 3
    texts = {name: [asked for asked in server.asked if f"of {name}" in asked] for name in ("all", "first", "text")}
    assert "correct one" in texts["all"][0]
    assert "correct two" not in texts["all"][0]
    assert all(text in texts["all"][1] for text in ("correct one", "correct two", "question 2"))
    assert ["only one" in text for text in texts["first"]] == [True, False]
    assert "of another" not in texts["text"][0]
    assert "{question_9} {} {{" in texts["text"][0], "braces in texts are no fields"


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def single(name: str, template: str) -> dict[str, str]:
    return {"name": name, "type": "single", "system_prompt": f"be {name}", "prompt_template": template}


def test_a_prompt_of_a_file_is_chosen_by_its_fields(server: FakeServer, tmp_path: Path):
    path = write(
        tmp_path / "judge_prompts.jsonl",
        {"name": "pair", "type": "pairwise", "prompt_template": "{question} {answer_a} {answer_b}"},
        single("plain", "P {question} / {answer} {{rate}}"),
        single("maths", "M {question} / {ref_answer_1} / {answer}"),
        single("turns", "T {question_1} {answer_1} {question_2} {answer_2}"),
    )
    items = [item("a", "one", "two"), item("b", "three", reference=["right"]), item("c", "4", "5", "6")]
    scores = judged(*items, prompts=path, parallel=1)
    assert [(request["messages"][0]["content"], asked) for request, asked in zip(
        server.requests, server.asked, strict=True
    )] == [
        ("be plain", "P question 1 of a / one {rate}"),
        ("be turns", "T question 1 of a one question 2 of a two"),
        ("be maths", "M question 1 of b / right / three"),
        ("be plain", "P question 1 of c / 4 {rate}"),
        ("be turns", "T question 1 of c 4 question 2 of c 5"),
    ]  # fmt: skip
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
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        Judge(URL, prompts=tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("text", "rating"),
    [("[[7]]", 7), ("fine. Rating: [[7.5]].", 7.5), ("[7]", 7), ("[[3]] or rather [[8]]", 8), ("see [1]: [[10]]", 10)]
    + [(text, None) for text in ("", "7/10", "[[seven]]", "[[11]]", "[[0]]", "[[-3]]", "[ 7 ]")],
)
def test_ratings(text: str, rating: float | None):
    if rating is not None:
        assert rating_of(text) == rating
    else:
        with pytest.raises(DataError, match="the judge's answer has no rating from 1 to 10: "):
            rating_of(text)


@pytest.mark.parametrize(
    ("reply", "problem", "attempts"),
    [
        ((500, {"error": {"message": "boom"}}), "the judge did not answer: Error code: 500 .*boom", 4),
        ((400, {"error": {"message": "too long"}}), "the judge did not answer: Error code: 400 .*too long", 1),
        ((302, "http://elsewhere/v1"), "the judge did not answer: Error code: 302", 1),  # is not followed
        ((200, {"choices": []}), "the judge did not answer with a completion", 1),
        ((200, ["no JSON"]), "the judge did not answer with a completion", 1),
        ((200, ""), "the judge's answer has no rating", 1),
    ],
)
def test_an_error_is_a_problem_of_one_item(server: FakeServer, reply: Reply, problem: str, attempts: int):
    server.behave = lambda asked: reply if "of bad" in asked else (200, "[[6]]")
    scores = judged(item("bad", "y"), item("good", "x"), parallel=1)
    assert scores.values == {"good": 6}
    assert re.match(problem, scores.problems["bad"])
    assert len(server.requests) == attempts + 1
    assert not any("elsewhere" in address for address in server.addresses)


def test_a_busy_server_is_asked_again(server: FakeServer):
    replies: list[Reply] = [(429, {}), (500, {}), (503, {}), (200, "[[3]]")]
    server.behave = lambda _: replies.pop(0)
    assert judged(item("a", "x")).values == {"a": 3}
    assert len(server.requests) == 4


@pytest.mark.parametrize("model", ["big", None])
def test_a_server_that_is_down_is_one_problem_for_all(server: FakeServer, model: str | None):
    server.is_down = True
    progress = FakeProgress()
    [scores] = Judge(URL, model)([item(str(i), "x") for i in range(30)], progress)
    assert len(scores.problems) == 30
    [problem] = set(scores.problems.values())
    assert f"the judge at {URL} cannot be asked: nobody listens" in problem
    assert progress.last[:2] == (30, 30)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_key_or_a_wrong_address_is_asked_once(server: FakeServer, status: int):
    server.behave = lambda _: (status, {})
    scores = judged(*[item(str(i), "x") for i in range(20)], model="big", parallel=2)
    [problem] = set(scores.problems.values())
    assert f"Error code: {status}" in problem
    assert "check its address, its model and api_key_env" in problem
    assert (len(scores.problems), len(server.requests) <= 2) == (20, True)


def test_saved_ratings_are_used_again_for_the_same_model(server: FakeServer, tmp_path: Path):
    items, bad = [item("a", "one", "two"), item("b", "three")], ["of b"]
    server.behave = lambda asked: (200, "no idea" if any(word in asked for word in bad) else "[[7]]")
    judge = Judge(URL)
    judge.folder = tmp_path
    [scores] = judge(items, FakeProgress())
    assert (scores.values, list(scores.problems), judge.made_by) == ({"a": 7}, ["b"], "fake")
    bad.clear()
    before = len(server.requests)
    [scores] = judge(items, FakeProgress())
    assert (scores.values, len(server.requests) - before) == ({"a": 7, "b": 7}, 1)
    server.models, server.behave = ["large"], lambda _: (200, "[[3]]")
    [scores] = judge(items, FakeProgress())
    assert (scores.values, judge.made_by) == ({"a": 3, "b": 3}, "large")
    server.is_down = True
    [scores] = judge(items, FakeProgress())
    assert not scores.values, "its model is unknown"
    named = Judge(URL, "large")
    named.folder = tmp_path
    [scores] = named([*items, item("c", "four")], FakeProgress())
    assert (scores.values, list(scores.problems)) == ({"a": 3, "b": 3}, ["c"])


@pytest.mark.parametrize(
    ("url", "is_openai"),
    [
        ("https://api.openai.com/v1", True),
        ("https://API.OpenAI.com:443", True),
        ("http://api.openai.com/v1", False),
        ("https://api.openai.com:8443/v1", False),
        ("https://api.openai.com.evil.org/v1", False),
        ("https://api.openai.com@evil.org/v1", False),
        ("https://evil.org/api.openai.com/v1", False),
        ("https://eu.api.openai.com/v1", False),
    ],
)
def test_by_default_only_openai_gets_its_key(
    server: FakeServer, url: str, is_openai: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert judged(item("a", "x"), url=url).values == {"a": 5}
    assert (server.keys == {"Bearer secret"}) == is_openai


def test_a_server_gets_the_key_that_is_named_for_it(server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "its own")
    judged(item("a", "x"), api_key_env="JUDGE_KEY")
    assert server.keys == {"Bearer its own"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "https://api.openai.com/v1"}, "key is in 'OPENAI_API_KEY', but this environment variable is not set"),
        ({"url": URL, "api_key_env": "NO_KEY"}, "key is in 'NO_KEY'"),
        ({"url": "nowhere"}, "url is 'nowhere'; give an address such as"),
        ({"url": "http://[::1"}, "give an address such as"),
    ],
)
@pytest.mark.usefixtures("server")
def test_impossible_judges(options: dict[str, Any], words: str):
    with pytest.raises(InvalidSettings, match=words):
        Judge(**options)


def test_requests_run_at_the_same_time(server: FakeServer):
    four = Barrier(4)  # nobody passes alone

    def behave(_: str) -> Reply:
        four.wait(60)
        return 200, "[[5]]"

    server.behave = behave
    assert len(judged(*[item(str(i), "x") for i in range(24)]).values) == 24


@pytest.mark.usefixtures("server")
def test_turns_without_answers():
    scores = judged(Item("a", "any", ("one", "two"), ("x",)), Item("b", "any", (), ()))
    assert "turn 2" in scores.problems["a"]
    assert "ZeroDivisionError" in scores.problems["b"]


def test_our_prompts_cover_two_turns_with_and_without_references():
    fields = [prompt.fields for prompt in DEFAULT_PROMPTS]
    assert len(fields) == len(set(map(frozenset, fields))) == 4
