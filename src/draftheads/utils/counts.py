"""Counts and sizes: whole blocks of them, and in words, for messages, tables and pages."""

import unicodedata
from collections import Counter
from collections.abc import Mapping
from functools import cache

_SCRIPTS = {  # by the first word of a letter's name in Unicode
    **{name.upper(): name for name in ("Latin", "Cyrillic", "Arabic", "Devanagari", "Hangul", "Greek")},
    "CJK": "Han",
    **dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"), "Kana"),
}


def rounded_up(number: int, block: int) -> int:
    """The least number of whole blocks that has them all.

    >>> rounded_up(0, 128), rounded_up(128, 128), rounded_up(129, 128)
    (0, 128, 256)
    """
    return -(-number // block) * block


def counted(number: int, noun: str) -> str:
    """A number with its noun, which is singular for one.

    >>> counted(1, "held-out text"), counted(2152, "token"), counted(2, "batch")
    ('1 held-out text', '2,152 tokens', '2 batches')
    """
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{ending}"


def short_count(number: int) -> str:
    """A number of parameters with its first digits.

    >>> short_count(812), short_count(46_100), short_count(12_520_000), short_count(8_030_000_000)
    ('812', '46.1 k', '12.5 M', '8.0 B')
    """
    return _scaled(number, ("", "k", "M", "B"))


def byte_size(num_bytes: int) -> str:
    """A size of files or memory.

    >>> byte_size(812), byte_size(46_100), byte_size(18_590_208), byte_size(49_000_000_000)
    ('812 B', '46.1 kB', '18.6 MB', '49.0 GB')
    """
    return _scaled(num_bytes, ("B", "kB", "MB", "GB"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    """The number in the smallest unit in which it is below 1,000, as it is shown."""
    last = units[-1]
    for unit in units:
        shown = f"{number:,.0f}" if unit == units[0] else f"{number:,.1f}"
        if unit == last or float(shown.replace(",", "")) < 1000:
            break
        number /= 1000
    return f"{shown} {unit}".rstrip()


def scripts_of(text: str) -> Counter[str]:
    """The number of letters of each script.

    >>> dict(scripts_of("Да, yes: 東京タワー 12"))
    {'Cyrillic': 2, 'Latin': 3, 'Han': 2, 'Kana': 3}
    """
    found = Counter[str]()
    for letter, number in Counter(text).items():
        if letter.isalpha():
            found[_script(letter)] += number
    return found


@cache
def _script(letter: str) -> str:
    return _SCRIPTS.get(unicodedata.name(letter, "").partition(" ")[0], "other")


def shares(numbers: Mapping[str, int]) -> str:
    """Parts of a whole in words, the largest first.

    >>> shares({"Han": 1, "Latin": 499, "Greek": 500})
    'Greek 50 %, Latin 50 %, Han 0.1 %'
    """
    whole = sum(numbers.values())
    largest = sorted(numbers.items(), key=lambda part: -part[1])
    percent = ((name, 100 * number / whole) for name, number in largest if number)
    return ", ".join(f"{name} {part:.0f} %" if part >= 1 else f"{name} {part:.1g} %" for name, part in percent)
