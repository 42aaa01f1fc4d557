"""Block drafters beside the published layout, row by row, and how they are trained."""

from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftheads.errors import InvalidSettings
from draftheads.formats.dflash import dflash_names
from draftheads.heads import head_classes
from draftheads.heads.base import DraftHead
from draftheads.heads.dflash2 import BlockConvolution
from draftheads.models.chat_template import unused_token
from draftheads.speculation.draft import Context
from draftheads.speculation.tree import Tree
from draftheads.testing import check_head
from draftheads.train.learner import Learner
from draftheads.train.losses import find_predictions, random_places
from families import propose, tiny_head, tiny_model
from slow_heads import slow_block, slow_block_log_probs

TEXT = torch.tensor([[3, 4, 5, 6, 7, 8, 9]])


def slow_log_probs(head: DraftHead, hidden: Tensor, text: list[int], length: int, *, drafts: bool = False) -> Tensor:
    """(K, V') behind the first ``length`` tokens of a text; its later tokens stand where draft tokens would.

    With ``drafts`` only tokens that may be drafted count.
    """
    config: Any = head.config
    weight, embedding = dict(head.named_parameters()), head.target_embedding * head.embedding_scale
    tensors = {theirs: weight[ours] for ours, theirs in dflash_names(config).items()}
    few = None
    if config.method != "dflash":
        down, up = weight["down.0.weight"], weight["up.0.weight"]
        down = down if config.own_embedding else embedding @ down.T
    if config.method == "dflash2":
        few, start = (config.num_candidates if drafts else None), "candidate_selector."
        tensors |= {f"{start}predecessor_codebook": down, f"{start}successor_codebook": up}
        tensors[f"{start}hidden_projection.weight"] = weight["gates.0.weight"]
        tensors |= {name: tensor for name, tensor in weight.items() if "_conv." in name}
    if config.method == "dspark":
        tensors |= {"markov_w1.weight": down, "markov_w2.weight": 2 * up if config.gated else up}
        if config.gated:
            of_token = weight.get("token_gates.0.weight", torch.zeros(up.shape[1], up.shape[1]))
            tensors["gate_proj.weight"] = torch.cat([weight["gates.0.weight"], of_token], 1)
            tensors["gate_proj.bias"] = weight["gates.0.bias"]
        if config.recurrent:
            parts = [weight[f"{name}.0.weight"] for name in ("state_gates", "token_gates", "gates")]
            tensors |= {"joint_proj.weight": torch.cat(parts, 1), "joint_proj.bias": weight["gates.0.bias"]}
    lm_head = weight.get("lm_heads.heads.0.weight", head.lm_heads.shared)
    sizes = {"heads": config.num_attention_heads, "groups": config.num_key_value_heads, "base": config.rope_theta}
    mask = head.mask_embedding * head.embedding_scale if config.own_mask else embedding[config.mask_token_id]
    block = [embedding[text[length]], *[mask] * (config.block_size - 1)]
    seen = {"windows": config.windows, "causal": config.causal_layers}
    rows = slow_block(tensors, block, list(hidden[:length]), **sizes, **seen)
    how = {"is_shifted": config.is_shifted, "num_candidates": few}
    return slow_block_log_probs(tensors, rows, lm_head, text[length:], **how)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "num_key_value_heads": 2, "mask_token_id": 5},
        {"layers": [], "embedding_scale": 3.0},
        {"layers": [1], "draft_vocab_size": 12, "lm_head": "own"},
        {"is_shifted": True},
        {"is_shifted": False},
        {"own_embedding": True, "gated": False},
        {"own_embedding": True, "gate_reads_token": True, "draft_vocab_size": 12},
        {"gate_reads_token": True, "embedding_scale": 3.0},
        {"gated": False, "recurrent": True, "draft_vocab_size": 12},
        {"own_mask": True, "embedding_scale": 3.0, "num_layers": 2, "windows": [0, 2], "causal_layers": [0]},
    ],
)
@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
def test_training_and_drafting_follow_the_published_layout(method: str, options: dict[str, Any]) -> None:
    """Values and gradients in training at a place, and a chain behind a text that is read in two parts."""
    model = tiny_model("llama")
    if method != "dspark" and {"gated", "gate_reads_token"} & set(options):
        return
    if method == "dflash" and "own_embedding" in options:
        return
    if method == "dflash2":
        options = {"kernel_group": 8, "num_candidates": 4, **options}
    head = tiny_head(method, model, **options)
    hidden = head.split(model.hidden_states(TEXT, head.hidden_layers).clone())[0]
    text, place = TEXT[0].tolist(), 2
    head.requires_grad_(requires_grad=True)
    slow = slow_log_probs(head, hidden[0], text, place + 1)
    features = head(hidden, TEXT)
    fast = torch.stack([head.logits(features[i, 0, place], i).log_softmax(-1) for i in range(3)])
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    parameters = list(head.parameters())
    chosen = torch.randn(slow.shape, generator=torch.Generator().manual_seed(0))
    gradients = [torch.autograd.grad((logits * chosen).sum(), parameters) for logits in (fast, slow)]
    for (name, _), one, other in zip(head.named_parameters(), *gradients, strict=True):
        rounding = 1e-4 * float(other.abs().max())  # sums of terms with both signs; each CPU adds in another order
        torch.testing.assert_close(one, other, rtol=1e-3, atol=rounding, msg=f"the gradient of {name}")

    drafted = [*text]
    with torch.inference_mode():
        for i in range(3):
            drafted.append(
                int(
                    head.to_target_ids(slow_log_probs(head, hidden[0], [*drafted, 0, 0, 0], 6, drafts=True)[i].argmax())
                )
            )
        session = head.start()
        session.observe(Context(hidden[:, :4], TEXT[:, :4], torch.tensor([4]), TEXT[:, 4]))
        context = Context(hidden[:, 4:6], TEXT[:, 4:6], torch.tensor([2]), TEXT[:, 6])
        assert session.propose(context, Tree.chain(3)).token_ids[0].tolist() == drafted[6:]
        whole = Context(hidden[:, :6], TEXT[:, :6], torch.tensor([6]), TEXT[:, 6])
        assert propose(head, whole, Tree.chain(3)).token_ids[0].tolist() == drafted[6:]


