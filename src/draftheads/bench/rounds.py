"""The rounds of a comparison: all ways of decoding answer the same questions in turn, and their numbers are rows.

A question may have several turns: then the next one continues the conversation with the answer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from draftheads.bench.contenders import Contender, TreeFinder
from draftheads.bench.quality import Agreement, Item, Measure, Scores, quality_fields
from draftheads.bench.settings import DRAWN, LOADED, MIN_PROMPTS, BenchSettings, Point, Variant
from draftheads.bench.table import ALL, TURN, WITH_COPIES, Row, heads_only, parts_of, timed_row
from draftheads.bench.timing import (
    PLAIN,
    STOCK,
    Answers,
    Way,
    drafting_cost,
    engine_way,
    first_texts,
    stock_way,
    take_turns,
    together,
)
from draftheads.data.records import Record
from draftheads.decode.engine import Engine
from draftheads.decode.prompts import Prompt, prompt_ids
from draftheads.decode.text import TextStream, pieces_of
from draftheads.errors import DataError, InvalidPrompt, InvalidSettings
from draftheads.models.model import TargetModel
from draftheads.utils.counts import counted
from draftheads.utils.messages import Message
from draftheads.utils.progress import Progress, counted_stage
from draftheads.utils.provenance import identity_digest, saved_json

_QUEUE = 4  # prompts in a group for each one that is at work: the next one takes the place of one that is answered


@dataclass(frozen=True)
class Question:
    """A conversation as far as it is given, and what the user says next, turn by turn."""

    number: int  # among all questions
    turns: tuple[str, ...]
    before: tuple[Message, ...] = ()
    role: str = "user"  # of the turns
    is_ids: tuple[int, ...] | None = None  # token ids in place of all
    name: str = ""  # of a record, else its number from 1
    category: str = ""
    language: str = ""
    reference: Any = None


def question_of(number: int, prompt: Prompt | Record) -> Question:
    """The question of a prompt or a record."""
    about: dict[str, Any] = {"name": str(number + 1)}
    if isinstance(prompt, Record):
        found = (prompt.labels[label] for label in ("question_id", "id") if label in prompt.labels)
        language = str(prompt.labels.get("language") or "")
        about = {"name": str(next(found, number + 1)), "category": prompt.category, "language": language}
        about["reference"] = prompt.reference
        if prompt.is_text:
            return Question(number, prompt.user_turns, **about)
    messages = list(prompt.messages) if isinstance(prompt, Record) else prompt
    if isinstance(messages, str):
        return Question(number, (messages,), **about)
    if isinstance(messages[0], int):
        return Question(number, ("",), is_ids=tuple(messages), **about)  # type: ignore[arg-type]
    *before, last = messages
    return Question(number, (last["content"],), tuple(before), role=last["role"], **about)  # type: ignore[index,arg-type]


# --- the rounds ---


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
        self.others = [each for each in self.measures if isinstance(each, Measure) and each.asks_others]
        for measure in self.others:  # their answers are saved, too
            measure.folder = self.folder
        self.unmeasured = False  # whether such a measure failed, so that the same comparison should try it again
        self._scored: dict[Any, list[Scores]] = {}  # by measure and texts: those of exact drafters are measured once
        self.questions = [question_of(number, prompt) for number, prompt in enumerate(prompts)]
        if len({question.name for question in self.questions}) < len(self.questions):
            self.questions = [replace(question, name=str(question.number + 1)) for question in self.questions]
        self.trees = TreeFinder(self.target, calibration, self.settings, folder=self.folder, progress=self.progress)
        self.engine = Engine(self.target)  # reads prompts
        self.lines: list[dict[str, Any]] = []  # every answer
        self.problems: list[dict[str, Any]] = []  # what was not answered or measured, and why
        self.drafting: dict[str, Any] = {}  # milliseconds of each head's parts
        self.saved: list[Path] = []  # answers of this comparison
        self.example: dict[str, Any] | None = None  # an answer in pieces, accepted draft tokens marked

    def run(self) -> list[Row]:
        """The table: for each combination of settings a row for each way, over all questions and by part."""
        for contender in self.contenders:
            if contender.head is not None and math.isinf(self.max_seconds):  # else the time is for answers
                self.progress.stage(f"timing the drafting of {contender.name}")
                self.drafting[contender.name] = drafting_cost(self.target, contender.head, max(self.settings.num_nodes))
        points = list(self.settings.points())
        rows: list[Row] = []
        for number, point in enumerate(points, 1):
            rows += self._rows(point, "" if len(points) == 1 else f" at {in_words(point)} ({number} of {len(points)})")
        self._show_best(rows)
        if self.others:
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

    def _ids(self, point: Point, question: Question, answers: Sequence[str] = ()) -> list[int]:
        """Token ids of the turn after these answers. Long prompts lose their middle: instructions are at both ends."""
        ids, longest, size = list(question.is_ids or ()), self.settings.longest_prompt, point.prompt_tokens
        if question.is_ids is None:
            said = list(question.before)
            for turn, text in enumerate(question.turns[: len(answers) + 1]):
                said.append({"role": question.role, "content": text})
                said += [{"role": "assistant", "content": answer} for answer in answers[turn : turn + 1]]
            ids = prompt_ids(self.target, said)
        if longest is not None and len(ids) > longest:
            ids = ids[: -(-longest // 2)] + ids[-(longest // 2) :]
        if size is not None:
            ids = (ids * -(-size // len(ids)))[:size]
        return self.engine.encode(ids)

    def _said(self, token_ids: Sequence[int]) -> str:
        """An answer as it stands in the conversation."""
        text: str = self.target.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text.strip()

    def _conversing(self, point: Point, decode: Way) -> Way:
        """The way that answers questions, all turns, in place of prompts. A turn that is too long ends its question."""

        def answer(group: Sequence[Question], max_new_tokens: int) -> list[Answers]:
            texts: dict[int, list[str]] = {question.number: [] for question in group}
            found = []
            for turn in range(max(len(question.turns) for question in group)):
                asked = {}
                for question in group:
                    if len(texts[question.number]) == turn < len(question.turns):
                        with suppress(InvalidPrompt):
                            asked[question.number] = self._ids(point, question, texts[question.number])
                if not asked:
                    break
                (answers,) = decode(list(asked.values()), max_new_tokens)
                found.append(replace(answers, turn=turn, questions=tuple(asked)))
                for number, ids in zip(asked, answers.token_ids, strict=True):
                    texts[number].append(self._said(ids))
            return found

        return answer

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
            labels = [
                (question.category, f"language {question.language}" * bool(question.language))
                for question in self.questions
            ]
            for part, belongs in parts_of(plain, labels):
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
        questions = []
        for question in self.questions:
            try:
                self._ids(point, question)
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

        given, tokens = (
            {name: self._conversing(point, way.decode) for name, way in ways.items()},
            self.settings.max_new_tokens,
        )
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
        for question, item in self._answered(point, own):
            if len(item.answers) < len(question.turns):
                try:
                    self._ids(point, question, item.answers)
                except InvalidPrompt as error:
                    self._problem(question.name, len(item.answers) + 1, f"{way.name}: {error}")

    def _answered(self, point: Point, own: Sequence[Answers]) -> Iterator[tuple[Question, Item]]:
        """Each question that has answers, with these."""
        texts = first_texts(own)
        for question in self.questions:
            places = [(question.number, turn) for turn in range(len(question.turns))]
            if ids := tuple(texts[place] for place in places if place in texts):
                name, answers, turns = question.name, tuple(map(self._said, ids)), question.turns[: len(ids)]
                prompts = tuple(tuple(self._ids(point, question, answers[:turn])) for turn in range(len(ids)))
                yield question, Item(name, question.category, turns, answers, question.reference, prompts, ids)

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

    def _scores(self, point: Point, own: Sequence[Answers], plain: Sequence[Answers]) -> list[Scores]:
        """What measures say of a way's answers; ``"agreement"`` stands for :class:`Agreement` with plain decoding."""
        scores: list[Scores] = []
        if not self.measures:
            return scores
        items, plain_items = ([item for _, item in self._answered(point, answers)] for answers in (own, plain))
        texts = tuple(item.answer_ids for item in items)
        for number, given in enumerate(self.measures):
            measure = Agreement(plain_items) if isinstance(given, str) else given
            if measure is not given or (number, texts) not in self._scored:
                self._scored[number, texts] = measure(items, self.progress)
            for score in self._scored[number, texts]:
                self.unmeasured |= measure.asks_others and bool(score.problems)
                scores.append(score)
                for question_id, reason in score.problems.items():
                    self._problem(question_id, 0, f"{measure.name}: {reason}")
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
