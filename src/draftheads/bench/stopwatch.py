"""Seconds of each part of a decoding step, for comparisons."""

import time

import torch

from draftheads.decode.step_timer import wait_for

_PARTS = ("draft", "verify", "rest")


class Stopwatch:
    """Seconds of each part of a step; on an accelerator it waits for the work to be done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(_PARTS, 0.0)
        self._last = 0.0

    def start(self) -> None:
        """A step begins."""
        self._last = self.now

    def lap(self, part: str) -> None:
        """A part of it has ended."""
        now = self.now
        self.seconds[part], self._last = now - self._last, now

    @property
    def now(self) -> float:
        """Seconds of a clock, when all that was asked for is done."""
        wait_for(self.device)
        return time.perf_counter()
