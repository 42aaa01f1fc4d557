"""Candidates that are found in one native call are those that are found step by step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftheads.cpu.drafts import best_tree
from draftheads.cpu.kernels import pack, replace_linears
from draftheads.heads.attention import TransformerLayer, native_layers
from draftheads.heads.base import DraftHead
from draftheads.heads.eagle import EagleConfig, EagleHead
from draftheads.heads.history import HeadKVCache, NativeKVCache
from draftheads.heads.stateful import StatefulHead
from draftheads.speculation.candidates import _best_tree
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.shapes import BestFirst, Shape
from families import needs_library, tiny_head, tiny_model

pytestmark = needs_library
SHAPES: dict[str, Shape] = {
    "ten": BestFirst(10),
    "many": BestFirst(30, beam=5, top_k=6),
    "likely only": BestFirst(20, min_level_probability=0.5),
    "every level": BestFirst(20, min_level_probability=None),
    "temperatures": BestFirst(12, temperatures=(0.5, 1.5, 2.0)),
    "one": BestFirst(2),
}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "hydra": ("hydra", {}),
    "deep hydra": ("hydra", {"num_layers": 3, "draft_vocab_size": 12}),
    "hydra of own lm_heads": ("hydra", {"lm_head": "own"}),
    "hydra++": ("hydra++", {}),
    "medusa": ("medusa", {"num_layers": 2}),
    "medusa of own lm_heads": ("medusa", {"lm_head": "own", "draft_vocab_size": 10}),
}


def context_of(head: DraftHead, rows: int) -> Context:
    """Rows that accepted different numbers of tokens."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 3, head.config.hidden_size, generator=generator)
    tokens = torch.randint(head.config.vocab_size, (rows, 3), generator=generator)
    counts = torch.tensor([1 + row % 3 for row in range(rows)])
    return Context(hidden, tokens, counts, torch.randint(head.config.vocab_size, (rows,), generator=generator))


def drafted(head: DraftHead, shape: Shape, rows: int) -> Draft:
    with torch.inference_mode():
        return head.start().propose(context_of(head, rows), shape)


