"""Token ids to text, a piece at a time, without ever showing half a character."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftheads.decode.answer_forms import AnswerForm, form_of, shown_tokens
from draftheads.decode.answer_forms.form import Schemas, ToolCall
from draftheads.decode.answer_forms.response_template import Parse, parsed, read_by
from draftheads.models.chat_template import ChatReader, special_texts

_UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that are not a whole character yet
_MOST_WAITING = 8  # tokens whose text is not certain; a character has at most four bytes


class TextStream:
    """The text of a growing list of token ids, decoded in small windows: the cost does not grow with the text.

    Special tokens are left out, but for the tags of calls and thoughts.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        special = special_texts(tokenizer) if skip_special_tokens else {}
        shown = shown_tokens(special.values(), getattr(tokenizer, "response_template", None))
        self.hidden = {token: text for token, text in special.items() if text not in shown}  # tokens that are left out
        self._hides = len(self.hidden) < len(special)  # tokenizers would leave the tags out, too
        skips = skip_special_tokens and not self._hides
        self._options = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
        self._ids: list[int] = []
        self._start = 0  # of the window that is decoded again: some tokenizers need left neighbours for spaces
        self._shown = 0  # tokens whose text is out

    def push(self, token_ids: list[int]) -> str:
        """Adds tokens and returns the new text that is certain: whole characters, and bytes that can be none."""
        self._ids += token_ids
        text = self._show_whole(len(self._ids))
        return text or (self._show_broken() if len(self._ids) - self._shown >= _MOST_WAITING else "")

    def flush(self) -> str:
        """The rest, half characters included: the text will not grow any more."""
        new = self._new_text(len(self._ids))
        self._start = self._shown = len(self._ids)
        return new

    def _show_whole(self, end: int) -> str:
        """The new text of the tokens before ``end``, if it ends with a whole character."""
        new = self._new_text(end)
        if not new or new.endswith(_UNFINISHED):
            return ""
        self._start, self._shown = self._shown, end
        return new

    def _show_broken(self) -> str:
        """The certain text of many tokens, which end in half a character; without it each push would decode more."""
        text = "".join([self._show_whole(end) for end in range(self._shown + 1, len(self._ids))])
        # special tokens have no text, and one character may be spread among them; a single space may be dropped
        self._ids[self._shown :] = [token for token in self._ids[self._shown :] if self._decode([token, token])]
        if len(self._ids) - self._shown < _MOST_WAITING:
            return text
        # more bytes than a character has: all of their text is certain, but for the last mark
        new = self._new_text(len(self._ids))
        for end in range(len(self._ids) - 1, self._shown, -1):
            length = len(self._new_text(end))
            if 0 < length < len(new):
                self._start, self._shown = self._broken_before(end), end
                return text + new[:length]
        return text

    def _broken_before(self, end: int) -> int:
        """Where a window of broken text begins: to some tokenizers all bytes are wrong beside a wrong one."""

        def begins_whole(start: int) -> bool:
            windows = (self._ids[start:stop] for stop in range(start + 1, start + 5))
            return any(not self._decode(window).endswith(_UNFINISHED) for window in windows)

        return next((start for start in range(self._shown, end) if not begins_whole(start)), self._shown)

    def _new_text(self, end: int) -> str:
        before = self._decode(self._ids[self._start : self._shown])
        return self._decode(self._ids[self._start : end])[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        if self._hides:
            token_ids = [token for token in token_ids if token not in self.hidden]
        text: str = self._tokenizer.decode(token_ids, **self._options)
        return text


def pieces_of(text: str, token_ids: Sequence[int], stream: TextStream) -> tuple[str, ...]:
    """What each token added to ``text``, which is their text or its beginning. The stream is a new one.

    A character of several tokens belongs to the last of them.
    """
    pieces, start = [], 0
    for token in token_ids:
        end = start + len(stream.push([token]))
        pieces.append(text[start:end])
        start = min(end, len(text))
    return (*pieces[:-1], pieces[-1] + text[start:]) if pieces else ()


class StopText:
    """Holds back what may become a stop string and cuts the text before one, or behind it if it is kept.

    A stop string may have the names of ``hidden`` tokens in it, which have no text. ``may_end`` tells whether an answer
    may end with a text.

    >>> stop = StopText(("END",))
    >>> stop.push("one E"), stop.push("N"), stop.push("X two END three"), stop.found
    ('one ', '', 'ENX two ', True)
    """

    def __init__(
        self,
        stop: tuple[str, ...],
        *,
        keep: bool = False,
        hidden: Mapping[int, str] | None = None,
        may_end: Callable[[str], bool] | None = None,
    ) -> None:
        texts = {token: text for token, text in (hidden or {}).items() if any(text in each for each in stop)}
        # half characters stand for these tokens: no text has them
        self._marks = {token: chr(0xD800 + number) for number, token in enumerate(texts)}
        self._shown = {ord(mark): texts[token] for token, mark in self._marks.items()}
        marked = stop
        for token, text in sorted(texts.items(), key=lambda pair: -len(pair[1])):
            marked = tuple(each.replace(text, self._marks[token]) for each in marked)
        self._stop, self._keep = tuple(dict.fromkeys((*stop, *marked))), keep
        self._may_end, self._before = may_end, ""  # the text that is out
        self._held = ""
        self._num_early = 0  # characters at the beginning of it in which no stop string ends
        self.found = False

    def push(self, text: str, *, token: int | None = None, is_early: bool = False) -> str:
        """Adds text and returns what is certain not to belong to a stop string. None ends in text that is early.

        ``token`` is the one with which the text came.
        """
        if not self._stop or self.found:
            return "" if self.found else text
        self._held += text + ("" if token is None else self._marks.get(token, ""))
        if is_early:
            self._num_early = len(self._held)
        while hits := [
            (start + len(stop), start)
            for stop in self._stop
            if (start := self._held.find(stop, max(0, self._num_early + 1 - len(stop)))) >= 0
        ]:
            end, start = min(hits)  # the one that ended first, however the text was cut into pieces
            found = self._held[start:end].translate(self._shown) if self._keep else ""
            certain = self._without_marks(self._held[:start]) + found
            if self._may_end is None or self._may_end(self._before + certain):
                self.found, self._held = True, ""
                return certain
            self._num_early = end
        count = len(self._held) - max(overlap(self._held, stop) for stop in self._stop)
        certain, self._held = self._without_marks(self._held[:count]), self._held[count:]
        self._num_early = max(0, self._num_early - count)
        self._before += certain if self._may_end else ""
        return certain

    def flush(self) -> str:
        """What was held back, once the text has ended without a stop string."""
        certain, self._held = self._held, ""
        return self._without_marks(certain)

    def _without_marks(self, text: str) -> str:
        return text.translate(dict.fromkeys(self._shown))


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


Span = tuple[int, str]  # a part of an answer: where it begins, and its text


class TaggedText:
    """Separates a text that comes in pieces at its tags. Parts have the kind of their tags, others are "text".

    Args:
        openings: tags that may come in text, with the kind of the part that they open; "text" if they open none.
        closings: of each kind, the tags that end it.
        first: of the openings, those that are ones only at the beginning of the text.
        kind: of the beginning.

    >>> parts = TaggedText({"<think>": "thought"}, {"thought": ("</think>",)})
    >>> parts.push("<think>Hm.</th"), parts.push("ink>Yes")
    ([('thought', '<think>', True), ('thought', 'Hm.', False)], [('thought', '</think>', True), ('text', 'Yes', False)])
    """

    def __init__(
        self,
        openings: Mapping[str, str],
        closings: Mapping[str, Sequence[str]],
        *,
        first: Collection[str] = (),
        kind: str = "text",
    ) -> None:
        self._openings, self._closings, self._first, self._kind = openings, closings, first, kind
        self._held, self._has_begun = "", False

    def push(self, text: str, *, is_end: bool = False) -> list[tuple[str, str, bool]]:
        """The certain parts, and whether they are tags. What may become a tag is held back, but at the end."""
        self._held += text
        parts: list[tuple[str, str, bool]] = []
        tag = self._held
        while tag:
            tags = self._openings if self._kind == "text" else dict.fromkeys(self._closings[self._kind], "text")
            found = [(at, -len(each), each) for each in tags if (at := self._find(each)) >= 0]
            held = 0 if is_end else max((overlap(self._held, each) for each in tags), default=0)
            end, _, tag = min(found, default=(len(self._held) - held, 0, ""))
            rest = self._held[end:]
            if tag and not is_end and any(each.startswith(rest) and each != rest for each in tags):
                tag = ""  # it may become a longer one
            kind, following = self._kind, tags.get(tag, self._kind)
            parts += [(kind, self._held[:end], False), (kind if kind != "text" else following, tag, True)]
            self._has_begun |= kind == "text" and (following == "call" or bool(self._held[:end].strip()))
            self._kind, self._held = following, rest[len(tag) :]
        return [part for part in parts if part[1]]

    def _find(self, tag: str) -> int:
        at = self._held.find(tag)
        return -1 if tag in self._first and (self._has_begun or self._held[:at].strip()) else at


class TrimmedText:
    """Text without the spaces beside the tags that were cut out of it."""

    def __init__(self) -> None:
        self._space: Span = (0, "")  # at the end of the text so far
        self._space_behind: Span | None = None  # what follows a cut, which was the last thing; None: there was none
        self._has_begun = False

    def cut(self) -> None:
        self._space_behind = (0, "")

    def push(self, start: int, text: str, *, is_end: bool = False) -> list[Span]:
        """Adds text that begins there and returns what is certain."""
        if self._space_behind is not None:
            trimmed = text.lstrip()
            blank = text[: len(text) - len(trimmed)]
            self._space_behind = (self._space_behind[0] or start, self._space_behind[1] + blank)
            if not trimmed:
                return []
            self._space = (self._space if self._space[1] else self._space_behind) if self._has_begun else (0, "")
            start, text, self._space_behind = start + len(blank), trimmed, None
        certain = text if is_end else text.rstrip()
        if not certain and not is_end:
            self._space = (self._space[0] if self._space[1] else start, self._space[1] + text)
            return []
        spans = [span for span in (self._space, (start, certain)) if span[1]]
        self._space = (start + len(certain), text[len(certain) :])
        self._has_begun |= bool(spans)
        return spans


@dataclass
class AnswerParts:
    """What a piece of an answer adds to it."""

    content: list[Span] = field(default_factory=list)
    thought: list[Span] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def texts(self) -> dict[str, str]:
        """By their names in messages."""
        spans = {"reasoning_content": self.thought, "content": self.content}
        return {name: "".join(text for _, text in each) for name, each in spans.items() if each}


class AnswerText:
    """Finds the calls in a text that comes in pieces, and the thoughts, from which no call is read.

    Args:
        form: how the model writes them.
        schemas: of the functions that may be called; None: calls are text.
        in_thought: the text begins in a thought.
        is_forced: the text is one call, whose opening is before it.

    Attributes:
        barred: functions whose calls are text.
        prefix: the prompt, of which a ``response_template`` reads where the answer begins.
        parse: reads by a ``response_template``.
    """

    barred: Collection[str] = ()
    prefix = ""
    parse: Parse = staticmethod(parsed)

    def __init__(
        self, form: AnswerForm, schemas: Schemas | None = None, *, in_thought: bool = False, is_forced: bool = False
    ) -> None:
        self._template, self._text, self._has_tools = form.template, "", schemas is not None
        self.is_read_at_end = form.template is not None  # by the parser of transformers
        calls = form.calls if schemas is not None else None
        self._form, self._schemas, self._is_forced = calls, schemas or {}, is_forced
        first = calls.first(self._schemas) if calls else ()
        openings = dict.fromkeys(form.calls.marks if form.calls else (), "text")
        closings: dict[str, Sequence[str]] = {"call": calls.closings if calls else ()}
        if form.thinking:
            openings[form.thinking[0]], closings["thought"] = "thought", (form.thinking[1],)
        openings |= dict.fromkeys((*calls.tags, *first) if calls else (), "call")
        kind = "call" if is_forced else "thought" if in_thought else "text"
        self._parts = TaggedText(openings, closings, first=first, kind=kind)
        self._content, self._thoughts = TrimmedText(), TrimmedText()
        self._thoughts.cut()
        if in_thought:
            self._content.cut()
        # one that has begun
        self._call: Span | None = (-len(calls.opening), calls.opening) if calls and is_forced else None
        self.at = 0  # how much of the text is separated
        self.thoughts: list[range] = []  # where they are, with their tags

    def push(self, text: str, *, is_end: bool = False, is_cut: bool = False) -> AnswerParts:
        """Adds text; returns what is certain. ``is_cut``: the answer ends because it is too long."""
        parts = AnswerParts()
        if self.is_read_at_end:
            self._text += text
            return self._by_template(is_cut=is_cut) if is_end else parts
        for kind, part, is_tag in self._parts.push(text, is_end=is_end):
            start, self.at = self.at, self.at + len(part)
            if kind == "call":
                is_closing = is_tag and self._call is not None
                self._call = (self._call[0], self._call[1] + part) if self._call else (start, part)
                if is_closing:
                    self._end_call(parts)
            elif kind == "thought":
                begun = self.thoughts.pop().start if self.thoughts and self.thoughts[-1].stop == start else start
                self.thoughts.append(range(begun, self.at))
                if is_tag:
                    self._content.cut()
                    self._thoughts.cut()
                else:
                    parts.thought += self._thoughts.push(start, part)
            elif is_tag:
                self._content.cut()
            else:
                parts.content += self._content.push(start, part)
        if is_end:
            if self._call is not None:  # the end of the answer can take the place of the closing tag
                self._end_call(parts, is_cut=is_cut)
            parts.content += self._content.push(self.at, "", is_end=True)
        return parts

    def _by_template(self, *, is_cut: bool) -> AnswerParts:
        """The parts of the whole answer; one that cannot be read is content."""
        text, self.at = self._text, len(self._text)
        found = read_by(self._template, self.prefix, text, self._schemas, self.parse)
        thought, content, calls, is_open = found or ("", text, [], False)
        if calls and (not self._has_tools or (is_cut and is_open) or any(each.name in self.barred for each in calls)):
            thought, content, calls = "", text, []
        end = max(0, text.find(thought)) + len(thought)
        self.thoughts = [range(end)] if thought else []
        place = text.find(content, end) % (len(text) + 1)  # behind the text if it was put together from parts
        thoughts = [(end - len(thought), thought)] if thought else []
        return AnswerParts([(place, content)] if content else [], thoughts, calls)

    def _end_call(self, parts: AnswerParts, *, is_cut: bool = False) -> None:
        """Adds the calls; a text without is content. ``is_cut``: it has no end."""
        assert self._form is not None
        (start, text), self._call = self._call or (0, ""), None
        calls: list[ToolCall] | None = None
        if is_cut and self._is_forced:
            calls = self._form.part(text.removeprefix(self._form.opening), self._schemas)
        elif not is_cut or not self._form.closings:
            calls = self._form.calls(text, self._schemas)
        if calls is None or any(call.name in self.barred for call in calls):
            hidden = max(0, -start)  # the opening of a forced call
            parts.content += self._content.push(start + hidden, text[hidden:])
        else:
            parts.calls += calls
            self._content.cut()


def begins_thought(reader: ChatReader, prompt_ids: Sequence[int]) -> str:
    """The tag of a thought at the end of a prompt, which begins it; empty if there is none."""
    tag = (form_of(reader).thinking or ("",))[0]
    return tag if tag and reader.tokenizer.decode(prompt_ids[-16:]).rstrip().endswith(tag) else ""


def read_answer(
    reader: ChatReader, prompt_ids: Sequence[int], text: str, schemas: Schemas | None = None
) -> AnswerParts:
    """The parts of a whole answer; without schemas calls are text."""
    parts = AnswerText(form_of(reader), schemas, in_thought=bool(begins_thought(reader, prompt_ids)))
    parts.prefix = reader.tokenizer.decode(prompt_ids)
    return parts.push(text, is_end=True)
