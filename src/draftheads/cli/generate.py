"""``draftheads generate``: answers one prompt as a stream, or several in a batch."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from draftheads.cli.options import ChatOptions, GenerateOptions
from draftheads.cli.show import (
    ProgressDisplay,
    drafted_text,
    error_console,
    quiet_transformers,
    show_stream,
    speed_words,
)
from draftheads.data.records import Record, read_prompts
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.errors import InvalidPrompt
from draftheads.loading import load
from draftheads.settings import ROUNDED_BITS
from draftheads.utils.counts import counted
from draftheads.utils.files import check_writable, write_atomic
from draftheads.utils.progress import Progress


def run(options: GenerateOptions) -> None:
    """Decodes and shows or writes the answers."""
    questions, settings = _questions(options), options.settings()
    if not questions:
        raise InvalidPrompt("nothing to answer: give a prompt, --prompts FILE, or text on standard input")
    if options.out is not None:
        check_writable(options.out)
    quiet_transformers()
    with ProgressDisplay(error_console(), transient=True) as progress:
        engine = load_engine(options, progress, max_batch_size=options.batch_size)
        requests = engine.requests([question.prompt for question in questions], settings)
    console = Console(highlight=False)
    start = time.perf_counter()
    if len(questions) == 1 and options.out is None:
        (request,) = requests
        show_stream(engine.run(requests), request, engine.model.tokenizer, console)
        results = [request.result()]
    else:
        with ProgressDisplay(error_console(), transient=True) as progress:
            progress.stage("answering")
            done = 0
            for event in engine.run(requests):
                done += event.finish_reason is not None
                progress.progress(done, len(requests))
        results = [request.result() for request in requests]
        _give(questions, results, options.out, console)
    _print_count(results, time.perf_counter() - start)
    if sys.stderr.isatty() and (sentence := no_draft_sentence(engine, options)):
        print(sentence, file=sys.stderr)


def load_engine(options: GenerateOptions | ChatOptions, progress: Progress, *, max_batch_size: int) -> Engine:
    """The engine that the options ask for; errors as of :func:`draftheads.load`."""
    drafting = options.drafting
    progress.stage(f"loading {options.model}" + (f" and {drafting.head}" if drafting.head else ""))
    return load(options.model, **drafting.keywords(), max_batch_size=max_batch_size, **options.load.given())


def piped_lines() -> Iterator[str]:
    """Lines of standard input."""
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"standard input is not text: {error}") from None


def _questions(options: GenerateOptions) -> list[Record]:
    if options.prompts is not None:
        return list(read_prompts(options.prompts))
    piped = [] if options.prompt or sys.stdin.isatty() else ["".join(piped_lines())]
    return [Record(({"role": "user", "content": text},), is_text=True) for text in (*options.prompt, *piped)]


def _give(questions: Sequence[Record], results: Sequence[GenerationResult], out: Path | None, console: Console) -> None:
    """Answers to read on a terminal; JSON lines in a pipe or file."""
    lines = ""
    for question, result in zip(questions, results, strict=True):
        if out is None and console.is_terminal:
            text = question.messages[0 if question.is_text else -1]["content"]
            name = question.labels.get("question_id", question.labels.get("id"))
            heading = Text(" ".join(f"{'' if name is None else name}  {text}".split()), style="bold")
            console.print(Rule(heading, align="left", style="dim"))
            console.print(drafted_text(result), end="\n\n", soft_wrap=True)
        else:
            record = {**question.labels, "prompt": question.prompt, **result.record()}
            lines += json.dumps(record, ensure_ascii=False) + "\n"
    if out is None:
        print(lines, end="")
    else:
        write_atomic(out, lines.encode())


def _print_count(results: Sequence[GenerationResult], seconds: float) -> None:
    """Tokens and speed, on standard error."""
    tokens = sum(len(result.token_ids) for result in results)
    words = f"{counted(len(results), 'answer')}, {counted(tokens, 'token')} in {seconds:.1f} s"
    several = f"{words}, {tokens / seconds:.1f} tokens/s"
    print(several if len(results) > 1 else speed_words(results[0], seconds), file=sys.stderr)


def no_draft_sentence(engine: Engine, options: GenerateOptions | ChatOptions) -> str | None:
    """What to try where the head drafts nothing, because that would be slower than plain decoding."""
    planner = engine.planner
    if planner is None or planner.choose(1, follows=False)[0] is not None:
        return None
    head = options.drafting.head if engine.check is None else engine.check.head
    trials = "Try --precision int8, or measure" if options.load.precision not in ROUNDED_BITS else "Measure"
    copies = ", only copies from the text" if options.drafting.copy else ""
    return (
        f"{head} drafts no tokens of its own here{copies}: verifying them takes more time than it saves. "
        f"{trials} its trees on your prompts: draftheads tune {options.model} {head} --prompts FILE"
    )
