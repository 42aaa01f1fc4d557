"""The progress protocol: stages, units, and counting."""

from draftheads.progress import NoProgress, counted_stage
from fake_progress import FakeProgress


def test_a_counted_stage_reports_each_unit():
    progress = FakeProgress()
    advance = counted_stage(progress, "reading", 3)
    advance()
    advance()
    assert progress.stages == ["reading"]
    assert progress.last == (2, 3, "")


def test_no_progress_shows_nothing():
    advance = counted_stage(NoProgress(), "reading", 1)
    advance()
