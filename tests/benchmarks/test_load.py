"""Servers under load: what users see is counted right, and a load stays what it is called."""

import asyncio
import doctest
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import load
import load_client
from load import Load, LoadRow
from load_client import Joining, Messages, RequestFailed, Sample, closed_loop, joining, parsed, poisson, throughput

from cli_world import TEMPLATE
from draftheads.cli.main import read_options
from serve_world import NAME, running, tiny_engines


def prompts(count: int) -> list[Messages]:
    return [[{"role": "user", "content": f"question {number} " * 9}] for number in range(count)]


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\r\n\r\n"


def chunk(text: str) -> bytes:
    return event(choices=[{"delta": {"content": text}}])


def sample(latency: float, tokens: int, *, first: float = 0.1, sent: float = 0.0, steps: int | None = None) -> Sample:
    return Sample((first, latency), latency, tokens, 9, None, steps, f"{tokens} tokens", sent)


def test_a_stream_is_parsed_wherever_it_was_cut():
    cached = {"cached_tokens": 1}
    usage = {"completion_tokens": 5, "prompt_tokens": 3, "prompt_tokens_details": cached, "draft": {"steps": 2}}
    first, rest = chunk("Hé"), chunk("llo") + event(choices=[], usage=usage) + b"data: [DONE]\r\n\r\n"
    for cut in range(len(first) + 1):
        found = parsed([(0.5, first[:cut]), (1.0, first[cut:]), (2.0, rest)], 2.5)
        assert found.text == "Héllo"
        assert found.times == (0.5 if cut >= first.index(b"\r\n") + 2 else 1.0, 2.0)
        assert (found.num_tokens, found.num_prompt_tokens, found.num_cached, found.num_steps) == (5, 3, 1, 2)


def test_without_usage_each_event_with_text_is_a_token():
    stream = event(choices=[{"delta": {"role": "assistant"}}]) + chunk("a") + chunk("b") + chunk("")
    found = parsed([(1.0, stream)], 1.0)
    assert (found.num_tokens, found.num_prompt_tokens, found.num_steps) == (2, None, None)


@pytest.mark.parametrize("stream", [event(error={"message": "out of memory"}), b"data: {out of memory\n\n"])
def test_a_stream_that_breaks_off_is_a_failed_request(stream: bytes):
    with pytest.raises(RequestFailed, match="out of memory"):
        parsed([(1.0, chunk("a") + stream)], 1.0)


def test_the_time_per_token_leaves_the_first_event_out():
    assert sample(1.1, 11, first=0.1).per_token == pytest.approx(0.1)
    assert sample(1.1, 1).per_token is None


class Server:
    """Answers after some turns of the event loop, and notes how many requests it has at the same time."""

    def __init__(self, turns: Callable[[int], int]) -> None:
        self.turns, self.asked, self.running = turns, 0, 0
        self.ends: list[tuple[int, int]] = []  # number of the request, and requests that were running when it ended

    async def ask(self, messages: Messages) -> Sample:
        number, self.asked = self.asked, self.asked + 1
        self.running += 1
        try:
            for _ in range(self.turns(number)):
                await asyncio.sleep(0)
            self.ends.append((number, self.running))
        finally:
            self.running -= 1
        return Sample((0.1,), 1.0, 2, 3, None, None, messages[0]["content"])


def test_a_closed_loop_has_the_same_number_of_requests_until_all_prompts_are_answered():
    server = Server(lambda number: 90 if number == 9 else 3 + number % 5)
    found = asyncio.run(closed_loop(server.ask, prompts(10), 4))
    assert [one.text for one in found] == [one[0]["content"] for one in prompts(10)]
    assert [running for number, running in server.ends if number < 10] == [4] * 10
    assert server.running == 0, "requests that are not counted were cancelled"


def test_an_error_of_one_user_ends_the_closed_loop():
    async def refuse(messages: Messages) -> Sample:
        await asyncio.sleep(0)
        raise RequestFailed("status 429")

    with pytest.raises(RequestFailed, match="429"):
        asyncio.run(closed_loop(refuse, prompts(5), 2))


def test_poisson_arrivals_wait_for_no_answer():
    seen: list[Messages] = []
    all_asked = asyncio.Event()

    async def ask(messages: Messages) -> Sample:
        seen.append(messages)
        if len(seen) == 6:
            all_asked.set()
        await all_asked.wait()
        return sample(1.0, 2)

    assert len(asyncio.run(asyncio.wait_for(poisson(ask, prompts(6), 500.0, seed=1), 20))) == 6
    assert seen == prompts(6)


def test_throughput_of_a_closed_loop_is_users_times_tokens_per_latency():
    assert throughput([sample(2.0, 10), sample(3.0, 15)], 4) == pytest.approx(4 * 25 / 5)
    assert throughput([sample(2.0, 10, sent=7.0), sample(3.0, 15, sent=8.0)], None) == pytest.approx(25 / 4)


