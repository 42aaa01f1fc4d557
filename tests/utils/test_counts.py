"""Counts in words: one is singular, and no count is shown as 0.0."""

import re
from pathlib import Path

import pytest

import draftheads
from draftheads.utils.counts import byte_size, counted, short_count


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (999_940, "999.9 k"), (999_960, "1.0 M"), (3 * 10**12, "3,000.0 B")],
)
def test_small_counts_keep_their_digits(number: int, shown: str) -> None:
    assert short_count(number) == shown


def test_sizes_have_a_unit() -> None:
    assert [byte_size(number) for number in (0, 999, 4096, 10**12)] == ["0 B", "999 B", "4.1 kB", "1,000.0 GB"]


def test_one_is_singular() -> None:
    assert [counted(number, "pass") for number in (0, 1, 2)] == ["0 passes", "1 pass", "2 passes"]


# numbers that are followed by a plural: "{len(texts)} texts"
_PLURAL = re.compile(
    r"\{(?:len\([^{}]*\)|[\w.\[\]']*\bnum_\w+)(?:'\])?(?:, *)?(?::,)?\} "
    r"(?:(?:held-out|draft|accepted) )*"
    r"(?:answers|attempts|chats|conversations|layers|nodes|prompts|steps|texts|threads|tokens|weights)\b"
)


def test_the_pattern_finds_plurals() -> None:
    assert _PLURAL.search("hidden states of {len(texts)} texts")
    assert _PLURAL.search("on {metrics['num_texts']:,} held-out texts")
    assert not _PLURAL.search("{counted(len(texts), 'text')}")


def test_no_message_has_a_plural_for_one() -> None:
    root = Path(draftheads.__file__).parent
    found = [
        f"{path.relative_to(root)}: {match.group()}"
        for path in sorted(root.rglob("*.py"))
        for match in _PLURAL.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
