"""Many threads submit and cancel jobs on a running scheduler: nothing is lost, mixed up or left behind."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from draftheads.decode.engine import Engine
from draftheads.errors import QueueFull
from draftheads.serve.scheduler import Job, Lane
from families import TREES, tiny_head, tiny_model
from scheduler_world import Inbox, check_empty, plain_answer, scheduler_of, submit

THREADS, JOBS = 8, 50
LANES = [Lane("m"), Lane("m:eagle"), Lane("m", 0), Lane("m", 6)]
SYSTEM = [3 + n * n % 20 for n in range(30)]


def test_jobs_of_many_threads_get_their_answers():
    model = tiny_model("llama")
    engines = {
        "m": Engine(model, tiny_head("hydra", model), shape=TREES["chain"]),
        "m:eagle": Engine(model, tiny_head("eagle", model), shape=TREES["ragged"]),
    }
    prompts = [[*SYSTEM[: 30 * (n % 2)], 3 + n, 5] for n in range(10)]
    expected = {
        (place, length): plain_answer(engines["m"], prompts[place], max_new_tokens=length, temperature=0.7, seed=3)
        for place, length in product(range(10), (1, 6, 20))
    }
    before = set(threading.enumerate())
    scheduler = scheduler_of(engines, max_rows=6, max_waiting=10, chunk_tokens=20)
    scheduler.start()
    done: list[tuple[int, int, Inbox]] = []
    cancelled: list[tuple[Job, Inbox, int]] = []

    def client(number: int) -> None:
        dice = random.Random(number)  # noqa: S311
        for _ in range(number, JOBS, THREADS):
            place, length = dice.randrange(10), dice.choice((1, 6, 20))
            options = {"max_new_tokens": length, "temperature": 0.7, "seed": 3}
            while True:
                try:
                    job, inbox = submit(
                        scheduler, prompts[place], dice.choice(LANES), client=str(number % 3), **options
                    )
                    break
                except QueueFull:
                    time.sleep(0.002)
            if dice.random() < 0.4:
                time.sleep(dice.random() * 0.02)
                scheduler.cancel(job)
                cancelled.append((job, inbox, len(inbox.events)))
            else:
                inbox.end.get(timeout=600)
                done.append((place, length, inbox))
            assert scheduler.snapshot().waiting <= 10

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(client, number) for number in range(THREADS)]:
            future.result(timeout=600)
    scheduler.call(lambda: None).result(timeout=600)
    scheduler.call(lambda: None).result(timeout=600)  # the iteration of the first one is over
    check_empty(scheduler)
    found = scheduler.snapshot()
    scheduler.close(drain_seconds=5)
    assert len(done) + len(cancelled) == JOBS
    for place, length, inbox in done:
        assert inbox.answer == expected[place, length]
    for _, inbox, count in cancelled:
        assert len(inbox.events) == count, "no event comes after cancel()"
    ended_before = sum(bool(inbox.ends) for _, inbox, _ in cancelled)
    assert (found.finished, found.cancelled) == (len(done) + ended_before, len(cancelled) - ended_before)
    assert found.failed == 0
    assert found.prefix_bytes > 0
    assert scheduler.snapshot().prefix_bytes == 0
    assert set(threading.enumerate()) == before
