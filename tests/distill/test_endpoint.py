"""Answers of a server: one on this machine, which can be slow, refuse requests and fail."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distill_world import RECORDS, manifest, records, remote, write_prompts
from distill_world import run_remote as run
from draftheads.cli import distill as command_line
from draftheads.cli.main import main
from draftheads.data.texts import load_texts
from draftheads.distill import endpoint
from draftheads.distill.options import DistillOptions
from draftheads.distill.run import part_path
from draftheads.errors import (
    DistillationInterrupted,
    EndpointError,
    EndpointWarning,
    InvalidSettings,
    MissingDependency,
)
from draftheads.models.pretrained import ModelTokenizer
from fake_openai import FakeServer, Fields, asked, completion
from fake_openai import repeating as answer
from fake_progress import FakeProgress
from think_world import WORDS, think_tokenizer
from training_world import EOS

pytestmark = pytest.mark.filterwarnings("ignore:.* is sent again")
Response = tuple[int, Any]


def said(text: Any, finish: str = "stop", **more: Any) -> Response:
    return 200, completion(text, finish=finish, num_tokens=3, **more)


@pytest.fixture
def server(quick_retries: None) -> Iterator[FakeServer]:
    with FakeServer(answer, models=[{"id": "parrot"}]) as found:
        yield found


def paths(server: FakeServer) -> set[str]:
    return {request["path"] for request in server.requests}


def indices(chosen: DistillOptions) -> list[int]:
    return [record["index"] for record in records(chosen)]


EVERY = list(range(len(RECORDS)))


def test_the_server_answers_turn_by_turn(server: FakeServer, tmp_path: Path):
    chosen = remote(tmp_path, server)
    progress = FakeProgress()
    outcome = run(chosen, progress)
    found = records(chosen)
    assert indices(chosen) == EVERY
    for record in found:
        for place, message in enumerate(record["messages"]):
            if message["role"] == "assistant":
                before = "/".join(turn["content"] for turn in record["messages"][:place])
                assert message["content"].startswith(f"{before} at {record['temperature']} by ")
    assert sum(len(record["messages"]) for record in found) == 2 * outcome.counts["answers"] + 1  # a system's word
    assert outcome.counts["answers"] == len(server.requests) == len(RECORDS) + 3
    assert progress.last[:2] == (len(RECORDS), len(RECORDS))
    assert outcome.counts["tokens"] == 3 * len(server.requests)
    assert {(each["path"], each["model"], each["max_tokens"]) for each in server.requests} == {
        ("/v1/chat/completions", "parrot", 12)
    }
    assert len({request["seed"] for request in server.requests}) == len(server.requests)
    assert manifest(chosen)["identity"]["model"] == "parrot"


def test_at_most_batch_size_requests_run_at_the_same_time(server: FakeServer, tmp_path: Path):
    met = threading.Event()

    def meeting(request: Fields) -> Response:
        if server.now >= 4:
            met.set()
        met.wait(20)  # no request is answered before there are four
        return answer(request)

    server.behave = meeting
    run(remote(tmp_path, server, batch_size=4))
    assert server.most == 4


def test_failed_requests_are_repeated(server: FakeServer, tmp_path: Path):
    plain = remote(tmp_path, server, out=tmp_path / "plain.jsonl")
    run(plain)
    troubles = iter([(status, "no") for status in (429, 503, 0, 500, 429, 0)])  # 0 breaks the connection
    server.behave = lambda request: next(troubles, answer(request))
    chosen = remote(tmp_path, server)
    num_before = len(server.requests)
    with pytest.warns(EndpointWarning) as warned:
        run(chosen)
    assert len(warned) == 1, "once for each server"
    assert chosen.out.read_bytes() == plain.out.read_bytes()
    assert len(server.requests) == 2 * num_before + 6


def test_a_request_that_takes_too_long_is_repeated(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first one is not answered before it was asked again."""
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(endpoint, "REQUEST_RETRIES", 20)
    again = threading.Event()

    def behave(request: Fields) -> Response:
        if len(server.requests) == 1:
            again.wait()
        again.set()
        return answer(request)

    server.behave = behave
    chosen = remote(tmp_path, server, batch_size=1)
    run(chosen)
    assert indices(chosen) == EVERY


