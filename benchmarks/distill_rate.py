"""What a second server brings ``distill --endpoint``: answers per second of one and of two, in turn.

Each server is a process with as many places as requests at once. It has no model: an answer takes a random time, as
answers of different lengths do, so what is measured is how full the places are.
"""

import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import tyro
import uvicorn
from fastapi import FastAPI
from harness import machine, print_setting, shown, table_of, write_record

from draftheads.distill.endpoint import EndpointSource
from draftheads.distill.options import DistillOptions
from draftheads.distill.run import distill
from draftheads.utils.progress import NoProgress

_TOKENS = 100  # of an answer, as the server says


@dataclass(frozen=True)
class Options:
    """What is measured."""

    prompts: int = 1000
    """Prompts of a run."""
    batch_size: int = 16
    """Requests at the same time at each server."""
    seconds: float = 0.5
    """What an answer takes, on average; each a random time between none and twice that."""
    rounds: int = 3
    """Runs with one server and with two."""
    json: Path | None = None
    """Write everything there."""


def serve(seconds: float, places: int) -> None:
    """Answers until it is killed; prints its address first."""
    app, free = FastAPI(), asyncio.Semaphore(places)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "none"}]}

    @app.post("/v1/chat/completions")
    async def complete(fields: dict[str, Any]) -> dict[str, Any]:
        async with free:
            await asyncio.sleep(random.Random(fields["seed"]).uniform(0, 2 * seconds))  # noqa: S311 - no secret
        message = {"role": "assistant", "content": "words"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"completion_tokens": _TOKENS}}

    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])


def rate(urls: tuple[str, ...], options: Options) -> tuple[float, float]:
    """Answers per second of a whole run, and what share of its time this process computed."""
    with TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        prompts.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(options.prompts)))
        files: dict[str, Any] = {"out": Path(folder, "out.jsonl"), "prompts": (prompts,)}
        chosen = DistillOptions(**files, endpoint=urls, model="none", batch_size=options.batch_size)
        begun, computed = time.perf_counter(), time.process_time()
        distill(chosen, lambda: EndpointSource(chosen), NoProgress())
        seconds = time.perf_counter() - begun
        return options.prompts / seconds, (time.process_time() - computed) / seconds


def main(options: Options) -> None:
    """Prints the table."""
    command = [sys.executable, __file__, "child", json.dumps([options.seconds, options.batch_size])]
    facts = machine(torch.get_num_threads())
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))  # noqa: S603 - this file
            for _ in range(2)
        ]
        for server in servers:
            stack.callback(server.kill)
        urls = tuple(str(server.stdout and server.stdout.readline().strip()) for server in servers)
        rate(urls, options)  # to warm up
        for _ in range(options.rounds):
            for count, rates in found.items():
                rates.append(rate(urls[:count], options))
    full = options.batch_size / options.seconds
    console = print_setting(facts, f"{options.prompts} prompts, {options.batch_size} requests at once at each server")
    table = table_of("servers", "answers/s", "most possible", "share of one", "processor time, %")
    for count, rates in found.items():
        ratios = [this[0] / one[0] for this, one in zip(rates, found[1], strict=True)]
        busy = shown([100 * share for _, share in rates], 0)
        table.add_row(str(count), shown([each for each, _ in rates]), f"{count * full:.1f}", shown(ratios, 2), busy)
    console.print(table)
    names = ("prompts", "batch_size", "seconds", "rounds")
    write_record(options.json, facts, options, names, rates={str(count): rates for count, rates in found.items()})


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        serve(*json.loads(sys.argv[2]))
    else:
        main(tyro.cli(Options, prog="benchmarks/distill_rate.py"))
