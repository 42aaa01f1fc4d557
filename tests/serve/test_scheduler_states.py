"""Any sequence of submissions, cancellations, deadlines, failures and iterations, checked against a simple model."""

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.decode.prompt_reader import PromptReader
from draftheads.errors import QueueFull, ShuttingDown, TooLarge
from draftheads.serve.scheduler import Job, JobFailed, Lane
from families import TREES, tiny_head, tiny_model
from scheduler_world import Clock, Inbox, check_empty, plain_answer, scheduler_of, submit

MODEL = tiny_model("llama")
ENGINES = {
    "m": Engine(MODEL, tiny_head("hydra", MODEL), shape=TREES["chain"]),
    "m:eagle": Engine(MODEL, tiny_head("eagle", MODEL, num_key_value_heads=1, head_size=8), shape=TREES["ragged"]),
}
LANES = [Lane("m"), Lane("m:eagle"), Lane("m", 0), Lane("m", 4)]
SYSTEM = [3 + n * n % 20 for n in range(40)]
PROMPTS = [SYSTEM[:12], SYSTEM, [*SYSTEM[:20], 7, 7], [9], [*SYSTEM, 5, 8], [9, 4, 4, *range(3, 20)], [5] * 120]
SLOTS = 128 * 4  # of the memory: two short rows and a prompt, or a long one
ROWS, WAITING = 3, 4


