"""Rows that join a batch and leave it."""

import pytest
import torch

from draftheads.decode.engine import Engine
from draftheads.decode.prefix_cache import ReadText
from draftheads.decode.request import Request
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import Mixed
from draftheads.models.model import TargetModel
from draftheads.runners import runner_for
from draftheads.speculation.drafter import Drafter
from families import TREES, tiny_head, tiny_model
from scheduler_world import assert_plain, join, plain_answer, request_of

# --- rows that leave ---


def drafters(model: TargetModel) -> dict[str, Drafter]:
    heads = {method: Mixed(tiny_head(method, model)) for method in ("hydra", "eagle", "eagle3", "small-llama")}
    return {**heads, "lookahead": Lookahead(), "model": DraftModel(tiny_model("llama", num_hidden_layers=1), model)}


@pytest.mark.few(11)
@pytest.mark.parametrize("method", ["hydra", "eagle", "eagle3", "small-llama", "lookahead", "model"])
@pytest.mark.parametrize("chosen", [[0], [3], [0, 1, 2], [1, 4], [3, 4], [0, 4, 5], [0, 1, 2, 3, 4, 5]])
def test_rows_leave_before_and_after_their_first_step(method: str, chosen: list[int]):
    """Rows 0 to 2 have been stepped, and rows 3 to 5 have just joined."""
    model = tiny_model("llama")
    drafter = drafters(model)[method]
    engine = Engine(model, drafter, shape=None if method == "lookahead" else TREES["ragged"])
    requests = [request_of(engine, [3 + row, 5, *[7 + row] * row]) for row in range(6)]
    batch = engine.batch()
    join(batch, requests[:3])
    batch.step()
    join(batch, requests[3:5])
    join(batch, requests[5:])
    going = {request for request in requests if request in batch.requests}
    batch.drop([requests[row] for row in chosen])
    assert set(batch.requests) == going - {requests[row] for row in chosen}
    late = request_of(engine, [9, 9, 4])
    join(batch, [late])
    while batch.requests:
        batch.step()
    gone = [requests[row] for row in chosen]
    for request in gone:
        assert tuple(request.token_ids) == plain_answer(engine, request.prompt_ids)[: len(request.token_ids)]
    assert_plain(engine, *(request for request in requests if request not in gone), late)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_row_that_leaves_is_reported_with_all_that_was_read_of_it(name: str):
    model = tiny_model(name)
    engine = Engine(model, tiny_head("hydra", model), shape=TREES["cartesian"])
    batch = engine.batch()
    seen: dict[Request, ReadText] = {}
    batch.on_leave = lambda request, text: seen.setdefault(request, text) and None
    requests = [request_of(engine, [4 + n, 5, 6, *[7] * n], max_new_tokens=9 + n) for n in range(4)]
    join(batch, requests[:3])
    batch.step()
    join(batch, requests[3:])
    batch.step()
    batch.drop([requests[1]])
    while batch.requests:
        assert batch.num_bytes >= batch.runner.num_bytes + sum(row.length for row in batch.rows) * 32 * 4
        batch.step()
    for request in requests:
        whole = [*request.prompt_ids, *request.token_ids]
        assert len(seen[request].token_ids) in (len(whole), len(whole) - 1)
        text = seen[request]
        assert text.token_ids == whole[: len(text.token_ids)]
        expected = model.hidden_states(torch.tensor([text.token_ids]))[0]
        torch.testing.assert_close(text.hidden, expected, rtol=0, atol=1e-4)
        runner = runner_for(model)
        [row], _, _ = runner.prefill([text.token_ids])
        right = runner.entries(row, len(text.token_ids))
        torch.testing.assert_close(text.entries, right, rtol=0, atol=1e-4)
    assert batch.num_bytes == 0


# --- counts ---


@pytest.mark.parametrize("shape", ["ragged", "cartesian", "chain"])
def test_draft_tokens_are_counted_by_depth(shape: str):
    model = tiny_model("llama")
    engine = Engine(model, tiny_head("hydra", model), shape=TREES[shape])
    tree = TREES[shape]
    per_step = [tree.depths.count(depth) for depth in range(1, tree.max_depth + 1)]
    requests = engine.requests([[3, 4], [5, 6, 7]], max_new_tokens=30, ignore_eos=True)
    events = list(engine.run(requests))
    for request in requests:
        own = [event for event in events if event.index == request.index]
        result = request.result()
        assert own[0].drafted_by_depth == ()
        assert all(event.drafted_by_depth == tuple(per_step) for event in own[1:])
        assert result.drafted_by_depth == tuple(result.num_steps * count for count in per_step)
        for depth, accepted in enumerate(result.accepted_by_depth, 1):
            assert accepted == sum(event.num_drafted >= depth for event in own)
        assert sum(result.accepted_by_depth) == sum(result.drafted) > 0


def test_nodes_that_only_fill_up_a_row_are_not_counted():
    model = tiny_model("llama")
    engine = Engine(model, Lookahead())
    requests = engine.requests([[3, 4], [5, 6, 7]], max_new_tokens=20, ignore_eos=True)
    sizes = {sum(event.drafted_by_depth) for event in engine.run(requests) if event.num_drafted or event.text}
    assert len(sizes) > 2
    plain = Engine(model).generate([[3, 4]], max_new_tokens=5)[0]
    assert plain.drafted_by_depth == plain.accepted_by_depth == ()
