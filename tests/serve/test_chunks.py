"""A long prompt delays no stream by more than a chunk; counted in passes of the model, not in seconds."""

from itertools import pairwise

import pytest

from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.runners.transformers_runner import TransformersRunner
from draftheads.serve.scheduler import Lane
from families import TREES, tiny_head, tiny_model
from scheduler_world import Inbox, iterate, plain_answer, run_to_end, scheduler_of, submit

CHUNK = 256


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [None, "medusa", "eagle"])
def test_no_stream_waits_longer_than_two_steps_and_a_chunk(method: str | None, monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("llama", max_position_embeddings=4096)
    head = None if method is None else tiny_head(method, model)
    engine = Engine(model, head, shape=TREES["chain"] if head else None)
    passes: list[int] = []  # 0 for a step, else the prompt tokens of a pass
    step, read = Batch.step, TransformersRunner.read
    monkeypatch.setattr(Batch, "step", lambda batch: (passes.append(0), step(batch))[1])
    monkeypatch.setattr(
        TransformersRunner, "read", lambda *args: (passes.append(sum(map(len, args[2]))), read(*args))[1]
    )
    scheduler = scheduler_of({"m": engine}, chunk_tokens=CHUNK, kv_bytes=1 << 26)
    streams: list[tuple[Inbox, list[int]]] = []  # and how many passes there were at each event
    for number in range(8):
        job, inbox = submit(scheduler, [3 + number, 5, 6], Lane("m"), max_new_tokens=80)
        streams.append((inbox, []))
        job.on_event = lambda event, stream=streams[-1]: (stream[0](event), stream[1].append(len(passes)))
    iterate(scheduler, 5)
    prompt = [3 + n * n % 20 for n in range(2000)]
    _, late = submit(scheduler, prompt, max_new_tokens=10)
    run_to_end(scheduler)
    assert sum(passes) >= 2000
    waits = [passes[before:after] for _, when in streams for before, after in pairwise(when)]
    for wait in waits:
        assert wait.count(0) <= 2
        assert sum(wait) <= CHUNK
    assert max(map(len, waits)) == 2, "a chunk and a step"
    assert late.answer == plain_answer(engine, prompt, max_new_tokens=10)
    for number, (inbox, _) in enumerate(streams):
        assert inbox.token_ids == plain_answer(engine, [3 + number, 5, 6], max_new_tokens=80)


def test_streams_of_other_lanes_are_stepped_beside_a_long_prompt():
    model = tiny_model("llama")
    engine = Engine(model, tiny_head("medusa", model), shape=TREES["chain"])
    scheduler = scheduler_of({"m": engine}, chunk_tokens=8)
    inboxes = [submit(scheduler, [3, 4], Lane("m", nodes), max_new_tokens=40)[1] for nodes in (None, 0, 3)]
    iterate(scheduler, 2)
    _, late = submit(scheduler, [5 + n % 9 for n in range(60)], Lane("m", 0))
    for _ in range(7):
        before = [len(inbox.events) for inbox in inboxes]
        iterate(scheduler)
        assert [len(inbox.events) - count for inbox, count in zip(inboxes, before, strict=True)] == [1, 1, 1]
        assert not late.events
    iterate(scheduler)
    assert len(late.events) == 2, "its first token, and a step with the others"
