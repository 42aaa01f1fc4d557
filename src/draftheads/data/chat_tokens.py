"""Chats as token ids with a mask of the assistant's tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any, NamedTuple

from draftheads.data.records import NO_ANSWER
from draftheads.errors import DataError, UnlearnableChat, first_line
from draftheads.models.chat_template import BUILT_IN, ChatReader, continuing_ids, render, template_of, thinking_tags
from draftheads.utils.messages import Message, half_character


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens; ids and mask have the same length."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # True on what the assistant says, the token that ends its turn included
    source: str = ""  # FILE:LINE
    is_cut: bool = False  # whether there was more of it
    is_plain: bool = False  # plain text, not a chat or a prompt with its completion
    earlier: tuple["EncodedChat", ...] = ()  # texts of earlier turns, if they are no part of this text


def encode_chat(
    reader: ChatReader,
    messages: Sequence[Message],
    *,
    finished: bool,
    max_length: int,
    tools: Sequence[Mapping[str, Any]] = (),
    is_generated: bool = False,
) -> EncodedChat:
    """Tokens and loss mask of a chat, cut after ``max_length`` tokens.

    Prompts and answers are tokenized separately, as in generation: the model reads the tokens of a prompt and continues
    with tokens of its own. The mask covers what the template writes after its generation prompt, calls and thoughts
    included, and the token of ``reader.eos_ids`` right after it. What follows the last answer is left out; where that
    answer was cut off (``finished`` is False), so is its end-of-turn token.

    Words that a model wrote after its generation prompt (``is_generated``, or cut off) are learned as they are, also
    where the template would write them in another way. If the template later changes a turn, such as by leaving out its
    thought, each turn has a text of its own: the result is that of the last turn, and ``earlier`` has the others.
    """
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise UnlearnableChat(NO_ANSWER)
    template = _Template(reader, tools)
    texts: list[EncodedChat] = []
    turns = [
        template.turn(messages[: place + 1], finished=finished or place != places[-1], is_generated=is_generated)
        for place in places
    ]
    while turns:  # as many turns as follow each other in one text
        whole, end = turns[0].prompt + turns[0].words, 1
        while end < len(turns) and turns[end].prompt.startswith(whole):
            whole, end = turns[end].prompt + turns[end].words, end + 1
        texts.append(_encoded(reader, turns[:end], max_length))
        turns = turns[end:]
    return replace(texts[-1], earlier=tuple(texts[:-1]))


def encode_completion(
    reader: ChatReader, prompt: str, completion: str, *, finished: bool, max_length: int
) -> EncodedChat:
    """A text and its completion, without a chat template; the loss covers the completion and the end of the text."""
    prompt_ids = reader.tokenizer(prompt)["input_ids"] if prompt else []
    answer_ids = continuing_ids(reader.tokenizer, completion)
    if finished and reader.eos_ids:
        answer_ids.append(min(reader.eos_ids))
    return encode_answer(prompt_ids, answer_ids, max_length=max_length)


def encode_answer(prompt_ids: Sequence[int], answer_ids: Sequence[int], *, max_length: int) -> EncodedChat:
    """A prompt and an answer that are tokens already; the loss covers the answer."""
    token_ids = (*prompt_ids, *answer_ids)
    loss_mask = (False,) * len(prompt_ids) + (True,) * len(answer_ids)
    return EncodedChat(token_ids[:max_length], loss_mask[:max_length], is_cut=len(token_ids) > max_length)


def _encoded(reader: ChatReader, turns: Sequence["_Turn"], max_length: int) -> EncodedChat:
    """The text of turns that follow each other."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    for ids, is_said in _segments(reader, turns):
        token_ids += ids
        loss_mask += [is_said] * len(ids)
        if len(token_ids) > max_length:
            break
    is_cut = len(token_ids) > max_length
    return EncodedChat(tuple(token_ids[:max_length]), tuple(loss_mask[:max_length]), is_cut=is_cut)


