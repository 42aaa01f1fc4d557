"""Prompts go on from states of recurrent layers that were kept: the same text, the same bits, fewer tokens read."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cpu.test_native import sped_up
from draftheads.decode.core import CoreLimits, EngineCore
from draftheads.decode.engine import Engine
from draftheads.decode.request import Lane, Request, StreamEvent
from draftheads.drafters.draft_model import DraftModel
from draftheads.runners import bytes_of_states, num_slots, runner_for
from draftheads.speculation.tree import Tree
from families import HAS_RECURRENT, TREES, needs_library, tiny_head, tiny_model
from scheduler_world import assert_plain, request_of

pytestmark = pytest.mark.skipif(not HAS_RECURRENT, reason="transformers has no functions that trees can follow")
SYSTEM = [3 + n * n % 17 for n in range(60)]  # shares 56 tokens in whole blocks
LONG = [4 + n * n % 19 for n in range(100)]


@pytest.fixture(
    scope="module",
    params=[
        *("qwen3_5_text", "mamba2"),
        *(pytest.param(f"fast {name}", marks=needs_library) for name in ("qwen3_5_text", "falcon_h1", "lfm2")),
    ],
)
def engine(request: pytest.FixtureRequest) -> Engine:
    family = request.param.removeprefix("fast ")
    model = tiny_model(family) if family == request.param else sped_up(family)[0]
    return Engine(model, tiny_head("hydra", model), shape=TREES["ragged"])


def core_of(engine: Engine, **limits: Any) -> EngineCore:
    return EngineCore({"": engine}, CoreLimits(**{"chunk_tokens": 4096, **limits}), keeps_answers=True)


def run(
    core: EngineCore, engine: Engine, *prompts: Sequence[int], lane: Lane | None = None, **how: Any
) -> list[Request]:
    """Answers to prompts that come at the same time."""
    requests = [request_of(engine, prompt, **how) for prompt in prompts]
    for request in requests:
        core.add(request, lane)
    finish(core)
    return requests


def finish(core: EngineCore) -> None:
    while core.has_work:
        for _, event in core.step():
            assert isinstance(event, StreamEvent), event
        if (limit := core.limits.kv_bytes) is not None:
            assert core.kv_bytes + core.prefixes.num_bytes <= limit


@pytest.mark.parametrize("chunk_tokens", [4096, 48])
def test_the_same_prompt_is_read_from_its_last_block_on_with_the_same_bits(engine: Engine, chunk_tokens: int) -> None:
    cores = [core_of(engine, chunk_tokens=chunk_tokens) for _ in range(2)]
    first, again = (run(cores[0], engine, LONG, logprobs=0)[0] for _ in range(2))
    [alone] = run(cores[1], engine, LONG, logprobs=0)
    assert (cores[0].tokens_read, cores[1].tokens_read) == (104, 100)
    assert (first.num_cached, again.num_cached, alone.num_cached) == (0, 96, 0)
    assert_plain(engine, first, again, alone)
    assert again.result().logprobs == first.result().logprobs == alone.result().logprobs, "the bits differ"
    assert (cores[0].prefixes.hits, cores[0].prefixes.tokens_reused) == (1, 96)


def test_a_common_beginning_is_kept_by_the_second_prompt_that_has_it(engine: Engine) -> None:
    core = core_of(engine)
    found = [run(core, engine, [*SYSTEM, *[5 + n] * 5])[0] for n in range(4)]
    assert [request.num_cached for request in found] == [0, 0, 56, 56]
    assert core.tokens_read == 2 * 65 + 2 * 9
    assert_plain(engine, *found)


def test_a_common_beginning_of_prompts_that_come_together_is_read_once(engine: Engine) -> None:
    """Their rows go on in one batch, each from a copy of the same states."""
    core = core_of(engine)
    found = run(core, engine, *([*SYSTEM, *[5 + n] * (12 + n)] for n in range(5)), LONG)
    assert [request.num_cached for request in found] == [0, 56, 56, 56, 56, 0]
    assert core.tokens_read == 72 + sum(range(17, 21)) + 100
    assert_plain(engine, *found)


@pytest.mark.parametrize("nodes", [0, None])
def test_the_next_turn_of_a_conversation_reads_its_new_tokens_only(engine: Engine, nodes: int | None) -> None:
    core = core_of(engine, chunk_tokens=16)
    prompt = LONG[:42]
    for turn in range(4):
        before = core.tokens_read
        request, _ = run(core, engine, prompt, [5 + turn] * 12, lane=Lane("", nodes))
        assert_plain(engine, request)
        read = core.tokens_read - before - 12
        # drafted, states may be behind the whole answer; those beyond its end are not kept, only those of its prompt
        whole, blocks = len(prompt) - 7, (len(prompt) - 19) // 8 * 8
        known = [0] if turn == 0 else [whole] if nodes == 0 else [whole, whole + 1, blocks]
        assert read in [len(prompt) - tokens for tokens in known]
        assert request.num_cached == len(prompt) - read
        prompt = [*prompt, *request.token_ids, *LONG[turn : turn + 6]]


@pytest.mark.parametrize("length", [11, 13])
def test_states_beyond_the_end_of_an_answer_are_not_kept(engine: Engine, length: int) -> None:
    """The model drafts for itself, so every step has four tokens, and the last one goes beyond eleven."""
    model = engine.model
    drafting = Engine(model, DraftModel(model, model), shape=Tree.chain(3))
    core = core_of(drafting)
    [request] = run(core, drafting, LONG, max_new_tokens=length)
    assert_plain(engine, request)
    kept = [text for text, _ in core.prefixes._texts.values()]
    assert [len(text.token_ids) for text in kept] == ([96] if length == 11 else [96, 112])
    for text in kept:
        runner = runner_for(model)
        rows, _, _ = runner.prefill([text.token_ids])
        for key, state in runner.states(rows[0]).items():
            torch.testing.assert_close(text.states[key], state, rtol=1e-4, atol=1e-5)


def test_an_interrupted_request_reads_its_answer_again_and_not_its_prompt(engine: Engine) -> None:
    core = core_of(engine)
    request = request_of(engine, LONG)
    core.add(request)
    while len(request.token_ids) < 5:
        core.step()
    count = request.num_tokens - 1
    core._interrupt(request)
    finish(core)
    assert core.tokens_read == 100 + count - 96
    assert request.num_cached == 0
    assert_plain(engine, request)
    # while a prompt is read, nothing but whole chunks is kept
    core = core_of(engine, chunk_tokens=20)
    core.add(request := request_of(engine, LONG))
    core.step()
    core._interrupt(request)
    finish(core)
    assert core.tokens_read == 20 + 100
    assert_plain(engine, request)


def test_the_memory_of_states_counts_and_leaves_with_the_keys_and_values(engine: Engine) -> None:
    core = core_of(engine)
    run(core, engine, LONG, max_new_tokens=1)
    state = bytes_of_states(engine.model, 1)
    texts = [96, 100]  # up to the last block, and the whole prompt, of which an answer of one token is
    assert sorted(len(text.token_ids) for text, _ in core.prefixes._texts.values()) == texts
    # hidden states of answers are shared by nothing, and head and target read the same ones
    assert core.prefixes.num_bytes == 196 * engine.bytes_per_token + 2 * state > 2 * state > 0
    core.prefixes.limit(core.prefixes.num_bytes - 1)
    assert core.prefixes.num_bytes == 100 * engine.bytes_per_token + state


def test_texts_leave_where_memory_is_short(engine: Engine) -> None:
    """The longest one used ago first; what is running comes before."""
    limit = engine.num_bytes([112]) + 120 * engine.bytes_per_token + bytes_of_states(engine.model, 1)
    core = core_of(engine, kv_bytes=limit)
    others = [[5 + n, *LONG[1:]] for n in range(3)]
    for prompt in [LONG, *others, LONG]:
        [request] = run(core, engine, prompt)
        assert request.num_cached == 0
        assert_plain(engine, request)
    assert 0 < len(core.prefixes) < 5


def test_a_text_outside_of_requests_has_states_too(engine: Engine) -> None:
    core = core_of(engine, kv_bytes=1 << 24)
    core.hold(100, engine)
    expected = num_slots(engine.model, [100]) * engine.bytes_per_token + bytes_of_states(engine.model, 1)
    assert core.held_bytes == expected > num_slots(engine.model, [100]) * engine.bytes_per_token
    core.hold(-100, engine)
    assert core.held_bytes == 0
