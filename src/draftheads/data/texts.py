"""The texts of a training run as tokens: chats with a mask of the assistant's tokens, and plain text in blocks.

The blocks of plain text follow each other without padding, and the loss covers all of them. Each text ends with the
end-of-text token, and a block may contain the end of one text and the start of the next.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, islice, repeat
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

from draftheads.data.files import at_line, read_lines
from draftheads.data.lines import LeftOut, none_left, usable
from draftheads.data.records import Record, read_chats
from draftheads.decode.answer_forms import form_of
from draftheads.errors import DataError, UnlearnableChat, first_line
from draftheads.models.chat_template import (
    BUILT_IN,
    ChatReader,
    continuing_ids,
    ids_around,
    ids_of,
    render,
    template_of,
    text_pieces,
    token_pieces,
)
from draftheads.models.fingerprint import tokenizer_fingerprint
from draftheads.utils.counts import counted
from draftheads.utils.messages import Message, half_character

Mapped = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]  # such as ``map``


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens; ids and mask have the same length."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # True on what the assistant says, the token that ends its turn included
    source: str = ""  # FILE:LINE
    is_cut: bool = False  # whether there was more of it
    is_plain: bool = False  # plain text, not a chat or a prompt with its completion
    earlier: tuple["EncodedChat", ...] = ()  # texts of earlier turns, if they are no part of this text


def encode_chat(reader: ChatReader, chat: Record, *, max_length: int) -> EncodedChat:
    """Tokens and loss mask of a chat, cut after ``max_length`` tokens.

    Prompts and answers are tokenized separately, as in generation: the model reads the tokens of a prompt and continues
    with tokens of its own. The mask covers what the template writes after its generation prompt, calls and thoughts
    included, and the token of ``reader.eos_ids`` right after it. What follows the last answer is left out; where that
    answer was cut off (``finished`` is False), so is its end-of-turn token.

    Words that a model wrote after its generation prompt (``is_generated``, or cut off) are learned as they are, also
    where the template would write them in another way. If the template later changes a turn, such as by leaving out its
    thought, each turn has a text of its own: the result is that of the last turn, and ``earlier`` has the others. The
    messages ``before`` are not learned.
    """
    messages = (*chat.before, *chat.messages)
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    template = _Template(reader, chat.tools)
    texts: list[EncodedChat] = []
    turns: list[_Turn] = []
    for place in places:
        finished = chat.finished or place != places[-1]
        turn = template.turn(messages[: place + 1], finished=finished, is_generated=chat.is_generated)
        turns.append(turn._replace(is_learned=place >= len(chat.before)))
    while turns:  # as many turns as follow each other in one text
        whole, end = turns[0].prompt + turns[0].words, 1
        while end < len(turns) and turns[end].prompt.startswith(whole):
            whole, end = turns[end].prompt + turns[end].words, end + 1
        texts.append(_cut(_segments(reader, turns[:end]), max_length))
        turns = turns[end:]
    return replace(texts[-1], earlier=tuple(texts[:-1]))


def encode_completion(reader: ChatReader, chat: Record, *, max_length: int) -> EncodedChat:
    """A text and its completion, without a chat template; the loss covers the completion and the end of the text."""
    prompt, completion = (message["content"] for message in chat.messages)
    before, _ = ids_around(reader.tokenizer)
    end = [min(reader.eos_ids)] if chat.finished and reader.eos_ids else []
    prompt_ids = chain([before], token_pieces(reader.tokenizer, prompt) if prompt else ())
    answer_ids = chain(token_pieces(reader.tokenizer, completion, first=continuing_ids), [end])
    return _cut([*((ids, False) for ids in prompt_ids), *((ids, True) for ids in answer_ids)], max_length)


def _cut(segments: Iterable[tuple[Sequence[int], bool]], max_length: int) -> EncodedChat:
    """The text of token ids piece by piece, each learned or not, read as far as it is used."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    for ids, is_said in segments:
        token_ids += ids
        loss_mask += [is_said] * len(ids)
        if len(token_ids) > max_length:
            break
    is_cut = len(token_ids) > max_length
    return EncodedChat(tuple(token_ids[:max_length]), tuple(loss_mask[:max_length]), is_cut=is_cut)


