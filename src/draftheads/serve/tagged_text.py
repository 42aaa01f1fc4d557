"""Thoughts and calls in a text that comes in pieces: its parts by their tags, and the text without them."""

from collections.abc import Mapping

from draftheads.decode.text import overlap


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


class TrimmedText:
    """Text without the spaces beside the tags that were cut out of it."""

    def __init__(self) -> None:
        self._space = ""  # at the end of the text so far
        self._space_behind: str | None = None  # what follows a cut, which was the last thing; None: there was none
        self._has_begun = False

    def cut(self) -> None:
        self._space_behind = ""

    def push(self, text: str, *, is_end: bool = False) -> str:
        """Adds text and returns what is certain."""
        if self._space_behind is not None:
            trimmed = text.lstrip()
            self._space_behind += text[: len(text) - len(trimmed)]
            if not trimmed:
                return ""
            self._space = (self._space or self._space_behind) if self._has_begun else ""
            text, self._space_behind = trimmed, None
        text = self._space + text
        certain = text if is_end else text.rstrip()
        self._space = text[len(certain) :]
        self._has_begun |= bool(certain)
        return certain
