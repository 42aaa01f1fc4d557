"""Requests that would never end: they do, and hold up neither others nor the end of the server."""

import os
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest

from draftheads.decode.engine import Engine
from draftheads.decode.grammar import in_llguidance
from draftheads.models.chat_template import BUILT_IN, read_template, render
from draftheads.serve import limited as module
from draftheads.serve.guard import HttpLimits
from draftheads.serve.limited import OverLimit, Trials, result_of
from draftheads.settings import Grammar
from serve_process import ServerProcess, wait_until
from serve_world import NAME, PLAIN, USER, Running, check_wrong, error_of, raw_request, running, tiny_engines

if TYPE_CHECKING:
    from draftheads.decode.grammar import GrammarCompiler

PRIMES = {"allOf": [{"multipleOf": prime} for prime in (1009, 1013, 1019, 1021)]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": PRIMES}}}}
LOOPS = (
    "{% for a in range(spin or 0) %}{% for b in range(spin) %}{% endfor %}{% endfor %}"
    "{% set own = namespace(text='a') %}"
    "{% for a in range(grow or 0) %}{% set own.text = own.text ~ own.text %}{% endfor %}"
)


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


ENDLESS: dict[str, dict[str, Any]] = {  # by the field that is wrong
    "messages": {"chat_template_kwargs": {"spin": 100_000}},
    "response_format": form(PRIMES),
    "tools": {"tools": [TOOL], "tool_choice": "required"},
}
OTHERS: list[psutil.Process] = []  # of the server that all tests share


def trials(pid: int | None = None) -> list[psutil.Process]:
    """The processes that wait for jobs, and those that they forked."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends now
            found += [each] if each not in OTHERS and "limited.py" in " ".join(each.cmdline()) else []
    return found


def busy(pid: int | None = None) -> set[psutil.Process]:
    """Those that do a slow job: the first try of a chat template takes 0.1 s at most."""
    found = set()
    for each in trials(pid):
        with suppress(psutil.NoSuchProcess):
            is_host = each.ppid() == (pid or os.getpid())
            if not is_host and each.status() == psutil.STATUS_RUNNING and each.cpu_times().user > 0.2:
                found.add(each)
    return found


def looping_engines() -> dict[str, Engine]:
    return tiny_engines(LOOPS + str(tiny_engines()[NAME].model.chat_template))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    OTHERS[:] = trials()
    with running(looping_engines(), HttpLimits(schema_seconds=0.5)) as server:
        yield server
    assert trials() == []


@pytest.mark.parametrize("field", ENDLESS)
def test_what_does_not_end_is_refused_and_ended(server: Running, field: str):
    for _ in range(2):
        response = server.chat(**ENDLESS[field])
        check_wrong(response, field)
        assert "0.5 s (--schema-seconds)" in error_of(response)["message"]
    assert server.chat().status_code == 200
    wait_until(lambda: not busy())


def test_what_takes_memory_is_refused_and_ended():
    """A chat template that doubles a text again and again."""
    with running(looping_engines(), HttpLimits(schema_seconds=3600)) as server:
        response = server.chat(chat_template_kwargs={"grow": 99})
        check_wrong(response, "messages")
        assert "takes more than 1 GiB of memory for" in error_of(response)["message"]
        assert server.chat(chat_template_kwargs={"grow": 9}).status_code == 200


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_text_is_that_of_transformers(name: str):
    """Also the tokens of the tokenizer, tools, dates, and errors."""
    more = "{{ bos_token }}{{ tools | tojson(indent=1) }}{{ strftime_now('%Y') }}{{ style }}"
    more += "{% generation %}é<{% endgeneration %}"
    [model, *_] = [engine.model for engine in tiny_engines(more + str(read_template(name))).values()]
    chat = [USER, {"role": "assistant", "content": "a <b> & \ud800 "}]
    ways: list[dict[str, Any]] = [
        {"add_generation_prompt": True, "tools": [TOOL], "variables": {"style": {"a": [1, 2.5, None]}}},
        {"continue_final_message": True, "variables": {"bos_token": "<s>"}},
        {"variables": {"conversations": []}},
        {"variables": {"style": 10**4000}},
    ]
    trials = Trials()

    def run(call: dict[str, Any]) -> str:
        text, problem = trials.rendered(call, 3600)
        if text is None:
            raise ValueError(problem)
        return str(text)

    for way in ways:
        found = []
        for how in (None, run):
            try:
                found.append(render(model, chat, **way, run=how))
            except Exception as error:  # noqa: BLE001 - of a template
                found.append(type(error) is TypeError or str(error))
        assert found[0] == found[1]
    trials.close()


def test_processes_that_were_killed_are_started_again(server: Running):
    for number in range(2):
        response = server.chat(**form({"anyOf": [{"enum": [f"value {number}"]}]}), max_tokens=40)
        assert response.json()["choices"][0]["message"]["content"] == f'"value {number}"'
        killed = trials()
        for each in killed:
            each.kill()
        psutil.wait_procs(killed)
        assert server.chat().status_code == 200  # also where a process had waited for it


def test_a_wrong_schema_that_was_tried_names_its_field(server: Running):
    check_wrong(server.chat(**form({"anyOf": [{"type": "strin"}]})), "response_format")


IMPATIENT = """
import sys
from draftheads.cli.main import main
from draftheads.serve import app, limited

app._DRAIN_SECONDS = app._LAST_BYTES_SECONDS = 0.2
limited.TRIAL_BYTES = 1 << 40
sys.exit(main(sys.argv[1:]))
"""


def computes(pid: int, number: int) -> bool:
    return len(busy(pid)) == number


def one_ended(processes: Iterable[psutil.Process]) -> bool:
    return not all(each.is_running() for each in processes)


def test_others_are_answered_beside_it_and_nothing_holds_up_the_end(tmp_path: Path):
    """Without a limit: a client that goes ends its trial, and a signal ends the server."""
    model = tiny_engines()[PLAIN].model
    model.model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "loops.jinja").write_text(LOOPS + str(model.chat_template), encoding="utf-8")
    options = ("--chat-template", "loops.jinja", "--schema-seconds", "36000", "--precision", "fp32")
    with ServerProcess(tmp_path, "model", *options, program=("-c", IMPATIENT)) as server:
        base, pid = server.client.base_url, server.process.pid
        clients = {}
        for number, field in enumerate(("tools", "messages", "response_format")):
            place = (f"127.0.0.{number + 2}", 0)  # clients are told apart by their addresses
            clients[field] = socket.create_connection((base.host, base.port), source_address=place)
            body = {"model": "model", "messages": [USER], **ENDLESS[field]}
            clients[field].sendall(raw_request("chat/completions", body))
            wait_until(partial(computes, pid, min(number + 1, 2)))  # two of them at once
            assert len(server.text("the cat", max_tokens=4)) > 0
        for field, left in (("tools", 2), ("messages", 1)):
            before = busy(pid)
            assert len(before) == 2
            clients[field].close()
            wait_until(partial(one_ended, before))
            wait_until(partial(computes, pid, left))
        left = trials(pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert psutil.wait_procs(left, timeout=60)[1] == []
        clients["response_format"].close()


class Unlimited:
    """A compiler of grammars whose limits are none."""

    def __init__(self) -> None:
        *tokens, limits = tiny_engines()[PLAIN].grammars.parts
        self.parts = (*tokens, {**dict.fromkeys(limits, 2**62), "verbose_errors": False})


def test_masks_are_tried_too(monkeypatch: pytest.MonkeyPatch):
    """This grammar compiles at once, and its first mask takes gigabytes."""
    monkeypatch.setattr(module, "TRIAL_BYTES", 200 << 20)
    trials, compiler = Trials(), cast("GrammarCompiler", Unlimited())
    try:
        with trials.connect(compiler) as connection, pytest.raises(OverLimit, match="GiB of memory"):
            result_of(connection, in_llguidance(Grammar.regex("(a{3000}b){3000}")), 3600)
    finally:
        trials.close()


BROKEN = {
    "raise ImportError('not here')": "ImportError: not here",
    "LLMatcher = lambda *_, **__: ctypes.string_at(0)": "Fatal Python error: Segmentation fault",
    "LLMatcher = lambda *_, **__: os.kill(os.getpid(), 9)": "its process was killed",
    "LLMatcher = lambda *_, **__: {}['a']": "KeyError: 'a'",
}
STUB = """
import ctypes, os, types
LLTokenizer = TokenizerWrapper = LLParserLimits = lambda *_, **__: types.SimpleNamespace(greedy_tokenize=None)
"""


@pytest.mark.parametrize("library", BROKEN)
def test_what_fails_for_another_reason_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str):
    """The llguidance of the process is broken."""
    (tmp_path / "llguidance.py").write_text(STUB + library, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running(tiny_engines()) as server:
        for _ in range(2):
            response = server.chat(**form({"anyOf": [{"enum": ["a"]}]}))
            assert (response.status_code, error_of(response)["code"]) == (500, "trial_failed")
            problem = f"the process that reads response_format failed: {BROKEN[library]}"
            assert error_of(response)["message"] == problem
        assert server.chat().status_code == 200