@pytest.mark.parametrize("windows", [[3, 0], [3, 5], [4, 4], [40, 2]])
@torch.inference_mode()
def test_a_window_keeps_the_tokens_that_it_sees(windows: list[int]) -> None:
    """Rows of different lengths read in parts, one leaves, another joins; drafts are those of the whole text."""
    model = tiny_model("llama")
    head: Any = tiny_head("dspark", model, num_layers=2, windows=windows)
    texts = torch.randint(2, 20, (3, 30), generator=torch.Generator().manual_seed(5))
    hidden = head.split(model.hidden_states(texts, head.hidden_layers))[0]
    whole = head(hidden, texts)
    session, at = head.start(), [0, 0]
    rows = [0, 1]
    for counts in ([9, 2], [1, 3], [2, 4], [7], [3, 1]):
        if len(counts) < len(rows):
            session.keep(torch.tensor([1]))
            rows, at = [1], at[1:]
        elif len(counts) > len(rows):
            rows, at = [1, 2], [at[0], 0]
        index = torch.tensor([[min(a + i, 28) for i in range(max(counts))] for a in at])
        ends = [a + count for a, count in zip(at, counts, strict=True)]
        row = torch.tensor(rows)
        context = Context(
            hidden[row[:, None], index],
            texts[row[:, None], index],
            torch.tensor(counts),
            texts[row, torch.tensor(ends)],
        )
        found = head.block_features(session.root(context))
        expected = torch.stack(
            [whole[:, r, end - 1, : head.config.hidden_size] for r, end in zip(rows, ends, strict=True)], 1
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        at = ends
    sizes = [kept.keys.shape[1] for kept in session.history.layers]
    assert all(size <= 128 for size in sizes)
    long = texts.repeat(1, 20)[:1]
    states = hidden.repeat(1, 20, 1)[:1]
    session = head.start()
    session.root(Context(states, long, torch.tensor([long.shape[1]]), long[:, 0]))
    sizes = [kept.keys.shape[1] for kept in session.history.layers]
    assert [size <= 128 for size in sizes] == [window > 0 for window in windows], "of 600 tokens"


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
def test_a_block_of_some_places_is_as_one_of_all(method: str) -> None:
    model = tiny_model("llama")
    head = tiny_head(method, model)
    tokens = torch.arange(2, 20).view(2, 9)
    hidden = head.split(model.hidden_states(tokens, head.hidden_layers))[0]
    places = torch.tensor([[4, 1], [6, 0]])
    whole, some = head(hidden, tokens), head(hidden, tokens, places)
    for row, of_row in enumerate(places.tolist()):
        torch.testing.assert_close(some[:, row, of_row], whole[:, row, of_row])
        others = [place for place in range(9) if place not in of_row]
        assert not some[:, row, others].any()


def test_places_are_drawn_anew_before_two_tokens_of_the_assistant() -> None:
    mask = torch.tensor([[False, True, True, True, True, False], [True, True, False, False, True, True]])
    torch.manual_seed(0)
    drawn = [random_places(mask, 2) for _ in range(20)]
    assert {tuple(sorted(places[0].tolist())) for places in drawn} == {(0, 1), (0, 2), (1, 2)}
    assert all(len(set(places[1].tolist())) == 2 for places in drawn)
    assert all(3 in places[1] for places in drawn), "x_4 and x_5 are the assistant's"
    assert {int(random_places(mask[1:], 1)) for _ in range(20)} == {3}, "x_3 is not, though x_4 is"
    predictions = find_predictions(mask, 3)
    kept = predictions.behind(torch.tensor([[1], [3]]), 6, [1, 1, 1])
    assert kept.positions.tolist() == [2, 3, 10]
    assert kept.counts.int().tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]