def test_rows_are_compared_round_by_round():
    plain = LoadRow("plain", Load(users=1), rounds=[[sample(2.0, 10)], [sample(4.0, 10)]])
    head = LoadRow("hydra", Load(users=1), rounds=[[sample(1.0, 11, steps=4)], [sample(2.0, 20, steps=8)]])
    found = json.loads(json.dumps(head.record(plain)))
    assert found["speed_ratios"] == pytest.approx([2.2, 4.0])
    assert found["latency_ratios"] == pytest.approx([0.5, 0.5])
    assert (head.tokens_per_step, plain.tokens_per_step) == (29 / 12, None)
    twin = LoadRow("twin", Load(users=1), rounds=[[sample(9.0, 11)], [sample(9.0, 10)]])
    assert head.numbers(twin)["same_texts"] == 0.5
    assert found["latency_seconds"][0] == 1.5
    assert [len(one) for one in found["rounds"]] == [1, 1]


def test_the_longest_wait_is_that_of_the_time_in_which_the_long_prompt_was_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("load_client._SECONDS_BEFORE", 0.0)
    lengths: list[int] = []

    def joined(*times: float, sent: float) -> Joining:
        async def long(messages: Messages) -> Sample:
            lengths.append(len(messages[0]["content"]))
            return Sample((0.8,), 0.9, 2, 900, None, None, "", sent=10.0)

        async def stream(messages: Messages) -> Sample:
            return Sample(times, times[-1], 9, 9, None, None, "", sent=sent)

        return asyncio.run(joining("plain", long, stream, prompts(4), streams=2, tokens=450))

    # steps of 0.1 s; one of 0.3 s while the prompt is read (10.0 to 10.8), and one of 5 s after it
    found = joined(0.0, 0.1, 0.2, 0.3, 0.6, 0.7, 0.9, 1.05, 6.05, sent=9.8)
    assert lengths == [2025, 1012], "the second one has the right number of tokens"
    assert found.step == pytest.approx(100)
    assert found.longest == pytest.approx((300, 300))
    assert found.allowed(256) == pytest.approx(200 + 800 / 4)
    with pytest.raises(RequestFailed, match="ask for longer answers"):
        joined(0.0, 0.1, sent=9.0)  # the streams end before the long prompt comes


@pytest.fixture
def smallest(world: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> load.Options:
    monkeypatch.setattr(load, "_PAUSE_SECONDS", 0)
    places = {"environments": tmp_path, "json": tmp_path / "load.json", "prompts": world / "prompts.jsonl"}
    return load.Options(**places, model=str(world / "model"), precision="fp32", threads=1, quick=True)


def checked_rows(options: load.Options) -> dict[str, set[str]]:
    """Loads by the name of the row, where every row is right."""
    assert options.json
    rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
    names = {row["name"] for row in rows}
    for row in rows:
        assert [sample["num_tokens"] for sample in row["rounds"][0]] == [8, 8, 8]
        assert [sample["num_cached"] for sample in row["rounds"][0]] == [0, 0, 0], "each way reads its prompts"
        assert row["same_texts"] == 1.0, "in fp32 drafts do not change an answer"
        assert row["name"] != "plain" or row["tokens_per_step"] == 1.0
    return {name: {str(Load(**row["load"])) for row in rows if row["name"] == name} for name in names}


def test_a_server_answers_plain_and_with_its_head(smallest: load.Options, monkeypatch: pytest.MonkeyPatch):
    """The server is in this process. Its command line is read as its own process would."""

    def here(command: list[object], **_: object) -> object:
        options = read_options("serve", list(map(str, command[4:])))
        assert (options.model, options.head, options.load.precision) == (smallest.model, ("hydra",), "fp32")
        models = httpx2.get(f"{server.url}/v1/models").json()["data"]
        return SimpleNamespace(url=server.url, models=models, stop=lambda: None)

    monkeypatch.setattr(load, "ServerProcess", here)
    with running({NAME: tiny_engines(TEMPLATE)[NAME]}) as server:
        load.main(replace(smallest, servers=("draftheads",), fixed_nodes=(4,)))
    names, loads = ("plain", "medusa", "medusa, 4 nodes"), {"1 user", "2 users"}
    assert checked_rows(smallest) == dict.fromkeys(names, loads)


@pytest.mark.thorough
def test_a_run_starts_our_server_and_names_the_servers_that_are_missing(
    smallest: load.Options, world: Path, capsys: pytest.CaptureFixture[str]
):
    heads = (str(world / "medusa"), str(world / "hydra"))
    load.main(replace(smallest, servers=("draftheads", "llama-cpp"), heads=heads, fixed_nodes=(4,), rates=(50.0,)))
    missing = "llama-cpp: skipped: no environment; run benchmarks/environments.sh llama-cpp"
    assert missing in capsys.readouterr().out
    names, loads = ("plain", "medusa", "hydra", "medusa, 4 nodes"), {"1 user", "2 users", "50 requests/s"}
    assert checked_rows(smallest) == dict.fromkeys(names, loads)


def test_the_examples_in_docstrings_hold():
    result = doctest.testmod(load_client)
    assert result.attempted
    assert not result.failed
