"""The one loop of all comparisons: several ways of decoding answer the same prompts in turn, and are timed.

Speeds of one run can be compared, speeds of different runs cannot: a machine has slow hours. So all ways answer a
prompt before the next prompt begins, and who goes first changes. Times include reading the prompt.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any, Self

import torch

from draftheads.decode.engine import Engine
from draftheads.decode.step_costs import wait_for
from draftheads.models.generation import ALL_TOKENS
from draftheads.models.model import TargetModel
from draftheads.settings import SamplingSettings
from draftheads.utils.estimates import Share, ratio_with_error
from draftheads.utils.provenance import identity_digest

PLAIN = "plain"
STOCK = "transformers"
Group = Sequence[Sequence[int]]  # prompts (token ids) that are answered together; often a single one
_WARM_UP_TOKENS = 4
_PROBE_TOKENS = 16  # of an answer that shows the speed of a way
_MIN_TOKENS = 32  # of an answer, however slow the machine is
_MIN_PROMPTS = 3  # answers get shorter before fewer prompts are answered than these
_FEW_PROMPTS, _FEW_TOKENS, _FEW_SECONDS = 6, 64, 60.0  # of a short comparison with plain decoding
_SAFETY = 0.9  # share of the time that is planned for: later tokens of a text take longer than the first ones


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One way's answers to a group of prompts."""

    token_ids: tuple[tuple[int, ...], ...]
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

    @property
    def speed_share(self) -> Share:
        return self.num_tokens, self.seconds


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def together(first: Sequence[Answers], second: Sequence[Answers]) -> tuple[list[Answers], list[Answers]]:
    """The answers to turns that both have: a conversation can become too long for one way alone."""

    def turn(one: Answers) -> tuple[Any, ...]:
        return one.group, one.turn, one.questions

    both = set(map(turn, first)) & set(map(turn, second))
    return [one for one in first if turn(one) in both], [one for one in second if turn(one) in both]


def first_texts(own: Sequence[Answers]) -> dict[tuple[int, int], tuple[int, ...]]:
    """The token ids of each question's answer to each turn; of the first round."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for answers in own:
        for number, ids in zip(answers.questions, answers.token_ids, strict=True):
            found.setdefault((number, answers.turn), ids)
    return found


# a way of decoding: prompts, most new tokens of an answer -> answers; of conversations, to each turn
Way = Callable[[Any, int], list[Answers]]
_GREEDY = SamplingSettings()


@dataclass(frozen=True)
class Timings:
    """What all ways answered."""

    answers: dict[str, list[Answers]]  # by the way's name, for each group of prompts
    max_new_tokens: int  # of an answer
    seconds: float  # of all ways together, warming up included

    @property
    def num_groups(self) -> int:
        """How many groups of prompts were answered."""
        return len(next(iter(self.answers.values())))


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


class _FirstToken:
    """A streamer of transformers that notes when the first new token came."""

    def __init__(self, clock: StepClock) -> None:
        self._clock, self._num_calls = clock, 0
        self.time = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, and then with each token."""
        self._num_calls += 1
        if self._num_calls == 2:
            self.time = self._clock.now

    def end(self) -> None:
        """Called behind the last token."""