def assert_same(found: Draft, expected: Draft) -> None:
    for name in ("token_ids", "parents", "ancestors", "depths"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.path_log_probs, expected.path_log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_candidates_are_as_step_by_step(kind: str, shape: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method, options = HEADS[kind]
    # a number that int8 rounds to the other side changes the rest
    monkeypatch.setattr("draftheads.heads.base.pack", lambda layers, **_: pack(layers))
    head = tiny_head(method, tiny_model("llama"), num_heads=3, **options)
    head.speed_up()
    assert head.growth is not None
    found = drafted(head, SHAPES[shape], rows)
    head.growth = None
    assert_same(found, drafted(head, SHAPES[shape], rows))


TURNS = {"rope_frequencies": [1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01], "rope_scale": 1.2}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "two layers": ("eagle", {"num_layers": 2, "qkv_bias": True, **TURNS}),
    "small-llama": ("small-llama", {"num_layers": 2}),
    "hydra++": ("hydra++", TURNS),
}


def drafts_of_steps(head: DraftHead) -> list[Draft]:
    """A row joins, texts grow to 1,023 tokens, with which tables of positions end, and a row leaves."""
    session, drafts = head.start(), []
    with torch.inference_mode():
        for step, rows in enumerate([[0, 1], [0, 1, 2], [0, 1, 2], [2, 0]]):
            shape, context = BestFirst(20, max_depth=3, top_k=5), context_of(head, 3)
            if step == 2:
                shape = BestFirst(4, top_k=1, beam=1)
                hidden, tokens = (part.repeat_interleave(340, 1) for part in (context.hidden, context.token_ids))
                context = Context(hidden, tokens, 340 * context.num_accepted, context.root_ids)
            if step == 3:
                session.keep(torch.tensor(rows))
            drafts.append(session.propose(context.keep(rows), shape))
    return drafts


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_are_computed_as_by_the_modules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, options = LAYERS[kind]
    monkeypatch.setattr("draftheads.heads.base.pack", lambda layers, **_: pack(layers, portable=True))
    head = tiny_head(method, tiny_model("llama"), num_heads=3, **options)
    assert isinstance(head, StatefulHead)
    head.speed_up()
    assert head.native is not None
    found = drafts_of_steps(head)
    head.native = None
    for own, expected in zip(found, drafts_of_steps(head), strict=True):
        assert_same(own, expected)


def test_any_layers_are_computed_as_by_the_modules() -> None:
    config = EagleConfig(hidden_size=32, vocab_size=24, num_key_value_heads=2, head_size=8)
    torch.manual_seed(0)
    layers = [TransformerLayer(config, norm_heads=True), TransformerLayer(config, rotary=False)]
    for parameter in nn.ModuleList(layers).parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    pack(replace_linears(nn.ModuleList(layers)), portable=True)
    native = native_layers(layers)
    assert native is not None
    x, rows, own, found = torch.randn(2, 5, 32), slice(0, 2), HeadKVCache(2), NativeKVCache(native)
    with torch.inference_mode():
        for history in (own, found):
            history.join(2, x.device)
        expected = layers[1].step(layers[0].step(x, own, 0, rows), own, 1, rows)
        torch.testing.assert_close(found.run(x, rows), expected, rtol=0, atol=1e-4)


class OwnLayer(TransformerLayer):
    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        return x


class OwnStep(EagleHead):
    def step(self, x: Tensor, rows: slice, history: HeadKVCache, **places: Any) -> Tensor:
        return x


def test_other_layers_are_the_modules() -> None:
    """Layers with inputs, functions or a window of their own, a head with its own step, and one that may be moved."""
    model = tiny_model("llama")
    for method in ("eagle3", "function", "window", "step", "moved"):
        head: Any = tiny_head("eagle3" if method == "eagle3" else "eagle", model)
        head.layer.window = 3 * (method == "window")
        if method == "function":
            head.layer.__class__ = OwnLayer
        if method == "step":
            head.__class__ = OwnStep
        head.speed_up()
        assert (head.native is None) == (method != "moved")
    head.bind(model.weights)
    assert head.native is None


def test_memory_is_reserved_for_draft_tokens_beside_a_text() -> None:
    """Ten nodes are chosen of more candidates, which reach into another block of slots."""
    for is_fast in (False, True):
        head = tiny_head("eagle", tiny_model("llama"))
        assert isinstance(head, StatefulHead)
        if is_fast:
            head.speed_up()
        session, context = head.start(), context_of(head, 1)
        hidden, tokens = (part[:, :1].expand(-1, 110, *part.shape[2:]) for part in (context.hidden, context.token_ids))
        with torch.inference_mode():
            long = Context(hidden, tokens, torch.tensor([110]), context.root_ids)
            session.propose(long, BestFirst(10, max_depth=8, min_level_probability=None))
        history = session.history
        kept = (
            history.memory
            if isinstance(history, NativeKVCache)
            else [p for layer in history.layers for p in layer or ()]
        )
        assert sum(part.nbytes for part in kept) == 128 * head.bytes_per_slot + head.bytes_of_rows(1)


@pytest.mark.parametrize("is_tied", [False, True])
def test_candidates_of_an_embedding_in_8_bits(is_tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftheads.heads.base.pack", lambda layers, **_: pack(layers))
    head = tiny_head("hydra", tiny_model("llama", tie_word_embeddings=is_tied).sped_up(bits=4), num_heads=3)
    assert head.target_embedding is None
    head.speed_up()
    assert head.growth is not None
    found = drafted(head, SHAPES["ten"], 3)
    head.growth = None
    assert_same(found, drafted(head, SHAPES["ten"], 3))


@pytest.mark.usefixtures("instructions", "threads")
def test_a_rows_candidates_depend_on_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftheads.heads.base.pack", lambda layers, **_: pack(layers, portable=True))
    head = tiny_head("hydra", tiny_model("llama"), num_heads=3, num_layers=2)
    head.speed_up()
    shape, context = BestFirst(12, min_level_probability=None), context_of(head, 4)
    with torch.inference_mode():
        together = head.start().propose(context, shape)
        for row in range(4):
            alone = head.start().propose(context.keep([row]), shape)
            assert torch.equal(alone.token_ids[0], together.token_ids[row])
            torch.testing.assert_close(alone.path_log_probs[0], together.path_log_probs[row], rtol=0, atol=0)


def test_a_damaged_head_drafts_nothing_likely() -> None:
    head = tiny_head("hydra", tiny_model("llama"), num_heads=3)
    for parameter in head.parameters():
        parameter.data.fill_(float("nan"))
    head.speed_up()
    draft = drafted(head, BestFirst(6), 2)
    assert draft.path_log_probs is not None
    assert (draft.path_log_probs[:, 1:] == -float("inf")).all()


def test_other_heads_are_asked_step_by_step() -> None:
    for method in ("markov-medusa", "mlp-speculator", "eagle"):
        head = tiny_head(method, tiny_model("llama"))
        head.speed_up()
        assert head.growth is None


@pytest.mark.parametrize("count", [1, 5, 14, 40])
def test_the_best_candidates_become_a_tree(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    rows, parents, priority = 3, torch.zeros(3, 40, dtype=torch.int64), torch.zeros(3, 40)
    for node in range(1, 40):
        parents[:, node] = torch.randint(node, (rows,), generator=generator)
        step = torch.randint(3, (rows,), generator=generator) * 0.5  # many are equal
        priority[:, node] = priority.gather(1, parents[:, node : node + 1])[:, 0] - step
    found = best_tree(priority, parents, count)
    assert found is not None
    for part, expected in zip(found, _best_tree(priority, parents, count, count - 1), strict=True):
        assert torch.equal(part, expected)
