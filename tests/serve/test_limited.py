"""Requests that would never end: they do, and hold up neither others nor the end of the server."""

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftheads.serve.guard import HttpLimits
from serve_process import ServerProcess, wait_until
from serve_world import NAME, PLAIN, USER, Running, check_wrong, error_of, raw_request, running, tiny_engines

PRIMES = {"allOf": [{"multipleOf": prime} for prime in (1009, 1013, 1019, 1021)]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": PRIMES}}}}
LOOPS = "{% for a in range(spin or 0) %}{% for b in range(spin) %}{% endfor %}{% endfor %}"


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


ENDLESS: dict[str, dict[str, Any]] = {  # by the field that is wrong
    "messages": {"chat_template_kwargs": {"spin": 100_000}},
    "response_format": form(PRIMES),
    "tools": {"tools": [TOOL], "tool_choice": "required"},
}
OTHERS: list[psutil.Process] = []  # of the server that all tests share


def trials(pid: int | None = None) -> list[psutil.Process]:
    """The process that waits for grammars, and those that it forked."""
    found = [each for each in psutil.Process(pid).children(recursive=True) if "limited.py" in " ".join(each.cmdline())]
    return [each for each in found if each not in OTHERS]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    OTHERS[:] = trials()
    engines = tiny_engines(LOOPS + str(tiny_engines()[NAME].model.chat_template))
    with running(engines, HttpLimits(schema_seconds=0.5)) as server:
        yield server
    assert trials() == []


@pytest.mark.parametrize("field", ENDLESS)
def test_what_does_not_end_is_refused_and_ended(server: Running, field: str):
    for _ in range(2):
        response = server.chat(**ENDLESS[field])
        check_wrong(response, field)
        assert "0.5 s (--schema-seconds)" in error_of(response)["message"]
    assert server.chat().status_code == 200
    wait_until(lambda: len(trials()) <= 1 and not any("(run)" in each.name for each in threading.enumerate()))


def test_a_process_of_trials_that_was_killed_is_started_again(server: Running):
    for number in range(2):
        response = server.chat(**form({"anyOf": [{"enum": [f"value {number}"]}]}), max_tokens=40)
        assert response.json()["choices"][0]["message"]["content"] == f'"value {number}"'
        [waiting] = trials()
        waiting.kill()
        waiting.wait()


def test_a_wrong_schema_that_was_tried_names_its_field(server: Running):
    check_wrong(server.chat(**form({"anyOf": [{"type": "strin"}]})), "response_format")


def test_others_are_answered_beside_it_and_nothing_holds_up_the_end(tmp_path: Path):
    """Without a limit: a client that goes ends its trial, and a signal ends the server."""
    model = tiny_engines()[PLAIN].model
    model.model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "loops.jinja").write_text(LOOPS + str(model.chat_template), encoding="utf-8")
    options = ("--chat-template", "loops.jinja", "--schema-seconds", "36000", "--precision", "fp32")
    with ServerProcess(tmp_path, "model", *options) as server:
        base, pid = server.client.base_url, server.process.pid
        clients = {}
        for number, (field, fields) in enumerate(ENDLESS.items()):  # clients are told apart by their addresses
            place = (f"127.0.0.{number + 2}", 0)
            clients[field] = socket.create_connection((base.host, base.port), source_address=place)
            body = {"model": "model", "messages": [USER], **fields}
            clients[field].sendall(raw_request("chat/completions", body))
        wait_until(lambda: len(trials(pid)) == 3)
        assert len(server.text("the cat", max_tokens=4)) > 0
        clients["tools"].close()
        wait_until(lambda: len(trials(pid)) == 2)
        left = trials(pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert psutil.wait_procs(left, timeout=60)[1] == []
        for client in clients.values():
            client.close()
