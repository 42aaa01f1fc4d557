"""How long streams pause while requests with new JSON schemas arrive, with a vocabulary of 262,144 tokens.

A real server on loopback, with a tiny random model. Prints the longest gap between two chunks of any stream, without
and with the schemas, and as the last line one JSON object.
"""

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import Request, urlopen

import torch
import tyro
from harness import ServerProcess, machine
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Options:
    """How much is asked."""

    streams: int = 8
    """Streams beside the schemas."""
    schemas: int = 20
    """Requests with a new schema each, in one burst."""
    vocab_size: int = 262_144
    """Tokens of the model."""


def tokenizer_of(vocab_size: int) -> PreTrainedTokenizerFast:
    """As Gemma's: byte fallback, and spaces that are part of words."""
    random = Random(0)  # noqa: S311
    special = ["<pad>", "<eos>", "<unk>"]
    letters = [*map(chr, range(33, 127)), "▁"]
    words, merges = list(letters), []
    vocabulary = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    ids = {token: number for number, token in enumerate(vocabulary)}
    while len(ids) < vocab_size:
        parts = random.choice(words), random.choice(random.choice([letters, words]))
        word = "".join(parts)
        if len(word) <= 12 and word not in ids:
            ids[word] = len(ids)
            merges.append(parts)
            words.append(word)
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))  # noqa: S106
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")  # noqa: S106


def write_model(folder: Path, vocab_size: int) -> None:
    """A model with a step of a few milliseconds."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(**sizes, vocab_size=vocab_size, eos_token_id=1, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer_of(vocab_size).save_pretrained(folder)


def post(address: str, **fields: Any) -> Any:
    """The response to a completion, which may be a stream."""
    body = json.dumps({"model": "tiny", "temperature": 0, **fields}).encode()
    request = Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})  # noqa: S310
    return urlopen(request, timeout=600)  # noqa: S310


def longest_gap(address: str, num_streams: int, beside: Callable[[], float]) -> tuple[float, float]:
    """The longest gap in any stream while a function runs, and what it returns."""
    last, longest, is_over = [0.0] * num_streams, [0.0] * num_streams, threading.Event()
    have_begun = [threading.Event() for _ in last]

    def stream(number: int) -> None:
        with post(
            address, prompt=f"Text {number}.", stream=True, max_tokens=2000, ignore_eos=True, seed=number
        ) as response:
            for line in response:
                if is_over.is_set():
                    return
                if line.startswith(b"data"):
                    now = time.perf_counter()
                    if have_begun[number].is_set():
                        longest[number] = max(longest[number], now - last[number])
                    last[number] = now
                    have_begun[number].set()

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(num_streams)]
    for thread in threads:
        thread.start()
    for event in have_begun:
        event.wait()
    time.sleep(1)
    longest[:] = [0.0] * num_streams
    result = beside()
    ends = time.perf_counter()
    is_over.set()
    for thread in threads:
        thread.join()
    return max(*longest, *(ends - when for when in last)), result


def schemas_at_once(address: str, count: int) -> float:
    """Seconds until all answers are there."""
    start = time.perf_counter()

    def ask(number: int) -> None:
        kinds: list[dict[str, Any]] = [
            {"type": "string", "maxLength": 3},
            {"type": "integer", "minimum": 0, "maximum": 9},
        ]
        fields = {f"field_{number}_{each}": kinds[each % 2] for each in range(2)}
        schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        with post(address, prompt=f"JSON {number}:", max_tokens=200, response_format=form) as response:
            json.loads(json.load(response)["choices"][0]["text"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def pause(seconds: float) -> float:
    """Nothing, for so long."""
    time.sleep(seconds)
    return seconds


def main(options: Options) -> None:
    """Starts the server, and measures twice."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        write_model(folder, options.vocab_size)
        command: list[str | Path] = [sys.executable, "-m", "draftheads", "serve", folder, "--max-rows", "32"]
        start, log = time.perf_counter(), Path(name) / "log"
        server = ServerProcess(command, threads=torch.get_num_threads(), log=log, timeout=600)
        try:
            loaded, seconds = time.perf_counter() - start, 0.0

            def burst() -> float:
                return schemas_at_once(server.url, options.schemas)

            with_schemas, seconds = longest_gap(server.url, options.streams, burst)
            without, _ = longest_gap(server.url, options.streams, partial(pause, seconds))
        finally:
            server.stop()
    gaps = f"{without:.2f} s alone, {with_schemas:.2f} s beside {options.schemas} new schemas"
    print(f"longest gap of {options.streams} streams: {gaps}")
    record = {"loaded": loaded, "without": without, "with_schemas": with_schemas, "seconds": seconds}
    print(json.dumps({**vars(options), **record, "machine": machine(torch.get_num_threads())}))


if __name__ == "__main__":
    main(tyro.cli(Options))
