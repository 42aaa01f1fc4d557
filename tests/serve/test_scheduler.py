"""The scheduler driven iteration by iteration: turns, limits, deadlines, failures, memory and its end."""

import logging
import time
from concurrent.futures import Future
from threading import Event, get_ident
from typing import Any
from unittest.mock import Mock

import pytest

from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.decode.request import StreamEvent
from draftheads.drafters.mixed import Mixed, MixedSession
from draftheads.errors import InvalidSettings, QueueFull, ShuttingDown, TooLarge
from draftheads.heads.history import NativeKVCache
from draftheads.heads.stateful import StatefulSession
from draftheads.serve.scheduler import Job, JobFailed, Lane, Limits
from families import GROWING, TREES, tiny_head, tiny_model
from scheduler_world import (
    Clock,
    Inbox,
    check_empty,
    iterate,
    plain_answer,
    request_of,
    run_to_end,
    scheduler_of,
    submit,
)
from thorough import some

MODEL = tiny_model("llama")
ENGINES = {
    "m": Engine(MODEL, tiny_head("medusa", MODEL), shape=TREES["ragged"]),
    "m:hydra": Engine(MODEL, tiny_head("hydra", MODEL), shape=GROWING["best first"]),
    "plain": Engine(MODEL),
}
PLAIN = Lane("plain")
PER_SLOT = ENGINES["m"].bytes_per_token


def plain(prompt: list[int], **settings: Any) -> tuple[int, ...]:
    return plain_answer(ENGINES["m"], prompt, **settings)


# --- turns ---


def test_clients_take_turns_and_each_ones_jobs_keep_their_order():
    scheduler = scheduler_of(ENGINES, max_rows=1)
    ended: list[str] = []
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        job, _ = submit(scheduler, [3, 4], client=name[0], max_new_tokens=2)
        job.on_event = lambda event, name=name: ended.append(name) if Inbox.is_last(event) else None
    run_to_end(scheduler)
    assert ended == ["a1", "b1", "c1", "a2", "b2", "a3"]


# --- what is refused ---


def test_a_full_queue_refuses_and_names_the_time_after_which_to_retry():
    clock = Clock()
    scheduler = scheduler_of(ENGINES, clock=clock, max_rows=1, max_waiting=2)
    for client in "ab":
        submit(scheduler, [3, 4], max_new_tokens=2, client=client)
    with pytest.raises(QueueFull, match="2 requests wait and at most 2 may: retry after 1 s") as caught:
        submit(scheduler, [3, 4])
    assert caught.value.retry_after == 1.0
    for _ in range(2):
        clock.now += 10
        run_to_end(scheduler)
        for client in "ab":
            submit(scheduler, [3, 4], max_new_tokens=2, client=client)
    # four jobs ended in the ten seconds since the first of them; rates of long ago do not count
    for seconds, retry_after in ((0, 10 / 4), (100, 1.0)):
        clock.now += seconds
        with pytest.raises(QueueFull) as caught:
            submit(scheduler, [3, 4])
        assert caught.value.retry_after == retry_after
    assert scheduler.snapshot().waiting == 2


def test_a_request_that_cannot_fit_is_refused_at_once():
    exact = 128 * PER_SLOT
    fits = scheduler_of(ENGINES, kv_bytes=exact)
    submit(fits, [3] * 50, PLAIN, max_new_tokens=77)
    with pytest.raises(TooLarge, match=r"77 new tokens need 0 MiB .* ask for fewer tokens"):
        submit(scheduler_of(ENGINES, kv_bytes=exact - 1), [3] * 50, PLAIN, max_new_tokens=77)
    for lane, length in ((PLAIN, 78), (Lane("m"), 77)):  # one slot more is another block, and so are a tree's nodes
        with pytest.raises(TooLarge):
            submit(fits, [3] * 50, lane, max_new_tokens=length)


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        (Lane("n"), "no model 'n'; choose among m, m:hydra, plain"),
        (Lane("m", 129), "draft_nodes is 129; it must be at most 128"),
        (Lane("plain", 4), "draft_nodes is 4, which is for drafters that fill trees.*plain decoding does not"),
    ],
)
def test_impossible_lanes_are_refused(lane: Lane, message: str):
    scheduler = scheduler_of(ENGINES)
    with pytest.raises(InvalidSettings, match=message):
        scheduler.submit(Job(request_of(ENGINES["m"], [3, 4]), lane, "someone", Inbox()))
    check_empty(scheduler)


