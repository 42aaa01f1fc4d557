"""What becomes of jobs and memory when the core fails, prompts are scored, or grammars are compiled."""

import asyncio
from threading import Event, Thread
from typing import Any

import pytest

from draftheads.decode.engine import Engine
from draftheads.decode.grammar import GrammarCompiler
from draftheads.errors import InvalidSettings, TooLarge
from draftheads.runners import num_slots
from draftheads.serve.completions import score
from draftheads.serve.scheduler import JobFailed
from families import tiny_model
from scheduler_world import Inbox, check_empty, iterate, plain_answer, run_to_end, scheduler_of, submit
from structured_world import json_model


def test_a_job_that_comes_while_others_fail_is_answered(monkeypatch: pytest.MonkeyPatch):
    engine = Engine(tiny_model("llama"))
    scheduler = scheduler_of({"m": engine})
    _, first = submit(scheduler, [3, 4])
    late, came = list[Inbox](), Event()
    clear, turns = scheduler.core.clear, iter((True, False))

    def fail() -> Any:
        raise RuntimeError("a fault of the core")

    def clear_and_submit() -> None:
        clear()
        Thread(target=lambda: (late.append(submit(scheduler, [5, 6])[1]), came.set())).start()
        came.wait(0.2)  # the other thread has to wait longer

    monkeypatch.setattr(scheduler.core, "step", fail)
    monkeypatch.setattr(scheduler.core, "clear", clear_and_submit)
    monkeypatch.setattr(scheduler, "_wait_for_work", lambda: next(turns))
    monkeypatch.setattr(scheduler, "_end", lambda: None)
    scheduler._run()
    assert came.wait(60)
    monkeypatch.undo()
    assert isinstance(first.events[-1], JobFailed)
    run_to_end(scheduler)
    assert late[0].answer == plain_answer(engine, [5, 6])
    check_empty(scheduler)


def test_a_job_that_the_core_refuses_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    scheduler = scheduler_of({"m": Engine(tiny_model("llama"))})

    def add(*_: Any, **__: Any) -> None:
        raise InvalidSettings("the engine was replaced since it was checked")

    monkeypatch.setattr(scheduler.core, "add", add)
    with pytest.raises(InvalidSettings):
        submit(scheduler, [3, 4])
    assert not scheduler._has_work()


def scored(scheduler: Any, engine: Engine, prompt: list[int]) -> Any:
    """The scheduler works on this thread, between the turns of the event loop."""

    async def both() -> Any:
        task = asyncio.ensure_future(score(scheduler, engine, prompt, 0))
        while not task.done():
            await asyncio.sleep(0)
            iterate(scheduler)
            held.append(scheduler.core.held_bytes)
            assert scheduler.core._reserved() <= scheduler.limits.kv_bytes
        return await task

    held: list[int] = []
    result = asyncio.run(both())
    iterate(scheduler)
    assert (max(held) > 0, scheduler.core.held_bytes) == (True, 0)
    return result


def test_scored_prompts_are_part_of_the_memory_budget():
    engine = Engine(tiny_model("llama", max_position_embeddings=4096))
    prompt = [3 + number % 20 for number in range(900)]
    size = engine.bytes_per_token
    alone = num_slots(engine.model, [900]) * size
    free = scored(scheduler_of({"m": engine}, kv_bytes=1 << 28), engine, prompt)
    scheduler = scheduler_of({"m": engine}, kv_bytes=alone + 64 * size)
    inboxes = [submit(scheduler, [5 + number] * 300, max_new_tokens=40)[1] for number in range(2)]
    iterate(scheduler, 4)
    assert scored(scheduler, engine, prompt).logprobs == free.logprobs
    assert scheduler.snapshot().interruptions > 0
    run_to_end(scheduler)
    for number, inbox in enumerate(inboxes):
        assert inbox.answer == plain_answer(engine, [5 + number] * 300, max_new_tokens=40)
    with pytest.raises(TooLarge, match="send a shorter one"):
        scored(scheduler_of({"m": engine}, kv_bytes=alone // 2), engine, prompt)


def test_streams_go_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch):
    """On the model's thread, a compiler that waits for further tokens of a stream would see none."""
    engine = Engine(json_model())
    scheduler = scheduler_of({"m": engine})
    scheduler.start()
    _, stream = submit(scheduler, [3, 4], max_new_tokens=400)
    checked, steps = GrammarCompiler._checked, list[int]()

    def slowly(compiler: GrammarCompiler, grammar: Any) -> Any:
        before = len(stream.events)
        while len(stream.events) < before + 3 and not stream.ends:
            pass
        steps.append(len(stream.events) - before)
        return checked(compiler, grammar)

    monkeypatch.setattr(GrammarCompiler, "_checked", slowly)
    schemas = [{"type": "object", "properties": {f"key{n}": {"type": "boolean"}}} for n in range(3)]
    inboxes = [submit(scheduler, [5, 6], grammar=schema, ignore_eos=False)[1] for schema in schemas]
    assert [count >= 3 for count in steps] == [True] * 3
    for inbox in (stream, *inboxes):
        inbox.end.get(timeout=300)
    scheduler.close(drain_seconds=0)
