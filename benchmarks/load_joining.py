"""A long prompt joins running streams: how long each of them waits for its next event meanwhile."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from load_client import Ask, Messages, RequestFailed, Sample

_SECONDS_BEFORE = 2.0  # that the streams run undisturbed
_FIRST_CHARACTERS_PER_TOKEN = 4.5  # of English text; the first long prompt shows the real number


@dataclass(frozen=True)
class Joining:
    """What the streams of one way saw. Times are in milliseconds."""

    name: str
    prompt_tokens: int
    alone: float  # until the first text of a prompt of this length, on an idle server
    first_token: float  # the same while the streams run
    step: float  # between two events of a stream, before the long prompt came: the median
    longest: tuple[float, ...]  # of each stream: the longest time between two events while the prompt was read

    @property
    def steps(self) -> float:
        """The longest wait of all streams, in steps before the long prompt came."""
        return max(self.longest) / self.step

    def allowed(self, chunk_tokens: int) -> float:
        """Two steps and one chunk of a prompt."""
        return 2 * self.step + self.alone / -(-self.prompt_tokens // chunk_tokens)


async def joining(
    name: str, long_ask: Ask, stream_ask: Ask, prompts: Sequence[Messages], *, streams: int, tokens: int
) -> Joining:
    """Measures one way.

    Args:
        name: of the way.
        long_ask: sends the long prompt; a few tokens of answer are enough.
        stream_ask: sends the prompt of a stream. Answers must be so long that they still run when the prompt comes.
        prompts: the first ones are the streams'; the long prompts are made of all.
        streams: how many run.
        tokens: of the long prompt.

    Raises:
        RequestFailed: a request failed, or the streams ended too early.
    """
    characters = int(tokens * _FIRST_CHARACTERS_PER_TOKEN)
    alone = await long_ask(_long_prompt(prompts[::2], characters))
    length = alone.num_prompt_tokens or tokens
    running = [asyncio.create_task(stream_ask(prompts[number % len(prompts)])) for number in range(streams)]
    try:
        await asyncio.sleep(_SECONDS_BEFORE)
        joined = await long_ask(_long_prompt(prompts[1::2], characters * tokens // length))  # no prefix in common
        seen = await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
    start, end = joined.sent, joined.sent + joined.first_token
    before = [late - early for sample in seen for early, late in _pairs(sample) if late <= start]
    during = [[late - early for early, late in _pairs(one) if late > start and early < end] for one in seen]
    if not before or not any(during):
        raise RequestFailed("the streams ended before the long prompt came: ask for longer answers")
    return Joining(
        name,
        joined.num_prompt_tokens or length,
        1e3 * alone.first_token * (joined.num_prompt_tokens or length) / length,
        1e3 * joined.first_token,
        1e3 * float(np.median(before)),
        tuple(1e3 * max(gaps) for gaps in during if gaps),
    )


def _long_prompt(prompts: Sequence[Messages], characters: int) -> Messages:
    """A request about the texts of the prompts, repeated as often as needed."""
    text = " ".join(message["content"] for messages in prompts for message in messages)
    repeated = text * (characters // len(text) + 1)
    return [{"role": "user", "content": repeated[:characters]}]


def _pairs(sample: Sample) -> list[tuple[float, float]]:
    """The times of neighbouring events."""
    return list(pairwise(sample.sent + moment for moment in sample.times))
