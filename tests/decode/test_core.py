"""Which prompts the core reads in one pass, and who waits for whom."""

import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from draftheads.decode.batch import Batch
from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.engine import Engine
from draftheads.decode.request import Lane, Request, StreamEvent
from draftheads.decode.waiting import ReadingTurns
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import Mixed
from draftheads.errors import TooLarge
from draftheads.runners import bytes_of_states
from draftheads.runners.transformers_runner import TransformersRunner
from draftheads.speculation.drafter import NoDraft
from families import RECURRENT_FAMILIES, TREES, tiny_head, tiny_model
from scheduler_world import assert_plain, request_of

SHORT = [[3, 4, 5], [9, 8, 7, 6], [11, 5]]
LONG = [5 + n % 13 for n in range(140)]  # two blocks of the cache


def test_who_comes_anew_begins_with_the_least_time_of_those_that_were_read_together(engine: Engine) -> None:
    busy, idle, new = requests = [request_of(engine, prompt) for prompt in SHORT]
    busy.client, idle.client, new.client = "busy", "idle", "new"
    turns = ReadingTurns(None)
    for clients, seconds in (([busy], 9.0), ([busy, idle], 2.0)):
        turns.order([busy, idle])
        turns.note_reading(dict.fromkeys(clients, 1), seconds, is_beside=False)
    assert turns.order(requests) == [new, idle, busy]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each reading, how many tokens of each prompt."""
    found: list[list[int]] = []
    read = TransformersRunner.read

    def noted(runner: TransformersRunner, rows: Any, token_ids: Any) -> Any:
        found.append([len(ids) for ids in token_ids])
        return read(runner, rows, token_ids)

    monkeypatch.setattr(TransformersRunner, "read", noted)
    return found


def test_prompts_are_read_together(passes: list[list[int]]) -> None:
    engine = Engine(tiny_model("llama"))
    prompts = [SHORT[0], LONG, *SHORT[1:]]
    requests = [request_of(engine, prompt) for prompt in prompts]
    list(engine.run(requests))
    assert passes == [[2, 3, 140, 4]]
    assert_plain(engine, *requests)
    assert all((request.row, request.hidden) == (None, []) for request in requests), "they hold memory of the model"


@pytest.mark.parametrize(
    ("salts", "groups", "tokens"),
    [
        (("one", "one"), [[62], [7]], 62 + 7),  # the second one waits until the first one's beginning is there
        (("one", "other"), [[62, 63]], 62 + 63),  # else the time would tell one of them what the other one asked
    ],
)
def test_only_prompts_of_one_salt_wait_for_their_common_beginning(
    engine: Engine, salts: tuple[str, str], groups: list[list[int]], tokens: int, passes: list[list[int]]
) -> None:
    core = core_of(engine, chunk_tokens=1024)
    requests = [request_of(engine, [*LONG[:60], *[3 + n] * (2 + n)]) for n in range(2)]
    for request, salt in zip(requests, salts, strict=True):
        core.add(request, client=salt, cache_salt=salt)
    core.step()
    assert (passes, core.tokens_read) == (groups, tokens)
    assert [request.num_cached for request in requests] == [0, 125 - tokens]
    run(core, *requests)
    assert_plain(engine, *requests)


@pytest.mark.parametrize("waiting", [10, 1000])
def test_those_that_wait_cost_nothing_while_no_row_is_free(engine: Engine, waiting: int) -> None:
    """Counted in looks at requests, not in seconds."""
    core = core_of(engine, max_rows=2)
    running = [add(core, engine, [3, 4, n], max_new_tokens=60) for n in range(2)]
    core.step()
    for n in range(waiting):
        add(core, engine, [5, 6, n % 9])
    calls: list[str] = []
    sys.setprofile(lambda frame, *_: calls.append(frame.f_code.co_filename))
    try:
        core._admit()
    finally:
        sys.setprofile(None)
    assert sum(file.endswith("core.py") for file in calls) < 60
    assert len(core.running) == len(running)


# --- fairness and memory ---


def core_of(engine: Engine, **limits: Any) -> EngineCore:
    return EngineCore({"": engine}, CoreLimits(**limits), keeps_answers=True)


def add(core: EngineCore, engine: Engine, prompt: Sequence[int], client: str = "", **settings: Any) -> Request:
    request = request_of(engine, prompt, **settings)
    core.add(request, client=client)
    return request


def run(core: EngineCore, *requests: Request, most: int = 500) -> int:
    """The number of steps until these requests have ended."""
    for number in range(most):
        if all(request.finish_reason for request in requests):
            return number
        for _, event in core.step():
            assert isinstance(event, StreamEvent), event
        assert core.limits.kv_bytes is None or core.kv_bytes + core.prefixes.num_bytes <= core.limits.kv_bytes
    raise AssertionError(f"not finished after {most} steps")


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = tiny_model("llama", max_position_embeddings=65536)
    return Engine(model, tiny_head("hydra", model), shape=TREES["ragged"])


def test_a_long_answer_reserves_no_more_than_its_next_tokens(engine: Engine) -> None:
    """The memory is that of the longest answer alone, and yet fifteen others are decoded beside it."""
    core = core_of(engine, kv_bytes=60_200 * engine.bytes_per_token)
    add(core, engine, [3, 4], "one", max_new_tokens=59_000)
    core.step()
    others = [add(core, engine, [5, 6, n], f"client {n}", max_new_tokens=20) for n in range(3, 18)]
    assert run(core, *others) <= 20
    assert_plain(engine, *others)


@pytest.mark.few(5)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 7}])
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        *(("llama", name) for name in ("plain", "hydra", "eagle", "small-llama", "copying", "lookahead")),
        *((family, "hydra") for family in RECURRENT_FAMILIES),
    ],
)
def test_interrupted_answers_are_plain_answers(family: str, drafter: str, settings: dict[str, Any]) -> None:
    model = tiny_model(family)
    made = {"plain": NoDraft, "lookahead": Lookahead, "copying": lambda: Mixed(tiny_head("hydra", model))}
    engine = Engine(model, made.get(drafter, lambda: tiny_head(drafter, model))())
    limit = 128 * 5 * engine.bytes_per_token + bytes_of_states(model, 3)
    core = core_of(engine, kv_bytes=limit, headroom_tokens=4, chunk_tokens=21)
    requests = [add(core, engine, [3 + n, 4, 5], max_new_tokens=150, **settings) for n in range(3)]
    run(core, *requests)
    assert core.interruptions > 0
    assert_plain(engine, *requests, **settings)
    assert [request.num_cached for request in requests] == [0, 0, 0]


def test_a_request_that_fits_overtakes_one_that_does_not_but_not_for_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftheads.decode.core._MOST_OVERTAKEN", 3)
    core = core_of(engine, kv_bytes=640 * engine.bytes_per_token, max_rows=4)
    first = add(core, engine, [3, 4], max_new_tokens=40)
    core.step()
    large = add(core, engine, [5] * 400, max_new_tokens=2)
    small: list[Request] = []
    while not large.token_ids and len(small) < 200:
        small.append(add(core, engine, [6, 7, len(small) % 9], max_new_tokens=6))
        core.step()
    assert first.finish_reason
    assert sum(request.finish_reason is not None for request in small) >= 3
    assert large.token_ids, "it is overtaken for ever"
    assert run(core, *small, large) < 100


def test_an_answer_that_could_not_go_on_is_not_interrupted(engine: Engine) -> None:
    """While a text is read again it takes its memory twice, and that of a long one is all that there is."""
    core = core_of(engine, kv_bytes=768 * engine.bytes_per_token, headroom_tokens=4)
    long = add(core, engine, [3, 4], "one", max_new_tokens=600)
    while len(long.token_ids) < 350:
        core.step()
    others = [request_of(engine, [5, 6, n], max_new_tokens=120) for n in range(3, 5)]
    for number, request in enumerate(others):
        core.add(request, Lane("", 0), client=f"client {number}")
        core.step()
    assert len(core.running) == 3
    run(core, long, *others, most=1000)
    assert core.interruptions > 0
    assert_plain(engine, long, *others)


def test_a_request_that_fits_no_more_fails_instead_of_waiting_for_ever() -> None:
    """Its engine was replaced by one that takes more memory."""
    model = tiny_model("llama")
    small, large = Engine(model), Engine(model, tiny_head("eagle", model))
    core = core_of(small, kv_bytes=256 * small.bytes_per_token)
    requests = [add(core, small, [3, 4, n], max_new_tokens=20) for n in (5, 6)]
    core.engines[""] = large
    events = core.step()
    assert [(request, type(event)) for request, event in events] == [(request, TooLarge) for request in requests]
    assert not core.has_work


def test_a_short_prompt_does_not_wait_for_a_long_one(engine: Engine) -> None:
    core = core_of(engine, chunk_tokens=64)
    long = add(core, engine, [5 + n % 13 for n in range(2000)], "one", max_new_tokens=3)
    core.step()
    short = add(core, engine, [5, 6, 7], "other", max_new_tokens=1)
    core.step()
    assert short.finish_reason == "length"
    # and a long one is read whatever comes: at least half of each chunk is its own
    for number in range(60):
        add(core, engine, [5, number % 20] * 30, "other", max_new_tokens=1)
        core.step()
    assert_plain(engine, long)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock: a step takes a second, and a token that is read a tenth of it."""
    now = [0.0]
    step, read = Batch.step, TransformersRunner.read

    def stepped(batch: Batch) -> Any:
        now[0] += 1
        return step(batch)

    def read_slowly(runner: TransformersRunner, rows: Any, token_ids: Any) -> Any:
        now[0] += sum(map(len, token_ids)) / 10
        return read(runner, rows, token_ids)

    monkeypatch.setattr(Batch, "step", stepped)
    monkeypatch.setattr(TransformersRunner, "read", read_slowly)
    return now


