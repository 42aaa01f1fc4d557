"""The prompts that are being read: which ones the next passes read, alone or side by side."""

from dataclasses import dataclass

from draftheads.decode.prefix_cache import PrefixCache, num_shared
from draftheads.decode.prompt_reader import PromptReader, ReadPrompt
from draftheads.decode.request import Request
from draftheads.decode.running import RunningLane
from draftheads.models.kv_target import PREFILL_TOKENS, slots_for

_WORTH_READING_ONCE = 32  # tokens that two prompts share; with more, one waits until the other is read


@dataclass(eq=False)
class Reading:
    """A prompt that is being read, or that waits for it."""

    lane: RunningLane
    request: Request
    reader: PromptReader | None = None  # made when reading begins: another prompt may have left a common beginning
    alone: bool = False  # whether it is read beside no other, because reading it with others failed


class ReadingQueue:
    """Prompts in the order in which they came, and the texts that were read before.

    Half of each chunk goes to the prompt with the fewest tokens left, so that a short one does not wait for a long one.
    The other half goes to the one that came first, so that a long one is read, too, whatever comes.
    """

    def __init__(self, prefixes: PrefixCache) -> None:
        self.prefixes = prefixes
        self.readings: list[Reading] = []

    def __len__(self) -> int:
        return len(self.readings)

    @property
    def num_bytes(self) -> int:
        """Memory of what was read so far."""
        readers = {reading.reader for reading in self.readings if reading.reader is not None}
        return sum(reader.num_bytes for reader in readers)

    def of(self, request: Request) -> Reading | None:
        """The reading of a request; None if its prompt was read, or if there is no such request."""
        return next((reading for reading in self.readings if reading.request is request), None)

    def remove(self, *requests: Request) -> None:
        """Forgets the readings of these requests."""
        self.readings = [reading for reading in self.readings if reading.request not in requests]

    def next_group(self, most_tokens: int, chunk_tokens: int) -> tuple[list[Reading], int]:
        """Prompts of one lane that the next pass reads together, and how many tokens it may read of one that is alone.

        Args:
            most_tokens: what is left of the chunk.
            chunk_tokens: the size of the whole chunk.
        """
        left = {reading: self._num_left(reading) for reading in self.readings}
        shortest = min(self.readings, key=left.__getitem__)
        first, second_half = self.readings[0], chunk_tokens // 2
        if shortest is not first and most_tokens > second_half:
            first, most_tokens = shortest, most_tokens - second_half
        return self._beside(first, left, min(most_tokens, PREFILL_TOKENS)), most_tokens

    def read(self, group: list[Reading], most_tokens: int, *, keep: bool) -> tuple[list[ReadPrompt], int]:
        """Reads the next tokens of prompts: those that are read whole now, all of them or none, and how many tokens.

        Args:
            group: the prompts, of one lane.
            most_tokens: at most, of a single prompt.
            keep: whether a later prompt may begin like one of these.
        """
        reader = group[0].reader or self._reader(group)
        for reading in group:
            reading.reader = reader
        count = reader.read(most_tokens)
        if reader.num_left:
            return [], count
        prompts = reader.prompts
        if keep or len(self.readings) > len(group):
            for prompt in prompts:
                self.prefixes.add(group[0].lane.namespace(prompt.request), prompt.text, copy=len(group) > 1)
        self.readings = [reading for reading in self.readings if reading not in group]  # last: all this may fail
        return prompts, count

    def _beside(self, first: Reading, left: dict[Reading, int], most_tokens: int) -> list[Reading]:
        """A prompt, and others that fit beside it in one pass."""
        group, lane = [first], first.lane
        # with batch invariance, bits must not depend on the other prompts
        if first.reader is not None or first.alone or lane.engine.model.batch_invariant:
            return group
        text = first.request.ids_to_read
        texts, longest = [(lane.namespace(first.request), text)], left[first]
        for other in self.readings:
            if other is first or other.lane is not lane or other.reader is not None or other.alone:
                continue
            text = other.request.ids_to_read
            if slots_for(lane.engine.model, len(text)) != slots_for(lane.engine.model, len(texts[0][1])):
                continue  # they share a rectangle
            unread = max(longest, left[other])
            if (len(group) + 1) * unread > most_tokens:
                continue
            known, namespace = len(text) - left[other], lane.namespace(other.request)
            others = [read for space, read in texts if space == namespace]  # the time tells nothing of other texts
            if any(num_shared(text, read) - known > _WORTH_READING_ONCE for read in others):
                continue
            group.append(other)
            texts.append((namespace, text))
            longest = unread
        return group

    def _num_left(self, reading: Reading) -> int:
        """Tokens that are still to be read."""
        if reading.reader is not None:
            return reading.reader.num_left
        text = reading.request.ids_to_read
        return len(text) - self.prefixes.num_known(reading.lane.namespace(reading.request), text)

    def _reader(self, group: list[Reading]) -> PromptReader:
        lane = group[0].lane
        requests = [reading.request for reading in group]
        known = [self.prefixes.find(lane.namespace(request), request.ids_to_read) for request in requests]
        return PromptReader(lane.engine.model, requests, known, lane.batch.target.layers)
