"""The rounds of a comparison: all ways of decoding answer the same questions in turn, and their numbers are rows."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from draftheads.bench.contenders import Contender
from draftheads.bench.conversations import Conversations, Question, question_of
from draftheads.bench.quality import Item, Measure, Ratings, Scores, quality_fields
from draftheads.bench.settings import DRAWN, LOADED, MIN_PROMPTS, BenchSettings, Point, Variant
from draftheads.bench.table import ALL, TURN, WITH_COPIES, Row, heads_only, parts_of, timed_row
from draftheads.bench.timing import (
    PLAIN,
    STOCK,
    Answers,
    Ids,
    Way,
    drafting_cost,
    engine_way,
    first_texts,
    stock_way,
    take_turns,
    together,
)
from draftheads.bench.trees import TreeFinder
from draftheads.data.records import Record
from draftheads.decode.engine import Engine
from draftheads.decode.prompts import Prompt
from draftheads.decode.text import TextStream, pieces_of
from draftheads.errors import DataError, InvalidPrompt, InvalidSettings
from draftheads.models.model import TargetModel
from draftheads.utils.counts import counted
from draftheads.utils.progress import Progress, counted_stage
from draftheads.utils.provenance import identity_digest, saved_json

_QUEUE = 4  # prompts in a group for each one that is at work: the next one takes the place of one that is answered


@dataclass(frozen=True)
class _Way:
    """A way of decoding at a point, before it is measured."""

    name: str
    settings: dict[str, Any]
    decode: Way
    identity: Any = None
    num_parameters: int = 0
    tree: str = ""
    predicted: float | None = None


@dataclass
class Bench:
    """A comparison of drafters for one model."""

    target: TargetModel
    contenders: Sequence[Contender]
    prompts: InitVar[Sequence[Prompt | Record]]
    calibration: InitVar[Sequence[list[int]]]  # token ids of prompts on which trees are found
    settings: BenchSettings
    _: KW_ONLY
    folder: Path  # findings are saved there, and used again; answers in a time box are not
    progress: Progress
    stock: TargetModel | None = None  # transformers' own model, timed as well
    measures: Sequence[Measure | Literal["agreement", "perplexity"]] = ()
    max_seconds: float = math.inf  # of all answers

    def __post_init__(self, prompts: Sequence[Prompt | Record], calibration: Sequence[list[int]]) -> None:
        self.ratings = Ratings(self.measures, self.folder, self.progress)
        self.questions = [question_of(number, prompt) for number, prompt in enumerate(prompts)]
        if len({question.name for question in self.questions}) < len(self.questions):
            self.questions = [replace(question, name=str(question.number + 1)) for question in self.questions]
        self.trees = TreeFinder(self.target, calibration, self.settings, folder=self.folder, progress=self.progress)
        self.lines: list[dict[str, Any]] = []  # every answer
        self.problems: list[dict[str, Any]] = []  # what was not answered or measured, and why
        self.drafting: dict[str, Any] = {}  # milliseconds of each head's parts
        self.saved: list[Path] = []  # answers of this comparison
        self.example: dict[str, Any] | None = None  # an answer in pieces, accepted draft tokens marked

    def run(self) -> list[Row]:
        """The table: for each combination of settings a row for each way, over all questions and by part."""
        self.progress.stage("timing the drafting of each head")
        for contender in self.contenders:
            if contender.head is not None and math.isinf(self.max_seconds):  # else the time is for answers
                self.drafting[contender.name] = drafting_cost(self.target, contender.head)
        points = list(self.settings.points())
        rows: list[Row] = []
        for number, point in enumerate(points, 1):
            rows += self._rows(point, "" if len(points) == 1 else f" at {in_words(point)} ({number} of {len(points)})")
        self._show_best(rows)
        if self.ratings.others:
            self.saved += self.folder.glob("rated-*.json")
        return rows

    # --- ways of decoding ---

    def _ways(self, point: Point) -> dict[str, _Way]:
        """All ways at a point by what tells them apart; plain decoding first."""
        common = asdict(point)
        plain, sampling = Engine(self.target, max_batch_size=point.batch_size), self.settings.sampling(point, Variant())
        ways = [_Way(PLAIN, common, engine_way(plain, sampling))]
        if self.stock is not None and point.batch_size == 1:
            ways.append(_Way(STOCK, common, stock_way(self.stock, sampling)))
        for contender in self.contenders:
            variants = self.settings.variants(point.temperature)
            found = [way for variant in variants if (way := self._way(contender, point, variant)) is not None]
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
            tree += f", {WITH_COPIES}" if engine.drafter.budget else ""
        else:
            chosen = self.trees.find(contender, variant)
            if chosen is None:
                return None
            tree, predicted = chosen.words, chosen.predicted
            drafter = contender.sized(variant.num_nodes)
            engine = Engine(self.target, drafter, shape=chosen.shape, max_batch_size=point.batch_size)
        settings, decode = asdict(point) | asdict(variant), engine_way(engine, self.settings.sampling(point, variant))
        return _Way(contender.name, settings, decode, contender.identity, contender.num_parameters, tree, predicted)

    # --- what they do ---

    def _talks(self, point: Point) -> Conversations:
        return Conversations(Engine(self.target), point.prompt_tokens, self.settings.longest_prompt)

    def _rows(self, point: Point, where: str) -> Iterator[Row]:
        ways = self._ways(point)
        found = self._timed(point, ways, where)
        plain, *_ = found.values()
        stock = next((found[key] for key, way in ways.items() if way.name == STOCK), None)
        plain_texts = first_texts(plain)
        for key, way in ways.items():
            own = found[key]
            self._note(way, point, own)
            scores = self._scores(point, own, plain)
            for part, belongs in parts_of(plain, [question.category for question in self.questions]):
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
                    num_different=sum(text != plain_texts.get(place) for place, text in first_texts(chosen).items()),
                    # of whole conversations, so it says nothing about a single turn
                    **quality_fields(
                        [] if part.startswith(TURN) else scores,
                        {self.questions[number].name for answer in chosen for number in answer.questions},
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
                self._problem(question.name, 1, str(error))
        if len(questions) < MIN_PROMPTS:
            raise DataError(f"the model takes {counted(len(questions), 'prompt')}: give at least {MIN_PROMPTS}")
        if point.batch_size > len(questions):
            self._problem(None, 0, f"batch size {point.batch_size}: {counted(len(questions), 'prompt')} cannot fill it")
        size = 1 if point.batch_size == 1 else min(len(questions), _QUEUE * point.batch_size)
        groups = [questions[start : start + size] for start in range(0, len(questions), size)]
        if len(groups) > 1 and len(groups[-1]) < size:
            rest = groups.pop()
            groups[-1] += rest
        asked = [asdict(question) for group in groups for question in group]
        identities = [[key, way.identity] for key, way in ways.items()]
        key = identity_digest([asked, identities, asdict(self.settings), self.stock is not None])
        stage = f"timing {len(ways)} ways on {counted(len(questions), 'prompt')}{where}"
        advance = counted_stage(self.progress, stage, len(groups))

        def saved(number: int, find: Callable[[], Any]) -> Any:
            path = self.folder / f"timed-{key}-{number}.json"
            answers = saved_json(path, find) if math.isinf(self.max_seconds) else find()
            advance()
            return answers

        given, tokens = {name: talks.way(way.decode) for name, way in ways.items()}, self.settings.max_new_tokens
        found = take_turns(given, groups, max_new_tokens=tokens, max_seconds=self.max_seconds, saved=saved)
        self.saved += self.folder.glob(f"timed-{key}-*.json")
        return found

    def _note(self, way: _Way, point: Point, own: Sequence[Answers]) -> None:
        """Notes every answer, and each turn without one."""
        for answers in own:
            for place, number in enumerate(answers.questions):
                ids = answers.token_ids[place]
                self.lines.append(
                    {
                        "way": way.name,
                        "settings": way.settings,
                        "question_id": self.questions[number].name,
                        "category": self.questions[number].category,
                        "turn": answers.turn + 1,
                        "text": self.target.tokenizer.decode(ids, skip_special_tokens=True),
                        "token_ids": ids,
                        "step_tokens": answers.step_tokens[place],
                        "seconds": answers.seconds if len(answers.token_ids) == 1 else None,
                        "first_seconds": answers.first_seconds[place],
                        "last_seconds": answers.last_seconds[place],
                    }
                )
        for question, _, said in self._answered(point, own):
            if len(said) < len(question.turns):
                try:
                    self._talks(point).ids(question, said)
                except InvalidPrompt as error:
                    self._problem(question.name, len(said) + 1, f"{way.name}: {error}")

    def _answered(self, point: Point, own: Sequence[Answers]) -> Iterator[tuple[Question, list[Ids], list[str]]]:
        """Each question that has answers, with the token ids and texts of these."""
        talks, texts = self._talks(point), first_texts(own)
        for question in self.questions:
            places = [(question.number, turn) for turn in range(len(question.turns))]
            if ids := [texts[place] for place in places if place in texts]:
                yield question, ids, [talks.said(each) for each in ids]

    def _show_best(self, rows: Sequence[Row]) -> None:
        """Keeps the fastest drafter's answer to the first question as the example."""
        best = max(heads_only(rows), key=lambda row: row.speedup, default=None)
        for line in self.lines:
            if best is not None and (line["way"], line["settings"]) == (best.name, best.settings):
                ids, steps = line["token_ids"], line["step_tokens"]
                pieces = pieces_of(line["text"], ids, TextStream(self.target.tokenizer))
                drafted = [False, *(place < count - 1 for count in steps for place in range(count))]
                asked = next(each.turns[0] for each in self.questions if each.name == line["question_id"])
                marked = [[piece, mark] for piece, mark in zip(pieces, drafted, strict=False)]
                self.example = {"way": best.name, "question": asked, "pieces": marked}
                return

    def _problem(self, question: str | None, turn: int, reason: str) -> None:
        """Notes a problem of the question with a name, or of all (None)."""
        problem = {"question": question, "turn": turn, "problem": reason}
        if problem not in self.problems:
            self.problems.append(problem)

    # --- quality ---

    def _items(self, point: Point, own: Sequence[Answers]) -> list[Item]:
        """The answers question by question."""
        talks = self._talks(point)
        return [
            Item(
                question.name,
                question.category,
                question.turns[: len(ids)],
                tuple(answers),
                question.reference,
                tuple(tuple(talks.ids(question, answers[:turn])) for turn in range(len(ids))),
                tuple(ids),
            )
            for question, ids, answers in self._answered(point, own)
        ]

    def _scores(self, point: Point, own: Sequence[Answers], plain: Sequence[Answers]) -> list[Scores]:
        if not self.measures:
            return []
        scores, problems = self.ratings.of(self._items(point, own), self._items(point, plain))
        for question_id, reason in problems:
            self._problem(question_id, 0, reason)
        return scores


def in_words(point: Point) -> str:
    """What all ways have in common, for a stage of progress.

    >>> in_words(Point(4, 0.7))
    'batch size 4, temperature 0.7'
    """
    words = [f"batch size {point.batch_size}", f"temperature {point.temperature:g}"]
    if point.prompt_tokens is not None:
        words.append(f"prompts of {point.prompt_tokens} tokens")
    return ", ".join(words)