def test_many_long_prompts_of_one_client_hardly_slow_others(engine: Engine, seconds: list[float]) -> None:
    core = core_of(engine, chunk_steps=12)
    core.clock = lambda: seconds[0]

    def time_of(number: int) -> float:
        start = seconds[0]
        run(core, add(core, engine, [5 + number, 6, 7] * 10, "polite", max_new_tokens=8))
        return seconds[0] - start

    time_of(0)
    alone = time_of(1)
    greedy = [add(core, engine, [5 + n, *(6 + each % 13 for each in range(900))], "greedy") for n in range(6)]
    core.step()
    assert max(map(time_of, range(2, 7))) <= 2.5 * alone
    # while a stream runs, reading takes no more time than its steps; alone it takes a chunk between two steps
    stream, before, start = add(core, engine, [4, 5], "polite", max_new_tokens=40), core.tokens_read, seconds[0]
    run(core, stream)
    assert 0.3 < (core.tokens_read - before) / 10 / (seconds[0] - start) < 0.6
    other = add(core, engine, [3, *[7, 8] * 450], "other")
    run(core, other)
    assert sum(request.finish_reason is not None for request in greedy) <= 2, "clients share the time of reading"
    run(core, *greedy)
    assert_plain(engine, *greedy, other, stream)


def test_a_client_gives_up_rows_when_another_one_waits(engine: Engine) -> None:
    core = core_of(engine, max_rows=4)
    many = [add(core, engine, [3, 4, n], "one", max_new_tokens=60) for n in range(3, 9)]
    core.step()
    other = add(core, engine, [5, 6, 7], "other", max_new_tokens=3)
    core.step()
    assert other.token_ids
    assert core.interruptions == 1
    third = add(core, engine, [5, 6, 8], "third", max_new_tokens=3)
    core.step()
    assert third.token_ids
    run(core, *many, other, third)
    assert_plain(engine, *many, other, third)


