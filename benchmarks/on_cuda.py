"""What decoding costs on a CUDA GPU, and whether captured steps are right. Takes less than eight minutes.

Each result is printed and written at once as a line of JSON, so a run that is cut off still leaves results:

* ``check``: whether captured steps, ordinary steps and plain decoding give the same texts in fp32 (else the exit code
  is 1), and the largest difference of logits;
* ``decoding``: tokens per second by batch size, plain with and without graphs, and with each head;
* ``verification`` of a 7B-shaped Llama beside its lower bound (bytes of the weights / bandwidth); ``drafting`` by head.

It needs no network, and of the optional packages none. Where the model is not on the machine, a Llama of its shape with
random weights and untrained heads takes its place: its texts repeat themselves, so that copies are accepted. Example::

    PYTHONPATH=src python benchmarks/on_cuda.py --json cuda.jsonl
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import machine, median_ms
from transformers import AutoModelForCausalLM, LlamaConfig

from draftheads.bench.timing import StepClock
from draftheads.checkpoints.checkpoint import resolve_head
from draftheads.cli.show import quiet_transformers
from draftheads.data.records import own_prompts
from draftheads.decode.batch import Batch
from draftheads.decode.engine import Engine
from draftheads.decode.prompts import Prompt
from draftheads.decode.step_costs import StepTimer, typical_tree, wait_for
from draftheads.drafters.mixed import Mixed
from draftheads.errors import MissingDependency, ModelNotFound
from draftheads.heads import head_classes
from draftheads.heads.base import DraftHead
from draftheads.loading import engine_on, load_drafter, load_target
from draftheads.models.model import StepMode, TargetModel
from draftheads.models.model_config import default_dtype
from draftheads.runners.graphs import StepGraphs
from draftheads.runners.transformers_runner import TransformersRunner
from draftheads.settings import Precision, SamplingSettings
from draftheads.speculation.draft import Draft
from draftheads.speculation.shapes import BestFirst, Drafting, Shape
from draftheads.speculation.tree import Tree

Row = dict[str, Any]
RANDOM = "random"  # in place of the name of a model
TASKS = own_prompts("tasks")
SHAPES: dict[str, Shape] = {"static": Tree.cartesian([3, 2, 1]), "growing": BestFirst(16)}
# the sizes of SmolLM2-135M, and of Llama 7B
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SMOLLM: Row = dict(zip(_SIZES, (576, 1536, 30, 9, 3), strict=True))
SMOLLM |= {"max_position_embeddings": 8192, "vocab_size": 49152, "tie_word_embeddings": True}
LLAMA_7B: Row = {**dict(zip(_SIZES, (4096, 11008, 32, 32, 32), strict=True)), "max_position_embeddings": 8192}


@dataclass(frozen=True)
class Options:
    """What is measured. The first four are options of the command."""

    model: str = "smollm2-135m"
    device: str = "cuda"
    minutes: float = 7.0  # no measurement begins after that time; what is left out is listed
    json: Path | None = None  # a file for the lines
    heads: tuple[str, ...] = ("hydra", "eagle", "medusa")
    nodes: tuple[int, ...] = (1, 8, 16, 32, 64)
    lengths: tuple[int, ...] = (512, 4096)  # tokens of text
    batch_sizes: tuple[int, ...] = (1, 8, 2, 4, 16, 32)  # prompts that are decoded together
    warm_steps: int = 24  # before decoding is timed: they capture
    steps: int = 64  # that are timed
    repeats: int = 20  # of each part of a step; the median counts


class Clock:
    """How much time is left."""

    def __init__(self, minutes: float) -> None:
        self.start = time.monotonic()
        self.end = self.start + 60 * minutes
        self.left_out: list[str] = []

    def allows(self, what: str) -> bool:
        """Notes what is left out."""
        if time.monotonic() < self.end:
            return True
        self.left_out.append(what)
        return False


class Subject:
    """The model with heads, in one precision, and prompts for it; or random ones of the same shape."""

    def __init__(self, options: Options, precision: Precision) -> None:
        self.options, self.name = options, options.model
        if self.name != RANDOM:
            try:
                self.target = load_target(self.name, device=options.device, precision=precision, fast=False)
            except (ModelNotFound, MissingDependency) as error:
                print(f"random weights in place of those of {self.name}: {error}", flush=True)
                self.name = RANDOM
        if self.name == RANDOM:
            dtype = torch.float32 if precision == "fp32" else default_dtype(options.device)
            self.target = random_llama(SMOLLM, options.device, dtype)

    @property
    def prompts(self) -> list[Prompt]:
        if self.name == RANDOM:
            chance = torch.Generator().manual_seed(0)
            lengths = (7, 190, 40, 75, 20, 300, 12, 130) * 4
            return [torch.randint(self.target.vocab_size, (length,), generator=chance).tolist() for length in lengths]
        lines = [json.loads(line) for line in TASKS.read_text(encoding="utf-8").splitlines()]
        return [line["turns"][0] for line in lines]

    def head(self, method: str) -> DraftHead:
        if self.name == RANDOM:
            return untrained_head(method, self.target)
        return load_drafter(resolve_head(method, self.name), self.target, fast=False)

    def engine(self, target: TargetModel, method: str | None, size: int) -> Engine:
        """As ``draftheads.load`` makes it, but for random weights: these have no profile."""
        if method is None:
            return Engine(target, max_batch_size=size)
        if self.name == RANDOM:
            return Engine(target, Mixed(self.head(method)), shape=SHAPES["growing"], max_batch_size=size)
        drafts, head = resolve_head(method, self.name), self.head(method)
        return engine_on(target, drafts, Drafting(method), drafter=head, max_batch_size=size)


def random_llama(sizes: Row, device: str, dtype: torch.dtype) -> TargetModel:
    """A Llama with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype)
    no_text = SimpleNamespace(eos_token_id=None, chat_template=None, decode=lambda *_, **__: "")
    return TargetModel(model.eval().requires_grad_(requires_grad=False), no_text, f"{RANDOM} Llama")