def test_a_run_ends_if_the_server_stays_down_and_can_be_continued(server: FakeServer, tmp_path: Path):
    chosen = remote(tmp_path, server)
    server.behave = lambda request: (503, "tired") if "w20" in str(request["messages"]) else answer(request)
    with pytest.raises(EndpointError, match=r"status 503: tired; .*the same command continues"):
        run(chosen)
    assert sum("w20" in str(request["messages"]) for request in server.requests) == 3
    num_done = len(part_path(chosen.out).read_text().splitlines()) - 1
    assert num_done > 12
    server.behave, num_before = answer, len(server.requests)
    run(chosen)
    assert indices(chosen) == EVERY
    assert len(server.requests) - num_before <= len(RECORDS) - num_done + 3


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Raises SIGINT, also if the tests run in the background of a shell that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_all_requests(server: FakeServer, tmp_path: Path, ctrl_c: Callable[[], None]):
    chosen = remote(tmp_path, server)
    with pytest.raises(DistillationInterrupted, match="8 of 25"):
        run(chosen, FakeProgress(8, ctrl_c))
    run(chosen)
    assert indices(chosen) == EVERY


CALL = {"id": "c1", "type": "function", "function": {"name": "w30", "arguments": '{"at": "w31"}'}}
AS_VALUES = {**CALL, "function": {"name": "w30", "arguments": {"at": "w31"}}}
THOUGHT = "<think> \n w8 \n </think> \n w2 <e>"


@pytest.mark.parametrize(
    ("response", "kept", "learned"),  # cut off where no <e> is learned
    [
        (said("w2", reasoning_content="w8"), {"reasoning_content": "w8"}, THOUGHT),
        (said("w2", reasoning="w8"), {"reasoning_content": "w8"}, THOUGHT),
        (said("w2", reasoning_content=None), {}, "w2 <e>"),
        (said(None, "length", reasoning="w8 w9"), {"reasoning_content": "w8 w9"}, "<think> \n w8 w9"),
        (said(None, "stop", reasoning="w8 w9"), {"reasoning_content": "w8 w9"}, "<think> \n w8 w9"),
        (said(None, "tool_calls", tool_calls=[CALL]), {"tool_calls": [AS_VALUES]}, "w30 w31 <e>"),
        (said("w5", "stop", tool_calls=[CALL]), {"tool_calls": [AS_VALUES]}, "w5 w30 w31 <e>"),
        (said("w5", "length", tool_calls=[CALL]), {}, "w5"),
        (said("", "stop", tool_calls=[]), {}, "<e>"),
        (said("w5 \ud800", "stop"), {}, "w5 <unk> <e>"),
    ],
)
def test_thoughts_and_calls_are_kept_and_learned(
    server: FakeServer, tmp_path: Path, response: Response, kept: dict[str, Any], learned: str
):
    server.behave = lambda _: response
    tool, finished = {"type": "function", "function": {"name": "w30"}}, learned.endswith("<e>")
    prompts = write_prompts(tmp_path / "p.jsonl", [{"turns": ["w1", "w2"], "tools": [tool]}, {"prompt": "w3"}])
    chosen = remote(tmp_path, server, prompts=(prompts,))
    outcome = run(chosen)
    first, second = records(chosen)
    content = response[1]["choices"][0]["message"]["content"] or ""
    assert first["messages"][1] == {"role": "assistant", "content": content.replace("\ud800", "?"), **kept}
    assert first["finished"] == second["finished"] == finished
    assert len(first["messages"]) == (4 if finished and "tool_calls" not in kept else 2)
    assert [record.get("tools") for record in (first, second)] == [[tool], None]
    given = {request["messages"][0]["content"]: request.get("tools") for request in server.requests}
    assert given == {"w1": [tool], "w3": None}
    assert outcome.counts["unfinished"] == (0 if finished else 2)
    sent = [message for request in server.requests for message in request["messages"]]
    assert not any("reasoning_content" in message for message in sent)  # some servers refuse it
    reader = ModelTokenizer(think_tokenizer("optional"), frozenset({EOS}))
    text = load_texts(reader, [chosen.out], max_length=99)[-1]
    trained = [WORDS[token] for token, is_said in zip(text.token_ids, text.loss_mask, strict=True) if is_said]
    assert " ".join(trained).removeprefix("<think> \n \n </think> \n " * ("tool_calls" in kept)) == learned


REFUSALS = [
    *(((status, "no  way"), f"status {status}: no way") for status in (400, 413, 422, 451)),
    (said("w1", "content_filter"), "a content filter"),
    (said(None), "content is None"),
    (said("", "length"), "content is ''"),
    (said(None, "length", tool_calls=[CALL]), "content is None"),
    (said("", refusal="I cannot."), "refusal: I cannot."),
]


