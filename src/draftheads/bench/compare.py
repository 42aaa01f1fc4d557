"""Drafters side by side with one engine: every way of decoding answers the same questions in turn, and is timed.

Heads draft on trees of the same size, found on other prompts, and as :func:`draftheads.load` makes them. The answers
are the one record of a comparison: all numbers follow from them.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from draftheads.bench.contenders import DRAFT_MODEL, Contender, heads_for, load_contenders, names_of
from draftheads.bench.conversations import Conversations, Question
from draftheads.bench.drafting import drafting_cost
from draftheads.bench.quality import Agreement, Item, Measure, Perplexity, Scores
from draftheads.bench.settings import DRAWN, LOADED, BenchSettings, Point, Variant
from draftheads.bench.table import ALL, TURN, WITH_COPIES, Row, heads_only, parts_of, timed_row
from draftheads.bench.timing import PLAIN, STOCK, Answers, engine_way, stock_way, take_turns
from draftheads.bench.trees import TreeFinder
from draftheads.checkpoints.registry import head_name
from draftheads.data.records import Record, own_prompts, prompts_in, read_prompts
from draftheads.decode.engine import Engine
from draftheads.decode.prompts import Prompt, prompt_list
from draftheads.decode.step_costs import machine_of
from draftheads.decode.text import TextStream, pieces_of
from draftheads.drafters.copying import Copying
from draftheads.errors import DataError, InvalidPrompt, InvalidSettings
from draftheads.loading import load_target, resolve, template_of
from draftheads.models.model import TargetModel
from draftheads.models.model_names import model_name
from draftheads.search.replay import encoded
from draftheads.settings import Precision
from draftheads.utils.cache import cache_folder
from draftheads.utils.counts import counted
from draftheads.utils.files import locked
from draftheads.utils.identity import identity_digest, saved_json
from draftheads.utils.machine import OtherPrograms
from draftheads.utils.progress import Progress, counted_stage, shown
from draftheads.utils.provenance import provenance

MIN_PROMPTS = 3  # for an interval
_QUEUE = 4  # prompts in a group for each one that is at work: the next one takes the place of one that is answered


@dataclass(frozen=True)
class Comparison:
    """A finished comparison."""

    rows: list[Row]  # over all questions, and by category and turn
    record: dict[str, Any]  # as in ``bench.json``
    answers: list[dict[str, Any]]  # as the lines of ``answers.jsonl``
    saved: tuple[Path, ...] = ()  # files in the user's cache by which a stopped comparison continues

    def forget(self) -> None:
        """Deletes what was saved, so that the next comparison measures times anew."""
        for path in self.saved:
            path.unlink(missing_ok=True)


def compare_heads(
    model: str | PathLike[str] = "smollm2-135m",
    heads: Sequence[str | PathLike[str]] = (),
    prompts: Sequence[Prompt | Record] | None = None,
    *,
    chat_template: str | PathLike[str] | None = None,
    draft_model: str | PathLike[str] | None = None,
    settings: BenchSettings | None = None,
    quality: Sequence[Measure | Literal["agreement", "perplexity"]] = (),
    original_model: str | PathLike[str] | None = None,
    transformers: bool = False,
    precision: Precision = "auto",
    fresh: bool = False,
    keep: bool = False,
    progress: Progress | bool = True,
    **load_options: Any,
) -> Comparison:
    """Compares draft heads, and drafters without a head, on the same prompts; what ``draftheads bench`` does.

    Finished answers are saved in the user's cache until the comparison ends. So one that was stopped or killed
    continues with the same arguments.

    Args:
        model: ``smollm2-135m``, a folder, or a Hugging Face id.
        heads: bundled heads' names, folders or Hugging Face ids; also ``prompt-lookup`` and ``lookahead``. When left
            out, these two and all bundled heads of the model.
        prompts: at least 3, better 80; six built-in ones when left out. Records of
            :func:`draftheads.data.suites.read_suite` have all turns and categories.
        chat_template: as for :func:`draftheads.load`.
        draft_model: a smaller model of the same tokenizer, compared as well.
        settings: what is measured, and on how much.
        quality: measures of the answers. ``"agreement"`` compares them with plain decoding's, ``"perplexity"`` is under
            the original model; both are measured for typical acceptance when nothing is given.
        original_model: what the model was tuned from, for the perplexity; the model itself when left out.
        transformers: also time transformers' own ``generate``, one prompt at a time.
        precision: as for :func:`draftheads.load`.
        fresh: ignore what was saved.
        keep: the finished answers stay saved until :meth:`Comparison.forget` is called.
        progress: True shows bars in a notebook or on a terminal; or receives each stage.
        load_options: other arguments of :func:`draftheads.load` for the model, such as ``device`` or ``four_bit``.

    Raises:
        ModelNotFound, CheckpointError: the model or a head cannot be loaded.
        DataError: fewer than 3 prompts that the model takes.
        InvalidSettings: two drafters have the same name, or no drafter can draft these trees.
        StorageError: another process makes the same comparison.
    """
    model, settings, progress = model_name(model), settings or BenchSettings(), shown(progress)
    records = _records(list(read_prompts(own_prompts("demo"))) if prompts is None else prompts)
    if len(records) < MIN_PROMPTS:
        raise DataError(f"{counted(len(records), 'prompt')}: give at least {MIN_PROMPTS}, better 80")
    if isinstance(heads, str | PathLike) or not isinstance(heads, Sequence):
        raise InvalidSettings(f"heads is {heads!r}; give a list, such as ['medusa']")
    names = [head_name(head) for head in heads] or heads_for(model)
    named = names_of(names, taken=(PLAIN, STOCK, DRAFT_MODEL) if draft_model else (PLAIN, STOCK))
    drafts = {name: resolve(head, model, ignore_profile=True) for name, head in named.items()}
    template = template_of(chat_template, *drafts.values())  # raises before the model is loaded
    target = load_target(model, chat_template=template, precision=precision, **load_options)
    stock = None
    if transformers:
        exact = {"precision": "auto" if precision == "int8" else precision, **load_options, "fast": False}
        stock = load_target(model, chat_template=template, **exact)
    if not quality and any(rule.startswith("typical") for rule in settings.acceptance):
        quality = ("agreement", "perplexity")  # typical acceptance is never shown without what it costs
    original = target
    if original_model is not None and "perplexity" in quality:
        original = load_target(original_model, chat_template=template, precision=precision, **load_options)
    measures = [Perplexity(original) if measure == "perplexity" else measure for measure in quality]
    more: dict[str, Any] = {"draft_model": draft_model, "precision": precision, **load_options}
    contenders = list(load_contenders(drafts, target, **more))
    calibration = encoded(target, prompts_in(own_prompts("calibration")), settings.replay(2))
    identity = {
        "model": [target.model_id, target.weights_fingerprint],
        "machine": machine_of(target),
        "calibration": [calibration, settings.max_new_tokens],
        **({"load": {name: str(value) for name, value in load_options.items()}} if load_options else {}),
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = _saved_folder(identity) or Path(temporary)
        with locked(folder, "set DRAFTHEADS_CACHE"):
            if fresh:
                shutil.rmtree(folder / "found", ignore_errors=True)
            bench = Bench(
                target,
                contenders,
                records,
                calibration,
                settings,
                stock=stock,
                measures=measures,
                folder=folder / "found",
                progress=progress,
            )
            others = OtherPrograms()
            rows = bench.run()
            disturbed = target.device.type == "cpu" and others.disturb(torch.get_num_threads())
    record = {
        "format_version": 3,
        "model": model,
        "precision": target.precision,
        "threads": torch.get_num_threads(),
        "num_prompts": len({line["question_id"] for line in bench.lines}),
        "prompts": None,  # their file, which only the command knows
        "settings": asdict(settings),
        "drafters": {contender.name: contender.identity for contender in contenders},
        "drafting": bench.drafting,
        "accuracy": bench.trees.accuracy,
        "peak_bytes": _peak_bytes(),
        "disturbed": disturbed,  # other programs used the cores
        "problems": bench.problems,
        "unmeasured": bench.unmeasured,  # a judge failed, and can be asked again
        "judge": next((each.made_by for each in measures if isinstance(each, Measure) and each.made_by), None),
        "example": bench.example,
        "rows": [asdict(row) for row in rows],
        "provenance": provenance(),
    }
    comparison = Comparison(rows, record, bench.lines, tuple(bench.saved))
    if not keep and not bench.unmeasured:
        comparison.forget()
    return comparison


def _records(prompts: Sequence[Prompt | Record]) -> list[Prompt | Record]:
    """Checked prompts, and records as they are."""
    if isinstance(prompts, Sequence) and not isinstance(prompts, str):
        return [one if isinstance(one, Record) else prompt_list([one])[0] for one in prompts]
    return list(prompt_list(prompts))


def _saved_folder(identity: dict[str, Any]) -> Path | None:
    """The folder of what is saved; None where the user has no cache."""
    try:
        return cache_folder() / "bench" / identity_digest(identity)
    except InvalidSettings:
        return None


@dataclass(frozen=True)
class _Way:
    """A way of decoding at a point, before it is measured."""

    name: str
    settings: dict[str, Any]
    decode: Any
    identity: Any = None
    num_parameters: int = 0
    tree: str = ""
    predicted: float | None = None


class Bench:
    """A comparison of drafters for one model.

    Args:
        target: the model.
        contenders: each with a name of its own.
        prompts: to answer.
        calibration: other prompts, as token ids, on which trees are found.
        settings: what is compared.
        stock: transformers' own model, timed as well.
        measures: of the answers' quality.
        folder: where findings are saved; they are used again.
        progress: receives each stage.
    """

    def __init__(
        self,
        target: TargetModel,
        contenders: Sequence[Contender],
        prompts: Sequence[Prompt | Record],
        calibration: Sequence[list[int]],
        settings: BenchSettings,
        *,
        stock: TargetModel | None = None,
        measures: Sequence[Measure | Literal["agreement", "perplexity"]] = (),
        folder: Path,
        progress: Progress,
    ) -> None:
        self.target, self.contenders, self.settings, self.stock = target, contenders, settings, stock
        self.measures, self.folder, self.progress = measures, folder, progress
        for measure in measures:
            if not isinstance(measure, str) and measure.asks_others:
                measure.folder = folder
        self.questions = [question_of(number, prompt) for number, prompt in enumerate(prompts)]
        records = [prompt if isinstance(prompt, Record) else Record(()) for prompt in prompts]
        self.categories = [str(record.labels.get("category") or "") for record in records]
        labels = ("question_id", "id")
        numbers = [str(number + 1) for number in range(len(records))]
        ids = [
            next((str(record.labels[label]) for label in labels if label in record.labels), number)
            for number, record in zip(numbers, records, strict=True)
        ]
        self.ids = ids if len(set(ids)) == len(ids) else numbers
        self.references = [record.reference for record in records]
        self.trees = TreeFinder(target, calibration, settings, folder=folder, progress=progress)
        self.lines: list[dict[str, Any]] = []  # every answer
        self.problems: list[dict[str, Any]] = []  # what was not answered or measured, and why
        self.drafting: dict[str, Any] = {}  # milliseconds of each head's parts
        self._scored: list[tuple[Any, Any, list[Scores]]] = []  # measures, texts and their scores
        self.saved: list[Path] = []  # answers of this comparison
        self.unmeasured = False  # whether a measure failed, so that the same comparison should try it again
        self.example: dict[str, Any] | None = None  # an answer in pieces, accepted draft tokens marked

    def run(self) -> list[Row]:
        """The table: for each combination of settings a row for each way, over all questions and by part."""
        self.progress.stage("timing the drafting of each head")
        for contender in self.contenders:
            if contender.head is not None:
                self.drafting[contender.name] = drafting_cost(self.target, contender.head).record
        points = list(self.settings.points())
        rows: list[Row] = []
        for number, point in enumerate(points, 1):
            rows += self._rows(point, "" if len(points) == 1 else f" at {in_words(point)} ({number} of {len(points)})")
        self._show_best(rows)
        if any(not isinstance(measure, str) and measure.asks_others for measure in self.measures):
            self.saved += self.folder.glob("rated-*.json")
        return rows

    # --- ways of decoding ---

    def _ways(self, point: Point) -> dict[str, _Way]:
        """All ways at a point by what tells them apart; plain decoding first."""
        common = asdict(point)
        variant = Variant("best")
        plain = Engine(self.target, max_batch_size=point.batch_size)
        ways = [_Way(PLAIN, common, engine_way(plain, self.settings.sampling(point, variant)))]
        if self.stock is not None and point.batch_size == 1:
            ways.append(_Way(STOCK, common, stock_way(self.stock, self.settings.sampling(point, variant))))
        for contender in self.contenders:
            found = [
                way
                for variant in self.settings.variants(point.temperature)
                if (way := self._way(contender, point, variant)) is not None
            ]
            if not found:
                kinds = f"trees of the kind {', '.join(self.settings.trees)} with {', '.join(self.settings.acceptance)}"
                self._problem(None, 0, f"{contender.name} is left out: it cannot draft {kinds} acceptance")
            ways += found
        if self.contenders and ways[-1].name in (PLAIN, STOCK):
            raise InvalidSettings(f"no drafter is left: {'; '.join(each['problem'] for each in self.problems)}")
        return {identity_digest([way.name, way.settings]): way for way in ways}

    def _way(self, contender: Contender, point: Point, variant: Variant) -> _Way | None:
        """A drafter's way; None if it cannot draft like this."""
        tree, predicted = variant.tree, None
        if variant.tree in LOADED:
            engine = None if variant.acceptance in DRAWN else contender.as_loaded(variant.tree == "defaults")
            if engine is None:
                return None
            engine.max_batch_size = point.batch_size
            tree += f", {WITH_COPIES}" if isinstance(engine.drafter, Copying) else ""
        else:
            chosen = self.trees.find(contender, variant)
            if chosen is None:
                return None
            tree, predicted = chosen.words, chosen.predicted
            drafter = contender.drafter if contender.within is None else contender.within(variant.num_nodes or 0)
            engine = Engine(self.target, drafter, shape=chosen.shape, max_batch_size=point.batch_size)
        return _Way(
            contender.name,
            {**asdict(point), **asdict(variant)},
            engine_way(engine, self.settings.sampling(point, variant)),
            contender.identity,
            contender.num_parameters,
            tree,
            predicted,
        )

    # --- what they do ---

    def _talks(self, point: Point) -> Conversations:
        return Conversations(self.target, point.prompt_tokens, self.settings.longest_prompt)

    def _rows(self, point: Point, where: str) -> Iterator[Row]:
        ways = self._ways(point)
        found = self._timed(point, ways, where)
        plain, *_ = found.values()
        stock = next((found[key] for key, way in ways.items() if way.name == STOCK), None)
        plain_texts = _texts(plain)
        for key, way in ways.items():
            own = found[key]
            self._note(way, point, own)
            scores = self._scores(point, own, plain)
            for part, belongs in parts_of(plain, self.categories):
                chosen, of_plain = together(list(filter(belongs, own)), list(filter(belongs, plain)))
                chosen, of_stock = together(chosen, list(filter(belongs, stock or chosen)))
                if not chosen:
                    continue
                yield replace(
                    timed_row(way.name, chosen, of_plain, of_stock if stock else None),
                    part=part,
                    settings=way.settings,
                    num_parameters=way.num_parameters,
                    tree=way.tree,
                    predicted_tokens_per_step=way.predicted if part == ALL and not point.temperature else None,
                    num_different=sum(text != plain_texts.get(place) for place, text in _texts(chosen).items()),
                    # of whole conversations, so it says nothing about a single turn
                    **self._quality(
                        [] if part.startswith(TURN) else scores,
                        {number for answer in chosen for number in answer.questions},
                    ),
                )

    def _timed(self, point: Point, ways: dict[str, _Way], where: str) -> dict[str, list[Answers]]:
        """All ways' answers to all questions that the model takes, in turn; ``where`` names the point."""
        talks = self._talks(point)
        questions = []
        for question in self.questions:
            try:
                talks.ids(question)
                questions.append(question)
            except InvalidPrompt as error:
                self._problem(question.number, 1, str(error))
        if len(questions) < MIN_PROMPTS:
            raise DataError(f"the model takes {counted(len(questions), 'prompt')}: give at least {MIN_PROMPTS}")
        if point.batch_size > len(questions):
            self._problem(None, 0, f"batch size {point.batch_size}: {counted(len(questions), 'prompt')} cannot fill it")
        size = 1 if point.batch_size == 1 else min(len(questions), _QUEUE * point.batch_size)
        groups = [questions[start : start + size] for start in range(0, len(questions), size)]
        if len(groups) > 1 and len(groups[-1]) < size:
            rest = groups.pop()
            groups[-1] += rest
        key = identity_digest(
            [
                [asdict(question) for group in groups for question in group],
                [[key, way.identity] for key, way in ways.items()],
                asdict(self.settings),
                self.stock is not None,
            ]
        )
        stage = f"timing {len(ways)} ways on {counted(len(questions), 'prompt')}{where}"
        advance = counted_stage(self.progress, stage, len(groups) * self.settings.rounds)

        def saved(number: int, find: Callable[[], Any]) -> Any:
            answers = saved_json(self.folder / f"timed-{key}-{number}.json", find)
            advance()
            return answers

        timings = take_turns(
            {key: talks.way(way.decode) for key, way in ways.items()},
            groups,
            max_new_tokens=self.settings.max_new_tokens,
            rounds=self.settings.rounds,
            saved=saved,
        )
        self.saved += self.folder.glob(f"timed-{key}-*.json")
        return timings.answers

    def _note(self, way: _Way, point: Point, own: Sequence[Answers]) -> None:
        """Notes every answer, and each turn without one."""
        for answers in own:
            for place, number in enumerate(answers.questions):
                ids = answers.token_ids[place]
                self.lines.append(
                    {
                        "way": way.name,
                        "settings": way.settings,
                        "question_id": self.ids[number],
                        "category": self.categories[number],
                        "turn": answers.turn + 1,
                        "text": self._text(ids),
                        "token_ids": ids,
                        "step_tokens": answers.step_tokens[place],
                        "seconds": answers.seconds if len(answers.token_ids) == 1 else None,
                        "first_seconds": answers.first_seconds[place],
                        "last_seconds": answers.last_seconds[place],
                    }
                )
        texts = _texts(own)
        for question in self.questions:
            turns = [turn for turn in range(len(question.turns)) if (question.number, turn) in texts]
            said = [self._talks(point).said(texts[question.number, turn]) for turn in turns]
            if 0 < len(said) < len(question.turns):
                try:
                    self._talks(point).ids(question, said)
                except InvalidPrompt as error:
                    self._problem(question.number, len(said) + 1, f"{way.name}: {error}")

    def _show_best(self, rows: Sequence[Row]) -> None:
        """Keeps the fastest drafter's answer to the first question as the example."""
        best = max(heads_only(rows), key=lambda row: row.speedup, default=None)
        for line in self.lines:
            if best is not None and (line["way"], line["settings"]) == (best.name, best.settings):
                ids, steps = line["token_ids"], line["step_tokens"]
                pieces = pieces_of(line["text"], ids, TextStream(self.target.tokenizer))
                drafted = [False, *(place < count - 1 for count in steps for place in range(count))]
                question = self.questions[self.ids.index(line["question_id"])].turns[0]
                marked = [[piece, mark] for piece, mark in zip(pieces, drafted, strict=False)]
                self.example = {"way": best.name, "question": question, "pieces": marked}
                return

    def _problem(self, number: int | None, turn: int, reason: str) -> None:
        """Notes a problem of a question, or of all (None)."""
        problem = {"question": None if number is None else self.ids[number], "turn": turn, "problem": reason}
        if problem not in self.problems:
            self.problems.append(problem)

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.target.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    # --- quality ---

    def _items(self, point: Point, own: Sequence[Answers]) -> list[Item]:
        """The answers question by question; with several rounds, of the first one."""
        talks, texts = self._talks(point), _texts(own)
        items = []
        for question in self.questions:
            number, turns = question.number, range(len(question.turns))
            ids = [texts[number, turn] for turn in turns if (number, turn) in texts]
            answers = [talks.said(each) for each in ids]
            if ids:
                items.append(
                    Item(
                        self.ids[number],
                        self.categories[number],
                        question.turns[: len(ids)],
                        tuple(answers),
                        self.references[number],
                        tuple(tuple(talks.ids(question, answers[:turn])) for turn in range(len(ids))),
                        tuple(ids),
                    )
                )
        return items

    def _scores(self, point: Point, own: Sequence[Answers], plain: Sequence[Answers]) -> list[Scores]:
        if not self.measures:
            return []
        items, plain_items, scores = self._items(point, own), self._items(point, plain), []
        texts = [item.answer_ids for item in items]
        found: list[tuple[str, Scores]] = []
        for measure in self.measures:
            known = [found for name, seen, found in self._scored if name is measure and seen == texts]
            if not known:  # exact drafters have the same texts
                one = Agreement(plain_items) if isinstance(measure, str) else measure
                known = [one(items, self.progress)]
                self.unmeasured |= one.asks_others and any(each.problems for each in known[0])
                if not isinstance(measure, str):
                    self._scored.append((measure, texts, known[0]))
            scores += known[0]
            found += [(measure if isinstance(measure, str) else measure.name, each) for each in known[0]]
        numbers = {self.ids[number]: number for number in range(len(self.ids))}
        for name, each in found:
            for question_id, reason in each.problems.items():
                self._problem(numbers[question_id], 0, f"{name}: {reason}")
        return scores

    def _quality(self, scores: Sequence[Scores], numbers: set[int]) -> dict[str, Any]:
        """Means with intervals over these questions, as fields of a row."""
        ids = {self.ids[number] for number in numbers}
        chosen = [
            replace(score, values={key: value for key, value in score.values.items() if key in ids}) for score in scores
        ]
        means = {score.measure: (mean, len(score.values)) for score in chosen if (mean := score.estimate()) is not None}
        return {
            "quality": {name: mean.value for name, (mean, _) in means.items()},
            "quality_intervals": {
                name: (mean.low, mean.high) for name, (mean, count) in means.items() if count >= MIN_PROMPTS
            },
            "quality_counts": {name: count for name, (_, count) in means.items() if count < len(ids)},
        }