def _segments(reader: ChatReader, turns: Sequence["_Turn"]) -> Iterator[tuple[list[int], bool]]:
    """Token ids piece by piece, and whether they are learned."""
    done, ends = 0, False  # characters that are tokens already; whether the turn before is learned
    for turn in turns:
        if not done:  # a text of its own, as in generation; the template writes special tokens itself
            for ids in token_pieces(reader.tokenizer, turn.prompt) if turn.prompt else ():
                yield ids, False
        else:  # it begins with the end of the turn before, which the assistant says
            num_said = None
            for ids in token_pieces(reader.tokenizer, turn.prompt[done:], first=continuing_ids):
                num_said = int(bool(ids) and ids[0] in reader.eos_ids) if num_said is None else 0
                yield ids[:num_said], ends
                yield ids[num_said:], False
        for ids in token_pieces(reader.tokenizer, turn.words, first=continuing_ids):
            yield ids, turn.is_learned
        done, ends = len(turn.prompt) + len(turn.words), turn.is_learned
    closing = continuing_ids(reader.tokenizer, turns[-1].closing)
    if closing and closing[0] in reader.eos_ids:
        yield closing[:1], ends


class _Turn(NamedTuple):
    """A turn of the assistant."""

    prompt: str  # what the model reads before it, the whole chat so far
    words: str  # what the assistant says
    closing: str  # what the template writes after it; empty if the turn was cut off
    is_learned: bool = True


class _Template:
    """How a chat template writes turns of the assistant."""

    def __init__(self, reader: ChatReader, tools: Sequence[Mapping[str, Any]]) -> None:
        self.reader, self.tools = reader, tools
        if template_of(reader) is None:
            names = ", ".join(BUILT_IN)
            raise DataError(f"the model has no chat template: give one by --chat-template, a file or {names}")
        self.opening, self.closing = form_of(reader).thinking or ("<think>", "</think>")
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
        if whole.startswith(prompt):
            return len(prompt)
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
        try:
            text = render(self.reader, messages, add_generation_prompt=add_generation_prompt, tools=self.tools)
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


def load_texts(
    model: ChatReader,
    paths: Sequence[Path],
    *,
    max_length: int,
    max_tokens: int | None = None,
    left_out: LeftOut | None = None,
) -> list[EncodedChat]:
    """The chats of all files as tokens, at most about ``max_tokens`` in all.

    Texts are cut after ``max_length`` tokens, or fewer if the model takes fewer. Chats that nothing can be learned from
    are left out, and added to ``left_out``.
    """
    left_out = {} if left_out is None else left_out
    return list(chat_texts(model, paths, max_length=max_length, max_tokens=max_tokens, left_out=left_out))


def chat_texts(
    model: ChatReader,
    paths: Sequence[Path],
    *,
    max_length: int,
    max_tokens: int | None,
    left_out: LeftOut,
    mapped: Mapped = map,
) -> Iterator[EncodedChat]:
    """As :func:`load_texts`, one by one; ``mapped`` is ``map``, or has its results from other processes."""
    num_texts = num_tokens = 0
    read = partial(_texts_of, model, limited(max_length, model), cache(partial(tokenizer_fingerprint, model.tokenizer)))
    for found, reason, source in mapped(read, read_chats(*paths)):
        yield from found
        num_texts += len(found)
        num_tokens += sum(len(text.token_ids) for text in found)
        if not found:
            left_out.setdefault(reason, []).append(source)
        if max_tokens is not None and num_tokens >= max_tokens:
            break
    if not num_texts:
        raise none_left(left_out, paths, "chat")


def _texts_of(
    model: ChatReader, max_length: int, own_fingerprint: Callable[[], str], chat: Record
) -> tuple[list[EncodedChat], str, str]:
    """The texts of a chat; or none, and the reason; and the chat's place."""
    reason = f"no answer within the first {counted(max_length, 'token')}"
    found: list[EncodedChat] = []
    with at_line(chat.path, chat.line_number):
        try:
            last = _text_of(model, chat, max_length, own_fingerprint)
            found = [replace(text, source=chat.source, earlier=()) for text in (*last.earlier, last)]
        except UnlearnableChat as error:
            reason = str(error)
    return [text for text in found if any(text.loss_mask)], reason, chat.source


def limited(length: int, model: ChatReader) -> int:
    """The length, or that of the model's longest text."""
    return min(length, model.max_positions or length)


