"""A distillation: prompts to conversations, each of which is saved when it ends.

Knows the order of the work; shows nothing: it reports to a ``Progress``. An answer depends on its place in the run, and
on its neighbours only by rounding, so a run that was stopped and continues writes the same texts.

While the output grows, ``OUT.part`` has a line for each finished conversation, with its index. Lines come in any order,
and each is flushed to the disk. A run that continues reads them and answers the rest. At the end ``OUT`` gets the
records in order, and ``OUT.manifest.json`` tells what they are of.
"""

import contextlib
import hashlib
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any, BinaryIO, Self

from draftheads.data.lines import LeftOut, left_out_lines
from draftheads.distill.conversation import SELF_TALK, Dialogue, Prompt, Seen, Source, Survey, survey, unique_prompts
from draftheads.distill.options import DistillOptions
from draftheads.errors import DataError, DistillationInterrupted, EndpointError, InvalidSettings
from draftheads.models.chat_template import date_now, dated
from draftheads.utils.counts import counted
from draftheads.utils.files import append_synced, check_writable, locked, write_atomic
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import as_json_values, provenance, require_same

_MOST_REFUSED = 512  # prompts, with no answer to any other: not the prompts are wrong then, but an option
_MAY_CHANGE = (  # the answers do not depend on these (batch_size only by rounding)
    *("out", "prompts", "documents"),  # their content counts, not their place
    *("model", "chat_template", "template_variables"),  # the model's fingerprint counts, which has the template's text
    *("precision", "head", "batch_size", "endpoint", "api_key_env"),
)
WORK = ("generations", "tokens", "steps", "milliseconds")  # counts also of what is left out


class Journal:
    """The output of one run. Made by :meth:`locked`."""

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.out = out
        self.identity = as_json_values(identity)  # everything that the lines depend on
        self.manifest: dict[str, Any] | None = None  # of a complete run
        self.places: dict[int, int] = {}  # where the line of each finished conversation is in OUT.part
        self._num_bytes = 0  # of OUT.part that are valid

    @classmethod
    @contextlib.contextmanager
    def locked(cls, out: Path, identity: Mapping[str, Any]) -> Iterator[Self]:
        """The journal of a run, new or as a stopped process left it; no other process can write it meanwhile."""
        journal, manifest = cls(out, identity), manifest_path(out)
        with locked(out.parent, "name another --out", file=out.name):
            known = next((path for path in (part_path(out), manifest) if path.exists()), None)
            try:
                if known is not None:
                    journal._read(known)
            except (ValueError, LookupError, TypeError) as error:
                fix = "delete it and the file it belongs to, or name another --out"
                raise DataError(f"is not of a distillation ({error}): {fix}", path=known) from error
            if known == manifest and not out.exists():
                raise DataError("is complete, but its output file is gone: delete it, too", path=manifest)
            is_own = known == manifest or (journal.places and out.exists() and out.read_bytes() == journal._text())
            if out.exists() and not is_own:
                raise InvalidSettings(f"{out} exists, but is of no run: name another --out, or delete it")
            if not journal._num_bytes and journal.manifest is None:
                journal._append({"identity": journal.identity, "date": date_now()})
            yield journal

    def add(self, index: int, entry: Mapping[str, Any]) -> None:
        """Saves a finished conversation, as of ``Dialogue.entry``."""
        self.places[index] = self._num_bytes
        self._append({"index": index, **entry})

    def finish(self, details: Mapping[str, Any]) -> None:
        """Writes OUT and the manifest, and removes OUT.part. Self-talk whose question was asked before is left out."""
        found: dict[str, Any] = {"format": 2, "identity": self.identity, **details}
        write_atomic(self.out, lambda file: found.update(self._write(file)))
        self.manifest = {**found, "sha256": hashlib.sha256(self.out.read_bytes()).hexdigest()}
        write_atomic(manifest_path(self.out), (json.dumps(self.manifest, indent=2, ensure_ascii=False) + "\n").encode())
        part_path(self.out).unlink()

    def _write(self, file: BinaryIO) -> dict[str, Any]:
        """Writes all records in order; returns counts and the refused prompts."""
        counts, refused, seen = Counter[str](), list[Any](), Seen()
        with part_path(self.out).open("rb") as lines:
            for _, place in sorted(self.places.items()):
                lines.seek(place)
                entry = json.loads(lines.readline())
                record, found = entry["record"], entry["counts"]
                if record and not seen.add(_questions(record)) and entry["is_self_talk"]:
                    record, found = None, {"repeated": 1, **{name: found[name] for name in WORK}}
                counts.update(found, done=1, records=int(bool(record)))
                refused += [entry["refused"]] if entry["refused"] else []
                file.write(_line(record) if record else b"")
        return {"counts": dict(+counts), "refused": refused}

    def _text(self) -> bytes:
        """What OUT would have: a process that was stopped before it removed OUT.part has written it."""
        file = io.BytesIO()
        self._write(file)
        return file.getvalue()

    def _append(self, values: Mapping[str, Any]) -> None:
        line = _line(values)
        append_synced(part_path(self.out), line, offset=self._num_bytes)
        self._num_bytes += len(line)

    def _read(self, known: Path) -> None:
        """What a process left. The last line of OUT.part may be cut off: it does not count."""
        if known == manifest_path(self.out):
            self.manifest = json.loads(known.read_bytes())
            self._require_same(self.manifest)
            return
        with known.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    values = json.loads(line)
                    if self._num_bytes:
                        self.places[values["index"]] = self._num_bytes
                    else:
                        self._require_same(values)
                    self._num_bytes += len(line)

    def _require_same(self, values: Mapping[str, Any]) -> None:
        fix = "To continue that run use its settings; else name another --out, or delete its files"
        require_same(values["identity"], self.identity, problem=f"{self.out} belongs to another run", fix=fix)


