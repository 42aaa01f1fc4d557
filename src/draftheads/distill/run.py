"""A distillation: prompts to conversations, each of which is saved when it ends.

Knows the order of the work; shows nothing: it reports to a ``Progress``. An answer depends on its place in the run, and
on its neighbours only by rounding, so a run that was stopped and continues writes the same texts.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, repeat
from typing import Any

from draftheads.distill.conversation import Dialogue, Source
from draftheads.distill.journal import Journal
from draftheads.distill.options import DistillOptions
from draftheads.distill.prompts import SELF_TALK, Prompt, Survey, survey, unique_prompts
from draftheads.errors import DistillationInterrupted, EndpointError
from draftheads.utils.counts import counted
from draftheads.utils.files import check_writable
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import as_json_values, provenance

_BATCHES_AT_ONCE = 8  # that are in memory; at their end the batch is not full, which costs a tenth of the speed
_MAY_CHANGE = (  # the answers do not depend on these (batch_size only by rounding)
    *("out", "prompts", "documents"),  # their content counts, not their place
    *("model", "chat_template", "template_variables"),  # the model's fingerprint counts, which has the template's text
    *("precision", "head", "batch_size", "endpoint", "api_key_env"),
)


@dataclass(frozen=True)
class Outcome:
    """A complete run."""

    survey: Survey
    counts: Mapping[str, int]  # answers, generations (also of what is left out), …
    was_complete: bool  # before this call
    refused: Sequence[Mapping[str, Any]] = ()  # prompts that the server did not answer: source and reason


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
    with Journal.locked(options.out, {**source.identity, **settings, **asdict(prompt_survey)}) as journal:
        was_complete = journal.manifest is not None
        if not was_complete:
            progress.stage(f"answering {total - len(journal.places):,} of {counted(total, 'conversation')}")
            try:
                _answer(options, source, journal, progress, total)
            except KeyboardInterrupt:
                raise DistillationInterrupted(
                    f"stopped after {len(journal.places):,} of {counted(total, 'conversation')}: "
                    "the same command continues"
                ) from None
            journal.finish({"options": as_json_values(asdict(options)), "provenance": provenance()})
    manifest: Any = journal.manifest
    return Outcome(prompt_survey, Counter(manifest["counts"]), was_complete, manifest["refused"])


def _answer(options: DistillOptions, source: Source, journal: Journal, progress: Progress, total: int) -> None:
    """Answers what is not in the journal."""
    self_talk = repeat(Prompt((), None, SELF_TALK), options.num_self_talk)
    every = enumerate(chain(unique_prompts(options.prompts, options.documents), self_talk))
    left = (Dialogue(prompt, index=index, options=options) for index, prompt in every if index not in journal.places)
    started = saved = time.monotonic()
    num_tokens = 0
    held: list[Dialogue] = []  # refused, and nothing is answered yet: then the server or the options may be wrong

    def on_progress(more_tokens: int, dialogue: Dialogue | None = None) -> None:
        nonlocal num_tokens
        num_tokens += more_tokens
        if dialogue is not None:
            held.append(dialogue)
            if journal.places or not dialogue.refusal:
                save()
        speed = num_tokens / max(time.monotonic() - started, 1e-3)
        progress.progress(len(journal.places) + len(held), total, f"{speed:,.0f} tokens/s")

    def save() -> None:
        nonlocal saved
        for dialogue in held:
            entry, last, saved = dialogue.entry(), saved, time.monotonic()
            entry["counts"]["milliseconds"] = round(1e3 * (saved - last))
            journal.add(dialogue.index, entry)
        held.clear()

    while dialogues := list(islice(left, _BATCHES_AT_ONCE * options.batch_size)):
        source.converse(dialogues, on_progress)
        if len(held) == len(dialogues) > 1:
            first = min(held, key=lambda dialogue: dialogue.index)
            why = f"{first.prompt.source}: {first.refusal}"
            raise EndpointError(
                f"the server refused all of {counted(len(held), 'prompt')} ({why}): correct the options"
            )
        save()