def untrained_head(method: str, target: TargetModel) -> DraftHead:
    """A head as training begins with."""
    config_class, head_class = head_classes(method)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, **target.head_sizes}
    known = {field.name for field in fields(config_class)}
    head = head_class(config_class(**{name: value for name, value in sizes.items() if name in known}))
    head = head.to(target.device, target.dtype)
    head.initialise(target.weights)
    return head.eval().requires_grad_(requires_grad=False)


def with_graphs(model: TargetModel, *, on: bool) -> TargetModel:
    return replace(model, step_mode=StepMode(on))


def check(options: Options, clock: Clock) -> Iterator[Row]:
    """Texts and logits of captured and of ordinary steps, in fp32."""
    subject = Subject(options, "fp32")
    captured, ordinary = (with_graphs(subject.target, on=on) for on in (True, False))
    plain, _, _ = texts(Engine(ordinary), subject.prompts)
    found, num_graphs, _ = texts(Engine(captured), subject.prompts)
    yield {"drafter": "none", **same(ordinary, subject.prompts, plain, captured=found), "graphs": num_graphs}
    for method in options.heads:
        for name, shape in SHAPES.items():
            if not clock.allows(f"check of {method}, {name} tree"):
                continue
            drafter = Mixed(subject.head(method))
            one, num_graphs, per_step = texts(Engine(captured, drafter, shape=shape), subject.prompts)
            other, _, _ = texts(Engine(ordinary, drafter, shape=shape), subject.prompts)
            equal = same(ordinary, subject.prompts, plain, captured=one, ordinary=other)
            yield {"drafter": method, "tree": name, **equal, "graphs": num_graphs, "tokens/step": per_step}
    yield from logits(options, captured, ordinary)


def texts(engine: Engine, prompts: Sequence[Prompt]) -> tuple[list[Sequence[int]], int, float]:
    """Answers to four prompts, two of them greedy; how many graphs there were, and tokens per step.

    Rows join and leave at different steps.
    """
    usual = SamplingSettings(ignore_eos=True, top_k=20, seed=7)
    kinds = ((64, 0.0), (48, 1.0), (80, 0.0), (20, 1.0))
    settings = [replace(usual, max_new_tokens=length, temperature=temperature) for length, temperature in kinds]
    requests = engine.requests(prompts[:4], settings)
    core, num_graphs = engine.core(), 0
    for request in requests[:2]:
        core.add(request)
    core.step()
    for request in requests[2:]:
        core.add(request)
    while core.has_work:
        graphs = graphs_of(next(iter(core.batches.values())))
        for _, event in core.step():
            if isinstance(event, Exception):
                raise event
        num_graphs = max(num_graphs, len(graphs))
        if graphs.failure is not None:
            raise RuntimeError(f"a step was not captured: {graphs.failure}")
    results = [request.result() for request in requests]
    per_step = statistics.mean(result.tokens_per_step for result in results)
    return [result.token_ids for result in results], num_graphs, round(per_step, 2)


