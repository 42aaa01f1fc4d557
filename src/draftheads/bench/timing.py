"""The one loop of all comparisons: several ways of decoding answer the same prompts in turn, and are timed.

Also what drafting costs, head by head (Hydra, table 1).

Speeds of one run can be compared, speeds of different runs cannot: a machine has slow hours. So all ways answer a
prompt before the next prompt begins, and who goes first changes. Times include reading the prompt.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, zip_longest
from operator import attrgetter
from statistics import median
from typing import Any, Self

import torch

from draftheads.decode.engine import Engine
from draftheads.decode.step_costs import StepTimer, typical_tree, wait_for
from draftheads.heads.base import DraftHead
from draftheads.models.generation import ALL_TOKENS
from draftheads.models.model import TargetModel
from draftheads.search.tree_search import ratio_with_error
from draftheads.settings import SamplingSettings
from draftheads.speculation.tree import Tree
from draftheads.utils.provenance import identity_digest

PLAIN = "plain"
STOCK = "transformers"
Ids = tuple[int, ...]
Group = Sequence[Sequence[int]]  # prompts (token ids) that are answered together; often a single one
_WARM_UP_TOKENS = 4
_PROBE_TOKENS = 16  # of an answer that shows the speed of a way
_MIN_TOKENS = 32  # of an answer, however slow the machine is
_MIN_PROMPTS = 3  # answers get shorter before fewer prompts are answered than these
_FEW_PROMPTS, _FEW_TOKENS, _FEW_SECONDS = 6, 64, 60.0  # of a short comparison with plain decoding
_SAFETY = 0.9  # share of the time that is planned for: later tokens of a text take longer than the first ones
_REPEATS = 50  # of each part of drafting


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One way's answers to a group of prompts."""

    token_ids: tuple[Ids, ...]
    num_steps: tuple[int, ...]  # of each answer: passes of the target after its prompt was read
    seconds: float  # wall time of the group, prompts included
    prompt_seconds: float = 0.0  # of them until all prompts were read, their first tokens included
    first_seconds: tuple[float, ...] = ()  # of each answer: until its first token, from the group's start
    last_seconds: tuple[float, ...] = ()  # the same, until its last token
    step_tokens: tuple[tuple[int, ...], ...] = ()  # of each answer: the new tokens of every step
    accepted_by_depth: tuple[int, ...] = ()  # accepted draft tokens at depth 1, 2, … of all answers
    num_drafted: int = 0  # accepted draft tokens
    num_copied: int = 0  # those of them that only a copy from the text brought
    # milliseconds of each part of a step, summed over ``num_timed_steps`` steps of the whole group
    draft_milliseconds: float = 0.0
    verify_milliseconds: float = 0.0
    rest_milliseconds: float = 0.0
    num_timed_steps: int = 0  # without steps right after a prompt was read, in which a drafter reads it, too
    peak_bytes: int = 0  # of an accelerator's memory
    questions: tuple[int, ...] = ()  # the question of each answer, by its number among all
    turn: int = 0  # of the conversations, counted from 0
    group: int = 0  # the number of the group

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The record that ``asdict`` and JSON made of one."""
        return cls(**{name: _as_tuple(each) for name, each in value.items()})

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def together(first: Sequence[Answers], second: Sequence[Answers]) -> tuple[list[Answers], list[Answers]]:
    """The answers to turns that both have: a conversation can become too long for one way alone."""
    turn = attrgetter("group", "turn", "questions")
    both = set(map(turn, first)) & set(map(turn, second))
    return [one for one in first if turn(one) in both], [one for one in second if turn(one) in both]


def first_texts(own: Sequence[Answers]) -> dict[tuple[int, int], Ids]:
    """The token ids of each question's answer to each turn; of the first round."""
    found: dict[tuple[int, int], Ids] = {}
    for answers in own:
        for number, ids in zip(answers.questions, answers.token_ids, strict=True):
            found.setdefault((number, answers.turn), ids)
    return found


# a way of decoding: prompts, most new tokens of an answer -> answers; of conversations, to each turn
Way = Callable[[Any, int], list[Answers]]
_GREEDY = SamplingSettings()