def _text_of(model: ChatReader, chat: Record, max_length: int, own_fingerprint: Callable[[], str]) -> EncodedChat:
    """The text of a chat, or of a line with tokens."""
    if chat.problem:
        raise UnlearnableChat(chat.problem)
    if chat.tokens is None:
        return (encode_completion if chat.is_completion else encode_chat)(model, chat, max_length=max_length)
    ids, mask, other = chat.tokens
    if other is not None and (own := own_fingerprint()) != other:
        served = f"a tokenizer of fingerprint {other}; that of this model is {own}: give the model that was served"
        raise UnlearnableChat(f"recorded with {served}")
    return EncodedChat(ids[:max_length], mask[:max_length], is_cut=len(ids) > max_length)


def known_texts(texts: Iterable[EncodedChat], vocab_size: int, left_out: LeftOut) -> Iterator[EncodedChat]:
    """The texts without tokens that the model does not have; others are added to ``left_out``."""
    is_known = False
    for text in texts:
        if max(text.token_ids, default=0) < vocab_size:
            is_known = True
            yield text
        else:
            reason = f"a token is not one of the model, which has the tokens 0 … {vocab_size - 1}"
            left_out.setdefault(reason, []).append(text.source)
    if not is_known:
        raise none_left(left_out, ["the data"], "text")


def read_texts(
    path: Path, left_out: LeftOut | None = None, *, says: bool = True
) -> Iterator[tuple[Iterable[str], str]]:
    """The plain texts of a file or a folder, and their ``FILE:LINE``: .txt files, and "text" of lines and rows.

    A text is in parts, to be read before the next text. ``left_out`` and ``says`` as for
    :func:`draftheads.data.records.read_prompts`.
    """
    lines = read_lines(path, says=says)
    texts = usable(lines, _plain_text, what="text", sources=[path], left_out=left_out, says=says)
    return ((parts, f"{file}:{number}") for file, number, parts in texts)


def _plain_text(record: Any) -> Iterable[str]:
    text = record.get("text") if isinstance(record, dict) else None
    if isinstance(text, Iterator):
        return text
    if not isinstance(text, str):
        raise DataError('plain text is an object such as {"text": "…"}; chats go to --data')
    if problem := half_character(text):
        raise DataError(f"text {problem}")
    return [text.removeprefix("\ufeff")]


def load_blocks(
    tokenizer: Any,
    paths: Sequence[Path],
    *,
    eos_ids: frozenset[int],
    length: int,
    max_tokens: int | None = None,
    left_out: LeftOut | None = None,
    mapped: Mapped = map,
) -> Iterator[EncodedChat]:
    """All texts as blocks of ``length`` tokens, at most about ``max_tokens``; a block's source is its first text.

    The ids are those of the whole text, and no more of it is read than needed. ``left_out`` as for :func:`read_texts`,
    ``mapped`` as for :func:`chat_texts`.
    """
    most = None if max_tokens is None else -(-max_tokens // length)
    texts = chain.from_iterable(read_texts(path, left_out) for path in paths)
    block = None
    for block in islice(_blocks(tokenizer, texts, eos_ids, length, mapped), most):
        yield block
    if block is None:
        raise DataError(f"no text in {', '.join(map(str, paths))}")


def _blocks(
    tokenizer: Any, texts: Iterable[tuple[Iterable[str], str]], eos_ids: frozenset[int], length: int, mapped: Mapped
) -> Iterator[EncodedChat]:
    ids: list[int] = []  # tokens that do not fill a block yet; ``source`` is the place of their first text
    source = ""
    before, after = ids_around(tokenizer)
    end = after if after and after[-1] in eos_ids else [*after, *sorted(eos_ids)[:1]]

    def pieces() -> Iterator[tuple[str, Any, Any]]:
        for parts, place in texts:
            yield place, list, before
            yield from zip(repeat(place), chain([ids_of], repeat(continuing_ids)), text_pieces(tokenizer, parts))
            yield place, list, end

    def read(piece: tuple[str, Any, Any]) -> tuple[str, list[int]]:
        place, function, text = piece
        return place, text if function is list else function(tokenizer, text)

    for place, more in mapped(read, pieces()):
        source = source if ids else place
        ids += more
        whole = len(ids) // length * length
        for start in range(0, whole, length):
            yield _block(ids[start : start + length], source)
            source = place
        ids = ids[whole:]
    if len(ids) > 1:
        yield _block(ids, source)


def _block(ids: list[int], source: str) -> EncodedChat:
    return EncodedChat(tuple(ids), (True,) * len(ids), source, is_plain=True)
