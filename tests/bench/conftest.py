"""What tests of several files share."""

from typing import Any

import pytest

from draftheads.bench import timing
from draftheads.bench.timing import StepClock
from draftheads.decode.batch import Batch


class Clock:
    """Seconds, which pass only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.monkeypatch = 1.0, monkeypatch
        monkeypatch.setattr(StepClock, "now", property(lambda _: self.now))
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def slow(self, place: Any, name: str, **seconds: float) -> None:
        """A method takes so long: by its argument, or one second."""
        method = getattr(place, name)

        def later(own: Any, *arguments: Any) -> Any:
            self.now += seconds.get(arguments[0], 0.0) if seconds else 1.0
            return method(own, *arguments)

        self.monkeypatch.setattr(place, name, later)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Reading a prompt takes 1 s; a step 2 s to verify, 0.5 s for the rest."""
    found = Clock(monkeypatch)
    found.slow(StepClock, "on_phase", verify=2.0, rest=0.5)
    found.slow(Batch, "join")
    return found
