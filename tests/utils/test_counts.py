"""Counts in words: one is singular, and no count is shown as 0.0."""

import re
from pathlib import Path

import draftheads
from draftheads.utils.counts import byte_size, counted, short_count


def test_counts_and_sizes_in_words() -> None:
    """Further ones are in the docstrings."""
    assert [short_count(count) for count in (0, 999_940, 999_960, 3 * 10**12)] == ["0", "999.9 k", "1.0 M", "3,000.0 B"]
    assert (byte_size(999), byte_size(10**12)) == ("999 B", "1,000.0 GB")
    assert (counted(0, "pass"), counted(1, "pass")) == ("0 passes", "1 pass")


# numbers that are followed by a plural: "{len(texts)} texts"
_PLURAL = re.compile(
    r"\{(?:len\([^{}]*\)|[\w.\[\]']*\bnum_\w+)(?:'\])?(?:, *)?(?::,)?\} "
    r"(?:(?:held-out|draft|accepted) )*"
    r"(?:answers|attempts|chats|conversations|layers|nodes|prompts|steps|texts|threads|tokens|weights)\b"
)


def test_no_message_has_a_plural_for_one() -> None:
    assert _PLURAL.search("on {metrics['num_texts']:,} held-out texts")
    root = Path(draftheads.__file__).parent
    found = [
        f"{path.relative_to(root)}: {match.group()}"
        for path in sorted(root.rglob("*.py"))
        for match in _PLURAL.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
