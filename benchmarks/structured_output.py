"""Structured output with draft heads: valid answers, tokens per step beside free answers, and what the masks cost.

Asks for JSON of five schemas, and asks the same prompts without a grammar. Prints a table, and as the last line one
JSON object.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, product
from typing import Any

import jsonschema_rs
import torch
import tyro
from harness import machine
from rich.console import Console
from rich.table import Table

from draftheads.cli.show import quiet_transformers
from draftheads.decode.engine import Engine
from draftheads.decode.grammar import GrammarState, compiler_for
from draftheads.decode.request import GenerationResult
from draftheads.decode.token_rules import BatchRules
from draftheads.loading import load
from draftheads.settings import Grammar, Precision, SamplingSettings
from draftheads.speculation.shapes import BestFirst


def _record(**properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": most}


def _number(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": most}


def _list(items: dict[str, Any], *, least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: dict[str, dict[str, Any]] = {
    "person": _record(name=_text(30), age=_number(120), city=_text(30), job=_text(30)),
    "event": _record(
        title=_text(50),
        date={"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"},
        place=_text(40),
        people=_list(_text(20), least=0, most=4),
    ),
    "review": _record(
        sentiment={"enum": ["positive", "negative", "neutral", "mixed"]}, stars=_number(5), reason=_text(100)
    ),
    "order": _record(
        customer=_text(30),
        items={
            "type": "array",
            "items": _record(product=_text(30), quantity=_number(99)),
            "minItems": 1,
            "maxItems": 3,
        },
        paid={"type": "boolean"},
    ),
    "call": {
        "anyOf": [
            _record(tool={"const": "weather"}, city=_text(30), unit={"enum": ["celsius", "fahrenheit"]}),
            _record(tool={"const": "search"}, query=_text(60), limit=_number(20)),
        ]
    },
}
NAMES = ("Ada Moreno", "Bruno Keller", "Chioma Eze", "Dmitri Volkov", "Elif Kaya")
PLACES = ("Lisbon", "Nairobi", "Osaka", "Montreal")
THINGS = ("a garden chair", "two bicycles", "a box of tea")
SENTENCES = {
    "person": "{name} is {age} years old, lives in {place} and works as a nurse.",
    "event": "On 2025-03-{day} {name} and Omar meet in {place} to talk about {thing}.",
    "review": "{name} from {place} writes: I bought {thing} and it broke after {day} days, but they sent a new one.",
    "order": "{name} in {place} ordered {thing} and {day} candles, and has not paid yet.",
    "call": "{name} asks: how warm is it in {place} today? I want to try {thing} outside.",
}


@dataclass(frozen=True)
class Options:
    """What is measured."""

    model: str = "smollm2-135m"
    """A model: a name, a folder or a Hugging Face id."""
    head: str | None = "hydra"
    """A draft head."""
    precision: Precision = "fp32"
    """What the model computes in."""
    prompts: int = 200
    """Prompts, in equal parts for each schema."""
    nodes: int = 12
    """Nodes of the growing tree."""
    batch_size: int = 8
    """Prompts that are decoded together."""
    max_new_tokens: int = 256
    """Of an answer with a schema; more than any of them can have."""
    free_tokens: int = 64
    """Of an answer without a grammar."""


@dataclass(frozen=True)
class Question:
    """A prompt and the kind of its answer."""

    kind: str
    prompt: str


def questions(count: int) -> list[Question]:
    """So many, the kinds in turns."""
    numbers = cycle(range(11, 29))
    facts = [
        {"name": name, "place": place, "thing": thing, "day": next(numbers), "age": 20 + next(numbers)}
        for name, place, thing in product(NAMES, PLACES, THINGS)
    ]
    kinds = islice(cycle(SENTENCES), count)
    return [
        Question(kind, f"Extract the facts as JSON. {SENTENCES[kind].format(**facts[number // 5 % len(facts)])}")
        for number, kind in enumerate(kinds)
    ]


class Stopwatch:
    """Seconds and calls of some methods."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def on(self, kind: type, *names: str) -> Iterator[None]:
        """Times these methods of a class."""
        originals = {name: getattr(kind, name) for name in names}
        for name, original in originals.items():
            setattr(kind, name, self._timed(name, original))
        yield
        for name, original in originals.items():
            setattr(kind, name, original)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        found = self.seconds.setdefault(name, [])

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = method(*arguments, **named)
            found.append(time.perf_counter() - start)
            return result

        return timed


