"""The commands of docs/serve/, and the client in examples/, run against a server on the loopback address."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_process import ServerProcess

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
PAGES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "serve").glob("*.md")))
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGES, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of the first page, on a free port."""
    folder = tmp_path_factory.mktemp("serve")
    (words,) = re.findall(r"^\$ draftheads serve (smollm2-135m --head hydra)$", PAGES, re.MULTILINE)
    with ServerProcess(folder, *words.split(), "--record", str(folder / "traffic")) as server:
        yield str(server.client.base_url).rstrip("/")
    assert server.process.returncode == 0, server.errors


def run(block: str, server: str) -> str:
    """What a block of commands prints, at the test's server."""
    assert "http://127.0.0.1:8000" in block
    script = block.replace("http://127.0.0.1:8000", server).replace(
        "curl ", "curl --silent --show-error --fail-with-body "
    )
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_block_of_the_pages_succeeds(number: int, server: str):
    assert run(BLOCKS[number], server).strip()


def test_the_first_answer_has_text_and_counts_drafts(server: str):
    (block,) = [block for block in BLOCKS if "Why is the sky blue?" in block and "/v1/chat" in block]
    answer = json.loads(run(block, server))
    assert answer["choices"][0]["message"]["content"]
    assert sum(answer["usage"]["draft"]["drafted_by_depth"]) > 0


def test_the_stream_ends_with_usage(server: str):
    (block,) = [block for block in BLOCKS if '"stream": true' in block]
    events = [line.removeprefix("data: ") for line in run(block, server).splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] > 0


def test_the_structured_answer_is_of_the_schema(server: str):
    (block,) = [block for block in BLOCKS if "json_schema" in block]
    choice = json.loads(run(block, server))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) == {"city", "people"}


def test_the_client_prints_an_answer_and_its_draft_tokens(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["serve_client.py", "--url", f"{server}/v1", "--max-tokens", "24"])
    runpy.run_path(str(ROOT / "examples" / "serve_client.py"), run_name="__main__")
    answer, counts, stream, _ = capsys.readouterr().out.rsplit("\n", 3)
    assert "accepted_by_depth" in counts
    assert "[" in stream
    assert re.sub(r"\[(.*?)\]", r"\1", stream, flags=re.DOTALL).splitlines()[-1] in answer


def test_the_metrics_that_the_pages_name_are_there(server: str):
    text = run("curl http://127.0.0.1:8000/metrics\n", server)
    named = re.findall(r"`(draftheads_\w+)`", PAGES)
    assert len(named) >= 5
    assert [name for name in named if f"\n{name}" not in text] == []
