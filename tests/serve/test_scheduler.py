"""Answers of the scheduler are those of the offline engine, whatever else is decoded beside them."""

import queue
from collections.abc import Iterator

import pytest

from draftheads.decode.engine import Engine
from draftheads.decode.request import StreamEvent
from draftheads.serve.scheduler import Job, JobFailed, Lane, Limits, Scheduler
from draftheads.settings import SamplingSettings
from families import GROWING, PROMPTS, tiny_head, tiny_model

ON = {"max_new_tokens": 20, "ignore_eos": True, "seed": 5}


class Inbox:
    """Collects a job's events; any thread may wait for its end."""

    def __init__(self) -> None:
        self.events: list[StreamEvent | JobFailed] = []
        self.end: queue.Queue[StreamEvent | JobFailed] = queue.Queue()

    def __call__(self, event: StreamEvent | JobFailed) -> None:
        self.events.append(event)
        if isinstance(event, JobFailed) or event.finish_reason is not None:
            self.end.put(event)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for event in self.events if isinstance(event, StreamEvent) for token in event.token_ids)


@pytest.fixture
def engines() -> dict[str, Engine]:
    model = tiny_model("llama")
    return {
        "m": Engine(model, tiny_head("hydra", model), shape=GROWING["best first"]),
        "m:eagle": Engine(model, tiny_head("eagle", model), shape=GROWING["best first"]),
    }


@pytest.fixture
def scheduler(engines: dict[str, Engine]) -> Iterator[Scheduler]:
    scheduler = Scheduler(engines, Limits(kv_bytes=1 << 24, max_rows=3))
    scheduler.start()
    yield scheduler
    scheduler.close(drain_seconds=0)


def test_answers_are_those_of_the_plain_engine(scheduler: Scheduler, engines: dict[str, Engine]):
    plain = Engine(engines["m"].model)
    inboxes, expected = [], []
    for temperature in (0.0, 0.8):
        settings = SamplingSettings(temperature=temperature, **ON)
        for lane in (Lane("m"), Lane("m:eagle"), Lane("m", 0), Lane("m:eagle", 7)):
            for prompt in PROMPTS:
                inbox = Inbox()
                scheduler.submit(Job(plain.request(prompt, settings), lane, "someone", inbox))
                inboxes.append(inbox)
                expected.append(plain.generate([prompt], settings)[0].token_ids)
    for inbox in inboxes:
        last = inbox.end.get(timeout=60)
        assert isinstance(last, StreamEvent)
    assert [inbox.token_ids for inbox in inboxes] == expected


def test_only_prompts_with_the_same_salt_share_what_was_read(scheduler: Scheduler, engines: dict[str, Engine]):
    plain = Engine(engines["m"].model)
    prompt = [5, 6, 7, 8, 9, 10]
    found = []
    for salt, lane in (("", Lane("m")), ("a", Lane("m")), ("b", Lane("m", 0)), ("a", Lane("m", 0))):
        inbox = Inbox()
        request = plain.request(prompt, SamplingSettings(**ON))
        scheduler.submit(Job(request, lane, "someone", inbox, cache_salt=salt))
        inbox.end.get(timeout=60)
        found.append((inbox.token_ids, scheduler.snapshot().prefix_hits))
    assert [hits for _, hits in found] == [0, 0, 0, 1]
    assert len({ids for ids, _ in found}) == 1
