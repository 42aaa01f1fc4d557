"""Questions of several turns: what a way of decoding answers continues the conversation."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from draftheads.bench.timing import Answers, Way
from draftheads.data.records import Record
from draftheads.decode.engine import Engine
from draftheads.decode.prompts import Prompt, prompt_ids
from draftheads.errors import InvalidPrompt
from draftheads.utils.messages import Message


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
    reference: Any = None


def question_of(number: int, prompt: Prompt | Record) -> Question:
    """The question of a prompt or a record."""
    about: dict[str, Any] = {"name": str(number + 1)}
    if isinstance(prompt, Record):
        found = (prompt.labels[label] for label in ("question_id", "id") if label in prompt.labels)
        about = {"name": str(next(found, number + 1)), "category": prompt.category, "reference": prompt.reference}
        if prompt.is_text:
            return Question(number, prompt.user_turns, **about)
    messages = list(prompt.messages) if isinstance(prompt, Record) else prompt
    if isinstance(messages, str):
        return Question(number, (messages,), **about)
    if isinstance(messages[0], int):
        return Question(number, ("",), is_ids=tuple(messages), **about)  # type: ignore[arg-type]
    *before, last = messages
    return Question(number, (last["content"],), tuple(before), role=last["role"], **about)  # type: ignore[index,arg-type]


@dataclass(frozen=True)
class Conversations:
    """Puts questions to ways of decoding."""

    engine: Engine  # of the model whose chat template and tokenizer count
    prompt_tokens: int | None = None  # every prompt is cut or repeated to so many tokens; None leaves it as it is
    longest: int | None = None  # longer prompts lose their middle, so that the instructions at both ends stay

    def ids(self, question: Question, answers: Sequence[str] = ()) -> list[int]:
        """Token ids of the turn after these answers."""
        if question.is_ids is not None:
            ids = list(question.is_ids)
        else:
            said = list(question.before)
            for turn, text in enumerate(question.turns[: len(answers) + 1]):
                said.append({"role": question.role, "content": text})
                if turn < len(answers):
                    said.append({"role": "assistant", "content": answers[turn]})
            ids = prompt_ids(self.engine.model, said)
        if self.longest is not None and len(ids) > self.longest:
            ids = ids[: -(-self.longest // 2)] + ids[-(self.longest // 2) :]
        if self.prompt_tokens is not None:
            ids = (ids * -(-self.prompt_tokens // len(ids)))[: self.prompt_tokens]
        return self.engine.encode(ids)

    def said(self, token_ids: Sequence[int]) -> str:
        """An answer as it stands in the conversation."""
        text: str = self.engine.model.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text.strip()

    def way(self, decode: Way) -> Way:
        """The way that answers questions, all turns, in place of prompts. A turn that is too long ends its question."""

        def answer(group: Sequence[Question], max_new_tokens: int) -> list[Answers]:
            texts: dict[int, list[str]] = {question.number: [] for question in group}
            found = []
            for turn in range(max(len(question.turns) for question in group)):
                asked = {}
                for question in group:
                    if len(texts[question.number]) == turn < len(question.turns):
                        with suppress(InvalidPrompt):
                            asked[question.number] = self.ids(question, texts[question.number])
                if not asked:
                    break
                (answers,) = decode(list(asked.values()), max_new_tokens)
                found.append(replace(answers, turn=turn, questions=tuple(asked)))
                for number, ids in zip(asked, answers.token_ids, strict=True):
                    texts[number].append(self.said(ids))
            return found

        return answer