@cache
def answer(prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
    return plain_answer(ENGINES["m"], list(prompt), max_new_tokens=length)


class Schedules(RuleBasedStateMachine):
    """The model: which jobs were accepted, by whom, and how each of them may end."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        scheduler = scheduler_of(ENGINES)
        self.limit = SLOTS * max(map(scheduler.core.sizes.per_slot, ENGINES.values()))
        self.scheduler = scheduler_of(
            ENGINES,
            clock=self.clock,
            kv_bytes=self.limit,
            max_rows=ROWS,
            max_waiting=WAITING,
            chunk_tokens=16,
            headroom_tokens=4,
        )
        self.jobs: dict[Job, Inbox] = {}
        self.cancelled: dict[Job, int] = {}  # and how many events it had
        self.may_fail: set[Job] = set()
        self.closed = False

    @property
    def open_jobs(self) -> list[Job]:
        return [job for job, inbox in self.jobs.items() if not inbox.ends and job not in self.cancelled]

    @property
    def waiting(self) -> list[Job]:
        """Also those that were interrupted."""
        queued = {each.request for each in self.scheduler.core.waiting.in_turn()}
        return [job for job in self.open_jobs if job.request in queued]

    @rule(
        prompt=st.sampled_from(PROMPTS),
        lane=st.sampled_from(LANES),
        clients=st.text("abc", min_size=1, max_size=3),
        length=st.integers(1, 9) | st.just(150),  # 150 tokens need a second block, after a while
        seconds=st.none() | st.integers(1, 6),
    )
    def submit(self, prompt: list[int], lane: Lane, clients: str, length: int, seconds: int | None) -> None:
        deadline = None if seconds is None else self.clock.now + seconds
        for client in clients:
            try:
                job, inbox = submit(
                    self.scheduler, prompt, lane, client=client, deadline=deadline, max_new_tokens=length
                )
            except QueueFull:
                assert self.own_waiting(client) >= WAITING - len(self.waiting)
            except ShuttingDown:
                assert self.closed
            else:
                assert not self.closed
                assert self.own_waiting(client) < WAITING - len(self.waiting)
                self.jobs[job] = inbox

    def own_waiting(self, client: str) -> int:
        return sum(job.client == client for job in self.waiting)

    @rule()
    def submit_too_large(self) -> None:
        with pytest.raises((TooLarge, ShuttingDown)) as refused:
            submit(self.scheduler, [3] * 200, LANES[0], max_new_tokens=400)
        assert self.closed or refused.type is TooLarge

    @precondition(lambda self: not self.closed)
    @rule(times=st.integers(1, 4))
    def iterate(self, times: int) -> None:
        for _ in range(times):
            self.scheduler._iterate()

    @precondition(lambda self: self.open_jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.open_jobs))
        self.scheduler.cancel(job)
        self.cancelled[job] = len(self.jobs[job].events)

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds

    @precondition(lambda self: not self.closed)
    @rule(what=st.sampled_from([(Batch, "step"), (Batch, "adopt"), (PromptReader, "read")]))
    def a_pass_fails(self, what: tuple[type, str]) -> None:
        """The first of its kind in an iteration."""
        owner, name = what
        old, hits = getattr(owner, name), []

        def failing(self: Any, *arguments: Any) -> Any:
            if not hits:
                hits.append(self)
                raise RuntimeError("it broke")
            return old(self, *arguments)

        lanes = {id(lane.batch): set(lane.requests) for lane in self.scheduler.core.lanes}
        admitted = {job.request for job in self.waiting}
        with patch.object(owner, name, failing):
            before = {job for job, inbox in self.jobs.items() if inbox.ends}
            self.scheduler._iterate()
        failure = JobFailed("error", "the answer could not be computed: it broke")
        broken = {job for job, inbox in self.jobs.items() if job not in before and failure in inbox.ends}
        self.may_fail |= broken
        if not hits:
            assert not broken
        elif owner is PromptReader:
            assert len(broken) == 1
        else:
            assert len({job.lane for job in broken}) <= 1
            rows = {job.request for job in broken}
            assert rows <= lanes.get(id(hits[0]), rows) | admitted

    @precondition(lambda self: not self.closed)
    @rule()
    def close(self) -> None:
        self.scheduler.close(drain_seconds=0)
        self.closed = True

    @invariant()
    def memory_is_within_the_limit(self) -> None:
        core = self.scheduler.core
        assert core.kv_bytes + core.prefixes.num_bytes <= self.limit
        assert core.prefixes.num_bytes <= max(0, self.limit - core._reserved())
        assert core.prefixes.num_bytes == sum(text.num_bytes for text in core.prefixes._texts.values())

    @invariant()
    def rows_belong_to_open_jobs(self) -> None:
        core = self.scheduler.core
        assert core.num_running <= ROWS
        rows = [request for lane in core.lanes for request in lane.batch.requests]
        reading = [reading.request for reading in core._reading.readings]
        held = [request for lane in core.lanes for request in lane.requests]
        assert sorted(map(id, rows + reading)) == sorted(map(id, held))
        assert set(held) <= {job.request for job in (*self.open_jobs, *self.cancelled)}
        # each job waits or runs
        waiting = {job.request for job in self.waiting}
        assert not waiting & set(held)
        assert {job.request for job in self.open_jobs} <= waiting | set(held)
        assert self.scheduler.snapshot().waiting == len(waiting)

    @invariant()
    def events_are_right(self) -> None:
        for job, inbox in self.jobs.items():
            whole = answer(tuple(job.request.prompt_ids), job.request.most_new_tokens)
            assert inbox.token_ids == whole[: len(inbox.token_ids)]
            assert len(inbox.ends) <= 1
            if job in self.cancelled:
                assert len(inbox.events) == self.cancelled[job]
                assert not inbox.ends
            elif inbox.ends and isinstance(end := inbox.ends[0], JobFailed):
                assert inbox.events[-1] is end
                assert {
                    "deadline": job.deadline is not None and job.deadline <= self.clock.now,
                    "error": job in self.may_fail,
                    "shutdown": self.closed,
                }[end.reason]
            elif inbox.ends:
                assert inbox.answer == whole

    def teardown(self) -> None:
        for _ in range(900):
            if self.closed or not self.scheduler._has_work():
                break
            self.scheduler._iterate()
            self.events_are_right()
            self.memory_is_within_the_limit()
        assert not self.open_jobs, "every accepted job ends"
        check_empty(self.scheduler)
        counts = self.scheduler.snapshot()
        assert counts.finished + counts.failed + counts.cancelled == len(self.jobs)
        self.scheduler.close(drain_seconds=0)
        assert self.scheduler.core.prefixes.num_bytes == 0


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
