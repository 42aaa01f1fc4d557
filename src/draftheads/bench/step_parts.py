"""How long the parts of a decoding step take, in milliseconds, while an engine answers one prompt."""

import statistics
from collections.abc import Sequence

from draftheads.bench.stopwatch import Stopwatch
from draftheads.decode.engine import Engine

PARTS = {"draft": "drafting", "verify": "verification", "rest": "accept and rest"}  # by lap of a step
_FIRST_STEPS = 1  # in which a drafter may still read the prompt


def step_parts(engine: Engine, prompt_ids: Sequence[int], *, max_new_tokens: int) -> dict[str, float]:
    """The median milliseconds of each part over the steps of a greedy answer, by the part's name."""
    watch = Stopwatch(engine.model.device)
    batch = engine.batch(lap=watch.lap)
    batch.join(engine.sequences([list(prompt_ids)], max_new_tokens=max_new_tokens))
    steps = []
    while batch.sequences:
        watch.start()
        batch.step()
        steps.append(dict(watch.seconds))
    steps = steps[_FIRST_STEPS:] or steps
    return {name: 1e3 * statistics.median([step[lap] for step in steps] or [0.0]) for lap, name in PARTS.items()}
