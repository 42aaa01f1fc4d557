"""An LLM judge that rates each answer from 1 to 10, as in MT-Bench: any server with OpenAI's chat API."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from string import Formatter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from openai import (
    APIConnectionError,
    APIError,
    AuthenticationError,
    DefaultHttpxClient,
    NotFoundError,
    Omit,
    OpenAI,
    OpenAIError,
    PermissionDeniedError,
)

from draftheads.bench.quality import Item, Measure, Outcome, Scores
from draftheads.data.files import at_line, read_values
from draftheads.errors import DataError, EndpointError, InvalidSettings
from draftheads.utils.files import user_path
from draftheads.utils.messages import short
from draftheads.utils.progress import Progress
from draftheads.utils.provenance import identity_digest, saved_json

_OPENAI = "https", "api.openai.com", 443  # the only address that has a key by default
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
        InvalidSettings: the address is not one of HTTP, or there is no key.
    """

    url: str
    model: str | None = None  # its name there; None: the first one that the server lists
    prompts: str | PathLike[str] | None = None  # a file; None: our own prompts
    api_key_env: str | None = None  # variable with the key; None: OPENAI_API_KEY, for OpenAI's address alone
    parallel: int = 8
    name = "judge"
    asks_others = True

    def __post_init__(self) -> None:
        self._prompts = DEFAULT_PROMPTS if self.prompts is None else read_judge_prompts(self.prompts)
        self._client = OpenAI(
            base_url=_with_root(self.url),
            api_key=_key_for(self.url, self.api_key_env),
            max_retries=3,
            default_headers={
                "OpenAI-Organization": Omit(),  # type: ignore[dict-item]
                "OpenAI-Project": Omit(),  # type: ignore[dict-item]
            },  # of the environment: not for others
            http_client=DefaultHttpxClient(follow_redirects=False),  # keys go to no other server
        )

    def __call__(self, items: Sequence[Item], progress: Progress) -> list[Scores]:
        """If the server cannot be reached, all items without a rating have the same problem."""
        self._down, self.made_by = "", self.model or ""
        try:
            self.made_by = self.made_by or self._client.models.list().data[0].id
        except (OpenAIError, LookupError, TypeError, AttributeError) as error:
            self._down = self._refusal(error)  # why the server is not asked any more
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
        if self.folder is None or not self.made_by:  # it does not answer, and it is unknown whose ratings were saved
            return self._ask(asked)
        key = identity_digest([self.url, self.made_by, asked])
        return float(saved_json(self.folder / f"rated-{key}.json", partial(self._ask, asked)))

    def _ask(self, asked: Mapping[str, str]) -> float:
        if self._down:
            raise EndpointError(self._down)
        messages: Any = [{"role": role, "content": text} for role, text in asked.items()]
        create = self._client.chat.completions.create
        try:
            answer = create(model=self.made_by, messages=messages, max_tokens=2048, temperature=0)
            text = answer.choices[0].message.content or ""
        except (APIConnectionError, AuthenticationError, PermissionDeniedError, NotFoundError) as error:
            raise EndpointError(self._refusal(error)) from None
        except APIError as error:
            raise DataError(f"the judge did not answer: {error}") from None
        except (LookupError, TypeError, AttributeError) as error:
            raise DataError(f"the judge did not answer with a completion ({type(error).__name__}: {error})") from None
        return rating_of(text)

    def _refusal(self, error: Exception) -> str:
        cause = error.__cause__ or error
        return f"the judge at {self.url} cannot be asked: {cause}; check its address, its model and api_key_env"


def _with_root(url: str) -> str:
    """The address that requests are made from: with /v1 where it has no path."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url if parts.path.strip("/") else f"{url.rstrip('/')}/v1"
    except ValueError:
        pass
    raise InvalidSettings(f"the judge's url is {url!r}; give an address such as http://127.0.0.1:8000/v1")


def _key_for(url: str, variable: str | None) -> str:
    """The key for an address: of the variable that is named for it; by default only OpenAI has one."""
    parts = urlsplit(url)
    if variable is None and (parts.scheme, parts.hostname, parts.port or 443) == _OPENAI:
        variable = "OPENAI_API_KEY"
    if variable is None:
        return "none"
    if key := os.environ.get(variable):
        return key
    raise InvalidSettings(f"the judge's key is in {variable!r}, but this environment variable is not set: export it")


def rating_of(text: str) -> float:
    """The last rating in a judge's answer, in two pairs of brackets or else in one. DataError: none from 1 to 10.

    >>> rating_of("Correct. Rating: [[7]]"), rating_of("[8.5]")
    (7.0, 8.5)
    """
    ratings = next((found for pattern in _RATINGS if (found := pattern.findall(text))), None)
    if not ratings or not 1 <= float(ratings[-1]) <= 10:
        raise DataError(f"the judge's answer has no rating from 1 to 10: {short(text)!r}")
    return float(ratings[-1])
