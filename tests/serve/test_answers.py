"""Each answer is the offline engine's plain answer: beside any others, read in chunks, after shared beginnings."""

import random
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from adapter_world import merged, saved_adapter
from draftheads.decode.engine import Engine
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import Mixed
from draftheads.models.model import TargetModel
from draftheads.serve.scheduler import Lane
from draftheads.speculation.drafter import Drafter
from families import FAMILIES, GROWING, PROMPTS, TREES, VOCAB, needs_library, tiny_head, tiny_model
from scheduler_world import check_empty, iterate, plain_answer, run_to_end, scheduler_of, submit
from thorough import some

some_model = cache(tiny_model)
NEW_TOKENS = 14


def engines_of(model: TargetModel, *methods: str) -> dict[str, Engine]:
    """One served name for each kind of drafter; heads with copies, as they are loaded."""

    def engine(method: str) -> Engine:
        shape = GROWING["best first"] if method in ("hydra", "eagle") else TREES["ragged"]
        return Engine(model, Mixed(tiny_head(method, model)), shape=shape)

    without_head: dict[str, Drafter] = {"lookup": Mixed(None), "lookahead": Lookahead()}
    return {name: Engine(model, without_head[name]) if name in without_head else engine(name) for name in methods}


def text(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + place).randrange(3, VOCAB) for place in range(length)]  # noqa: S311


