"""Several servers: what they share, and what happens when one fails, comes back or is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distill_world import RECORDS, records, remote, run_remote, write_prompts
from draftheads.distill import endpoint
from draftheads.distill.conversation import Dialogue, unique_prompts
from draftheads.distill.endpoint import EndpointSource
from draftheads.distill.run import part_path
from draftheads.errors import EndpointError, EndpointWarning, InvalidSettings
from fake_openai import FakeServer, Fields, repeating
from fake_progress import FakeProgress
from nursery import Nursery

pytestmark = [pytest.mark.usefixtures("quick_retries"), pytest.mark.filterwarnings("ignore:.* is sent again")]
BATCH = 4  # requests at the same time at each server
SECONDS = 20.0  # to wait for what must happen
PARROT = [{"id": "parrot"}]


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer(repeating, models=PARROT) as first, FakeServer(repeating, models=PARROT) as second:
        yield first, second


def num_asked(*servers: FakeServer) -> Counter[str]:
    """How often each answer was asked for, by its seed and the words before it."""
    every = (request for server in servers for request in server.requests)
    return Counter("/".join([str(r["seed"]), *(said["content"] for said in r["messages"])]) for r in every)


def whole(folder: Path, **changes: Any) -> bytes:
    """The file of one server without trouble."""
    with FakeServer(repeating, models=PARROT) as server:
        chosen = remote(folder, server, out=folder / "whole.jsonl", **changes)
        run_remote(chosen)
    return chosen.out.read_bytes()


def test_all_servers_work_at_the_same_time(servers: tuple[FakeServer, FakeServer], tmp_path: Path):
    met = threading.Event()

    def meeting(request: Fields) -> tuple[int, Any]:
        if all(server.now == BATCH for server in servers):
            met.set()
        met.wait(SECONDS)  # no request is answered before both servers have as many as they may
        return repeating(request)

    for server in servers:
        server.behave = meeting
    progress, chosen = FakeProgress(), remote(tmp_path, *servers)
    run_remote(chosen, progress)
    assert [server.most for server in servers] == [BATCH, BATCH]
    assert chosen.out.read_bytes() == whole(tmp_path)
    assert set(num_asked(*servers).values()) == {1}
    assert " answers/s, " in progress.last[2]


def test_a_slow_answer_holds_no_other_back_and_few_prompts_are_read_ahead(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
):
    server, all_others = servers[0], threading.Event()
    num_read, done = 0, list[int]()
    held: list[bool] = []

    def behave(request: Fields) -> tuple[int, Any]:
        if request["messages"][0]["content"] == "w0":
            held.append(all_others.wait(SECONDS))
        return repeating(request)

    def read() -> Iterator[Dialogue]:
        nonlocal num_read
        for index, prompt in enumerate(unique_prompts(chosen.prompts)):
            num_read += 1
            yield Dialogue(prompt, index=index, options=chosen)

    def on_progress(_: int, dialogue: Dialogue) -> None:
        assert num_read - len(done) <= 2
        done.append(dialogue.index)
        if len(done) == len(RECORDS) - 1:
            all_others.set()

    server.behave = behave
    chosen = remote(tmp_path, server, batch_size=2)
    EndpointSource(chosen).converse(read(), on_progress)
    assert held == [True]
    assert sorted(done) == list(range(len(RECORDS)))


KILLED = """
import threading
from fake_openai import FakeServer, repeating
def behave(request):
    if len(request["messages"]) > 1:
        print("holds", flush=True)
        threading.Event().wait()
    return repeating(request)
with FakeServer(behave, models=[{"id": "parrot"}]) as server:
    print(server.url, flush=True)
    threading.Event().wait()