def test_no_row_is_given_up_for_a_client_that_has_as_many(engine: Engine) -> None:
    core = core_of(engine, max_rows=4)
    requests = [add(core, engine, [3, 4, n], f"client {n % 2}", max_new_tokens=9) for n in range(8)]
    run(core, *requests)
    assert core.interruptions == 0


def test_a_request_that_is_interrupted_while_it_is_cancelled_is_not_decoded(engine: Engine) -> None:
    core = core_of(engine)
    request = add(core, engine, [3, 4], max_new_tokens=50)
    core.step()
    tokens = list(request.token_ids)
    core.cancel(request)  # it runs, so the next step drops it, unless it waits by then
    core._interrupt(request)
    run(core, add(core, engine, [5, 6], max_new_tokens=3))
    assert request.token_ids == tokens
    assert not core.has_work


def test_an_error_in_the_text_of_one_request_ends_it_alone(engine: Engine) -> None:
    core = core_of(engine)
    bad, other = (add(core, engine, [3, 4, n], max_new_tokens=6) for n in (5, 6))
    core.step()
    bad._stream.push = Mock(side_effect=ValueError("no such token"))  # type: ignore[method-assign]
    events = [pair for _ in range(9) for pair in core.step()]
    failed = [(request, str(event)) for request, event in events if isinstance(event, Exception)]
    assert failed == [(bad, "no such token")]
    assert_plain(engine, other)
    assert not core.has_work


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts cannot be read together, and those with token 11 not at all."""
    read = TransformersRunner.read

    def read_alone(runner: TransformersRunner, rows: Any, token_ids: Any) -> Any:
        if len(rows) > 1 or 11 in token_ids[0]:
            raise MemoryError("no memory for the states")
        return read(runner, rows, token_ids)

    monkeypatch.setattr(TransformersRunner, "read", read_alone)


@pytest.mark.usefixtures("few_states")
def test_a_batch_that_ends_while_prompts_are_read_alone_ends_all_of_its_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no first token")

    monkeypatch.setattr(Batch, "join", fails)
    core = core_of(engine)
    requests = [add(core, engine, prompt, max_new_tokens=4) for prompt in SHORT[:2]]
    events = [pair for _ in range(9) for pair in core.step()]
    assert {request: str(error) for request, error in events} == dict.fromkeys(requests, "no first token")
    assert len(events) == len(requests)
    assert not core.has_work


@pytest.mark.usefixtures("few_states")
def test_prompts_are_read_alone_after_an_error_in_reading_them_together(engine: Engine) -> None:
    core = core_of(engine)
    requests = [add(core, engine, prompt, max_new_tokens=4) for prompt in SHORT]
    events = [pair for _ in range(9) for pair in core.step()]
    assert [(request, str(error)) for request, error in events if isinstance(error, Exception)] == [
        (requests[2], "no memory for the states")
    ]
    assert_plain(engine, *requests[:2])
    assert not core.has_work