def test_what_the_server_does_not_answer_is_left_out_and_counted(server: FakeServer, tmp_path: Path):
    """Refused prompts with the reason, also those before the server goes down; an answer that is cut off is kept."""
    too_long = '{"error": {"message": "This model\'s maximum context length is 8 tokens"}}'
    special = {"w50": (503, "no"), "w51": (400, too_long), "w52": said("w1", "length")}
    special |= {f"w{i}": response for i, (response, _) in enumerate(REFUSALS)}
    server.behave = lambda request: special.get(asked(request)) or answer(request)
    words = ["w0", "w20", *(f"w{i}" for i in range(1, len(REFUSALS))), "w50", "w51", "w52"]
    turns = [{"turns": ["w30", other, "w31"]} for other in ("w3", "w51", "w52")]
    chosen = remote(tmp_path, server, batch_size=1)
    write_prompts(chosen.prompts[0], [*({"prompt": word} for word in words), *turns])
    with pytest.raises(EndpointError, match="503"):
        run(chosen)
    del special["w50"]
    outcome = run(chosen)
    assert [(record["index"], record["finished"], len(record["messages"])) for record in records(chosen)] == [
        *((1, True, 2), (10, True, 2), (12, False, 2)),
        *((13, True, 2), (14, True, 2), (15, False, 4)),
    ]
    expected = {"done": 16, "refused": 9, "too_long": 1, "shortened": 2, "unfinished": 2}
    assert {name: outcome.counts[name] for name in expected} == expected
    assert [one["source"] for one in outcome.refused] == [f"prompts.jsonl:{n}" for n in (1, *range(3, 11), 14)]
    reasons = [*(reason for _, reason in REFUSALS), REFUSALS[3][1]]
    assert all(one["reason"].startswith(reason) for one, reason in zip(outcome.refused, reasons, strict=True))
    assert manifest(chosen)["refused"] == list(outcome.refused)
    num_requests = len(server.requests)
    assert run(chosen).was_complete
    assert len(server.requests) == num_requests


def test_a_server_that_refuses_every_prompt_is_an_error(server: FakeServer, tmp_path: Path):
    """Not the prompts are wrong then, but an option."""
    server.behave = lambda _: (400, "bad top_p")
    chosen = remote(tmp_path, server)
    with pytest.raises(EndpointError, match=r"prompts.jsonl:1: status 400: bad top_p"):
        run(chosen)
    server.behave = answer
    assert run(chosen).counts["records"] == len(RECORDS)


@pytest.mark.parametrize(
    ("response", "named"),
    [
        ((404, "no such model"), "status 404: no such model; .*--model 'parrot'"),
        ((401, "no"), "401.*--api-key-env"),
        ((307, "/v1/elsewhere"), "status 307"),
        ((200, "<html>"), "<html>"),
        ((200, {"choices": []}), "choices"),
        ((200, "[]"), r"\[\]"),
        ((200, {"choices": [{"message": {"tool_calls": [5]}}]}), "a call is 5"),
    ],
)
def test_a_refusal_or_an_invalid_response_ends_the_run(
    server: FakeServer, tmp_path: Path, response: Response, named: str
):
    server.behave = lambda _: response
    with pytest.raises(EndpointError, match=f"{server.url}/v1/chat/completions .*{named}"):
        run(remote(tmp_path, server, batch_size=1))
    assert len(server.requests) < len(RECORDS)  # the next ones may have been sent already
    assert paths(server) == {"/v1/chat/completions"}


@pytest.mark.parametrize("url", ["127.0.0.1:9/v1", "ftp://x/v1", "http://x:y/v1", "http://127.0.0.1:1/v1"])
def test_an_invalid_or_unreachable_address_is_an_error(server: FakeServer, tmp_path: Path, url: str):
    with pytest.raises((EndpointError, InvalidSettings), match=f"--endpoint .*{url}"):
        run(remote(tmp_path, server, endpoint=(url,)))


def test_the_key_comes_from_the_environment(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = remote(tmp_path, server, api_key_env=("PARROT_KEY",))
    with pytest.raises(InvalidSettings, match="--api-key-env is 'PARROT_KEY'"):
        run(chosen)
    monkeypatch.setenv("PARROT_KEY", "polly")
    run(chosen)
    assert server.keys == {"Bearer polly"}
    assert "polly" not in (tmp_path / "out.jsonl.manifest.json").read_text()


def test_a_missing_package_is_an_error(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingDependency, match=r"\.\[endpoint\]"):
        run(remote(tmp_path, server))


def test_the_command_line_loads_no_model_and_keeps_its_settings(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command_line, "quiet_transformers", lambda: None)  # for the whole process, and later tests
    prompts = write_prompts(tmp_path / "p.jsonl")
    command = f"distill --endpoint {server.url}/v1/ --model parrot --prompts {prompts} --out {tmp_path}/o.jsonl"
    assert main(command.split()) == 0
    assert paths(server) == {"/v1/chat/completions"}
    assert "25 of 25 conversations" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "o.jsonl.config.yaml").read_text(encoding="utf-8"))["model"] == "parrot"