def test_limits_are_checked():
    with pytest.raises(InvalidSettings, match="kv_bytes is 0; it must be at least 1"):
        Limits(kv_bytes=0)


def test_the_number_of_draft_nodes_is_that_of_the_lane_rounded():
    """Each lane is a pass of the model in every step, so there are few."""
    scheduler, rounded = scheduler_of(ENGINES, max_rows=9), {0: 0, 3: 0, 4: 8, 9: 8, 25: 32, 47: 32, 48: 64, 64: 64}
    inboxes = {asked: submit(scheduler, [3, 4], Lane("m:hydra", asked))[1] for asked in rounded}
    iterate(scheduler)
    assert len(scheduler.core.batches) == 4
    run_to_end(scheduler)
    for asked, inbox in inboxes.items():
        assert inbox.answer == plain([3, 4])
        drafted = {sum(event.drafted_by_depth) for event in inbox.events[1:] if isinstance(event, StreamEvent)}
        assert drafted == {max(0, rounded[asked] - 1)}


# --- jobs that end early ---


def test_a_callback_that_raises_is_logged_and_its_job_cancelled(caplog: pytest.LogCaptureFixture):
    scheduler = scheduler_of(ENGINES)
    job, _ = submit(scheduler, [3, 4])
    _, other = submit(scheduler, [3, 5])
    job.on_event = Mock(side_effect=ConnectionError("gone"))
    with caplog.at_level(logging.ERROR):
        run_to_end(scheduler)
    job.on_event.assert_called_once()
    assert "gone" in caplog.text
    assert other.answer == plain([3, 5])
    assert scheduler.snapshot().cancelled == 1
    check_empty(scheduler)


# --- memory ---


def test_a_token_takes_the_states_of_all_layers_that_a_head_reads():
    of_one, of_two = (Engine(MODEL, tiny_head(method, MODEL)).bytes_per_token for method in ("eagle", "eagle3"))
    assert of_two - of_one == MODEL.hidden_size * MODEL.dtype.itemsize


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("method", some(["hydra++", "eagle", "eagle3", "amphista", "small-llama"], "hydra++", "eagle3"))
def test_the_history_of_a_head_is_within_the_memory_that_is_reserved(method: str, is_fast: bool):
    head = tiny_head(method, MODEL)
    if is_fast:
        head.speed_up()
    engine = Engine(MODEL, Mixed(head), shape=TREES["chain"])
    limit = engine.num_bytes([128] * 6)
    scheduler = scheduler_of({"m": engine}, kv_bytes=limit, max_rows=8)
    for n, length in enumerate((20, 110, 20, 3, 40, 100, 7)):
        submit(scheduler, [3 + n] * length, max_new_tokens=60)
    most = 0
    while scheduler._has_work():
        iterate(scheduler)
        counts, histories = scheduler.snapshot(), sum(map(history_bytes, scheduler.core.batches.values()))
        assert counts.kv_bytes + counts.prefix_bytes + histories <= limit
        most = max(most, histories)
    assert most >= 2 * 128 * engine.drafter.bytes_per_slot > 0


def history_bytes(batch: Batch) -> int:
    session = batch.session
    assert isinstance(session, MixedSession)
    assert isinstance(session.session, StatefulSession)
    history = session.session.history
    kept = [part for layer in history.layers if layer is not None for part in layer]
    kept += history.memory if isinstance(history, NativeKVCache) else []
    return sum(part.untyped_storage().nbytes() for part in kept)


