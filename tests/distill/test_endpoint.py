"""Answers of a server: a real one on this machine, which can be slow, refuse requests and fail."""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai._base_client
import pytest

from distill_world import RECORDS, manifest, options, records, write_prompts
from draftheads.cli import distill as command_line
from draftheads.cli.main import main
from draftheads.data.texts import load_texts
from draftheads.distill import endpoint
from draftheads.distill.endpoint import EndpointSource
from draftheads.distill.journal import part_path
from draftheads.distill.options import DistillOptions
from draftheads.distill.run import Outcome, distill
from draftheads.errors import DistillationInterrupted, EndpointError, InvalidSettings, MissingDependency
from draftheads.models.pretrained import ModelTokenizer
from fake_progress import FakeProgress
from think_world import WORDS, think_tokenizer
from training_world import EOS

Response = tuple[int, dict[str, str], bytes]
Behaviour = Callable[[dict[str, Any]], Response | None]  # None breaks the connection


class Server:
    """Records its requests and answers them with a given function."""

    def __init__(self) -> None:
        self.behave: Behaviour = answer
        self.requests: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.keys: set[str | None] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.requests.append(request)
                server.paths.add(self.path)
                server.keys.add(self.headers["authorization"])
                response = server.behave(request)
                if response is None:
                    self.close_connection = True
                    return
                status, headers, body = response
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def completion(text: Any, finish_reason: str = "stop", num_tokens: int = 3, **further: Any) -> Response:
    choice = {"message": {"role": "assistant", "content": text, **further}, "finish_reason": finish_reason}
    return 200, {}, json.dumps({"choices": [choice], "usage": {"completion_tokens": num_tokens}}).encode()


def answer(request: dict[str, Any]) -> Response:
    """Repeats the conversation, so that it can be checked."""
    said = "/".join(message["content"] for message in request["messages"])
    return completion(f"{said} at {request['temperature']} by {request['seed']}")


def refusal(status: int, text: str = "no", **headers: str) -> Response:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, text.encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(endpoint, "REQUEST_RETRIES", 2)
    found = Server()
    yield found
    found.close()


def remote(folder: Path, server: Server, **changes: Any) -> DistillOptions:
    return options(folder, **{"endpoint": server.url, "model": "parrot", **changes})


def run(chosen: DistillOptions, progress: FakeProgress | None = None) -> Outcome:
    return distill(chosen, lambda: EndpointSource(chosen), progress or FakeProgress())


def test_the_server_answers_turn_by_turn(server: Server, tmp_path: Path):
    chosen = remote(tmp_path, server)
    progress = FakeProgress()
    outcome = run(chosen, progress)
    found = records(chosen)
    assert [record["index"] for record in found] == list(range(len(RECORDS)))
    for record in found:
        for place, message in enumerate(record["messages"]):
            if message["role"] == "assistant":
                said = "/".join(turn["content"] for turn in record["messages"][:place])
                assert message["content"].startswith(f"{said} at {record['temperature']} by ")
    assert sum(len(record["messages"]) for record in found) == 2 * outcome.counts["answers"] + 1  # a system's word
    assert outcome.counts["answers"] == len(server.requests) == len(RECORDS) + 3
    assert progress.last[:2] == (len(RECORDS), len(RECORDS))
    assert outcome.counts["tokens"] == 3 * len(server.requests)
    assert server.paths == {"/v1/chat/completions"}
    for request in server.requests:
        assert (request["model"], request["max_tokens"]) == ("parrot", 12)
    assert len({request["seed"] for request in server.requests}) == len(server.requests)
    assert manifest(chosen)["identity"]["model"] == "parrot"


def test_at_most_batch_size_requests_run_at_the_same_time(server: Server, tmp_path: Path):
    now, most, lock, met = [0], [0], threading.Lock(), threading.Event()

    def meeting(request: dict[str, Any]) -> Response:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] >= 4:
                met.set()
        met.wait(20)  # no request is answered before there are four
        with lock:
            now[0] -= 1
        return answer(request)

    server.behave = meeting
    run(remote(tmp_path, server, batch_size=4))
    assert most == [4]


def test_failed_requests_are_repeated(server: Server, tmp_path: Path):
    plain = remote(tmp_path, server, out=tmp_path / "plain.jsonl")
    run(plain)
    troubles = iter([refusal(429, retry_after="0"), refusal(503), None, refusal(500), refusal(429), None])
    server.behave = lambda request: next(troubles, answer(request))
    chosen = remote(tmp_path, server)
    num_before = len(server.requests)
    run(chosen)
    assert chosen.out.read_bytes() == plain.out.read_bytes()
    assert len(server.requests) == 2 * num_before + 6


