"""GGUF files for llama.cpp: every key and tensor read back, and a row-by-row version of what it makes of them."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, dequantize
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftheads import export_head
from draftheads.checkpoints.checkpoint import save_head
from draftheads.errors import InvalidSettings, MissingDependency
from draftheads.formats.gguf import write_dflash_gguf, write_gguf
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.models.model_config import layer_sizes
from draftheads.speculation.tree import Tree
from families import tiny_head, tiny_profile
from joint_world import on_disk
from slow_heads import slow_block, slow_block_log_probs
from training_world import chat_model

TEXT = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, 5, 3]])
READ = 6  # tokens before the block's first
NOT_GATED = {"gated": False, "mask_token_id": 9}
# z-lab's names
PUBLISHED = {"fc": "fc", "enc.output_norm": "hidden_norm", "output_norm": "norm", "attn_norm": "input_layernorm"}
PUBLISHED |= {"attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm"}
PUBLISHED |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
PUBLISHED |= {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
PUBLISHED |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
ROPE = {
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}


@pytest.fixture(scope="module")
def model() -> TargetModel:
    return chat_model()


def read_back(head: DraftHead, model: TargetModel, file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keys and tensors of the file that is written of a head."""
    write_gguf(file, *write_dflash_gguf(head, model))
    reader = GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        shape = tuple(int(size) for size in reversed(tensor.shape))
        assert kind == ("I64" if tensor.name == "d2t" else "F32" if len(shape) == 1 else "BF16"), tensor.name
        values = tensor.data if kind == "I64" else dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = torch.tensor(values).view(shape)
    return keys, tensors


def llama_cpp_log_probs(keys: dict[str, Any], tensors: dict[str, Tensor], model: TargetModel) -> Tensor:
    """(K, V) behind ``READ`` tokens of the text, whose tokens stand where draft tokens would, from the file alone."""
    weights = {}
    for name, tensor in tensors.items():
        parts = name.removesuffix(".weight").split(".", 2)
        if parts[0] == "blk":
            weights[f"layers.{parts[1]}.{PUBLISHED[parts[2]]}.weight"] = tensor
        elif (whole := name.removesuffix(".weight")) in PUBLISHED:
            weights[f"{PUBLISHED[whole]}.weight"] = tensor
    states = model.model(TEXT, output_hidden_states=True).hidden_states
    hidden = torch.cat([states[layer] for layer in keys["dflash.target_layers"]], -1)[0]
    text = TEXT[0].tolist()
    block = [text[READ], *[keys["tokenizer.ggml.mask_token_id"]] * (keys["dflash.block_size"] - 1)]
    rows = slow_block(
        weights,
        list(model.weights.embedding[block] * keys["dflash.embedding_scale"]),
        list(hidden[:READ]),
        heads=keys["dflash.attention.head_count"],
        groups=keys["dflash.attention.head_count_kv"],
        base=keys["dflash.rope.freq_base"],
    )
    lm_head = tensors.get("output.weight", model.weights.lm_head)
    is_shifted = bool(keys.get("dflash.sample_from_anchor"))  # plain DFlash fills in
    found = slow_block_log_probs(tensors, rows, lm_head, text[READ:], is_shifted=is_shifted)
    ids = tensors.get("d2t", torch.arange(model.vocab_size)).expand(len(found), -1)
    return torch.full((len(found), model.vocab_size), -torch.inf).scatter(1, ids, found)


@pytest.mark.parametrize("vocabulary", [{}, {"draft_vocab_size": 20}, {"draft_vocab_size": 20, "lm_head": "own"}])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dflash", {"mask_token_id": 9}),
        ("dflash", {"mask_token_id": 9, "lm_head": "own", "num_layers": 2, "embedding_scale": 3.0, "layers": [1, 0]}),
        ("dspark", NOT_GATED),
        ("dspark", {**NOT_GATED, "own_embedding": True, "embedding_scale": 3.0}),
        ("dspark", {**NOT_GATED, "is_shifted": False, "num_layers": 2}),
    ],
)
@torch.no_grad()
def test_the_file_has_the_log_probs_of_the_head(
    tmp_path: Path, model: TargetModel, method: str, options: dict[str, Any], vocabulary: dict[str, Any]
) -> None:
    head = tiny_head(method, model, num_attention_heads=4, num_key_value_heads=2, **{**options, **vocabulary})
    for name, parameter in head.named_parameters():  # norms far from 1 and from each other, and all as files have it
        varied = parameter + 0.5 * torch.randn_like(parameter) if "norm" in name else parameter
        parameter.copy_(varied.bfloat16().float())
    expected = llama_cpp_log_probs(*read_back(head, model, tmp_path / "draft.gguf"), model)
    states = model.model(TEXT, output_hidden_states=True).hidden_states
    hidden = torch.cat([states[layer] for layer in head.hidden_layers], -1)
    features = head(hidden, TEXT)[:, 0, READ - 1]
    drafted = torch.stack([head.logits(row, i).log_softmax(-1) for i, row in enumerate(features)])
    ids = head.to_target_ids(torch.arange(head.config.num_draft_tokens))
    assert drafted.shape == (3, len(ids))
    torch.testing.assert_close(expected[:, ids], drafted, rtol=0.03, atol=0.03)  # products of weights are rounded
    assert int(expected.isfinite().sum()) == drafted.numel()