class StepClock:
    """Sums the milliseconds of the parts of steps; on an accelerator it waits for the work to be done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.milliseconds = dict.fromkeys(("draft", "verify", "rest"), 0.0)
        self.prompt_seconds = 0.0
        self.prompt_end = 0.0  # when the last prompt was read
        self.num_steps = 0
        self._step = dict(self.milliseconds)
        self._after_prompt = True
        self._last = self.now

    def on_phase(self, part: str) -> None:
        """A part has ended: "prompt", or of a step "draft", "verify", "on_verify" or "rest"."""
        now = self.now
        if part == "prompt":
            self._after_prompt = True
            self.prompt_seconds += now - self._last
            self.prompt_end = now
        else:
            self._step["draft" if part == "on_verify" else part] += 1e3 * (now - self._last)
        self._last = now
        if part == "rest":
            if not self._after_prompt:
                self.num_steps += 1
                for name, milliseconds in self._step.items():
                    self.milliseconds[name] += milliseconds
            self._after_prompt = False
            self._step = dict.fromkeys(self._step, 0.0)

    @property
    def now(self) -> float:
        """Seconds of a clock, when all work is done."""
        wait_for(self.device)
        return time.perf_counter()


class _TokenTimes:
    """A streamer of transformers that notes when the prompt and each token came."""

    def __init__(self, clock: StepClock) -> None:
        self._clock, self.times = clock, list[float]()

    def put(self, _value: torch.Tensor) -> None:
        """Called with the prompt, and then with each token."""
        self.times.append(self._clock.now)

    def end(self) -> None:
        """Called behind the last token."""


def stock_way(model: TargetModel, sampling: SamplingSettings = _GREEDY) -> Way:
    """Transformers' own ``generate`` on the stock model, one prompt after the other, by the rules of our engines."""
    how: dict[str, Any] = {"do_sample": False, **model.generation.switched_off}
    if sampling.temperature:
        how |= {"do_sample": True, "temperature": sampling.temperature, **ALL_TOKENS}
    how |= {"eos_token_id": None if sampling.ignore_eos else sorted(model.eos_ids)}
    how |= {"pad_token_id": min(model.eos_ids, default=0)}

    def decode(group: Group, max_new_tokens: int) -> list[Answers]:
        clock = StepClock(model.device)
        start = last = clock.now
        texts, firsts, lasts, reading = [], [], [], 0.0
        for prompt_ids in group:
            ids = torch.tensor([list(prompt_ids)], device=model.device)
            mask, streamer = torch.ones_like(ids), _TokenTimes(clock)
            torch.manual_seed(_seed_of(prompt_ids))
            output = model.model.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, streamer=streamer, **how
            )
            texts.append(tuple(output[0, len(prompt_ids) :].tolist()))
            firsts.append(streamer.times[1] - start)  # behind the prompt
            reading += streamer.times[1] - last
            last = clock.now
            lasts.append(last - start)
        return [
            Answers(
                token_ids=tuple(texts),
                num_steps=tuple(len(text) - 1 for text in texts),
                seconds=last - start,
                prompt_seconds=reading,
                first_seconds=tuple(firsts),
                last_seconds=tuple(lasts),
                step_tokens=tuple((1,) * (len(text) - 1) for text in texts),
            )
        ]

    return decode


def engine_way(engine: Engine, sampling: SamplingSettings = _GREEDY) -> Way:
    """Decoding by one of our engines; each prompt has its own seed, the same for all ways."""

    def decode(group: Group, max_new_tokens: int) -> list[Answers]:
        each = [replace(sampling, max_new_tokens=max_new_tokens, seed=_seed_of(prompt)) for prompt in group]
        return [answers_of(engine, group, each)]

    return decode


def _seed_of(prompt_ids: Sequence[int]) -> int:
    """A number that differs for other prompts."""
    return int(identity_digest(list(prompt_ids))[:8], 16)


def answers_of(engine: Engine, group: Group, settings: Sequence[SamplingSettings]) -> Answers:
    """An engine's answers to prompts, with settings for each."""
    is_cuda = engine.model.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(engine.model.device)
    clock = StepClock(engine.model.device)
    start = clock.now
    requests = engine.requests([list(prompt_ids) for prompt_ids in group], settings)
    first, last = [0.0] * len(requests), [0.0] * len(requests)
    steps: list[list[int]] = [[] for _ in requests]
    num_drafted = 0
    for event in engine.run(requests, on_phase=clock.on_phase):
        last[event.index] = time.perf_counter() - start
        if first[event.index]:
            steps[event.index].append(len(event.token_ids))
        else:
            first[event.index] = clock.prompt_end - start  # its event comes with those of the first step
        num_drafted += event.num_drafted
    seconds = clock.now - start
    results = [request.result() for request in requests]
    accepted = zip_longest(*(result.accepted_by_depth for result in results), fillvalue=0)
    parts: dict[str, Any] = {f"{part}_milliseconds": spent for part, spent in clock.milliseconds.items()}
    return Answers(
        token_ids=tuple(result.token_ids for result in results),
        num_steps=tuple(result.num_steps for result in results),
        seconds=seconds,
        prompt_seconds=clock.prompt_seconds,
        first_seconds=tuple(first),
        last_seconds=tuple(last),
        step_tokens=tuple(map(tuple, steps)),
        accepted_by_depth=tuple(map(sum, accepted)),
        num_drafted=num_drafted,
        num_copied=sum(result.num_copied for result in results),
        **parts,
        num_timed_steps=clock.num_steps,
        peak_bytes=torch.cuda.max_memory_allocated(engine.model.device) if is_cuda else 0,
    )