def test_a_learner_trains_behind_some_places_and_measures_behind_all() -> None:
    model = tiny_model("llama")
    head = tiny_head("dflash", model).requires_grad_(requires_grad=True)
    tokens = torch.arange(2, 22).view(1, 20)
    hidden = model.hidden_states(tokens, head.hidden_layers).clone()
    mask = torch.ones(1, 20, dtype=torch.bool)

    def losses(*, train: bool) -> tuple[Tensor, int]:
        torch.manual_seed(1)
        places: list[int] = []
        head.register_forward_pre_hook(lambda _, inputs: places.append(inputs[2].shape[1] if inputs[2:] else 20))
        found = Learner(head, model.weights, loss="hard").train(train)(hidden, tokens, mask)["head_losses"]
        return found, places[0]

    (some, five), (every, twenty) = losses(train=True), losses(train=False)
    assert (five, twenty) == (5, 20), "a quarter of them"
    assert not torch.allclose(some, every)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({}, 63),
        ({24: "<file>", 25: "<repo>"}, 25),
        ({24: "<|MASK|>", 25: "<repo>"}, 24),
        ({24: "<file>", 25: "<end>"}, 24),
        ({70: "<mask>"}, 63),
    ],
)
def test_the_mask_is_a_token_that_no_text_has(texts: dict[int, str], expected: int) -> None:
    named = {20: "<s>", 21: "</s>", 22: "<pad>", 23: "<turn>", **texts}
    tokenizer = MagicMock(bos_token_id=20, eos_token_id=21, pad_token_id=22, unk_token_id=None)
    tokenizer.added_tokens_decoder = {key: Mock(content=text, special=True) for key, text in named.items()}
    tokenizer.chat_template = "<turn>{{ message }}"
    reader = Mock(tokenizer=tokenizer, chat_template=None)
    assert unused_token(reader, 64, {25} if "<end>" in texts.values() else set()) == expected