def graphs_of(batch: Batch) -> StepGraphs:
    assert isinstance(batch.runner, TransformersRunner)
    return batch.runner.graphs


def same(
    model: TargetModel, prompts: Sequence[Prompt], plain: list[Sequence[int]], **found: list[Sequence[int]]
) -> Row:
    """Whether texts equal plain ones; else where they begin to differ, and how far the logits of both tokens are apart.

    If these are as near as the logits of captured and ordinary steps, the kernels decide, and nothing is wrong.
    """
    row: Row = {}
    for name, answers in found.items():
        row[f"{name} = plain"] = answers == plain
        for number, (answer, expected) in enumerate(zip(answers, plain, strict=True)):
            if answer != expected:
                place = next(n for n, pair in enumerate(zip(answer, expected, strict=True)) if pair[0] != pair[1])
                text = [*Engine(model).encode(prompts[number]), *expected[:place]]
                scores = model.logits(model.hidden_states(torch.tensor([text], device=model.device))[0, -1])
                gap = float(scores[expected[place]] - scores[answer[place]])
                row[f"{name} differs"] = {"row": number, "token": place, "logits": gap}
    return row


@torch.inference_mode()
def logits(options: Options, captured: TargetModel, ordinary: TargetModel) -> Iterator[Row]:
    """The largest difference of logits on the same drafts."""
    chance = torch.Generator().manual_seed(0)
    runners = [TransformersRunner(captured), TransformersRunner(ordinary)]
    prompts = [torch.randint(ordinary.vocab_size, (length,), generator=chance).tolist() for length in (7, 190, 40)]
    pairs = [(runner, runner.prefill(prompts)[0]) for runner in runners]
    for nodes in options.nodes:
        tokens = torch.randint(ordinary.vocab_size, (3, nodes), generator=chance).to(ordinary.device)
        draft = Draft.on_tree(Tree.from_paths([(rank,) for rank in range(nodes - 1)]), tokens)
        gaps = []
        for _ in range(3):  # as it is; captured; replayed
            one, other = (runner.verify(rows, draft)[0].float() for runner, rows in pairs)
            gaps.append(float((one - other).abs().max()))
        yield {"nodes": nodes, "largest difference": max(gaps), "failure": runners[0].graphs.failure}


def decoding(options: Options, clock: Clock) -> Iterator[Row]:
    """Tokens per second while all rows are at work and all steps are captured."""
    subject = Subject(options, "auto")
    captured, ordinary = (with_graphs(subject.target, on=on) for on in (True, False))
    for size in options.batch_sizes:
        plain = (("plain, no graphs", ordinary, None), ("plain", captured, None))
        for name, target, method in (*plain, *((method, captured, method) for method in options.heads)):
            if clock.allows(f"{name} at batch {size}"):
                yield {"batch": size, "drafter": name, **speed(subject.engine(target, method, size), subject, options)}


def speed(engine: Engine, subject: Subject, options: Options) -> Row:
    """Of steps in the middle of long answers."""
    size = engine.max_batch_size
    # so long that no answer ends before the last step, whatever is accepted
    most = (options.warm_steps + options.steps) * (engine.most_nodes() + 1)
    requests = engine.requests(subject.prompts[:size], max_new_tokens=most, ignore_eos=True)
    core = engine.core()
    for request in requests:
        core.add(request)
    for _ in range(options.warm_steps):
        core.step()
    batch = next(iter(core.batches.values()))
    before, clock = sum(len(request.token_ids) for request in requests), StepClock(engine.model.device)
    start = clock.now
    for _ in range(options.steps):
        batch.step()
    seconds, tokens = clock.now - start, sum(len(request.token_ids) for request in requests) - before
    return {
        "tokens/s": round(tokens / seconds, 1),
        "tokens/step": round(tokens / options.steps / size, 2),
        "ms/step": round(1e3 * seconds / options.steps, 2),
        "graphs": len(graphs_of(batch)),
        "failure": graphs_of(batch).failure,
    }