def over_plain(engines: Mapping[str, Engine], prompts: Sequence[Sequence[int]]) -> dict[str, tuple[float, float]]:
    """How many times as fast as plain decoding each engine answers a few of the prompts, and one standard error.

    The engines, at least one, are of the same model. Prompts (token ids) are answered one at a time, in at most about a
    minute.
    """
    few = spread(prompts, _FEW_PROMPTS)
    plain = Engine(next(iter(engines.values())).model, max_batch_size=1)
    ways = {name: engine_way(engine) for name, engine in {PLAIN: plain, **engines}.items()}
    answers = take_turns(ways, [[prompt] for prompt in few], max_new_tokens=_FEW_TOKENS, max_seconds=_FEW_SECONDS)
    speeds = {name: [(one.num_tokens, one.seconds) for one in own] for name, own in answers.items()}
    return {name: ratio_with_error(speeds[name], speeds[PLAIN]) for name in engines}


def spread(prompts: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the prompts, spread over all of them: files are often sorted by kind.

    >>> spread("abcdef", 3)
    ['a', 'c', 'e']
    """
    count = min(most, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def take_turns(
    ways: Mapping[str, Way],
    groups: Sequence[Any],
    *,
    max_new_tokens: int,
    max_seconds: float = math.inf,
    saved: Callable[[int, Callable[[], Any]], Any] = lambda _, find: find(),
) -> dict[str, list[Answers]]:
    """Every way answers a group of prompts, then the next one. Who goes first changes, and the direction.

    Args:
        ways: what is compared, by name; each is warmed up first.
        groups: prompts, or what else the ways take, that are answered together. At least one group is answered.
        max_new_tokens: of an answer. In a time box fewer, if else three groups would not be answered; but at least 32.
        max_seconds: the time box of all ways together. No group is begun that would not be answered in time.
        saved: gets a group's number and a function that finds the answers, as JSON values by way; returns these, or
            what was saved before.

    Returns:
        By the way's name its answers to each group.
    """
    start = time.perf_counter()
    for decode in ways.values():
        decode(groups[0][:1], _WARM_UP_TOKENS)
    tokens = max_new_tokens
    if math.isfinite(max_seconds):
        each = sum(_seconds_per_token(decode, groups[0]) for decode in ways.values())
        left, num_groups = max_seconds - (time.perf_counter() - start), min(_MIN_PROMPTS, len(groups))
        by_time = _SAFETY * left / (num_groups * max(each, 1e-9))
        tokens = int(min(max_new_tokens, max(by_time, _MIN_TOKENS)))
    answers: dict[str, list[Answers]] = {name: [] for name in ways}
    longest = 0.0
    for number, group in enumerate(groups):
        begun = time.perf_counter()
        if number and begun + longest - start > max_seconds:
            break

        def answered(turn: Sequence[str] = turn_of(list(ways), number), group: Group = group) -> dict[str, Any]:
            return {name: [asdict(each) for each in ways[name](group, tokens)] for name in turn}

        for name, values in saved(number, answered).items():
            found = [Answers.from_json(value) for value in values]
            answers[name] += [replace(each, group=number) for each in found]
        longest = max(longest, time.perf_counter() - begun)
    return answers


def turn_of(names: Sequence[str], number: int) -> list[str]:
    """The order in which ways answer a group: there and back, each pair of groups beginning with another way.

    >>> ["".join(turn_of("abc", number)) for number in range(6)]
    ['abc', 'cba', 'bca', 'acb', 'cab', 'bac']
    """
    first = number // 2 % len(names)
    turn = [*names[first:], *names[:first]]
    return turn[::-1] if number % 2 else turn


def _seconds_per_token(decode: Way, group: Group) -> float:
    start = time.perf_counter()
    turns = decode(group, _PROBE_TOKENS)  # of conversations, all of them
    return (time.perf_counter() - start) / sum(max(map(len, answers.token_ids)) for answers in turns)


def drafting_cost(target: TargetModel, head: DraftHead, num_nodes: int) -> dict[str, Any]:
    """What drafting takes for one row with a tree of about so many nodes, in milliseconds (medians).

    ``prefix`` is the time of layers that read the accepted tokens, 0 without such layers; ``heads`` what each further
    level takes. The tree's first 1, 2, … levels are timed in turn: a head's time is what its level adds.
    """
    timer, levels = StepTimer(target, head), range(1, head.max_depth + 1)
    paths = {*typical_tree(num_nodes, depth=4, top_k=4).paths, *Tree.chain(head.max_depth).paths}
    parts = [partial(timer.draft, 1, Tree.from_paths(path for path in paths if len(path) <= level)) for level in levels]
    if head.needs_history:
        parts.insert(0, partial(timer.read, 1))
    times = ([part() for part in parts] for _ in range(_REPEATS + 2))
    sums = [median(each[2:]) for each in zip(*times, strict=True)]  # after warming up
    prefix = sums.pop(0) if head.needs_history else 0.0
    return {"prefix": prefix, "heads": [max(0.0, own - less) for less, own in pairwise([prefix, *sums])]}