def test_keys_that_do_not_change_the_log_probs_here(tmp_path: Path, model: TargetModel) -> None:
    head = tiny_head("dspark", model, **NOT_GATED, draft_vocab_size=20, num_layers=2)
    keys, tensors = read_back(head, model, tmp_path / "draft.gguf")
    config: Any = head.config
    assert keys.pop("tokenizer.ggml.tokens")[6:9] == ["system", "w0", "w1"]
    assert keys.pop("tokenizer.ggml.token_type").count(1) == model.vocab_size - 2, "all but <e> and <unk>"
    assert keys.pop("dflash.attention.scale") == pytest.approx(config.head_size**-0.5)
    assert keys.pop("dflash.attention.layer_norm_rms_epsilon") == pytest.approx(config.norm_epsilon)
    expected = {
        "general.architecture": "dflash",
        "dflash.context_length": model.max_positions,
        "dflash.embedding_length": 32,
        "dflash.block_count": 2,
        "dflash.feed_forward_length": config.intermediate_size,
        **{f"dflash.{key}_length": config.head_size for key in ("attention.key", "attention.value")},
        "dflash.rope.dimension_count": config.head_size,
        "dflash.has_confidence_head": False,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert {name: keys[name] for name in expected} == expected
    assert len(tensors) == 2 * 11 + 3 + len(("output", "markov_w1", "markov_w2", "d2t"))
    keys, tensors = read_back(tiny_head("dflash", model, mask_token_id=9), model, tmp_path / "whole.gguf")
    assert "dflash.sample_from_anchor" not in keys
    assert not {"d2t", "output.weight", "markov_w1.weight"} & set(tensors)


@pytest.mark.parametrize("kind", ROPE)
def test_scaled_rotary_positions_are_factors(tmp_path: Path, kind: str) -> None:
    """llama.cpp divides the usual frequencies by them; the scales of queries and keys are in that of attention."""
    model = chat_model(rope_parameters=ROPE[kind], max_position_embeddings=256)
    sizes = layer_sizes(model.config, model.hidden_size)
    keys, tensors = read_back(tiny_head("dflash", model, **sizes), model, tmp_path / "draft.gguf")
    size, base = keys["dflash.rope.dimension_count"], keys["dflash.rope.freq_base"]
    plain = torch.tensor([base ** (-2 * i / size) for i in range(size // 2)])
    found = plain / tensors["rope_freqs.weight"]
    torch.testing.assert_close(found, torch.tensor(sizes["rope_frequencies"]), rtol=1e-6, atol=0.0)
    assert keys["dflash.attention.scale"] == pytest.approx(sizes.get("rope_scale", 1.0) ** 2 / size**0.5)
    assert (sizes.get("rope_scale", 1.0) == 1.0) == (kind == "linear")


def test_tokenizers_with_merges_keep_them(model: TargetModel) -> None:
    """Of byte-level BPE; tokens that the tokenizer does not have are filled in."""
    vocabulary = {"<e>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "abc": 5}
    for byte_fallback, expected in ((False, ("gpt2", ["a b", "ab c"])), (True, ("llama", None))):
        bpe = BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c")], byte_fallback=byte_fallback)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(bpe), eos_token="<e>")
        target = TargetModel(model.model, tokenizer, "with merges")
        keys, _ = write_dflash_gguf(tiny_head("dflash", model), target)
        assert (keys["tokenizer.ggml.model"], keys.get("tokenizer.ggml.merges")) == expected
        tokens = keys["tokenizer.ggml.tokens"]
        assert tokens[:7] == [*vocabulary, "[PAD6]"]
        assert (len(set(tokens)), keys["tokenizer.ggml.eos_token_id"]) == (model.vocab_size, 0)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("dspark", {}, r"gate \(gated=true\), and llama.cpp .* \(gated=false\): train it with .* gated=false"),
        ("dspark", {"gated": False, "qkv_bias": True}, r"\(qkv_bias=true\), .* reads none \(qkv_bias=false\): "),
        ("dflash", {"layers": []}, "what enters layers: train a head"),
    ],
)
def test_what_llama_cpp_does_not_read_is_an_error(
    model: TargetModel, method: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSettings, match=message):
        write_dflash_gguf(tiny_head(method, model, **options), model)


def test_export_writes_one_file_and_prints_the_command(tmp_path: Path) -> None:
    name = on_disk(tmp_path / "model")
    target = TargetModel.load(name, dtype=torch.float32)
    head = tiny_head("dspark", target, draft_vocab_size=20, gated=False)
    save_head(head, tmp_path / "head", base=target, profile=tiny_profile(Tree.chain(3)))
    done = export_head(tmp_path / "head", tmp_path / "a folder", model=name, to="llama.cpp")
    file = tmp_path / "a folder" / "draft.gguf"
    assert (done.layout, done.left_out, list(done.folder.iterdir())) == ("gguf", None, [file])
    assert shlex.split(done.commands["llama.cpp"]) == [
        *("llama-server", "-m", "MODEL.gguf", "-md", str(file)),
        *("--spec-type", "draft-dspark", "--spec-draft-n-max", "3"),
    ]


def test_gguf_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependency, match=r"needs gguf; install it with: pip install '\.\[demo\]'"):
        write_gguf(tmp_path / "draft.gguf", {}, {})
