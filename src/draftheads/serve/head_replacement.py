"""Replaces the draft head of a served model at run time, after a comparison with the head that it has.

Both heads answer the same held-out prompts as ordinary jobs, one at a time, so that other streams go on. Draft trees
are of the same size, so the tokens per step do not depend on the load. Requests that are running keep the old head;
their text does not depend on it.
"""

import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Annotated, Literal

import torch
from pydantic import Field

from draftheads.checkpoints.checkpoint import resolve_head
from draftheads.checkpoints.registry import base_in_zoo, zoo_heads
from draftheads.data.batches import split_held_out
from draftheads.data.json_lines import read_json_lines
from draftheads.data.records import RecordedTokens, own_prompts, prompts_in
from draftheads.decode.core import Lane
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult, Request, StreamEvent
from draftheads.errors import DataError, DraftHeadsError, ModelNotFound, QueueFull
from draftheads.loading import engine_on
from draftheads.models.fingerprint import tokenizer_fingerprint
from draftheads.models.model_names import shown_name
from draftheads.serve.fields import Fields
from draftheads.serve.recorder import Recorder
from draftheads.serve.scheduler import Job, JobFailed, Scheduler
from draftheads.settings import SamplingSettings
from draftheads.speculation.acceptance_profile import DEFAULT_NODES
from draftheads.utils.file_set import current

_NUM_PROMPTS, _NUM_TOKENS = 16, 32  # answers are at most that long
_FEWEST_RECORDS = 8  # held-out ones; if there are fewer, the bundled prompts are better
_MOST_RECORDS = 2000  # the newest; 5 % of them are held out
_RETRY_SECONDS = 1.0  # if the queue is full; a shutdown waits so long at most
_HELD_OUT, _SEED = 0.05, 0  # the defaults of `draftheads train`
_NAME = re.compile(r"\w[\w.+-]{0,99}(/\w[\w.+-]{0,99}){0,4}", re.ASCII)  # a head's own, or folders and names


class Busy(DraftHeadsError):
    """Another head is being compared."""


@dataclass(frozen=True)
class Comparison:
    """Tokens per step of two heads."""

    old: float
    new: float
    num_prompts: int
    measured_on: Literal["recorded", "bundled"]
    replaced: bool


class HeadFields(Fields):
    """The fields of a request to replace a head."""

    model: Annotated[str, Field(min_length=1)]
    head: Annotated[str, Field(min_length=1)]
    force: bool = False


