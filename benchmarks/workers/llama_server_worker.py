"""Worker: the program llama-server of llama.cpp, plain or with an exported head."""

import atexit
import json
import socket
import subprocess
import sys
import time
from typing import Any
from urllib.request import Request, urlopen

from worker import Answers, Generate, Ids, serve


def load(settings: dict[str, Any]) -> Generate:
    """Settings: the program ``server``, its ``arguments``, ``precision``, ``threads``."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    threads = str(settings["threads"])
    more = ["-t", threads, "-tb", threads, "-c", "4096", "-np", "1", "--host", "127.0.0.1", "--port", str(port)]
    if settings["precision"] == "fp32":
        more += ["-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
    command = [settings["server"], *settings["arguments"], *more]
    server = subprocess.Popen(command, stdout=sys.stderr)  # noqa: S603 - the program that was named
    atexit.register(server.kill)
    url = f"http://127.0.0.1:{port}"
    while True:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {server.returncode}")
        try:
            urlopen(f"{url}/health", timeout=5).close()  # noqa: S310 - of this machine
            break
        except OSError:
            time.sleep(0.2)

    def generate(prompts: list[Ids], max_new_tokens: int) -> Answers:
        answers, steps = [], 0
        for ids in prompts:
            wish = {"prompt": ids, "n_predict": max_new_tokens, "temperature": 0.0}
            wish |= {"cache_prompt": False, "return_tokens": True}
            headers = {"Content-Type": "application/json"}
            request = Request(f"{url}/completion", json.dumps(wish).encode(), headers)  # noqa: S310 - of this machine
            with urlopen(request, timeout=600) as response:  # noqa: S310
                found = json.load(response)
            answers.append(found["tokens"])
            steps += len(answers[-1]) - 1 - found["timings"].get("draft_n_accepted", 0)  # the first is the prompt's
        return Answers(answers, steps)

    return generate


if __name__ == "__main__":
    serve(load, ())