"""


def test_conversations_of_a_killed_server_go_on_at_another(servers: tuple[FakeServer, FakeServer], tmp_path: Path):
    """It answers first turns, and is killed when each of its requests waits for a second one."""
    turns = [{"turns": [f"w{i}", "w1"]} for i in range(20, 44)]
    prompts = (write_prompts(tmp_path / "prompts.jsonl", turns),)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout
    url = process.stdout.readline().strip()

    def kill() -> None:
        assert process.stdout
        assert [process.stdout.readline() for _ in range(BATCH)] == ["holds\n"] * BATCH
        process.kill()
        process.wait()

    chosen = remote(tmp_path, prompts=prompts, endpoint=(f"{url}/v1", f"{servers[0].url}/v1"))
    with process, pytest.warns(EndpointWarning) as warned:
        outcome = run_remote(chosen, FakeProgress(5, kill))
    first, words = [str(warning.message) for warning in warned]
    assert first == f"{url}/v1: a request failed and is sent again; each request is sent up to 2 times more"
    assert words.startswith(f"after 0 conversations, {url}/v1/chat/completions failed: ")
    assert words.endswith("the other servers go on, and it is tried again after 60 seconds")
    assert chosen.out.read_bytes() == whole(tmp_path, prompts=prompts)
    asked = num_asked(servers[0])
    assert set(asked.values()) == {1}
    assert Counter("/w1" in words for words in asked) == {False: len(turns) - BATCH, True: len(turns)}
    assert (outcome.counts["done"], outcome.counts["answers"]) == (len(turns), 2 * len(turns))


def test_a_server_that_failed_is_asked_once_and_then_as_before(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(endpoint, "DROPPED_SECONDS", 0.0)
    broken, good = servers
    num_failures, met = BATCH * (endpoint.REQUEST_RETRIES + 1), threading.Event()
    alone: list[int] = []

    def behave(request: Fields) -> tuple[int, Any]:
        if len(broken.requests) <= num_failures:
            return 503, "no"
        if not alone:
            alone.append(broken.now)
            return repeating(request)
        if broken.now == BATCH:
            met.set()
        met.wait(SECONDS)
        return repeating(request)

    def waiting(request: Fields) -> tuple[int, Any]:
        met.wait(SECONDS)
        return repeating(request)

    broken.behave, good.behave = behave, waiting
    chosen = remote(tmp_path, broken, good)
    with pytest.warns(EndpointWarning, match="status 503: no; the other servers go on"):
        run_remote(chosen)
    assert met.is_set()
    assert alone == [1]
    assert chosen.out.read_bytes() == whole(tmp_path)


def test_a_failed_server_has_room_for_one_trial_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = [1000.0]
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    source = EndpointSource(remote(tmp_path, endpoint=("http://one/v1", "http://other/v1")))
    servers = one, _ = [endpoint._Server(url, None) for url in source.options.endpoint]
    assert one.has_room(2)
    with pytest.warns(EndpointWarning, match="no"):
        source._drop(one, EndpointError("no"), servers)
    for _ in range(2):  # each failed trial begins another minute
        assert not one.has_room(2)
        clock[0] += endpoint.DROPPED_SECONDS
        one.num_running = 1
        assert not one.has_room(2)
        one.num_running = 0
        assert one.has_room(2)
        source._drop(one, EndpointError("no"), servers)


def test_an_answer_that_was_on_its_way_does_not_bring_a_failed_server_back(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first server fails three prompts and then answers its fourth; the second answers when that is saved."""
    first, second = servers
    chosen, failed, drop = remote(tmp_path, *servers), threading.Semaphore(0), EndpointSource._drop

    def dropping(*arguments: Any) -> None:
        drop(*arguments)
        failed.release()

    def behave(request: Fields) -> tuple[int, Any]:
        if request["messages"][0]["content"] != "w0":
            return 503, "no"
        assert all(failed.acquire(timeout=SECONDS) for _ in range(BATCH - 1))
        return repeating(request)

    def later(request: Fields) -> tuple[int, Any]:
        deadline = time.monotonic() + SECONDS
        while b'"index": 0,' not in part_path(chosen.out).read_bytes() and time.monotonic() < deadline:
            time.sleep(0.002)
        return repeating(request)

    monkeypatch.setattr(EndpointSource, "_drop", dropping)
    first.behave, second.behave = behave, later
    with pytest.warns(EndpointWarning, match=first.url):
        run_remote(chosen)
    assert len(first.requests) == 1 + (BATCH - 1) * (endpoint.REQUEST_RETRIES + 1)
    assert chosen.out.read_bytes() == whole(tmp_path)