def family_of_prompts() -> list[list[int]]:
    """Prompts that share beginnings: none, a part, a whole other prompt; of 1 to 70 tokens."""
    system = text(1, 40)
    return [
        system + text(2, 9),
        system + text(3, 30),
        text(4, 1),
        system[:25] + text(5, 8),
        text(6, 23),
        system + text(2, 9) + text(7, 5),
        [*system],
        text(6, 23),
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", some(FAMILIES, "llama", "mistral", "gemma3_text", "gpt2"))
@pytest.mark.parametrize("chunk", [7, 256])
def test_in_any_lane_beside_any_others(name: str, chunk: int):
    model = some_model(name)
    engines = engines_of(model, "hydra", "eagle", "eagle3", "small-llama", "lookup")
    lanes = [*map(Lane, engines), Lane("hydra", 0), Lane("eagle3", 5)]
    scheduler = scheduler_of(engines, max_rows=5, chunk_tokens=chunk)
    dice = random.Random(name)  # noqa: S311
    inboxes, expected, cancelled = [], [], []
    for number, prompt in enumerate(family_of_prompts() * 2):
        settings = {"temperature": number % 3 * 0.4, "seed": number, "max_new_tokens": NEW_TOKENS}
        lane = lanes[number % len(lanes)]
        _, inbox = submit(scheduler, prompt, lane, client=f"client {number % 3}", **settings)
        inboxes.append(inbox)
        expected.append(plain_answer(engines["hydra"], prompt, **settings))
        if number % 4 == 1:  # others come and go beside them
            cancelled.append(submit(scheduler, text(number, 30), dice.choice(lanes), client="leaves"))
        iterate(scheduler, dice.randrange(3))
        if cancelled and dice.random() < 0.3:
            scheduler.cancel(cancelled.pop()[0])
    for job, _ in cancelled:
        scheduler.cancel(job)
    run_to_end(scheduler)
    assert [inbox.answer for inbox in inboxes] == expected
    assert scheduler.snapshot().prefix_tokens_reused > 100
    check_empty(scheduler)


@pytest.mark.parametrize("method", ["hydra++", "eagle", "eagle3", "small-llama", "mlp-speculator", "lookahead"])
def test_the_next_turn_of_a_conversation_reads_its_new_tokens_only(method: str):
    """Heads with a history get the hidden states of what was read before: they draft as from scratch."""
    model = some_model("llama")
    engines = engines_of(model, method)
    scheduler = scheduler_of(engines, chunk_tokens=16)
    prompt, num_drafted = text(1, 30), 0
    for turn in range(4):
        before = scheduler.snapshot()
        job, inbox = submit(scheduler, prompt, max_new_tokens=NEW_TOKENS)
        other = submit(scheduler, text(turn + 90, 12), max_new_tokens=4)[1]  # a neighbour
        run_to_end(scheduler)
        assert inbox.answer == plain_answer(engines[method], prompt, max_new_tokens=NEW_TOKENS)
        alone = engines[method].generate([prompt], max_new_tokens=NEW_TOKENS, ignore_eos=True)[0]
        assert job.request.result().drafted == alone.drafted
        num_drafted += sum(alone.drafted)
        assert len(other.answer) == 4
        read = scheduler.snapshot().prompt_tokens_read - before.prompt_tokens_read
        # the answer's last token is in the cache only if draft tokens beyond the end were accepted, too
        known = [0] if turn == 0 else [(len(prompt) - 6 - left_out) // 8 * 8 for left_out in (0, 1)]
        assert read in [12 + len(prompt) - count for count in known]
        prompt = [*prompt, *inbox.answer, *text(turn + 50, 6)]
    assert num_drafted


@needs_library
def test_answers_of_int8_have_the_same_bits():
    model = tiny_model("llama", hidden_size=64, intermediate_size=128).sped_up(bits=8)
    alone = Engine(model, max_batch_size=1)
    engines = engines_of(model, "hydra", "eagle")
    scheduler = scheduler_of(engines, max_rows=4, chunk_tokens=9)
    jobs, expected = [], []
    for number, prompt in enumerate(family_of_prompts()):
        settings = {"temperature": number % 2 * 0.9, "seed": number, "logprobs": 0}
        jobs.append(submit(scheduler, prompt, Lane(("hydra", "eagle")[number % 2]), **settings)[0])
        expected += alone.generate([prompt], max_new_tokens=12, ignore_eos=True, **settings)
    run_to_end(scheduler)
    for job, plain in zip(jobs, expected, strict=True):
        result = job.request.result()
        assert result.token_ids == plain.token_ids
        assert result.logprobs == plain.logprobs, "the bits differ"


def test_answers_with_static_steps():
    """As on CUDA: steps read all slots of the cache, whose number is a multiple of 256."""
    model = tiny_model("llama")
    model.step_mode.graphs = True
    engines = engines_of(model, "hydra", "eagle")
    least, most_per_slot = (engines[name].bytes_per_token for name in ("hydra", "eagle"))
    limit = (3 * 256 + 128) * most_per_slot
    scheduler = scheduler_of(engines, max_rows=4, chunk_tokens=9, kv_bytes=limit)
    prompts = family_of_prompts()
    inboxes = [submit(scheduler, prompt, Lane(("hydra", "eagle")[n % 2]))[1] for n, prompt in enumerate(prompts)]
    most = 0
    while scheduler._has_work():
        iterate(scheduler)
        most = max(most, scheduler.core.kv_bytes + scheduler.core.prefixes.num_bytes)
    assert 2 * 256 * least < most <= limit
    assert [inbox.answer for inbox in inboxes] == [plain_answer(engines["hydra"], prompt) for prompt in prompts]


def test_each_adapter_answers_as_its_merged_model(tmp_path: Path):
    """Whatever is decoded beside it, also after a beginning of which each adapter has keys and values of its own."""
    model = tiny_model("llama")
    folders = {name: saved_adapter(model, tmp_path / name, seed=n) for n, name in enumerate(("a", "b"), start=1)}
    plain = {"m": Engine(tiny_model("llama")), **{name: Engine(merged(model, folders[name])) for name in folders}}
    model = model.sped_up()
    base = Engine(model, tiny_head("hydra", model), shape=GROWING["best first"])
    engines = {"m": base, **{name: base.with_adapter(folder) for name, folder in folders.items()}}
    scheduler = scheduler_of(engines, max_rows=5, chunk_tokens=16, max_waiting=1000)
    inboxes, expected = [], []
    for temperature, prompt in product((0.0, 0.8), [*PROMPTS[:2], *([*text(1, 40), tail, 7] for tail in (3, 4))]):
        settings = {"temperature": temperature, "max_new_tokens": 16, "seed": 5}
        for name, nodes in product(plain, (None, 0)):
            inboxes.append(submit(scheduler, prompt, Lane(name, nodes), **settings)[1])
            expected.append(plain_answer(plain[name], prompt, **settings))
    run_to_end(scheduler)
    assert [inbox.answer for inbox in inboxes] == expected
    assert len(set(expected)) > len(expected) // 3, "the adapters differ"


def test_heads_of_one_model_share_what_was_read():
    engines = engines_of(some_model("llama"), "hydra", "eagle")
    scheduler = scheduler_of(engines)
    for number, lane in enumerate([Lane("hydra"), Lane("eagle"), Lane("hydra", 0)]):
        submit(scheduler, text(1, 30), lane)
        run_to_end(scheduler)
        assert scheduler.snapshot().prefix_tokens_reused == number * 24
