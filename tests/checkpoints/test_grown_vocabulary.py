"""A base model or a tokenizer that has grown since a head was trained: the head drafts the tokens that it knows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_world import letters_tokenizer
from draftheads.checkpoints.checkpoint import load_head, save_head
from draftheads.decode.engine import Engine
from draftheads.errors import CheckpointMismatch
from draftheads.heads import HEADS as METHODS
from draftheads.models.fingerprint import tokenizer_fingerprint, tokenizer_fingerprints
from draftheads.models.model import TargetModel
from draftheads.speculation.tree import Tree
from families import VOCAB, tiny_head, tiny_model

TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {}) for method in METHODS},
    "own lm_heads": ("medusa", {"lm_head": "own"}),
    "low-rank lm_heads": ("hydra", {"lm_head": "low_rank", "lm_head_rank": 4}),
    "a draft vocabulary": ("hydra", {"draft_vocab_size": 9}),
    "embeddings of each stage": ("mlp-speculator", {"embeddings": "own", "lm_head": "own"}),
    "an embedding of its own": ("eagle3", {"own_embedding": True, "inner_size": 24, "lm_head": "own"}),
}


def grown(base: TargetModel, number: int, tokenizer: Any = None) -> TargetModel:
    """The same model with that many tokens more."""
    torch.manual_seed(7)
    copy = base.twin().model
    copy.resize_token_embeddings(base.vocab_size + number, mean_resizing=False)
    for matrix in (copy.get_input_embeddings().weight, copy.get_output_embeddings().weight):
        matrix.data[base.vocab_size :] = 0.4 * torch.randn_like(matrix.data[base.vocab_size :])
    return TargetModel(copy.eval().requires_grad_(False), tokenizer or base.tokenizer, "grown")


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("number", [1, 40])
@pytest.mark.parametrize("case", HEADS)
@pytest.mark.few(24)
def test_it_drafts_the_tokens_that_it_knows(case: str, number: int, fast: bool, tmp_path: Path) -> None:
    base = tiny_model("llama")
    method, options = HEADS[case]
    save_head(tiny_head(method, base, **options), tmp_path / "head", base=base)
    target = grown(base, number)
    head = load_head(tmp_path / "head", target)
    assert head.config.num_draft_tokens == options.get("draft_vocab_size", VOCAB)
    if fast:
        head.speed_up()
    prompts = [[5, 6, VOCAB, 7, 8], [VOCAB + number - 1], [9, 10, 11]]
    plain = [answer.token_ids for answer in Engine(target).generate(prompts, max_new_tokens=24)]
    answers = Engine(target, head, shape=TREE).generate(prompts, max_new_tokens=24)
    assert [answer.token_ids for answer in answers] == plain


def test_another_model_is_refused_although_it_is_larger(tmp_path: Path) -> None:
    base = tiny_model("llama")
    save_head(tiny_head("hydra", base), tmp_path / "head", base=base)
    with pytest.raises(CheckpointMismatch, match=r"embedding .* grown"):
        load_head(tmp_path / "head", grown(tiny_model("llama", seed=3), 5))
    small = tiny_model("llama", vocab_size=VOCAB - 1)
    with pytest.raises(CheckpointMismatch, match=f"vocab_size {VOCAB}.* {VOCAB - 1}"):
        load_head(tmp_path / "head", small)


@pytest.mark.parametrize("number", [0, 2])
def test_the_tokenizer_may_have_grown_with_it_or_into_its_padding(number: int, tmp_path: Path) -> None:
    base = replace(tiny_model("llama"), tokenizer=letters_tokenizer())
    save_head(tiny_head("medusa", base), tmp_path / "head", base=base)
    tokenizer = letters_tokenizer()
    tokenizer.add_tokens(["<tool>", "<think>"], special_tokens=True)
    target = grown(base, number, tokenizer) if number else replace(base, tokenizer=tokenizer)
    assert load_head(tmp_path / "head", target).config.method == "medusa"
    other = letters_tokenizer("zyxwvutsrqponmlk")
    other.add_tokens(["<tool>"])
    with pytest.raises(CheckpointMismatch, match="tokenizer fingerprint"):
        load_head(tmp_path / "head", replace(base, tokenizer=other))


def test_earlier_tokenizers_are_those_before_the_last_tokens() -> None:
    tokenizer = letters_tokenizer()
    expected = [tokenizer_fingerprint(tokenizer)]
    for token in ("<a1>", "<a2>", "<a3>"):
        tokenizer.add_tokens([token])
        expected.append(tokenizer_fingerprint(tokenizer))
    assert list(tokenizer_fingerprints(tokenizer))[:4] == expected[::-1]