def test_no_mask_has_an_embedding_of_zeros() -> None:
    model = tiny_model("llama")
    model.model.get_input_embeddings().weight.data[-2:] = 0.0
    assert model.mask_token_id == model.vocab_size - 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": 64}, r"mask_token_id is 64; it must lie in 0 … vocab_size - 1 \(63\)"),
        ({"mask_token_id": -1}, "mask_token_id is -1"),
        ({"layers": [1, 1]}, r"layers is \[1, 1\]; give different numbers"),
        ({"gate_reads_token": True, "gated": False}, "there is no gate; give gated=true"),
        ({"recurrent": True}, "recurrent and gated are true, .*; give gated=false"),
        ({"windows": [2, 2]}, r"windows is \[2, 2\]; it must have num_layers \(1\) of them"),
        ({"windows": [-1]}, r"windows is \[-1\]"),
        ({"causal_layers": [1]}, r"causal_layers has \[1\]; give numbers in 0 … num_layers - 1 \(0\)"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        head_classes("dspark")[0](hidden_size=32, vocab_size=64, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_group": 7}, r"kernel_group is 7; hidden_size \(32\) must be a multiple of it"),
        ({"gated": False}, "gated=false are options of dspark, not of dflash2"),
        ({"gate_reads_token": True}, "gate_reads_token and .* are options of dspark"),
        ({"num_candidates": 0}, "num_candidates"),
        ({"kernel_taps": 0}, "kernel_taps"),
    ],
)
def test_what_dflash2_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        head_classes("dflash2")[0](hidden_size=32, vocab_size=64, **options)


def test_a_convolution_may_be_longer_than_its_block() -> None:
    config: Any = head_classes("dflash2")[0](hidden_size=4, vocab_size=9, num_heads=1, kernel_taps=5, kernel_group=2)  # type: ignore[call-arg]
    made, x = BlockConvolution(config), torch.randn(1, 2, 4)
    made.base_kernel.data.fill_(1.0)
    torch.testing.assert_close(made(x, x, 0)[0], torch.stack([x[0, 0], x[0, 0] + x[0, 1]]))


def test_a_saved_head_names_only_what_is_not_usual() -> None:
    """Heads that were saved before these options can be read."""
    made = head_classes("dspark")[0]
    assert not {"is_shifted", "own_embedding", "gate_reads_token"} & set(made(hidden_size=8, vocab_size=9).options())
    assert made(hidden_size=8, vocab_size=9, is_shifted=False).options()["is_shifted"] is False  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["dflash", "dspark"])
