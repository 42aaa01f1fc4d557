"""Groups of settings, and the ranges of their values."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Literal, get_args, get_origin

from draftheads.errors import InvalidSettings


@dataclass(frozen=True)
class Range:
    """The range of a setting, given as ``Annotated[float, Range(…)]``. None is in every range."""

    fix: str  # the end of the error message
    has: Callable[[float], bool]


ABOVE_0 = Range("must be above 0", lambda value: value > 0)
FROM_0 = Range("must be at least 0", lambda value: value >= 0)
FROM_1 = Range("must be at least 1", lambda value: value >= 1)
FRACTION = Range("must be at least 0 and below 1", lambda value: 0 <= value < 1)


def up_to(most: int) -> Range:
    """From 1 to ``most``: larger values would only take long to fail."""
    return Range(f"must lie in 1 … {most}", lambda value: 1 <= value <= most)


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Settings that belong together. Their ranges and choices are checked when a group is made."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if get_origin(field.type) is Literal:
                choices = get_args(field.type)
                self._require(field.name, fine=value in choices, fix=f"choose among {', '.join(choices)}")
            for limit in getattr(field.type, "__metadata__", ()):  # of Annotated
                if value is None:
                    continue
                kind = Integral if get_args(field.type)[0] in (int, int | None) else Real
                is_number = isinstance(value, kind) and not isinstance(value, bool)
                self._require(
                    field.name, fine=is_number, fix=f"must be {'a whole' if kind is Integral else 'a'} number"
                )
                self._require(field.name, fine=limit.has(value), fix=limit.fix)

    def _require(self, name: str, *, fine: bool, fix: str) -> None:
        """Raises InvalidSettings with the option's name, its value and how to fix it, unless the value is ``fine``."""
        if not fine:
            raise InvalidSettings(f"--{name.replace('_', '-')} is {getattr(self, name)!r}: {fix}")
