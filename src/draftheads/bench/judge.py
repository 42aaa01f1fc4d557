"""An LLM judge that rates each answer from 1 to 10, as in MT-Bench: any server with OpenAI's chat API."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from string import Formatter
from typing import Any, NamedTuple

from draftheads.bench.quality import Item, Measure, Outcome, Scores
from draftheads.data.files import at_line, read_values
from draftheads.errors import DataError, EndpointError
from draftheads.utils.files import user_path
from draftheads.utils.identity import identity_digest, saved_json
from draftheads.utils.messages import short
from draftheads.utils.openai_client import CHAT, OPENAI, NoAnswer, OpenAIClient, api_key, origin, said_in
from draftheads.utils.progress import Progress

_OPENAI_VARIABLE = "OPENAI_API_KEY"
_RATINGS = re.compile(r"\[\[(\d+(?:\.\d+)?)\]\]"), re.compile(r"\[(\d+(?:\.\d+)?)\]")
_SYSTEM = """You grade answers of an AI assistant. Consider whether the answer is correct, does what the user asked for,
and is clear and complete. Give no points for length. Write one or two sentences about the strengths and errors of the
answer. Then end with its grade from 1 (useless) to 10 (excellent) in two pairs of brackets, such as [[6]]."""
_ASKED = "# Question\n{question_1}\n\n# Answer of the assistant\n{answer_1}\n\n"
_AGAIN = "# Next question\n{question_2}\n\n# Next answer\n{answer_2}\n\nGrade the next answer only."
_CORRECT = "# Correct answer, to compare with\n{ref_answer_1}\n\n"
_CORRECT_AGAIN = "# Correct next answer\n{ref_answer_2}\n\n"


class JudgePrompt(NamedTuple):
    """A prompt of a judge; the template has fields in braces."""

    system: str
    template: str

    @property
    def fields(self) -> set[str]:
        """Names of its fields. Raises ValueError if the template is not a format string."""
        return {name for _, name, _, _ in Formatter().parse(self.template) if name is not None}


_TEMPLATES = (_ASKED, _CORRECT + _ASKED, _ASKED + _AGAIN, _CORRECT + _CORRECT_AGAIN + _ASKED + _AGAIN)
DEFAULT_PROMPTS = tuple(JudgePrompt(_SYSTEM, template) for template in _TEMPLATES)


def read_judge_prompts(path: str | PathLike[str]) -> tuple[JudgePrompt, ...]:
    """The prompts of type "single" in a file in the form of FastChat's ``judge_prompts.jsonl``."""
    place, prompts = user_path(path), []
    for _, number, record in read_values(place):
        with at_line(place, number):
            try:
                if record["type"] == "single":
                    prompts.append(JudgePrompt(record["system_prompt"], record["prompt_template"]))
                    prompts[-1].fields  # noqa: B018 - raises
            except (LookupError, TypeError, ValueError) as error:
                raise DataError(f"not a prompt of a judge ({type(error).__name__}: {error})") from None
    if not prompts:
        raise DataError('no prompt of "type": "single"; give a file such as judge_prompts.jsonl', path=place)
    return tuple(prompts)


@dataclass
class Judge(Measure):
    """Rates each turn of an item; the item's value is the mean of its turns.

    Raises:
        DataError: on construction, as :func:`read_judge_prompts`.
        InvalidSettings: the address is not one of HTTP.
        MissingDependency: httpx2 is not installed.
    """

    url: str
    model: str | None = None  # its name there; None: the first one that the server lists
    prompts: str | PathLike[str] | None = None  # a file; None: our own prompts
    api_key_env: str | None = None  # variable with the key; None: OPENAI_API_KEY, for that address alone
    parallel: int = 8
    name = "judge"
    unit = "of 10"
    asks_others = True

    def __post_init__(self) -> None:
        self._prompts = DEFAULT_PROMPTS if self.prompts is None else read_judge_prompts(self.prompts)
        variable, at_openai = self.api_key_env, origin(self.url, "--judge") == OPENAI
        if variable is None and at_openai and _OPENAI_VARIABLE in os.environ:
            variable = _OPENAI_VARIABLE
        self._client = OpenAIClient(self.url, "--judge", self.model or "", api_key(variable), retries=3)

    def __call__(self, items: Sequence[Item], progress: Progress) -> list[Scores]:
        """If the server cannot be reached, all items without a rating have the same problem."""
        self._down = ""  # why the server is not asked any more
        with replace(self._client) as self._server:  # without the model of the last call
            try:
                if not self.model:
                    self._server.connect()
            except EndpointError as error:
                self._down = str(error)
            return super().__call__(items, progress)

    def score(self, item: Item) -> Outcome:
        try:
            ratings = [self._rate(item, turn) for turn in range(len(item.turns))]
            return (sum(ratings) / len(ratings),)
        except EndpointError as error:
            self._down = self._down or str(error)
        return self._down

    def _rate(self, item: Item, turn: int) -> float:
        """The rating of a turn (from 0). DataError: there is none; EndpointError: the server refuses all requests."""
        references = item.reference if isinstance(item.reference, (list, tuple)) else ()
        texts = {"question": item.turns, "answer": item.answers, "ref_answer": references}
        known = {f"{name}_{i + 1}": text for name in texts for i, text in enumerate(texts[name][: turn + 1])}
        if turn == 0:
            known |= {"question": item.turns[0], "answer": item.answers[0]}
        rated = {f"answer_{turn + 1}", "answer"} & known.keys()
        fitting = [prompt for prompt in self._prompts if prompt.fields <= known.keys() and prompt.fields & rated]
        if not fitting:
            raise DataError(f"the judge has no prompt for turn {turn + 1}, or the turn has no answer")
        prompt = max(fitting, key=lambda prompt: len(prompt.fields))  # with references, if there are any
        asked = {"system": prompt.system, "user": prompt.template.format(**known)}
        self.made_by = self._server.model
        if self.folder is None or not self.made_by:  # it does not answer, and it is unknown whose ratings were saved
            return self._ask(asked)
        key = identity_digest([self.url, self.made_by, asked])
        return float(saved_json(self.folder / f"rated-{key}.json", partial(self._ask, asked)))

    def _ask(self, asked: Mapping[str, str]) -> float:
        if self._down:
            raise EndpointError(self._down)
        messages = [{"role": role, "content": text} for role, text in asked.items()]
        body: dict[str, Any] = {"model": self._server.model, "messages": messages, "max_tokens": 2048, "temperature": 0}
        try:
            text = self._server.post(CHAT, body, lambda found, _: "".join(said_in(found["choices"][0])))
        except NoAnswer as error:
            raise DataError(f"the judge did not answer: {error}") from None
        return rating_of(text)


def rating_of(text: str) -> float:
    """The last rating in a judge's answer, in two pairs of brackets or else in one. DataError: none from 1 to 10.

    >>> rating_of("Correct. Rating: [[7]]"), rating_of("[8.5]")
    (7.0, 8.5)
    """
    ratings = next((found for pattern in _RATINGS if (found := pattern.findall(text))), None)
    if not ratings or not 1 <= float(ratings[-1]) <= 10:
        raise DataError(f"the judge's answer has no rating from 1 to 10: {short(text)!r}")
    return float(ratings[-1])
