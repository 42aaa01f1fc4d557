"""Counts in words: one is singular, and no count is shown as 0.0."""

import re
from pathlib import Path

import pytest

import draftheads
from draftheads.utils.counts import byte_size, counted, short_count


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (short_count(0), "0"),
        (short_count(999_940), "999.9 k"),
        (short_count(999_960), "1.0 M"),
        (short_count(3 * 10**12), "3,000.0 B"),
        (byte_size(999), "999 B"),
        (byte_size(10**12), "1,000.0 GB"),
        (counted(0, "pass"), "0 passes"),
        (counted(1, "pass"), "1 pass"),
    ],
)
def test_counts_and_sizes_in_words(found: str, shown: str) -> None:
    assert found == shown


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
