"""A progress receiver for tests."""

from collections.abc import Callable


class FakeProgress:
    """Records stages and the last progress; may run an action after so many units of a stage."""

    def __init__(
        self, after: int | None = None, action: Callable[[], object] = lambda: None, *, stage: str = ""
    ) -> None:
        self.after, self.action, self.of_stage = after, action, stage
        self.stages: list[str] = []
        self.done: list[int] = []  # units, at each report
        self.steps: list[int] = []  # the same of a training
        self.last = (0, 0, "")  # units done, in all, note
        self.notes: list[str] = []

    def stage(self, what: str) -> None:
        self.stages.append(what)

    def progress(self, done: int, total: int, note: str = "") -> None:
        self.done.append(done)
        if (self.stages or [""])[-1].startswith("training"):
            self.steps.append(done)
        self.last = (done, total, note)
        self.notes.append(note)
        if done == self.after and (self.stages or [""])[-1].startswith(self.of_stage):
            self.action()
