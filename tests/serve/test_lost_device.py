"""An accelerator that fails for good, as after an assert on a GPU: clear errors, a failing /health, and the end."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import pytest
import torch

from cli_world import write_model
from draftheads.decode.batch import Batch
from draftheads.errors import DeviceLost
from draftheads.serve import scheduler as module
from draftheads.serve.guard import HttpLimits
from draftheads.utils.transfer import device_works
from scheduler_world import submit
from serve_process import ServerProcess, chat_body, wait_until
from serve_world import USER, Running, error_of, running, texts_of, tiny_engines

ASSERT = "CUDA error: device-side assert triggered"


@pytest.fixture
def server() -> Iterator[Running]:
    with running(tiny_engines(), max_rows=1) as one:
        yield one


def break_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step fails, and all after it."""
    steps, step = count(), Batch.step

    def failing(batch: Batch) -> Any:
        if next(steps) < 2:
            return step(batch)
        monkeypatch.setattr(module, "device_works", lambda _: False)
        raise RuntimeError(ASSERT)

    monkeypatch.setattr(Batch, "step", failing)


def test_requests_that_run_and_wait_get_a_clear_error(server: Running, monkeypatch: pytest.MonkeyPatch):
    break_device(monkeypatch)
    response = server.chat(n=3, max_tokens=500, ignore_eos=True)  # one of them runs
    error = error_of(response)
    assert (response.status_code, error["code"], error["type"]) == (503, "device_lost", "service_unavailable_error")
    assert error["message"] == "cpu of the server has failed: send the request again after its restart"
    assert server.service.lost is not None
    again = server.chat()
    assert (again.status_code, again.json()["error"]["code"]) == (503, "device_lost")
    assert int(again.headers["retry-after"]) > 0
    for path in ("/health", "/ready"):
        answer = httpx2.get(server.url + path)
        assert (answer.status_code, answer.json()) == (503, {"status": "failed"})
    assert httpx2.get(server.url + "/metrics").status_code == 200


def test_streams_end_with_the_error(server: Running, monkeypatch: pytest.MonkeyPatch):
    break_device(monkeypatch)
    *chunks, error, done, _ = server.chat(stream=True, max_tokens=500, ignore_eos=True).text.split("\n\n")
    assert len(chunks) > 2
    assert '"code":"device_lost"' in error
    assert done == "data: [DONE]"


def test_a_function_may_be_the_first_to_notice(server: Running, monkeypatch: pytest.MonkeyPatch):
    def failing() -> None:
        monkeypatch.setattr(module, "device_works", lambda _: False)
        raise RuntimeError(ASSERT)

    scheduler = server.scheduler
    with pytest.raises(RuntimeError, match="device-side assert"):
        scheduler.call(failing).result()
    wait_until(lambda: scheduler.lost is not None)
    with pytest.raises(DeviceLost, match="has failed"):
        scheduler.call(lambda: 5).result()
    with pytest.raises(DeviceLost, match="has failed"):
        submit(scheduler, [3, 4])


def test_a_device_works_unless_it_computes_nothing(monkeypatch: pytest.MonkeyPatch):
    device = torch.device("cpu")
    assert device_works(device)
    for error, works in ((RuntimeError(ASSERT), False), (torch.OutOfMemoryError("CUDA out of memory"), True)):

        def failing(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(torch, "ones", failing)
            assert device_works(device) is works


def test_health_fails_while_a_step_does_not_end(monkeypatch: pytest.MonkeyPatch):
    go, step = Event(), Batch.step
    monkeypatch.setattr(Batch, "step", lambda batch: (go.wait(), step(batch))[1])
    with running(tiny_engines(), HttpLimits(stalled_seconds=0.2)) as server, ThreadPoolExecutor(1) as pool:
        health = lambda: httpx2.get(server.url + "/health")  # noqa: E731
        assert health().status_code == 200
        asked = pool.submit(server.chat)
        try:
            wait_until(lambda: health().status_code == 503)
            assert health().json() == {"status": "stalled"}
        finally:
            go.set()
        assert texts_of(asked.result()) == [server.plain_answer([USER], max_new_tokens=12).text]
        assert health().status_code == 200


STUCK = """
import sys
from threading import Event
from draftheads.cli.main import main
from draftheads.decode.batch import Batch
from draftheads.serve import app, scheduler

Batch.step = lambda batch: print("a step", file=sys.stderr) or Event().wait()
app._DRAIN_SECONDS = scheduler._STEP_SECONDS = 0.2
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_ends_the_process_though_a_step_does_not_end(tmp_path: Path):
    with ServerProcess(write_model(tmp_path), "model", program=("-c", STUCK)) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.client.post, "/v1/chat/completions", json=chat_body("a dog"))
        wait_until(lambda: "a step\n" in server.errors)
        server.process.terminate()
        assert error_of(asked.result())["code"] == "shutdown"
        assert server.process.wait(60) == 0
    assert "stuck in a step" in "".join(server.errors)


PROGRAM = """
import sys
from draftheads.cli.main import main
from draftheads.decode.batch import Batch
from draftheads.serve import scheduler

def failing(batch):
    scheduler.device_works = lambda device: False
    raise RuntimeError("device-side assert")

Batch.step = failing
sys.exit(main(sys.argv[1:]))
"""


def test_the_process_ends_with_status_1(tmp_path: Path):
    with ServerProcess(write_model(tmp_path), "model", program=("-c", PROGRAM)) as server:
        response = server.client.post("/v1/chat/completions", json=chat_body("a dog"))
        assert error_of(response)["code"] == "device_lost"
        assert server.process.wait(300) == 1
        wait_until(lambda: any(line.startswith("error: cpu of the server has failed") for line in server.errors))
    assert "device-side assert" in "".join(server.errors)