# --- calls ---


def test_calls_run_between_steps_and_return_values_or_errors():
    scheduler = scheduler_of(ENGINES)
    found = scheduler.call(get_ident)
    failed: Future[float] = scheduler.call(lambda: 1 / 0)
    given_up = scheduler.call(get_ident)
    given_up.cancel()
    iterate(scheduler)
    assert found.result(timeout=0) == get_ident()
    assert isinstance(failed.exception(timeout=0), ZeroDivisionError)


def test_a_replaced_engine_gets_the_requests_that_come_then():
    scheduler = scheduler_of(ENGINES, max_rows=2)
    _, old = submit(scheduler, [3, 4], Lane("m"), max_new_tokens=30)
    iterate(scheduler, 2)
    _, waiting = submit(scheduler, [3, 5], Lane("m", 5))
    scheduler.call(lambda: scheduler.engines.update(m=Engine(MODEL)))
    _, late = submit(scheduler, [3, 6], Lane("m"))
    iterate(scheduler)
    assert len(scheduler.core.batches) == 2
    assert "draft_nodes is 8, which is for drafters that fill trees" in waiting.failure.message
    run_to_end(scheduler)
    assert old.answer == plain([3, 4], max_new_tokens=30)
    assert late.answer == plain([3, 6])
    assert all(event.num_drafted == 0 for event in late.events if isinstance(event, StreamEvent))


# --- the end ---


@pytest.mark.parametrize("started", [True, False])
def test_after_closing_nothing_is_taken(started: bool):
    scheduler = scheduler_of(ENGINES)
    if started:
        scheduler.start()
    scheduler.close(drain_seconds=1)
    with pytest.raises(ShuttingDown):
        submit(scheduler, [3, 4])
    assert isinstance(scheduler.call(get_ident).exception(timeout=1), ShuttingDown)
    scheduler.close(drain_seconds=1)
    check_empty(scheduler)


def test_what_does_not_end_in_time_fails():
    scheduler = scheduler_of(ENGINES, max_rows=1)
    job, slow = submit(scheduler, [3, 4], max_new_tokens=200)
    begun = Event()
    job.on_event = lambda event: (slow(event), begun.set())
    _, waiting = submit(scheduler, [3, 5])
    pending = scheduler.call(get_ident)
    scheduler.start()
    assert begun.wait(timeout=600)
    scheduler.close(drain_seconds=0)
    for inbox in (slow, waiting):
        assert inbox.failure == JobFailed("shutdown", "the server shut down before the answer was finished")
    assert pending.result(timeout=0) != get_ident()
    check_empty(scheduler)


def test_an_idle_scheduler_takes_no_processor_time(monkeypatch: pytest.MonkeyPatch):
    scheduler = scheduler_of(ENGINES)
    iterations = Mock(side_effect=scheduler._iterate)
    monkeypatch.setattr(scheduler, "_iterate", iterations)
    scheduler.start()
    _, inbox = submit(scheduler, [3, 4])
    inbox.end.get(timeout=600)
    scheduler.call(get_ident).result(timeout=600)
    count = iterations.call_count
    time.sleep(0.2)  # time in which a loop that does not sleep would run thousands of times
    assert iterations.call_count <= count + 1
    scheduler.close(drain_seconds=0)


@pytest.mark.parametrize("kind", [RuntimeError, BaseException])  # panics of libraries in Rust are of the second kind
def test_an_error_of_our_own_fails_the_jobs_and_the_thread_goes_on(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
):
    scheduler = scheduler_of(ENGINES)
    _, inbox = submit(scheduler, [3, 4])
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.core, "step", Mock(side_effect=kind("our own")))
        scheduler.start()
        assert isinstance(inbox.end.get(timeout=600), JobFailed)
    _, after = submit(scheduler, [3, 4])
    after.end.get(timeout=600)
    assert after.answer == plain([3, 4])
    scheduler.close(drain_seconds=0)
