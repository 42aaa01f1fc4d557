"""Counts and sizes: whole blocks of them, and in words, for messages, tables and pages."""


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
