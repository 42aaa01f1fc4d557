"""Several threads at once: on one engine they take turns, and engines of their own do not disturb each other."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from draftheads.cpu.native_library import load_library
from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.decode.request import StreamEvent
from families import GROWING, PROMPTS, TREES, tiny_head, tiny_model
from thorough import some_rows

NEW_TOKENS = 32
THREADS = 4


def engine(method: str | None, *, bits: int | None) -> Engine:
    model = tiny_model("llama", hidden_size=64, intermediate_size=128)
    model = model.sped_up(bits=bits)
    if method is None:
        return Engine(model)
    head = tiny_head(method, model)
    head.speed_up()
    return Engine(model, head, shape=TREES["ragged"] if method == "medusa" else GROWING["best first"])


def ask(one: Engine, seed: int) -> list[tuple[int, ...]]:
    """Answers of a thread of its own: prompts and settings differ from thread to thread."""
    prompts = PROMPTS[seed % 3 :] + PROMPTS[: seed % 3]
    found = one.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=seed % 2 * 0.8, seed=seed)
    streamed = one.stream(prompts[0], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return [*(result.token_ids for result in found), tuple(token for event in streamed for token in event.token_ids)]


@pytest.mark.parametrize(
    ("method", "shared", "bits"),
    some_rows(
        product([None, "medusa", "hydra", "eagle"], [True, False], [None, 8, 4]),
        *[("eagle", True, None), ("hydra", False, 8), ("hydra", True, 4)],
    ),
)
def test_threads_get_the_answers_that_they_would_get_alone(method: str | None, shared: bool, bits: int | None):
    if bits and load_library() is None:
        pytest.skip("int8 and int4 need the native library")
    alone = engine(method, bits=bits)
    expected = [ask(alone, seed) for seed in range(2 * THREADS)]
    engines = [engine(method, bits=bits)] * THREADS if shared else [engine(method, bits=bits) for _ in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        work = [pool.submit(ask, engines[seed % THREADS], seed) for seed in range(2 * THREADS)]
        assert [future.result() for future in work] == expected


def test_a_stream_that_nobody_reads_on_does_not_hold_up_others():
    one = engine("medusa", bits=None)
    stream = one.stream(PROMPTS[0], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(ask, one, 0).result(timeout=600)) == 4
    assert sum(1 for _ in stream) > 0


def test_threads_on_one_engine_take_turns(monkeypatch: pytest.MonkeyPatch):
    active, most, step = 0, 0, Batch.step

    def watched(batch: Batch) -> list[StreamEvent]:
        nonlocal active, most
        active += 1
        most = max(most, active)
        time.sleep(0.002)  # time for another thread to begin a step
        events = step(batch)
        active -= 1
        return events

    monkeypatch.setattr(Batch, "step", watched)
    one = Engine(tiny_model("llama"))
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda seed: ask(one, seed), range(THREADS)))
    assert most == 1