@dataclass(eq=False)
class HeadReplacement:
    """Finds, compares and replaces heads."""

    scheduler: Scheduler  # whose engines are replaced
    model: str  # by which the base model was loaded
    _: KW_ONLY
    head_folder: Path | None = None  # heads in it may be used, besides those that are installed with a package
    recorder: Recorder | None = None  # of answers to compare on
    copy: bool = True  # drafts hold copies, too
    fast: bool = True  # the head gets fast kernels
    _lock: Lock = field(default_factory=Lock, init=False)

    def replace(self, served: str, head: str, *, weights: str, force: bool = False) -> Comparison:
        """Replaces the head of a served model, if the new one is not worse. Takes seconds to minutes.

        Args:
            served: the name of the model.
            head: a name, see :meth:`find`.
            weights: the name under which answers of the model are recorded.
            force: replace it also if it is worse.
        """
        folder = self.find(head)
        if not self._lock.acquire(blocking=False):
            raise Busy("another head is being compared: retry later")
        try:
            return self._replace(served, folder, weights=weights, force=force)
        except DraftHeadsError as error:  # no path of this machine is shown to clients
            own = self.scheduler.engines[served].model.model_id
            error.args = (str(error).replace(str(folder), head).replace(own, shown_name(own)), *error.args[1:])
            raise
        finally:
            self._lock.release()

    def find(self, head: str) -> Path:
        """The folder of a head that is installed with a package, or lies below the folder of heads."""
        base = base_in_zoo(self.model)
        installed = {in_zoo.method: in_zoo.folder for in_zoo in zoo_heads() if in_zoo.base_name == base}
        if head in installed:
            return installed[head]
        if self.head_folder is not None and _NAME.fullmatch(head):
            root = self.head_folder.resolve()
            folder = (root / head).resolve()  # a link may lead elsewhere
            if folder.is_relative_to(root) and current(folder, "config.json").is_file():
                return folder
        where = "start the server with --head-folder" if self.head_folder is None else "it is not in --head-folder"
        names = ", ".join(installed) or "none"
        raise ModelNotFound(f"there is no head {head[:80]!r}: {where}; installed for this model: {names}")

    def _replace(self, served: str, folder: Path, *, weights: str, force: bool) -> Comparison:
        old = self.scheduler.engines[served]
        new = engine_on(
            old.model,
            resolve_head(folder, self.model),
            copy=self.copy,
            max_batch_size=old.max_batch_size,
            fast=self.fast,
            keep_cost=False,
        )
        new.check_draft_nodes(DEFAULT_NODES)
        prompts, source = self._prompts(old, weights)
        candidate = f"{served} (candidate)"  # no served name: requests cannot choose it
        self._set_engine(candidate, new)
        try:
            nodes = DEFAULT_NODES if old.drafter.default_shape is not None else None
            before = self._tokens_per_step(Lane(served, nodes), old, prompts)
            after = self._tokens_per_step(Lane(candidate, DEFAULT_NODES), new, prompts)
        finally:
            self._set_engine(candidate, None)
        is_replaced = force or after >= before
        if is_replaced:
            self._set_engine(served, new)
        return Comparison(before, after, len(prompts), source, is_replaced)

    def _set_engine(self, name: str, engine: Engine | None) -> None:
        """Adds, replaces or removes an engine between two steps."""

        def change() -> None:
            # a new dictionary: other threads may be looking at the old one
            engines = {**self.scheduler.engines, name: engine}
            self.scheduler.core.engines = {key: value for key, value in engines.items() if value is not None}

        self.scheduler.call(change).result()

    def _prompts(self, engine: Engine, weights: str) -> tuple[list[list[int]], Literal["recorded", "bundled"]]:
        """Token ids of the recorded prompts that training holds out, or of bundled ones."""
        texts = [] if self.recorder is None else _texts_for(engine, self.recorder.folder_of(weights))
        ids = [torch.tensor(text.prompt_ids + text.answer_ids) for text in texts]
        masks = [torch.arange(len(of_text)) >= len(text.prompt_ids) for of_text, text in zip(ids, texts, strict=True)]
        _, held_out = split_held_out(ids, masks, fraction=_HELD_OUT, seed=_SEED)
        if len(held_out) >= _FEWEST_RECORDS:
            return [list(texts[index].prompt_ids) for index in held_out[:_NUM_PROMPTS]], "recorded"
        return [engine.encode(prompt) for prompt in prompts_in(own_prompts("calibration"))[:_NUM_PROMPTS]], "bundled"

    def _tokens_per_step(self, lane: Lane, engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
        """Of greedy answers to the prompts, which are the same with every head."""
        settings = SamplingSettings(max_new_tokens=_NUM_TOKENS)
        results = [self._answered(engine.request(prompt, settings), lane) for prompt in prompts]
        # the first token of an answer comes from its prompt, without a step
        tokens = sum(len(result.token_ids) - 1 for result in results)
        return tokens / max(1, sum(result.num_steps for result in results))

    def _answered(self, request: Request, lane: Lane) -> GenerationResult:
        """The answer. Waits while the queue is full."""
        events: Queue[StreamEvent | JobFailed] = Queue()
        job = Job(request, lane, "comparison of heads", events.put)
        while True:
            try:
                self.scheduler.submit(job)
                break
            except QueueFull:
                time.sleep(_RETRY_SECONDS)
        while True:
            event = events.get()
            if isinstance(event, JobFailed):
                raise DraftHeadsError(f"the heads could not be compared: {event.message}")
            if event.finish_reason is not None:
                return request.result()


def _texts_for(engine: Engine, folder: Path) -> list[RecordedTokens]:
    """The newest records, of the tokenizer of a model and short enough for it."""
    print_ = tokenizer_fingerprint(engine.model.tokenizer)
    room = (engine.model.max_positions or 1 << 30) - _NUM_TOKENS
    newest = islice(_newest_records(folder), _MOST_RECORDS)
    return [text for text in newest if text.tokenizer == print_ and len(text.prompt_ids) < room]


def _newest_records(folder: Path) -> Iterator[RecordedTokens]:
    """What was recorded last, the newest first."""
    for path in sorted(folder.glob("traffic-*.jsonl"), reverse=True):
        with suppress(DataError):  # it was deleted to make room
            for _, value in reversed(deque(read_json_lines(path, may_be_torn=True), _MOST_RECORDS)):
                yield RecordedTokens(tuple(value["prompt_ids"]), tuple(value["answer_ids"]), value["tokenizer"])