def date_of(out: Path) -> str:
    """The date that the chat template writes: of the beginning of a run that was stopped, else now."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError), part_path(out).open("rb") as lines:
        return str(json.loads(lines.readline())["date"])
    return date_now()


def _line(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, ensure_ascii=False) + "\n").encode()


def _questions(record: Mapping[str, Any]) -> list[Any]:
    if "completion" in record:
        return [record["prompt"]]
    asked = [message for message in record["messages"] if message["role"] != "assistant"]
    return [asked, record.get("tools", [])]


def part_path(out: Path) -> Path:
    """The file of the lines until the run is complete."""
    return out.with_name(out.name + ".part")


def manifest_path(out: Path) -> Path:
    return out.with_name(out.name + ".manifest.json")


# --- the run ---


@dataclass(frozen=True)
class Outcome:
    """A complete run."""

    survey: Survey
    counts: Mapping[str, int]  # answers, generations (also of what is left out), …
    was_complete: bool  # before this call
    refused: Sequence[Mapping[str, Any]] = ()  # prompts that the server did not answer: source and reason
    left_out: Sequence[str] = ()  # what to tell of lines that cannot be asked


def distill(options: DistillOptions, load_source: Callable[[], Source], progress: Progress) -> Outcome:
    """Writes ``options.out``, or continues a run that was stopped.

    ``load_source`` makes the source of the answers. It is called after the prompts were read without an error.
    """
    check_writable(options.out)
    progress.stage("reading prompts")
    left_out: LeftOut = {}
    prompt_survey = survey(options.prompts, options.documents, left_out)
    lines = left_out_lines(left_out, "prompt")
    total = prompt_survey.num_prompts + options.num_self_talk
    settings = {name: value for name, value in asdict(options).items() if name not in _MAY_CHANGE}
    with dated(date_of(options.out)):
        source = load_source()
        with Journal.locked(options.out, {**source.identity, **settings, **asdict(prompt_survey)}) as journal:
            was_complete = journal.manifest is not None
            if not was_complete:
                progress.stage(f"answering {total - len(journal.places):,} of {counted(total, 'conversation')}")
                try:
                    _answer(options, source, journal, progress, total)
                except KeyboardInterrupt:
                    done = f"{len(journal.places):,} of {counted(total, 'conversation')}"
                    raise DistillationInterrupted(f"stopped after {done}: the same command continues") from None
                told = {"left_out": lines, "options": as_json_values(asdict(options))}
                journal.finish({**told, "provenance": provenance()})
    manifest: Any = journal.manifest
    return Outcome(prompt_survey, Counter(manifest["counts"]), was_complete, manifest["refused"], lines)


def _answer(options: DistillOptions, source: Source, journal: Journal, progress: Progress, total: int) -> None:
    """Answers what is not in the journal."""
    self_talk = repeat(Prompt((), None, SELF_TALK), options.num_self_talk)
    every = enumerate(chain(unique_prompts(options.prompts, options.documents), self_talk))
    left = (Dialogue(prompt, index=index, options=options) for index, prompt in every if index not in journal.places)
    started = saved = time.monotonic()
    num_tokens = num_answers = 0
    held: list[Dialogue] = []  # refused, and nothing is answered yet: then the server or the options may be wrong

    def on_progress(more_tokens: int, dialogue: Dialogue | None = None) -> None:
        nonlocal num_tokens, num_answers
        num_tokens += more_tokens
        if dialogue is not None:
            num_answers += dialogue.num_answers
            held.append(dialogue)
            if journal.places or not dialogue.refusal:
                save()
            elif len(held) == _MOST_REFUSED:
                refuse()
        seconds = max(time.monotonic() - started, 1e-3)
        is_slow = 0 < num_answers < seconds / 10
        answers = f"{seconds / num_answers:,.0f} s/answer" if is_slow else f"{num_answers / seconds:,.1f} answers/s"
        progress.progress(len(journal.places) + len(held), total, f"{answers}, {num_tokens / seconds:,.1f} tokens/s")

    def save() -> None:
        nonlocal saved
        for dialogue in held:
            entry, last, saved = dialogue.entry(), saved, time.monotonic()
            entry["counts"]["milliseconds"] = round(1e3 * (saved - last))
            journal.add(dialogue.index, entry)
        held.clear()

    def refuse() -> None:
        first = min(held, key=lambda dialogue: dialogue.index)
        why = f"{counted(len(held), 'prompt')} ({first.prompt.source}: {first.refusal})"
        raise EndpointError(f"the server refused all of {why}: correct the options")

    source.converse(left, on_progress)
    if len(held) > 1:
        refuse()
    save()
