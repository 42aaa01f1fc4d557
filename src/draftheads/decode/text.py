"""Token ids to text, a piece at a time, without ever showing half a character."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftheads.models.chat_template import is_tag, special_texts

_UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that are not a whole character yet
_MOST_WAITING = 8  # tokens whose text is not certain; a character has at most four bytes


class TextStream:
    """The text of a growing list of token ids, decoded in small windows: the cost does not grow with the text.

    Special tokens are left out, but for the tags of calls and thoughts.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        special = special_texts(tokenizer) if skip_special_tokens else {}
        self.hidden = {token: text for token, text in special.items() if not is_tag(text)}  # tokens that are left out
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


class TaggedText:
    """Separates a text that comes in pieces at its tags. Parts have the kind of their tags; others are "text".

    >>> parts = TaggedText({"thought": ("<think>", "</think>")})
    >>> parts.push("<think>So be it.</th"), parts.push("ink>Yes")
    ([('tag', '<think>'), ('thought', 'So be it.')], [('tag', '</think>'), ('text', 'Yes')])
    """

    def __init__(self, tags: Mapping[str, tuple[str, str]], kind: str = "text") -> None:
        self._tags, self._kind = tags, kind
        self._held = ""

    def push(self, text: str, *, is_end: bool = False) -> list[tuple[str, str]]:
        """The parts that are certain now. What may become a tag is held back, but at the end."""
        self._held += text
        parts: list[tuple[str, str]] = []
        while True:
            if self._kind == "text":
                following = {opening: kind for kind, (opening, _) in self._tags.items()}
            else:
                following = {self._tags[self._kind][1]: "text"}
            found = [(at, tag) for tag in following if (at := self._held.find(tag)) >= 0]
            held = 0 if is_end else max((overlap(self._held, tag) for tag in following), default=0)
            end, tag = min(found, default=(len(self._held) - held, ""))
            parts += [(self._kind, self._held[:end]), ("tag", tag)]
            self._held = self._held[end + len(tag) :]
            if not tag:
                return [part for part in parts if part[1]]
            self._kind = following[tag]