def num_valid(asked: Sequence[Question], answers: Sequence[GenerationResult]) -> int:
    """How many answers are JSON of their schema."""
    count = 0
    for question, answer in zip(asked, answers, strict=True):
        try:
            count += jsonschema_rs.is_valid(SCHEMAS[question.kind], json.loads(answer.text))
        except json.JSONDecodeError:
            continue
    return count


def tokens_per_step(answers: Sequence[GenerationResult]) -> float:
    """Of all answers together, without their first tokens."""
    return sum(len(answer.token_ids) - 1 for answer in answers) / sum(answer.num_steps for answer in answers)


def compile_ms(engine: Engine) -> dict[str, float]:
    """Milliseconds until a new grammar is ready, by schema."""
    model, found = engine.model, {}
    compiler = compiler_for(model.tokenizer, vocab_size=model.vocab_size, eos_ids=model.eos_ids)
    for kind, schema in SCHEMAS.items():
        start = time.perf_counter()
        compiler.start(Grammar.json_schema(schema))
        found[kind] = 1e3 * (time.perf_counter() - start)
    return found


def main(options: Options) -> None:
    """Measures and prints."""
    quiet_transformers()
    tree = BestFirst(options.nodes) if options.head else "auto"
    engine = load(
        options.model, options.head, precision=options.precision, tree=tree, max_batch_size=options.batch_size
    )
    start = time.perf_counter()
    compiler_for(engine.model.tokenizer, vocab_size=engine.model.vocab_size, eos_ids=engine.model.eos_ids)
    table_seconds = time.perf_counter() - start
    compiling = compile_ms(engine)
    asked = questions(options.prompts)
    prompts = [question.prompt for question in asked]
    free = engine.generate(prompts, max_new_tokens=options.free_tokens)
    settings = [
        SamplingSettings(grammar=Grammar.json_schema(SCHEMAS[question.kind]), max_new_tokens=options.max_new_tokens)
        for question in asked
    ]
    watch = Stopwatch()
    with watch.on(GrammarState, "_new_place", "read"), watch.on(BatchRules, "below", "drafted", "pruned", "verified"):
        start = time.perf_counter()
        answers = engine.generate(prompts, settings)
        constrained = time.perf_counter() - start
    rows = by_schema(asked, free, answers)
    cost = mask_cost(watch, answers, constrained)
    table = Table("schema", "valid", "tokens", "tokens/step", "free tokens/step")
    for kind, one in rows.items():
        numbers = (f"{one[name]:.2f}" for name in ("tokens_per_step", "free_tokens_per_step"))
        table.add_row(kind, f"{one['valid']:.0f} of {one['answers']:.0f}", f"{one['tokens']:.0f}", *numbers)
    Console(width=100).print(table)
    print(", ".join(f"{name} {value:.2f}" for name, value in cost.items()))
    record = {"options": vars(options), "machine": machine(torch.get_num_threads()), "by_schema": rows, "cost": cost}
    print(json.dumps(record | {"table_seconds": table_seconds, "compile_ms": compiling}))


def by_schema(
    asked: Sequence[Question], free: Sequence[GenerationResult], answers: Sequence[GenerationResult]
) -> dict[str, dict[str, float]]:
    """The numbers of each schema, and of all together."""
    rows: dict[str, dict[str, float]] = {}
    for kind in [*SCHEMAS, "all"]:
        places = [place for place, question in enumerate(asked) if kind in (question.kind, "all")]
        own = [answers[place] for place in places]
        if own:
            rows[kind] = {
                "answers": len(own),
                "valid": num_valid([asked[place] for place in places], own),
                "tokens": sum(len(answer.token_ids) for answer in own) / len(own),
                "tokens_per_step": tokens_per_step(own),
                "free_tokens_per_step": tokens_per_step([free[place] for place in places]),
            }
    return rows


def mask_cost(watch: Stopwatch, answers: Sequence[GenerationResult], seconds: float) -> dict[str, float]:
    """Microseconds of a mask, and milliseconds of all rules in a step."""
    masks, steps = sorted(watch.seconds["_new_place"]), len(watch.seconds["pruned"])
    parts = [watch.seconds[name] for name in ("read", "below", "drafted", "pruned", "verified")]
    return {
        "mask_us_median": 1e6 * statistics.median(masks),
        "mask_us_mean": 1e6 * statistics.mean(masks),
        "mask_us_p99": 1e6 * masks[int(0.99 * len(masks))],
        "masks_per_step_and_row": len(masks) / sum(answer.num_steps for answer in answers),
        "rules_ms_per_step": 1e3 * sum(map(sum, parts)) / steps,
        "step_ms": 1e3 * seconds / steps,
    }


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
