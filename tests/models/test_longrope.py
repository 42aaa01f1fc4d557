"""LongRoPE: texts end at the original length, before the other factors, and up to there equal transformers'."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftheads.data.compute_features import load_texts
from draftheads.decode.engine import Engine
from draftheads.errors import LengthWarning, PromptTooLong
from draftheads.models.model import TargetModel
from draftheads.models.model_config import max_positions_of
from draftheads.models.pretrained import ModelTokenizer
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import BestFirst
from draftheads.train.training_data import read_texts
from families import PlantedRandomTrees, tiny_head, tiny_model
from training_world import chat, chat_model, chat_options, chat_tokenizer, write_chats

ORIGINAL = 48
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 6.0, 10.0]}
LONGROPE = {
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS},
}
PROMPTS = [[5, 6, 7, 8], [3 + n * n % 20 for n in range(30)], [3 + 4 * n % 20 for n in range(ORIGINAL - 1)], [9]]
WHOLE = {"max_new_tokens": 1000, "ignore_eos": True}


def longrope() -> TargetModel:
    return tiny_model("phi3", **LONGROPE)


def texts(model: TargetModel, drafter: Drafter | None = None, *, rows: int = 4, **options: Any) -> list[Any]:
    results = Engine(model, drafter, max_batch_size=rows, **options).generate(PROMPTS, **WHOLE)
    return [result.token_ids for result in results]


def expected(model: TargetModel) -> list[tuple[int, ...]]:
    """transformers' texts to the last position before it changes its factors, without a cache."""
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) < ORIGINAL:
            ids.append(int(model.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found.append(tuple(ids[len(prompt) :]))
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_all_texts_equal_transformers_up_to_the_original_length(rows: int, *, static: bool) -> None:
    """Rows of different lengths, and draft tokens beyond the limit."""
    model = longrope()
    plain = expected(model)
    model.set_graphs(on=static)
    assert texts(model, rows=rows) == plain
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, plain, strict=True)}
    assert texts(model, PlantedRandomTrees(answers, max_nodes=24), rows=rows) == plain
    for method in ("medusa", "eagle"):
        assert texts(model, tiny_head(method, model), rows=rows, shape=BestFirst(24)) == plain


def test_prompts_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = longrope()
    monkeypatch.setattr("draftheads.models.kv_target.PREFILL_CHUNK", 16)
    assert texts(model) == expected(model)


def test_prompts_beyond_the_original_length_are_refused() -> None:
    with pytest.raises(PromptTooLong, match=f"has {ORIGINAL} tokens; tiny-phi3 takes at most {ORIGINAL - 1}"):
        Engine(longrope()).generate([[3] * ORIGINAL])


def test_one_warning() -> None:
    model = longrope()
    with pytest.warns(LengthWarning, match="at most 48 tokens, not 1,024") as told:
        loaded = TargetModel.of(model.model, model.tokenizer)
    loaded.twin()
    assert len(told) == 1
    assert loaded.max_positions == ORIGINAL


BY_KIND = {"full_attention": {"rope_type": "default"}, "sliding_attention": None, "other": {**FACTORS}}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"rope_parameters": {**FACTORS, "original_max_position_embeddings": 48}}, 48),
        ({"rope_parameters": FACTORS, "original_max_position_embeddings": 48}, 48),
        ({"rope_scaling": FACTORS, "original_max_position_embeddings": 48, "rope_parameters": None}, 48),
        ({"rope_parameters": BY_KIND, "original_max_position_embeddings": 48}, 48),
        ({"rope_parameters": {"full": {**FACTORS, "original_max_position_embeddings": 48}, "sliding": None}}, 48),
        ({"rope_parameters": FACTORS}, 96),
        ({"rope_parameters": FACTORS, "original_max_position_embeddings": 200}, 96),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 48}}, 96),
        ({"rope_parameters": {"rope_type": "default"}, "original_max_position_embeddings": 48}, 96),
        ({}, 96),
    ],
)
def test_the_original_length_is_found(config: dict[str, Any], limit: int) -> None:
    """Wherever a version of transformers, or a model's own code, stores it."""
    assert max_positions_of(SimpleNamespace(max_position_embeddings=96, **config)) == limit
    assert max_positions_of(SimpleNamespace()) is None


def test_training_reads_no_more_than_the_model_takes(tmp_path: Any) -> None:
    model = chat_model(max_position_embeddings=16)
    files = [write_chats(tmp_path / "chats.jsonl", [chat("w1", "w2 " * 40)])]
    [text] = load_texts(model, files, max_length=2048)
    assert (len(text.token_ids), text.is_cut) == (16, True)
    assert [text] == load_texts(ModelTokenizer(chat_tokenizer(), model.eos_ids, max_positions=16), files, max_length=99)
    book = tmp_path / "book.txt"
    book.write_text("w1 w2 w3 " * 20)
    settings = chat_options(tmp_path, text=(book,))
    assert max(len(block.token_ids) for block in read_texts(model, settings)) == 16
