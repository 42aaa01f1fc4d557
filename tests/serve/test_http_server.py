"""The command in a process of its own: its start, its end by a signal, and its restart after a kill."""

import importlib
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from cli_world import slow_imports, write_model
from draftheads.cli import serve as command
from draftheads.cli.main import main
from draftheads.errors import InvalidSettings, MissingDependency
from draftheads.loading import load
from draftheads.serve.options import read_keys
from serve_process import ServerProcess, chat_body

LONG = {"max_tokens": 400, "n": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("serve"))


def test_a_kill_a_restart_and_a_graceful_end(folder: Path):
    expected = load(str(folder / "model"), precision="fp32").generate(["a dog"], max_new_tokens=400)[0].text
    arguments = (
        "model",
        "--head",
        "medusa",
        "--precision",
        "fp32",
        "--max-rows",
        "9",
        "--kv-gib",
        "0.5",
        "--allow-typical",
    )
    first = ServerProcess(folder, *arguments)
    assert [first.process.stdout.readline() for _ in range(2)][1] == "9 rows, 0.5 GiB for keys and values\n"
    port = first.client.base_url.port
    assert port is not None
    stream = first.stream("a dog", **LONG)
    next(stream)
    first.stop(signal.SIGKILL)
    stream.close()
    with ServerProcess(folder, *arguments, port=port) as second:  # the old one's connections hold nothing
        assert second.text("a dog", max_tokens=400) == expected
        assert second.chat("a dog", max_tokens=2, acceptance="typical")["usage"]["acceptance"] == "typical"
        texts = [""] * 8
        stream = second.stream("a dog", **LONG)
        next(stream)
        second.process.send_signal(signal.SIGTERM)
        with httpx2.Client(base_url=second.client.base_url) as other:
            assert other.get("/ready").status_code == 503
            refused = other.post("/v1/chat/completions", json=chat_body("a dog", n=0))  # the body is not looked at
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"] == "1"
        for index, piece in stream:
            texts[index] += piece
        assert texts == [expected] * 8
        assert second.process.wait(600) == 0
    lines = "".join(second.errors)
    assert "POST /v1/chat/completions 200" in lines
    assert "GET /ready" not in lines
    assert "a dog" not in lines
    assert expected[:20] not in lines


def test_a_signal_while_the_model_is_loaded_ends_the_process(folder: Path):
    """The port is open before; loading waits here in the model's own code."""
    slow = folder / "slow"
    slow.mkdir()
    (slow / "config.json").write_text('{"model_type": "slow", "auto_map": {"AutoConfig": "slow.SlowConfig"}}')
    (slow / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    command = [sys.executable, "-m", "draftheads", "serve", "slow", "--port", "0", "--trust-remote-code"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        address = line.split()[2].removesuffix("/ready")
        assert httpx2.get(address + "/health").status_code == 200
        refused = httpx2.get(address + "/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0


def test_a_model_that_cannot_be_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    monkeypatch.setattr(command, "_log_to_stderr", lambda: None)  # it would change the loggers of other tests
    monkeypatch.delenv("DRAFTHEADS_API_KEY", raising=False)
    assert main(["serve", str(tmp_path), "--port", "0", "--host", "0.0.0.0"]) == 1  # noqa: S104
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: http://0.0.0.0")
    assert last.startswith("error: ")


def test_a_port_that_is_taken_is_named_before_anything_slow_is_imported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = f'sys.stderr = sys.stdout; assert main(["serve", "owner/none", "--port", "{port}"]) == 1'
        shown = slow_imports(code, "fastapi", "uvicorn")
    assert f"--port {port}: cannot listen there" in shown
    assert shown.endswith("\n[]\n")


def test_a_missing_web_server_is_named(monkeypatch: pytest.MonkeyPatch):
    for name in ("draftheads.serve.app", "draftheads.cli.serve"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingDependency, match=r"pip install '\.\[serve\]'"):
        importlib.import_module("draftheads.cli.serve")


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path):
    (tmp_path / "keys").write_text("# ours\nfirst\n\nsecond\n", encoding="utf-8")
    assert read_keys(tmp_path / "keys", "third") == ("first", "second", "third")
    assert read_keys(None, "third") == ("third",)
    assert read_keys(None, None) == ()
    (tmp_path / "empty").write_text("# ours\n", encoding="utf-8")
    wrong = (
        (tmp_path / "empty", None, "has no key"),
        (tmp_path / "none", None, "cannot be read"),
        (None, "a b", "no space"),
    )
    for file, variable, named in wrong:
        with pytest.raises(InvalidSettings, match=named):
            read_keys(file, variable)
