"""Which prompts the core reads in one pass, and who waits for whom."""

from collections.abc import Sequence
from typing import Any

import pytest

from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.engine import Engine
from draftheads.decode.prompt_reader import PromptReader
from draftheads.decode.request import Request, StreamEvent
from draftheads.decode.running import SlotBytes
from draftheads.decode.waiting import Lane
from draftheads.drafters.copying import Copying
from draftheads.drafters.lookahead import Lookahead
from draftheads.errors import TooLarge
from draftheads.models.model import TargetModel
from draftheads.speculation.drafter import NoDraft
from families import TREES, needs_library, tiny_head, tiny_model
from scheduler_world import plain_answer, request_of

SHORT = [[3, 4, 5], [9, 8, 7, 6], [11, 5]]
LONG = [5 + n % 13 for n in range(140)]  # two blocks of the cache


def groups_of(model: TargetModel, prompts: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the prompts of each reader; the answers are plain ones."""
    groups: list[list[int]] = []
    make = PromptReader.__init__

    def noted(reader: PromptReader, model: TargetModel, requests: Any, *arguments: Any) -> None:
        groups.append([len(request.prompt_ids) for request in requests])
        make(reader, model, requests, *arguments)

    engine = Engine(model)
    expected = [plain_answer(engine, prompt) for prompt in prompts]
    requests = [request_of(engine, prompt) for prompt in prompts]
    monkeypatch.setattr(PromptReader, "__init__", noted)
    list(engine.run(requests))
    assert [request.result().token_ids for request in requests] == expected
    return groups


def test_short_prompts_are_read_together_and_those_of_other_blocks_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader's rows are as long as its longest one, and each request reserves the blocks of its own prompt."""
    model = tiny_model("llama")
    assert groups_of(model, [SHORT[0], LONG, *SHORT[1:]], monkeypatch) == [[2, 3, 4], [140]]


@needs_library
def test_with_batch_invariance_each_prompt_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").sped_up(batch_invariant=True)
    assert groups_of(model, SHORT, monkeypatch) == [[2], [3], [4]]


@pytest.mark.parametrize(
    ("salts", "groups", "tokens"),
    [
        (("one", "one"), [[62], [63]], 62 + 3),  # the second one waits until the first one's beginning is there
        (("one", "other"), [[62, 63]], 62 + 63),  # else the time would tell one of them what the other one asked
    ],
)
def test_only_prompts_of_one_salt_wait_for_their_common_beginning(
    engine: Engine, salts: tuple[str, str], groups: list[list[int]], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[int]] = []
    make = PromptReader.__init__

    def noted(reader: PromptReader, model: TargetModel, requests: Any, *arguments: Any) -> None:
        found.append([len(request.prompt_ids) for request in requests])
        make(reader, model, requests, *arguments)

    monkeypatch.setattr(PromptReader, "__init__", noted)
    core = core_of(engine, chunk_tokens=1024)
    requests = [request_of(engine, [*LONG[:60], *[3 + n] * (2 + n)]) for n in range(2)]
    for request, salt in zip(requests, salts, strict=True):
        core.add(request, client=salt, cache_salt=salt)
    core.step()
    assert (found, core.tokens_read) == (groups, tokens)
    assert [request.num_cached for request in requests] == [0, 125 - tokens]
    run(core, *requests)
    for request in requests:
        assert request.result().token_ids == plain_answer(engine, request.prompt_ids)


# --- fairness and memory ---


def core_of(engine: Engine, **limits: Any) -> EngineCore:
    return EngineCore({"": engine}, CoreLimits(**limits), keeps_answers=True)


def add(core: EngineCore, engine: Engine, prompt: Sequence[int], client: str = "", **settings: Any) -> Request:
    request = request_of(engine, prompt, **settings)
    core.add(request, client=client)
    return request


def run(core: EngineCore, *requests: Request, most: int = 500) -> int:
    """The number of steps until these requests have ended."""
    for number in range(most):
        if all(request.finish_reason for request in requests):
            return number
        for _, event in core.step():
            assert isinstance(event, StreamEvent), event
    raise AssertionError(f"not finished after {most} steps")


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = tiny_model("llama", max_position_embeddings=65536)
    return Engine(model, tiny_head("hydra", model), shape=TREES["ragged"])


def test_a_long_answer_reserves_no_more_than_its_next_tokens(engine: Engine) -> None:
    """The memory is that of the longest answer alone, and yet fifteen others are decoded beside it."""
    core = core_of(engine, kv_bytes=60_200 * SlotBytes().per_slot(engine))
    add(core, engine, [3, 4], "one", max_new_tokens=59_000)
    core.step()
    others = [add(core, engine, [5, 6, n], f"client {n}", max_new_tokens=20) for n in range(3, 18)]
    assert run(core, *others) <= 20
    assert [request.result().token_ids for request in others] == [
        plain_answer(engine, [5, 6, n], max_new_tokens=20) for n in range(3, 18)
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 7}])
@pytest.mark.parametrize("drafter", ["plain", "hydra", "eagle", "small-llama", "copying", "lookahead"])
def test_interrupted_answers_are_plain_answers(drafter: str, settings: dict[str, Any]) -> None:
    model = tiny_model("llama")
    made = {"plain": NoDraft, "lookahead": Lookahead, "copying": lambda: Copying(tiny_head("hydra", model))}
    engine = Engine(model, made.get(drafter, lambda: tiny_head(drafter, model))())
    core = core_of(engine, kv_bytes=128 * 5 * SlotBytes().per_slot(engine), headroom_tokens=4)
    prompts = [[3 + n, 4, 5] for n in range(3)]
    requests = [add(core, engine, prompt, max_new_tokens=150, **settings) for prompt in prompts]
    run(core, *requests)
    assert core.interruptions > 0
    expected = [plain_answer(engine, prompt, max_new_tokens=150, **settings) for prompt in prompts]
    assert [request.result().token_ids for request in requests] == expected
    assert [request.num_cached for request in requests] == [0, 0, 0]


