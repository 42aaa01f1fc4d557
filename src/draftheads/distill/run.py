"""A distillation: prompts to conversations, in chunks; each chunk is saved before the next one begins.

Knows the order of the work; shows nothing: it reports to a ``Progress``. Each chunk starts with an empty batch. So
after a kill a chunk is computed again with the same neighbours in every batch, and the file is the same to the byte
even where kernels round by batch size.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, repeat
from typing import Any

from draftheads.distill.conversation import Dialogue, OnProgress, Source
from draftheads.distill.journal import Counts, Journal
from draftheads.distill.options import DistillOptions
from draftheads.distill.prompts import SELF_TALK, Prompt, Seen, Survey, survey, unique_prompts
from draftheads.errors import DistillationInterrupted, EndpointError
from draftheads.utils.counts import counted
from draftheads.utils.files import check_writable
from draftheads.utils.identity import as_json_values
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import provenance

_MAY_CHANGE = frozenset(  # the answers do not depend on these (batch_size only by rounding)
    {
        *("out", "prompts", "documents"),  # their content counts, not their place
        *(
            "model",
            "chat_template",
            "template_variables",
        ),  # the model's fingerprint counts, of which the template's text is a part
        *("precision", "device", "four_bit", "head", "tree", "batch_size", "chunk_size"),
        *("endpoint", "endpoint_model", "api_key_env", "request_timeout", "request_retries"),
    }
)


@dataclass(frozen=True)
class Outcome:
    """A complete run."""

    survey: Survey
    counts: Counts
    was_complete: bool  # before this call
    refused: Sequence[Mapping[str, Any]] = ()  # as in the manifest


def distill(options: DistillOptions, load_source: Callable[[], Source], progress: Progress) -> Outcome:
    """Writes ``options.out``, or continues a run that was stopped.

    ``load_source`` makes the source of the answers. It is called after the prompts were read without an error.
    """
    check_writable(options.out)
    progress.stage("reading prompts")
    prompt_survey = survey(options.prompts, options.documents)
    source = load_source()
    total = prompt_survey.num_prompts + options.num_self_talk
    settings = {name: value for name, value in asdict(options).items() if name not in _MAY_CHANGE}
    details = {"options": as_json_values(asdict(options)), "provenance": provenance()}
    with Journal.locked(options.out, {**source.identity, **settings, **asdict(prompt_survey)}, details) as journal:
        was_complete = journal.manifest.is_complete
        if not was_complete:
            progress.stage(f"answering {total - journal.counts.num_done:,} of {counted(total, 'conversation')}")
            try:
                _answer(options, source, journal, _tally(progress, journal.counts.num_done, total))
            except KeyboardInterrupt:
                raise DistillationInterrupted(
                    f"stopped after {journal.counts.num_done:,} of {counted(total, 'conversation')}: "
                    "the same command continues"
                ) from None
        journal.finish()
    return Outcome(prompt_survey, journal.counts, was_complete, journal.manifest.refused)


def _tally(progress: Progress, num_done: int, total: int) -> OnProgress:
    """Adds up and reports the progress of a source."""
    num_tokens = 0
    started = time.monotonic()

    def add(more_tokens: int, more_done: int) -> None:
        nonlocal num_tokens, num_done
        num_tokens += more_tokens
        num_done += more_done
        seconds = max(time.monotonic() - started, 1e-3)
        progress.progress(num_done, total, f"{num_tokens / seconds:,.0f} tokens/s")

    return add


def _answer(options: DistillOptions, source: Source, journal: Journal, on_progress: OnProgress) -> None:
    seen = Seen()
    for line in journal.lines():
        seen.add(_questions(json.loads(line)))
    self_talk = repeat(Prompt((), None, SELF_TALK), options.num_self_talk)
    every = enumerate(chain(unique_prompts(options.prompts, options.documents), self_talk))
    prompts = islice(every, journal.counts.num_done, None)
    while chunk := list(islice(prompts, options.chunk)):
        started = time.monotonic()
        dialogues = [Dialogue(prompt, index=index, options=options) for index, prompt in chunk]
        source.converse(dialogues, on_progress)
        refused = [{"source": one.prompt.source, "reason": one.refusal} for one in dialogues if one.refusal]
        if len(refused) == len(dialogues) > 1 and not journal.counts.num_answers:  # it is not for the prompts' sake
            first = "{source}: {reason}".format_map(refused[0])
            raise EndpointError(
                f"the server refused all of {counted(len(refused), 'prompt')} ({first}): correct the options"
            )
        lines, counts = _lines(dialogues, seen)
        journal.add(lines, counts + Counts(seconds=time.monotonic() - started), refused)


def _questions(record: Mapping[str, Any]) -> list[str]:
    if "completion" in record:
        return [record["prompt"]]
    return [message["content"] for message in record["messages"] if message["role"] != "assistant"]


def _lines(dialogues: Sequence[Dialogue], seen: Seen) -> tuple[bytes, Counts]:
    """The lines of a chunk, and its counts. Self-talk with questions that were asked before is left out."""
    lines: list[str] = []
    counts = Counts()
    for dialogue in dialogues:
        record = dialogue.record()
        is_new = record is not None and (seen.add(_questions(record)) or not dialogue.is_self_talk)
        if is_new:
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        counts += _counts_of(dialogue, is_new=is_new)
    return "".join(lines).encode(), counts


def _counts_of(dialogue: Dialogue, *, is_new: bool) -> Counts:
    return Counts(
        num_done=1,
        num_records=int(is_new),
        num_answers=dialogue.num_answers if is_new else 0,
        num_unfinished=int(is_new and not dialogue.is_finished),
        num_repeated=int(dialogue.num_answers > 0 and not is_new),
        num_no_question=int(dialogue.stop_reason == "no_question" and not dialogue.num_answers),
        num_too_long=int(dialogue.stop_reason == "too_long" and not dialogue.num_answers),
        num_refused=int(dialogue.stop_reason == "refused" and not dialogue.num_answers),
        num_shortened=int(is_new and dialogue.is_finished and dialogue.num_answers < dialogue.num_turns),
        num_generations=dialogue.num_generations,
        num_tokens=dialogue.num_tokens,
        num_steps=dialogue.num_steps,
    )
