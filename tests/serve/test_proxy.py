"""The example of a reverse proxy: no client that never finishes its request, and no dead server, keeps others out."""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest

from serve_process import wait_until
from serve_world import NAME, USER, Running

EXAMPLE = Path(__file__).parents[2] / "examples" / "nginx.conf"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")


@pytest.fixture
def proxy(server: Running, tmp_path: Path) -> Iterator[int]:
    """The port of nginx with the example's configuration, but for ports, folders and a second server that is dead."""
    if NGINX is None:
        pytest.skip("there is no nginx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    text = EXAMPLE.read_text().replace("listen 8080;", f"listen 127.0.0.1:{port};")
    (line,) = re.findall(r"^ +server 127.0.0.1:8000 .*;", text, re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        ports = server.address[1], closed.getsockname()[1]
    text = text.replace(line, "".join(line.replace("8000", str(each)) for each in ports))
    text = text.replace("max_fails=1", "max_fails=0")  # it is asked again and again
    folders = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in ("client_body", "proxy"))
    text = text.replace("http {\n", f"http {{\naccess_log off;\n{folders}")
    config = tmp_path / "nginx.conf"
    config.write_text(f"pid {tmp_path}/pid;\nerror_log {tmp_path}/errors;\ndaemon off;\n{text}")
    command = [NGINX, "-c", str(config), "-e", str(tmp_path / "errors")]
    with subprocess.Popen(command) as process:

        def answers() -> bool:
            with suppress(httpx2.TransportError):
                return httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200
            return False

        try:
            wait_until(answers)
            yield port
        finally:
            process.terminate()


def test_600_slow_clients_keep_nobody_out(server: Running, proxy: int) -> None:
    expected = server.plain_answer([USER], max_new_tokens=200, ignore_eos=True).text
    start = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
    with ExitStack() as stack:
        for number in range(600):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", proxy), timeout=60))
            client.sendall(start + (b"\r\n{" if number % 2 else b"X: "))  # no whole body, no whole headers
        asked = {"model": NAME, "messages": [USER], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        url = f"http://127.0.0.1:{proxy}/v1/chat/completions"
        whole = httpx2.post(url, json=asked, timeout=600)
        assert whole.json()["choices"][0]["message"]["content"] == expected
        with httpx2.stream("POST", url, json={**asked, "stream": True}, timeout=600) as stream:
            pieces = [piece for piece in stream.iter_raw() if piece]
        assert len(pieces) > 10, "a stream is sent on as it comes"
        assert len(server.server.server_state.connections) < 10


def test_sessions_of_a_dead_server_are_answered_by_the_other(proxy: int) -> None:
    """Of twelve sessions, all of them at the living server has a chance of 1 in 4,096."""
    asked = {"model": NAME, "messages": [USER], "max_tokens": 4}
    url = f"http://127.0.0.1:{proxy}/v1/chat/completions"
    sessions = [{"X-Session-Id": str(number)} for number in range(12)]
    answers = [httpx2.post(url, json=asked, headers=session, timeout=600) for session in sessions]
    assert [answer.status_code for answer in answers] == [200] * 12