@torch.inference_mode()
def verification(options: Options, clock: Clock) -> Iterator[Row]:
    """Milliseconds of verifying a tree, ordinary and captured, and the lower bound."""
    model = random_llama(LLAMA_7B, options.device, torch.bfloat16)
    weights = [model.lm_head.weight, *(weight for layer in model.decoder.layers for weight in layer.parameters())]
    num_bytes = sum(weight.nbytes for weight in weights)
    wait = partial(wait_for, model.device)
    source = torch.zeros(min(1 << 30, num_bytes), dtype=torch.uint8, device=model.device)
    target = torch.empty_like(source)  # a copy reads and writes
    bound = num_bytes * median_ms(lambda: target.copy_(source), 7, wait=wait) / (2 * len(source))
    for length in options.lengths:
        for nodes in options.nodes:
            if not clock.allows(f"verification of {nodes} nodes at {length} tokens"):
                continue
            draft = Draft.on_tree(Tree.chain(nodes - 1), torch.full((1, nodes), 5, device=model.device))
            times = {}
            for name, on in (("ordinary", False), ("captured", True)):
                runner = TransformersRunner(with_graphs(model, on=on))
                rows, _, _ = runner.prefill([[5]])
                rows[0].length = length  # the keys and values of a text that was not read are 0
                times[name] = median_ms(partial(runner.verify, rows, draft), options.repeats, wait=wait)
            shown = {f"{name}, ms": round(value, 3) for name, value in {**times, "bound": bound}.items()}
            yield {"text": length, "nodes": nodes, **shown, "captured / bound": round(times["captured"] / bound, 2)}


def drafting(options: Options, clock: Clock) -> Iterator[Row]:
    """Milliseconds of drafting 10 nodes, for one row and eight."""
    subject = Subject(options, "auto")
    for method in options.heads:
        if not clock.allows(f"drafting with {method}"):
            continue
        timer = StepTimer(subject.target, subject.head(method))
        row: Row = {"head": method}
        for kind in ("static", "dynamic"):
            for rows in (1, 8):
                shape = typical_tree(10, depth=4, top_k=4) if kind == "static" else BestFirst(10)
                times = [timer.draft(rows, shape) for _ in range(options.repeats + 3)][3:]
                row[f"{kind}, {rows} rows, ms"] = round(statistics.median(times), 3)
        yield row


def write(row: Row, file: Path | None) -> None:
    """A line of JSON, on the terminal and in the file."""
    line = json.dumps(row)
    print(line, flush=True)
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(line + "\n")


def main(options: Options) -> int:
    """Measures, prints, and returns the exit code."""
    is_cuda = options.device.startswith("cuda")
    if is_cuda and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 1
    quiet_transformers()
    if options.json:
        options.json.write_text("", encoding="utf-8")
    clock, right = Clock(options.minutes), True
    gpu = torch.cuda.get_device_name(torch.device(options.device)) if is_cuda else None
    write({"part": "machine", "gpu": gpu, **machine(torch.get_num_threads())}, options.json)
    parts = {"check": check, "decoding": decoding, "verification": verification, "drafting": drafting}
    for name, part in parts.items():
        if not clock.allows(name):
            continue
        try:
            for row in part(options, clock):
                right &= row.get("failure") is None and all(row[name] for name in row if name.endswith(" = plain"))
                seconds = round(time.monotonic() - clock.start, 1)
                write({"part": name, **row, "seconds": seconds}, options.json)
        except Exception as error:  # noqa: BLE001 - the other parts are worth their time all the same
            right = False
            write({"part": name, "error": f"{type(error).__name__}: {error}"}, options.json)
    write({"part": "end", "right": right, "left_out": clock.left_out}, options.json)
    return 0 if right else 1


def parsed(arguments: Sequence[str]) -> Options:
    """The options of the command; by the standard library, since the machine may have no more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Options()
    for name, kind in {"model": str, "device": str, "minutes": float, "json": Path}.items():
        parser.add_argument(f"--{name}", type=kind, default=getattr(default, name))
    return Options(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main(parsed(sys.argv[1:])))