def test_a_request_that_takes_too_long_is_repeated(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first one is not answered before it was asked again."""
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(endpoint, "REQUEST_RETRIES", 20)
    again = threading.Event()

    def behave(request: dict[str, Any]) -> Response:
        if len(server.requests) == 1:
            again.wait()
        again.set()
        return answer(request)

    server.behave = behave
    chosen = remote(tmp_path, server, batch_size=1)
    run(chosen)
    assert len(chosen.out.read_text().splitlines()) == len(RECORDS)


def test_a_run_ends_if_the_server_stays_down_and_can_be_continued(server: Server, tmp_path: Path):
    chosen = remote(tmp_path, server)
    server.behave = lambda request: refusal(503, "tired") if "w20" in str(request["messages"]) else answer(request)
    with pytest.raises(EndpointError, match=r"status 503: tired; .*the same command continues"):
        run(chosen)
    tried = [request for request in server.requests if "w20" in str(request["messages"])]
    assert len(tried) == 3
    num_done = len(part_path(chosen.out).read_text().splitlines()) - 1
    assert num_done > 12
    server.behave, num_before = answer, len(server.requests)
    run(chosen)
    assert [record["index"] for record in records(chosen)] == list(range(len(RECORDS)))
    assert len(server.requests) - num_before <= len(RECORDS) - num_done + 3


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Raises SIGINT, also if the tests run in the background of a shell that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_all_requests(server: Server, tmp_path: Path, ctrl_c: Callable[[], None]):
    chosen = remote(tmp_path, server)
    with pytest.raises(DistillationInterrupted, match="8 of 25"):
        run(chosen, FakeProgress(8, ctrl_c))
    run(chosen)
    assert len(records(chosen)) == len(RECORDS)


def test_chats_that_are_too_long_for_the_server_are_left_out(server: Server, tmp_path: Path):
    text = '{"error": {"message": "This model\'s maximum context length is 8 tokens"}}'
    cut = completion("w1", "length")
    server.behave = lambda request: (
        refusal(400, text)
        if request["messages"][-1]["content"] == "w3"
        else (cut if request["messages"][-1]["content"] == "w5" else answer(request))
    )
    chosen = remote(tmp_path, server)
    outcome = run(chosen)
    assert [record["index"] for record in records(chosen)] == [i for i in range(len(RECORDS)) if i != 3]
    assert (outcome.counts["too_long"], outcome.counts["shortened"]) == (1, 1)  # it is a second turn, too
    assert len(records(chosen)[11]["messages"]) == 2
    assert [record["index"] for record in records(chosen) if not record["finished"]] == [5]


CALL = {"id": "c1", "type": "function", "function": {"name": "w30", "arguments": '{"at": "w31"}'}}
AS_VALUES = {**CALL, "function": {"name": "w30", "arguments": {"at": "w31"}}}


THOUGHT = "<think> \n w8 \n </think> \n w2 <e>"


@pytest.mark.parametrize(
    ("response", "kept", "learned"),  # cut off where no <e> is learned
    [
        (completion("w2", reasoning_content="w8"), {"reasoning_content": "w8"}, THOUGHT),
        (completion("w2", reasoning="w8"), {"reasoning_content": "w8"}, THOUGHT),
        (completion("w2", reasoning_content=None), {}, "w2 <e>"),
        (completion(None, "length", reasoning="w8 w9"), {"reasoning_content": "w8 w9"}, "<think> \n w8 w9"),
        (completion(None, "stop", reasoning="w8 w9"), {"reasoning_content": "w8 w9"}, "<think> \n w8 w9"),
        (completion(None, "tool_calls", tool_calls=[CALL]), {"tool_calls": [AS_VALUES]}, "w30 w31 <e>"),
        (completion("w5", "stop", tool_calls=[CALL]), {"tool_calls": [AS_VALUES]}, "w5 w30 w31 <e>"),
        (completion("w5", "length", tool_calls=[CALL]), {}, "w5"),
        (completion("", "stop", tool_calls=[]), {}, "<e>"),
        (completion("w5 \ud800", "stop"), {}, "w5 <unk> <e>"),
    ],
)
def test_thoughts_and_calls_are_kept_and_learned(
    server: Server, tmp_path: Path, response: Response, kept: dict[str, Any], learned: str
):
    server.behave = lambda _: response
    tool, finished = {"type": "function", "function": {"name": "w30"}}, learned.endswith("<e>")
    prompts = write_prompts(tmp_path / "p.jsonl", [{"turns": ["w1", "w2"], "tools": [tool]}, {"prompt": "w3"}])
    chosen = remote(tmp_path, server, prompts=(prompts,))
    outcome = run(chosen)
    first, second = records(chosen)
    content = json.loads(response[2])["choices"][0]["message"]["content"] or ""
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
    said = [WORDS[token] for token, is_said in zip(text.token_ids, text.loss_mask, strict=True) if is_said]
    assert " ".join(said).removeprefix("<think> \n \n </think> \n " * ("tool_calls" in kept)) == learned


REFUSALS = [
    (refusal(400, "against the policy"), "status 400: against the policy"),
    *((refusal(status, "no"), f"status {status}: no") for status in (413, 422, 451)),
    (completion("w1", "content_filter"), "a content filter"),
    (completion(None), "content is None"),
    (completion("", "length"), "content is ''"),
    (completion(None, "length", tool_calls=[CALL]), "content is None"),
    *((completion(text, refusal="I cannot."), "refusal: I cannot.") for text in (None, "")),
]


@pytest.mark.parametrize(("response", "reason"), REFUSALS)
def test_prompts_that_the_server_refuses_are_set_aside_with_the_reason(
    server: Server, tmp_path: Path, response: Response, reason: str
):
    """Also if the last one before the server goes down is one of them, alone in its batch."""
    refused, down = {"w0", "w5", "w3"}, {"w2"}  # w3 is a second turn, too

    def behave(request: dict[str, Any]) -> Response:
        said = request["messages"][-1]["content"]
        return response if said in refused else refusal(503) if said in down else answer(request)

    server.behave = behave
    chosen = remote(tmp_path, server, batch_size=1)
    with pytest.raises(EndpointError, match="503"):
        run(chosen)
    down.clear()
    outcome = run(chosen)
    assert [record["index"] for record in records(chosen)] == [i for i in range(len(RECORDS)) if i not in (0, 3, 5)]
    assert (outcome.counts["refused"], outcome.counts["shortened"], outcome.counts["done"]) == (3, 1, len(RECORDS))
    assert [one["source"] for one in outcome.refused] == [f"prompts.jsonl:{n}" for n in (1, 4, 6, 13)]
    assert all(one["reason"].startswith(reason) for one in outcome.refused)
    assert outcome.counts["unfinished"] == 0
    assert manifest(chosen)["refused"] == list(outcome.refused)
    num_requests = len(server.requests)
    assert run(chosen).was_complete
    assert len(server.requests) == num_requests


def test_a_server_that_refuses_every_prompt_is_an_error(server: Server, tmp_path: Path):
    """Not the prompts are wrong then, but an option."""
    server.behave = lambda _: refusal(400, "bad top_p")
    chosen = remote(tmp_path, server)
    with pytest.raises(EndpointError, match=r"prompts.jsonl:1: status 400: bad top_p"):
        run(chosen)
    server.behave = answer
    assert run(chosen).counts["records"] == len(RECORDS)


@pytest.mark.parametrize(
    ("response", "named"),
    [
        (refusal(404, "no such model"), "status 404: no such model; .*--model 'parrot'"),
        (refusal(401), "401.*--api-key-env"),
        (refusal(307, "moved", location="/v1/elsewhere"), "status 307"),
        (refusal(200, "<html>"), "<html>"),
        (refusal(200, '{"choices": []}'), "choices"),
        (refusal(200, "[]"), r"\[\]"),
        (refusal(200, '{"choices": [{"message": {"tool_calls": [5]}}]}'), "a call is 5"),
    ],
)
def test_a_refusal_or_an_invalid_response_ends_the_run(server: Server, tmp_path: Path, response: Response, named: str):
    server.behave = lambda _: response
    with pytest.raises(EndpointError, match=f"{server.url}/chat/completions .*{named}"):
        run(remote(tmp_path, server, batch_size=1))
    assert len(server.requests) <= 2  # the next one may have been sent already
    assert server.paths == {"/v1/chat/completions"}


@pytest.mark.parametrize("url", ["127.0.0.1:9/v1", "ftp://x/v1", "http://x:y/v1", "http://127.0.0.1:1/v1"])
def test_an_invalid_or_unreachable_address_is_an_error(server: Server, tmp_path: Path, url: str):
    with pytest.raises((EndpointError, InvalidSettings), match=f"--endpoint .*{url}"):
        run(remote(tmp_path, server, endpoint=url))


def test_the_key_comes_from_the_environment(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = remote(tmp_path, server, api_key_env="PARROT_KEY")
    with pytest.raises(InvalidSettings, match="--api-key-env is 'PARROT_KEY'"):
        run(chosen)
    monkeypatch.setenv("PARROT_KEY", "polly")
    run(chosen)
    assert server.keys == {"Bearer polly"}
    assert "polly" not in (tmp_path / "out.jsonl.manifest.json").read_text()


def test_a_missing_package_is_an_error(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingDependency, match=r"draftheads\[endpoint\]"):
        run(remote(tmp_path, server))


def test_the_command_line_loads_no_model(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command_line, "quiet_transformers", lambda: None)  # for the whole process, and later tests
    prompts = write_prompts(tmp_path / "p.jsonl")
    command = f"distill --endpoint {server.url}/ --model parrot --prompts {prompts} --out {tmp_path}/o.jsonl"
    assert main(command.split()) == 0
    assert server.paths == {"/v1/chat/completions"}
    assert "25 of 25 conversations" in capsys.readouterr().out