def test_a_request_that_fits_overtakes_one_that_does_not_but_not_for_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftheads.decode.core._MOST_OVERTAKEN", 3)
    core = core_of(engine, kv_bytes=1100 * SlotBytes().per_slot(engine), max_rows=4)
    first = add(core, engine, [3, 4], max_new_tokens=40)
    core.step()
    large = add(core, engine, [5] * 400, max_new_tokens=2)
    order: list[Request] = []
    small: list[Request] = []
    for _ in range(200):
        if large.token_ids:
            break
        small.append(add(core, engine, [6, 7, len(small) % 9], max_new_tokens=6))
        order += [request for request, event in core.step() if isinstance(event, StreamEvent) and event.finish_reason]
    before = [request for request in small if request in order]
    assert len(before) >= 3
    assert first in order
    assert large.token_ids, "it is overtaken for ever"
    assert run(core, *small, large) < 100


def test_an_answer_that_could_not_go_on_is_not_interrupted(engine: Engine) -> None:
    """While a text is read again it takes its memory twice, and that of a long one is all that there is."""
    core = core_of(engine, kv_bytes=768 * SlotBytes().per_slot(engine), headroom_tokens=4)
    long = add(core, engine, [3, 4], "one", max_new_tokens=600)
    while len(long.token_ids) < 350:
        core.step()
    others = [request_of(engine, [5, 6, n], max_new_tokens=120) for n in range(3, 5)]
    for number, request in enumerate(others):
        core.add(request, Lane("", 0), client=f"client {number}")
        core.step()
    assert core.num_running == 3
    run(core, long, *others, most=1000)
    assert core.interruptions > 0
    for request in (long, *others):
        expected = plain_answer(engine, request.prompt_ids, max_new_tokens=request.most_new_tokens)
        assert request.result().token_ids == expected


def test_a_request_that_fits_no_more_fails_instead_of_waiting_for_ever() -> None:
    """Its engine was replaced by one that takes more memory."""
    model = tiny_model("llama")
    small, large = Engine(model), Engine(model, tiny_head("eagle", model))
    core = core_of(small, kv_bytes=256 * SlotBytes().per_slot(small))
    requests = [add(core, small, [3, 4, n], max_new_tokens=20) for n in (5, 6)]
    core.engines[""] = large
    events = core.step()
    assert [(request, type(event)) for request, event in events] == [(request, TooLarge) for request in requests]
    assert not core.has_work


