"""Worker: the program llama-server of llama.cpp, plain or with an exported head; runs with this checkout's Python."""

import atexit
import json
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from worker import Answers, Generate, Ids, serve

sys.path.append(str(Path(__file__).parents[1]))

from harness import ServerProcess  # of the folder above


def load(settings: dict[str, Any]) -> Generate:
    """Settings: the program ``server``, its ``arguments``, ``precision``, ``threads``, ``log``."""
    threads = str(settings["threads"])
    command = [settings["server"], *settings["arguments"], "-t", threads, "-tb", threads, "-c", "4096", "-np", "1"]
    if settings["precision"] == "fp32":
        command += ["-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
    server = ServerProcess(command, threads=settings["threads"], log=Path(settings["log"]), timeout=600.0)
    atexit.register(server.stop)

    def generate(prompts: list[Ids], max_new_tokens: int) -> Answers:
        answers, steps = [], 0
        for ids in prompts:
            wish = {"prompt": ids, "n_predict": max_new_tokens, "temperature": 0.0}
            wish |= {"cache_prompt": False, "return_tokens": True}
            headers = {"Content-Type": "application/json"}
            request = Request(f"{server.url}/completion", json.dumps(wish).encode(), headers)  # noqa: S310 - local
            with urlopen(request, timeout=600) as response:  # noqa: S310
                found = json.load(response)
            answers.append(found["tokens"])
            steps += len(answers[-1]) - 1 - found["timings"].get("draft_n_accepted", 0)  # the first is the prompt's
        return Answers(answers, steps)

    return generate


if __name__ == "__main__":
    serve(load, ())