def _segments(reader: ChatReader, turns: Sequence["_Turn"]) -> Iterator[tuple[list[int], bool]]:
    """Token ids piece by piece, and whether the assistant said them."""
    done = 0  # characters that are tokens already
    for turn in turns:
        text = turn.prompt[done:]
        if not done:  # a text of its own, as in generation; the template writes special tokens itself
            yield list(reader.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else [], False
        else:  # it begins with the end of the turn before, which the assistant says
            ids = continuing_ids(reader.tokenizer, text)
            num_said = int(bool(ids) and ids[0] in reader.eos_ids)
            yield ids[:num_said], True
            yield ids[num_said:], False
        yield continuing_ids(reader.tokenizer, turn.words), True
        done = len(turn.prompt) + len(turn.words)
    closing = continuing_ids(reader.tokenizer, turns[-1].closing)
    if closing and closing[0] in reader.eos_ids:
        yield closing[:1], True


class _Turn(NamedTuple):
    """A turn of the assistant."""

    prompt: str  # what the model reads before it, the whole chat so far
    words: str  # what the assistant says
    closing: str  # what the template writes after it; empty if the turn was cut off


class _Template:
    """How a chat template writes turns of the assistant."""

    def __init__(self, reader: ChatReader, tools: Sequence[Mapping[str, Any]]) -> None:
        self.reader, self.tools = reader, tools
        if template_of(reader) is None:
            names = ", ".join(BUILT_IN)
            raise DataError(f"the model has no chat template: give one by --chat-template, a file or {names}")
        self.opening, self.closing = thinking_tags(reader) or ("<think>", "</think>")
        self.ends = [text for i in sorted(reader.eos_ids) if (text := reader.tokenizer.decode([i]))]

    def turn(self, messages: Sequence[Message], *, finished: bool, is_generated: bool) -> _Turn:
        """The last turn of a chat."""
        *before, message = messages
        content, calls = message["content"], message.get("tool_calls", ())
        prompt, whole = self._written(before, add_generation_prompt=True), self._written(messages)
        shared = self._num_shared(prompt, whole)
        continues = shared == len(prompt)  # else the generation prompt has a thought that the chat has not
        end = max((whole.rfind(text, shared) for text in self.ends), default=-1)
        body, closing = (whole[shared:], "") if end < 0 else (whole[shared:end], whole[end:])
        closing = closing if finished else ""
        thought, said = self._thought_and_words(message)
        opened, closed = (prompt.rstrip().endswith(tag) for tag in (self.opening, self.closing))
        is_cut_thought = content.lstrip().startswith(self.opening) and self.closing not in content
        if opened and not is_generated and content.lstrip().startswith(self.opening):  # it is in the prompt already
            content = content.lstrip().removeprefix(self.opening).lstrip()
        if not calls and "reasoning_content" not in message and (is_generated or not finished or is_cut_thought):
            return _Turn(prompt, _with_space_of(body, content), closing)
        if any(self._written([*before, other]) == whole for other in _with_another_name(message)):
            raise UnlearnableChat("the chat template does not write calls of tools: use another --chat-template")
        rest = self._behind(thought, body)
        if closed or (calls and rest is None):  # a model that does not think here, or a thought before calls left out
            thought, rest = "", self._behind("", body)
        if rest is not None and said in rest:
            start = body.removesuffix(rest)
            is_next = not (start + rest[: rest.find(said)]).strip()
            if continues or (self.opening in prompt[shared:] and (calls or is_next)):
                if not finished or (end < 0 and not calls):  # up to the words, else to the thought
                    kept = start.removesuffix(self.closing).rstrip() if thought else ""
                    body = _cut_behind(body, start + rest[: rest.rfind(said)] + said, content) if said else kept
                return _Turn(prompt if continues or closed else prompt[:shared], body, closing)
        if calls:
            raise UnlearnableChat("the chat template writes a call after another text than its generation prompt")
        if thought and "reasoning_content" in message:
            begun = thought if opened else f"{self.opening}\n{thought}"
            content = f"{begun}\n{self.closing}\n\n{said}" if said or finished else begun
        return _Turn(prompt, content, closing)

    def _num_shared(self, prompt: str, whole: str) -> int:
        """How long the chat goes on as its generation prompt; a tag is whole or not shared at all."""
        shared = len(commonprefix((prompt, whole)))  # noqa: RUF071 - of texts, not of paths
        tag = prompt.rfind(self.opening)
        return tag if tag < shared < tag + len(self.opening) else shared

    def _behind(self, thought: str, body: str) -> str | None:
        """What the template writes behind a thought; None if the thought is not there."""
        begun = body.lstrip().removeprefix(self.opening)
        before, tag, rest = begun.partition(self.closing)
        if not tag:  # a template of channels, or one that writes no thoughts
            before, rest = (begun, begun.partition(thought)[2]) if thought else ("", body)
        return rest if thought in before else None

    def _thought_and_words(self, message: Message) -> tuple[str, str]:
        content: str = message["content"]
        if "reasoning_content" in message or self.closing not in content:
            return message.get("reasoning_content", "").strip(), content.strip()
        thought, _, said = content.partition(self.closing)
        return thought.strip().removeprefix(self.opening).strip(), said.strip()

    def _written(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        names = ("reasoning_content", "reasoning", "thinking")  # of a thought, in different templates
        chat = [{**one, **(dict.fromkeys(names, one[names[0]]) if names[0] in one else {})} for one in messages]
        try:
            text = render(self.reader, chat, add_generation_prompt=add_generation_prompt, tools=self.tools)
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            raise UnlearnableChat(f"the chat template refuses the chat: {first_line(error)}") from error
        if problem := half_character(text):
            raise UnlearnableChat(f"the text {problem}")
        return text


def _with_another_name(message: Message) -> Iterator[Message]:
    """The message with another name of the function, for each of its calls; a template that writes them differs."""
    calls = message.get("tool_calls", ())
    for i, call in enumerate(calls):
        function = {**call["function"], "name": f"{call['function']['name']}_2"}
        yield {**message, "tool_calls": [*calls[:i], {**call, "function": function}, *calls[i + 1 :]]}


def _cut_behind(body: str, kept: str, content: str) -> str:
    """The text up to its words, and the white space that ends the content, if the template writes it."""
    whole = kept + content[len(content.rstrip()) :]
    return whole if body.startswith(whole) else kept


def _with_space_of(body: str, content: str) -> str:
    """The words as they are, after the white space that the template writes before them, if it writes them first."""
    words = content.strip()
    before = body[: body.find(words)] if words in body else ""
    return before + content.lstrip() if words and before and not before.strip() else content