def test_a_run_ends_if_all_servers_failed_and_can_be_continued(servers: tuple[FakeServer, FakeServer], tmp_path: Path):
    """The first fails at once, and is not asked again so soon; the second in the middle."""
    first, second = servers
    first.behave = lambda _: (503, "tired")
    second.behave = lambda request: repeating(request) if len(second.requests) <= 12 else (500, "ill")
    chosen = remote(tmp_path, *servers)
    errors = f"{first.url}/v1/chat/completions failed: status 503: tired; {second.url}/v1/.*: status 500: ill; see"
    with (
        pytest.warns(EndpointWarning, match=first.url),
        pytest.raises(EndpointError, match=f"{errors} .*the same command continues"),
    ):
        run_remote(chosen)
    assert len(first.requests) <= BATCH * (endpoint.REQUEST_RETRIES + 1)
    num_kept = len(part_path(chosen.out).read_text().splitlines()) - 1
    assert num_kept > 0
    first.behave = second.behave = repeating
    before = num_asked(second)
    run_remote(chosen)
    assert chosen.out.read_bytes() == whole(tmp_path)
    assert sum((num_asked(*servers) - before).values()) > 0


def test_a_killed_run_asks_only_what_is_not_saved(servers: tuple[FakeServer, FakeServer], tmp_path: Path):
    """The servers stop answering after ten requests each, until the run was killed."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": f"w{i}"} for i in range(40)])
    chosen = remote(tmp_path, *servers, prompts=(prompts,))
    killed = threading.Event()

    def behave_of(server: FakeServer) -> Any:
        lock, count = threading.Lock(), iter(range(10))

        def behave(request: Fields) -> tuple[int, Any]:
            with lock:
                is_answered = next(count, None) is not None
            if not is_answered:
                killed.wait(SECONDS)
            return repeating(request)

        return behave

    for server in servers:
        server.behave = behave_of(server)
    command = ["--endpoint", *chosen.endpoint, "--model", "parrot", "--prompts", str(prompts), "--out", "out.jsonl"]
    command += ["--temperature", "0", "1", "--max-new-tokens", "12", "--batch-size", str(BATCH)]
    with Nursery("distill") as nursery:
        process, part = nursery.start(command, folder=tmp_path), part_path(chosen.out)
        deadline = time.monotonic() + 60
        while not (part.exists() and part.read_bytes().count(b"\n") == 21 and sum(s.now for s in servers) == 2 * BATCH):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(process, signal.SIGKILL)
        assert nursery.wait() == -signal.SIGKILL
        killed.set()
        nursery.start(command, folder=tmp_path)
        assert nursery.wait() == 0
    assert chosen.out.read_bytes() == whole(tmp_path, prompts=(prompts,))
    assert Counter(num_asked(*servers).values()) == {1: 32, 2: 2 * BATCH}, "what was being answered, once more"
    assert len(records(chosen)) == 40


def test_each_server_gets_its_own_key(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ONE", "polly")
    monkeypatch.setenv("TWO", "jacko")
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "own")
    run_remote(remote(tmp_path, *servers, api_key_env=("ONE", "TWO")))
    assert [server.keys for server in servers] == [{"Bearer polly"}, {"Bearer jacko"}]
    assert not any("openai-" in name for server in servers for name in server.headers), "what is for OpenAI's server"
    run_remote(remote(tmp_path, *servers, api_key_env=("TWO",), out=tmp_path / "other.jsonl"))
    assert [server.keys for server in servers] == [{"Bearer polly", "Bearer jacko"}, {"Bearer jacko"}]


def test_a_server_without_the_model_is_refused_and_one_without_a_list_is_not(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
):
    chosen = remote(tmp_path, *servers)
    servers[1].models = [{"id": "crow"}, {"id": "jay"}]
    with pytest.raises(InvalidSettings, match=f"--model is 'parrot', but {servers[1].url}/v1 has crow, jay"):
        run_remote(chosen)
    assert not servers[0].requests
    servers[1].models = None
    run_remote(chosen)
    assert chosen.out.read_bytes() == whole(tmp_path)