@pytest.mark.parametrize("layers", [[], [0, 1]])
def test_a_new_head_starts_as_a_linear_one(method: str, layers: list[int]) -> None:
    """Each text's hidden states are a vector that turns, in a part of the space as large as a head's values."""
    config: dict[str, Any] = {"layers": layers, "mask_token_id": 1, "num_key_value_heads": 1}
    head: Any = tiny_head(method, tiny_model("llama"), **config)
    size, rank = head.config.hidden_size, head.config.head_size
    torch.manual_seed(0)
    skew, space = torch.randn(rank, rank), torch.linalg.qr(torch.randn(size, rank)).Q
    turn = torch.linalg.matrix_exp(0.05 * (skew - skew.T))
    texts = []
    for _ in range(60):
        h = [torch.randn(rank) + 1.0]
        for _ in range(15):
            h.append(turn @ h[-1])
        last = torch.stack(h) @ space.T
        texts.append(torch.cat([-last, last, last], -1) if layers else last)
    masks = torch.full((1, 16), head.mask_token_id)
    head.start_near([(text, masks[0]) for text in texts])

    def first_rows(text: Tensor) -> Tensor:
        with torch.no_grad():
            rows: Tensor = head.logits(head(head.split(text)[0][None], masks)[0, 0, :-1], 0)
        return rows

    changed = texts[0].clone()
    changed[:4] = torch.randn_like(changed[:4])
    made, beside, last = first_rows(texts[0]), first_rows(changed), head.lm_heads(head.split(texts[0])[1], 0)
    likeness, of_before = (torch.cosine_similarity(made[4:], part[4:]).mean() for part in (last[1:], last[:-1]))
    assert likeness > 0.87
    assert method == "dflash" or likeness > of_before  # a row of dflash stands one place further from the text
    assert (made - beside)[10:].norm() < 0.05 * made[10:].norm()  # what is far away hardly matters
    every = torch.stack([first_rows(t) for t in texts[:8]])
    ahead = torch.stack([head.lm_heads(t[1:, -size:], 0) for t in texts[:8]])
    assert float((every * ahead).sum() / every.square().sum()) == pytest.approx(1.0, abs=0.05)  # the norm fits, too


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
def test_a_new_head_starts_with_what_the_root_tells(method: str) -> None:
    """The next hidden state is a turn of the last one plus a linear function of the root's embedding."""
    model = tiny_model("llama")
    head: Any = tiny_head(method, model, layers=[], mask_token_id=1, num_key_value_heads=2)
    size, rank = head.config.hidden_size, head.config.head_size
    torch.manual_seed(0)
    space = torch.linalg.qr(torch.randn(size, rank)).Q
    turn, table = torch.linalg.qr(torch.randn(rank, rank)).Q, torch.linalg.qr(torch.randn(size, rank)).Q
    told = F.normalize(model.weights.embedding.float(), dim=-1) @ table * rank**0.5  # (V, rank)
    texts = []
    for _ in range(80):
        ids = torch.randint(2, head.config.vocab_size, (16,))
        h = [torch.randn(rank)]
        for token in ids[1:]:
            h.append(0.7 * turn @ h[-1] + told[token])
        texts.append((torch.stack(h) @ space.T, ids))
    head.start_near(texts)

    def likeness(read: Tensor, ids: Tensor, ahead: Tensor) -> float:
        with torch.no_grad():
            made = head.logits(head(read[None], ids[None])[0, 0, :-1], 0)
            wanted = head.lm_heads(ahead[1:], 0)
        return float(torch.cosine_similarity(made, wanted, dim=-1)[4:].mean())

    right, other_root, other_text = (
        sum(likeness(*parts) for parts in cases) / 8
        for cases in (
            [(h, ids, h) for h, ids in texts[:8]],
            [(h, ids.flip(0), h) for h, ids in texts[:8]],
            [(h.flip(0), ids, h) for h, ids in texts[:8]],
        )
    )
    assert right > 0.55
    assert other_root < right - 0.3
    assert other_text < right - 0.05


@pytest.mark.parametrize("own_embedding", [False, True])
def test_the_bias_of_a_new_head_reads_what_tells_the_next_hidden_state(own_embedding: bool) -> None:
    """The next hidden state is a linear function of two directions of the root's embedding."""
    model = tiny_model("llama")
    head: Any = tiny_head("dspark", model, layers=[], mask_token_id=1, markov_rank=2, own_embedding=own_embedding)
    torch.manual_seed(0)
    embedding = model.weights.embedding.float()
    size = embedding.shape[1]
    told = embedding @ torch.randn(size, 2) @ torch.randn(2, size)  # (V, D)
    texts = []
    for _ in range(40):
        ids = torch.randint(2, head.config.vocab_size, (16,))
        texts.append((told[ids], ids))
    up = head.up[0].weight.clone()
    head.start_near(texts)
    assert torch.equal(head.up[0].weight, up)
    ids = torch.arange(2, head.config.vocab_size)
    scores = head.scores(ids, 0).detach()
    assert float(scores.square().mean()) == pytest.approx(1.0, rel=0.2)
    left = told[ids] - scores @ torch.linalg.lstsq(scores, told[ids]).solution
    assert float(left.square().sum()) < 0.01 * float(told[ids].square().sum())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dspark", {"gated": False, "recurrent": True}),
        ("dflash2", {"num_candidates": 64, "num_layers": 2, "windows": [4, 2], "kernel_taps": 3}),
    ],
)
def test_each_node_of_a_tree_has_what_its_own_path_makes(method: str, options: dict[str, Any]) -> None:
    check_head(method, **options)