def _peak_bytes() -> int:
    """The most memory that this process has had; what it has now, where that is not known."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return psutil.Process().memory_info().rss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def together(first: Sequence[Answers], second: Sequence[Answers]) -> tuple[list[Answers], list[Answers]]:
    """The answers to turns that both have: a conversation can become too long for one way alone."""

    def turns(answers: Sequence[Answers]) -> set[Any]:
        return {(answer.group, answer.turn, answer.questions) for answer in answers}

    both = turns(first) & turns(second)
    kept = [[one for one in each if (one.group, one.turn, one.questions) in both] for each in (first, second)]
    return kept[0], kept[1]


def question_of(number: int, prompt: Prompt | Record) -> Question:
    """The question of a prompt or a record."""
    if isinstance(prompt, Record) and prompt.is_text:
        return Question(number, prompt.user_turns)
    messages = list(prompt.messages) if isinstance(prompt, Record) else prompt
    if isinstance(messages, str):
        return Question(number, (messages,))
    if isinstance(messages[0], int):
        return Question(number, ("",), is_ids=tuple(messages))  # type: ignore[arg-type]
    *before, last = messages
    return Question(number, (last["content"],), tuple(before), role=last["role"])  # type: ignore[index,arg-type]


def _texts(own: Sequence[Answers]) -> dict[tuple[int, int], tuple[int, ...]]:
    """The token ids of each question's answer to each turn; of the first round."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for answers in own:
        for number, ids in zip(answers.questions, answers.token_ids, strict=True):
            found.setdefault((number, answers.turn), ids)
    return found


def in_words(point: Point) -> str:
    """What all ways have in common, for a stage of progress.

    >>> in_words(Point(4, 0.7))
    'batch size 4, temperature 0.7'
    """
    words = [f"batch size {point.batch_size}", f"temperature {point.temperature:g}"]
    if point.prompt_tokens is not None:
        words.append(f"prompts of {point.prompt_tokens} tokens")
    return ", ".join(words)