def test_a_short_prompt_does_not_wait_for_a_long_one(engine: Engine) -> None:
    core = core_of(engine, chunk_tokens=64)
    long = add(core, engine, [5 + n % 13 for n in range(2000)], "one", max_new_tokens=3)
    core.step()
    short = add(core, engine, [5, 6, 7], "other", max_new_tokens=1)
    core.step()
    assert short.finish_reason == "length"
    # and a long one is read whatever comes: at least half of each chunk is its own
    for number in range(60):
        add(core, engine, [5, number % 20] * 30, "other", max_new_tokens=1)
        core.step()
    assert long.result().token_ids == plain_answer(engine, long.prompt_ids, max_new_tokens=3)


def test_a_client_gives_up_rows_when_another_one_waits(engine: Engine) -> None:
    core = core_of(engine, max_rows=4)
    many = [add(core, engine, [3, 4, n], "one", max_new_tokens=60) for n in range(3, 9)]
    core.step()
    other = add(core, engine, [5, 6, 7], "other", max_new_tokens=3)
    core.step()
    assert other.token_ids
    assert core.interruptions == 1
    third = add(core, engine, [5, 6, 8], "third", max_new_tokens=3)
    core.step()
    assert third.token_ids
    run(core, *many, other, third)
    for request in (*many, other, third):
        assert request.result().token_ids == plain_answer(
            engine, request.prompt_ids, max_new_tokens=request.most_new_tokens
        )


def test_no_row_is_given_up_for_a_client_that_has_as_many(engine: Engine) -> None:
    core = core_of(engine, max_rows=4)
    requests = [add(core, engine, [3, 4, n], f"client {n % 2}", max_new_tokens=9) for n in range(8)]
    run(core, *requests)
    assert core.interruptions == 0


def test_a_long_row_among_short_ones_gets_a_lane_of_its_own(engine: Engine) -> None:
    """Else each step would read as much of the short ones' empty slots as of its text."""
    core = core_of(engine)
    long = add(core, engine, [5 + n % 13 for n in range(3000)], max_new_tokens=30)
    core.step()
    short = [add(core, engine, [3, 4, n], max_new_tokens=20) for n in range(3)]
    for _ in range(3):
        core.step()
    lanes = [set(lane.requests) for lane in core.lanes]
    assert lanes == [{long}, set(short)]
    run(core, long, *short)
    assert long.result().token_ids == plain_answer(engine, long.prompt_ids, max_new_tokens=30)


def test_an_interrupted_request_goes_on_however_little_memory_there_is(engine: Engine) -> None:
    """Its text is in memory twice while it is read again, more than when it was admitted first."""
    limit = 1536 * SlotBytes().per_slot(engine)
    core = core_of(engine, kv_bytes=limit, headroom_tokens=8)
    long = add(core, engine, [3, 4], "one", max_new_tokens=1000)
    while long.num_tokens < 800:
        core.step()
    others = [add(core, engine, [5, 6, n], "two", max_new_tokens=200) for n in range(3, 9)]
    run(core, long, *others, most=3000)
    assert core.interruptions > 0
    assert long.result().token_ids == plain_answer(engine, [3, 4], max_new_tokens=1000)


def test_a_request_that_is_interrupted_while_it_is_cancelled_is_not_decoded(engine: Engine) -> None:
    core = core_of(engine)
    request = add(core, engine, [3, 4], max_new_tokens=50)
    core.step()
    tokens = list(request.token_ids)
    core.cancel(request)  # it runs, so the next step drops it, unless it waits by then
    core._interrupt(core.lanes[0], request)
    run(core, add(core, engine, [5, 6], max_new_tokens=3))
    assert request.token_ids == tokens
    assert not core.has_work


def test_prompts_are_read_alone_after_an_error_at_the_end_of_reading_them_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = PromptReader.prompts

    def of(reader: PromptReader) -> object:
        if len(reader.requests) > 1:
            raise MemoryError("no memory for the logits")
        return prompts.__get__(reader)

    monkeypatch.setattr(PromptReader, "prompts", property(of))
    core = core_of(engine)
    requests = [add(core, engine, prompt, max_new_tokens=4) for prompt in SHORT]
    run(core, *requests)
    assert [request.result().token_ids for request in requests] == [
        plain_answer(engine, prompt, max_new_tokens=4) for prompt in SHORT
    ]


def test_the_weights_of_a_pass_are_all_products_however_they_are_stored() -> None:
    model = tiny_model("llama")
    before = SlotBytes().of_weights(Engine(model))
    assert SlotBytes().of_weights(Engine(model.sped_up())) == before