def stock_way(model: TargetModel, sampling: SamplingSettings = _GREEDY) -> Way:
    """Transformers' own ``generate`` on the stock model, one prompt after the other, by the rules of our engines."""
    no_end = {"eos_token_id": None} if sampling.ignore_eos else {"eos_token_id": sorted(model.eos_ids)}
    how: dict[str, Any] = {"do_sample": False, **model.generation.switched_off}
    if sampling.temperature:
        how |= {"do_sample": True, "temperature": sampling.temperature, **ALL_TOKENS}

    def answer(prompt_ids: Sequence[int], max_new_tokens: int, streamer: Any) -> tuple[int, ...]:
        ids = torch.tensor([list(prompt_ids)], device=model.device)
        torch.manual_seed(_seed_of(prompt_ids))
        output = model.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=min(model.eos_ids, default=0),
            streamer=streamer,
            **how,
            **no_end,
        )
        return tuple(output[0, len(prompt_ids) :].tolist())

    def decode(group: Group, max_new_tokens: int) -> list[Answers]:
        clock = StepClock(model.device)
        start = last = clock.now
        texts, firsts, lasts, reading = [], [], [], 0.0
        for prompt_ids in group:
            streamer = _FirstToken(clock)
            texts.append(answer(prompt_ids, max_new_tokens, streamer))
            firsts.append(streamer.time - start)
            reading += streamer.time - last
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
        draft_milliseconds=clock.milliseconds["draft"],
        verify_milliseconds=clock.milliseconds["verify"],
        rest_milliseconds=clock.milliseconds["rest"],
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
    timings = take_turns(ways, [[prompt] for prompt in few], max_new_tokens=_FEW_TOKENS, max_seconds=_FEW_SECONDS)
    speeds = {name: [answer.speed_share for answer in answers] for name, answers in timings.answers.items()}
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
    clock: Callable[[], float] = time.perf_counter,
    on_answer: Callable[[], None] = lambda: None,
    saved: Callable[[int, Callable[[], Any]], Any] | None = None,
) -> Timings:
    """Every way answers a group of prompts, then the next one. Who goes first changes, and the direction.

    Args:
        ways: what is compared, by name; each is warmed up first.
        groups: prompts, or what else the ways take, that are answered together. At least one group is answered.
        max_new_tokens: of an answer. In a time box fewer, if else three groups would not be answered; but at least 32.
        max_seconds: the time box of all ways together. No group is begun that would not be answered in time.
        clock: gives seconds.
        on_answer: is called after each group's answers by one way.
        saved: gets a group's number and a function that finds the answers, as JSON values by way; returns these, or
            what was saved before.
    """
    start = clock()
    for decode in ways.values():
        decode(groups[0][:1], _WARM_UP_TOKENS)
    tokens = max_new_tokens
    if math.isfinite(max_seconds):
        each = sum(_seconds_per_token(decode, groups[0], clock) for decode in ways.values())
        left, num_groups = max_seconds - (clock() - start), min(_MIN_PROMPTS, len(groups))
        tokens = affordable_tokens(left, each, num_groups=num_groups, most=max_new_tokens)
    answers: dict[str, list[Answers]] = {name: [] for name in ways}
    longest = 0.0
    for number, group in enumerate(groups):
        begun = clock()
        if number and begun + longest - start > max_seconds:
            break

        def answered(turn: Iterable[str] = turn_of(list(ways), number), group: Group = group) -> dict[str, Any]:
            values = {}
            for name in turn:
                values[name] = [asdict(each) for each in ways[name](group, tokens)]
                on_answer()
            return values

        for name, values in (saved(number, answered) if saved else answered()).items():
            found = [Answers.from_json(value) for value in values]
            answers[name] += [replace(each, group=number) for each in found]
        longest = max(longest, clock() - begun)
    return Timings(answers, tokens, clock() - start)


def turn_of(names: Sequence[str], number: int) -> list[str]:
    """The order in which ways answer a group: there and back, each pair of groups beginning with another way.

    >>> ["".join(turn_of("abc", number)) for number in range(6)]
    ['abc', 'cba', 'bca', 'acb', 'cab', 'bac']
    """
    first = number // 2 % len(names)
    turn = [*names[first:], *names[:first]]
    return turn[::-1] if number % 2 else turn


def affordable_tokens(seconds: float, seconds_per_token: float, *, num_groups: int, most: int) -> int:
    """Tokens of an answer, at most ``most``, such that so many groups are answered in time by all ways together.

    >>> affordable_tokens(100.0, 0.5, num_groups=3, most=128)
    60
    """
    by_time = _SAFETY * seconds / (num_groups * max(seconds_per_token, 1e-9))
    return int(min(most, max(by_time, _MIN_TOKENS)))


def _seconds_per_token(decode: Way, group: Group, clock: Callable[[], float]) -> float:
    start = clock()
    turns = decode(group, _PROBE_TOKENS)  # of conversations, all of them
    return (clock() - start) / sum(max(map(len, answers.token_ids)) for answers in turns)
