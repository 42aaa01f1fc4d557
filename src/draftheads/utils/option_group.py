"""Groups of settings, and the ranges of their values."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

from draftheads.errors import InvalidSettings


@dataclass(frozen=True)
class Range:
    """The range of a setting, given as ``Annotated[float, Range(…)]``. None is in every range."""

    fix: str  # the end of the error message
    has: Callable[[float], bool]


def at_least(least: int) -> Range:
    return Range(f"must be at least {least}", lambda value: value >= least)


ABOVE_0 = Range("must be above 0", lambda value: value > 0)
FROM_0, FROM_1 = at_least(0), at_least(1)
FRACTION = Range("must be at least 0 and below 1", lambda value: 0 <= value < 1)
SHARE = Range("must be above 0 and at most 1", lambda value: 0 < value <= 1)


def up_to(most: int) -> Range:
    """From 1 to ``most``: larger values would only take long to fail."""
    return Range(f"must lie in 1 … {most}", lambda value: 1 <= value <= most)


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Settings that belong together. Their ranges and choices are checked when a group is made."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kinds = getattr(self, field.name), get_args(field.type)
            for kind in (field.type, *kinds):
                if get_origin(kind) is Literal and not (value is None and NoneType in kinds):
                    choices, values = get_args(kind), value if get_origin(field.type) is tuple else (value,)
                    is_known = all(each in choices for each in values)
                    self._require(field.name, fine=is_known, fix=f"choose among {', '.join(choices)}")
            for limit in getattr(field.type, "__metadata__", ()):  # of Annotated
                if value is not None and isinstance(limit, Range):
                    is_whole = kinds[0] in (int, int | None)
                    is_number = isinstance(value, Integral if is_whole else Real) and not isinstance(value, bool)
                    self._require(field.name, fine=is_number, fix=f"must be {'a whole' if is_whole else 'a'} number")
                    self._require(field.name, fine=limit.has(value), fix=limit.fix)

    def _require(self, name: str, *, fine: bool, fix: str) -> None:
        """Raises InvalidSettings with the option's name, its value and how to fix it, unless the value is ``fine``."""
        if not fine:
            value = getattr(self, name)
            several = " ".join(map(str, value)) if isinstance(value, tuple) and value else repr(value)
            shown = str(value) if isinstance(value, Path) else several
            flag = f"--{name.replace('_', '-')}"
            raise InvalidSettings(f"{flag} is {shown}: {fix}")
