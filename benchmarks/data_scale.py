"""How fast training reads many chats, and in how much memory: tokenized, in arrays, and in batches.

    python benchmarks/data_scale.py --tokens 10000000

Chats are made of the words of our own prompts. The same chats are read in turn by all cores into mapped arrays, as
training does, then from these arrays, and with --lists by one process into lists. Seconds are of the wall and of all
processors together: on a busy machine only the latter can be compared. Memory is sampled: of each process what is
resident, and of all together what they have in proportion (PSS), which counts shared pages once. No weights are read.
"""

import argparse
import json
import random
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from draftheads.data.features import LiveStore
from draftheads.data.records import own_prompts, read_prompts
from draftheads.data.texts import load_texts
from draftheads.models.pretrained import load_tokenizer
from draftheads.train.options import TrainOptions
from draftheads.train.training_data import plan_training, read_texts
from draftheads.utils.provenance import provenance

TOKENS_PER_WORD = 1.4  # of these words, about
MB = 2**20


def write_chats(path: Path, num_tokens: int) -> None:
    """Chats of one to three turns, with short and long answers."""
    rng, num_words = random.Random(0), 0  # noqa: S311 - nothing secret
    texts = (text for record in read_prompts(own_prompts("tasks")) for text in record.user_turns)
    words = [word for text in texts for word in text.split()]
    with path.open("w", encoding="utf-8") as file:
        while num_words * TOKENS_PER_WORD < num_tokens:
            messages = []
            for turn in range(2 * rng.randint(1, 3)):
                said = rng.choices(words, k=rng.randint(5, 60) if turn % 2 == 0 else rng.randint(20, 300))
                messages.append({"role": ("user", "assistant")[turn % 2], "content": " ".join(said)})
                num_words += len(said)
            file.write(json.dumps({"messages": messages}) + "\n")


class Peaks:
    """The most bytes of any process, and of all together, of this process and its children."""

    def __init__(self) -> None:
        self.each = self.together = 0

    def sample(self) -> None:
        """Compares with what is in memory now."""
        this, together = psutil.Process(), 0
        for process in (this, *this.children()):
            try:
                found = process.memory_full_info()
            except psutil.Error:  # it ended
                continue
            self.each, together = max(self.each, found.rss), together + getattr(found, "pss", found.uss)
        self.together = max(self.together, together)


@contextmanager
def sampled() -> Iterator[Peaks]:
    """Samples the memory every second: this takes processor time, too."""
    peaks, ended = Peaks(), threading.Event()

    def run() -> None:
        while not ended.wait(1):
            peaks.sample()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


def processor_seconds() -> float:
    """Of this process and of its children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measured(name: str, read: Callable[[], Any], target: Any, options: TrainOptions) -> dict[str, Any]:
    """Reads all texts, and plans all batches."""
    wall, used = time.perf_counter(), processor_seconds()
    with sampled() as peaks:
        store = LiveStore(target, read())
        data = plan_training(store, options)
        num_tokens = sum(data.tokens_per_step) // options.epochs
    wall, used = time.perf_counter() - wall, processor_seconds() - used
    found = {
        "tokens": int(store.texts.starts[-1]),
        "texts": len(store),
        "planned_tokens": num_tokens,
        "tokens_per_second": round(num_tokens / wall),
        "tokens_per_processor_second": round(num_tokens / used),
        "seconds": round(wall, 1),
        "processor_seconds": round(used, 1),
        "peak_mb_each": peaks.each // MB,
        "peak_mb_together": peaks.together // MB,
        "fingerprint": store.fingerprint,
    }
    print(f"{name:10}", *(f"{key} {value:,}" for key, value in found.items() if key != "fingerprint"), sep="  ")
    return found


def main() -> None:
    """Prints a line for each way, and a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer")
    parser.add_argument("--lists", action="store_true", help="also by one process into lists")
    chosen = parser.parse_args()
    reader = load_tokenizer(chosen.model)
    facts = {"vocab_size": len(reader.tokenizer), "dtype": torch.float32, "weights_fingerprint": ""}
    names = ("tokenizer", "eos_ids", "chat_template", "max_positions", "model_id")
    target: Any = SimpleNamespace(**{name: getattr(reader, name) for name in names}, **facts)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "chats.jsonl"
        write_chats(data, chosen.tokens)
        options = TrainOptions.of(out=Path(folder) / "out", method="hydra", data=(data,), max_length=2048, epochs=1)
        ways = {
            "arrays": lambda: read_texts(target, options),
            "reused": lambda: read_texts(target, options),
            "lists": lambda: load_texts(reader, [data], max_length=2048),
        }
        chosen_ways = [*ways][: None if chosen.lists else -1]
        found = {name: measured(name, ways[name], target, options) for name in chosen_ways}
    print(json.dumps({**found, "provenance": provenance()}))


if __name__ == "__main__":
    main()
