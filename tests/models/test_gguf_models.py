"""Models in GGUF files: converted once, they give the text of the model that was written into the file."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import draftheads
from draftheads.cli.doctor import find_passes
from draftheads.cli.main import main
from draftheads.errors import GenerationWarning, ModelNotFound, UnsupportedModel
from draftheads.models.gguf_models import source_of
from draftheads.models.pretrained import load_pretrained, load_tokenizer
from families import SHARED_EXPERT, tiny_model
from gguf_world import write_gguf

FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}
PROMPT = [3, 4, 5, 6, 7, 8]
LETTERS = [chr(number) for number in range(ord("a"), ord("t") + 1)]
ROLES = {"bos": 0, "eos": 1, "unknown": 2, "padding": 1}
THETA = {"rope_theta": 1234.0}
PARTIAL = {"rope_parameters": {"rope_type": "default", **THETA, "partial_rotary_factor": 0.5}}
LINEAR = {"rope_type": "linear", "rope_theta": 4321.0, "factor": 4.0}
YARN = {"rope_type": "yarn", **THETA, "factor": 4.0, "original_max_position_embeddings": 256}
YARN |= {"beta_fast": 6.0, "beta_slow": 4.0}  # far enough from 32 and 1 to change the frequencies of so small a head
LLAMA3 = {"rope_type": "llama3", **THETA, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope", **THETA, "original_max_position_embeddings": 64, "attention_factor": 1.25,
    "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0,
}  # fmt: skip
WIDE = {"head_dim": 16, "rms_norm_eps": 1e-3}  # heads of another size than a part of the hidden size
GEMMA = {**WIDE, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
SLIDING = ["sliding_attention", "full_attention"]
BIASED = {"attention_bias": True, "mlp_bias": True}
MOE = {**SHARED_EXPERT, "mlp_only_layers": [], "decoder_sparse_step": 1, "head_dim": 8}
EPSILON = {"layer_norm_eps": 1e-2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # values that are not the defaults of families
    "llama": ("llama", {**WIDE, **BIASED, "rope_parameters": {"rope_type": "default", **THETA}}),
    "llama linear": ("llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama 3": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 128}}),
    "llama longrope": ("llama", {"rope_parameters": LONG}),
    "mistral": ("mistral", {**WIDE, "sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3}),
    "qwen2": ("qwen2", WIDE),
    "qwen2moe": ("qwen2_moe", {**MOE, "norm_topk_prob": True}),
    "qwen3": ("qwen3", {**WIDE, "attention_bias": True}),
    "qwen3moe": ("qwen3_moe", {**MOE, "shared_expert_intermediate_size": None, "norm_topk_prob": False}),
    "gemma": ("gemma", {**WIDE, "rope_parameters": {"rope_type": "default", **THETA}}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "num_hidden_layers": 6, "layer_types": [SLIDING[(i + 1) % 6 == 0] for i in range(6)]}
        | {"rope_parameters": {SLIDING[0]: {"rope_type": "default", **THETA}, SLIDING[1]: LINEAR}},
    ),
    "phi3": ("phi3", {"rope_parameters": {**LONG, "partial_rotary_factor": 1.0}, "sliding_window": 8}),
    "phi3 partial": ("phi3", {**PARTIAL, "sliding_window": None}),
    "gpt2": ("gpt2", {"n_inner": 80, "layer_norm_epsilon": 1e-2, "n_positions": 100}),
    "starcoder2": ("starcoder2", {"norm_epsilon": 1e-2, "use_bias": True, "sliding_window": 8}),
    "stablelm": ("stablelm", {**EPSILON, **PARTIAL, "use_qkv_bias": True, "use_parallel_residual": True}),
    "stablelm in turn": ("stablelm", {**EPSILON, **PARTIAL, "use_parallel_residual": False}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "layer_norm_epsilon": 1e-2}),
    "falcon of one group": (
        "falcon",
        {"new_decoder_architecture": False, "num_kv_heads": 1, "multi_query": True, "bias": True},
    ),
    "nemotron": ("nemotron", {**PARTIAL, **BIASED, "norm_eps": 1e-2}),
    "granite": ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
}  # fmt: skip
DECI = {"deci": CASES["llama"]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, family: str = "llama", model: dict[str, Any] | None = None, **changed: Any) -> Any:
    """The model of a family in a file, with a tokenizer of letters; returns the model."""
    written = tiny_model(family, **(model or {})).model
    torch.manual_seed(1)
    for weight in written.parameters():  # norms and biases, too
        weight.data += 0.05 * torch.randn_like(weight)
    tokens = ["<s>", "</s>", "<unk>", "ab", *LETTERS][: written.config.vocab_size]
    write_gguf(path, written, tokens, **{"merges": ["a b"], "special": ROLES, **changed})
    return written


def read(path: Path) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    model, tokenizer, _ = load_pretrained(str(path), device="cpu", dtype=torch.float32)
    return model, tokenizer


def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(96)[None] * 7 % 24).logits


def refused(path: Path, words: str, **changed: Any) -> None:
    """The file is refused with these words, and its name."""
    write(path, **changed)
    with pytest.raises(UnsupportedModel, match=words) as caught:
        read(path)
    assert path.name in str(caught.value)


# --- the model ---


@pytest.mark.parametrize("case", [*CASES, "deci"])
def test_a_file_has_the_logits_of_the_model_that_it_was_made_from(case: str, tmp_path: Path) -> None:
    family, changes = (CASES | DECI)[case]
    written = write(tmp_path / "model.gguf", family, changes, architecture="deci" if case == "deci" else None)
    found, _ = read(tmp_path / "model.gguf")
    torch.testing.assert_close(logits(found), logits(written), rtol=1e-4, atol=1e-4)
    assert found.config.max_position_embeddings == written.config.max_position_embeddings
    assert found.config.tie_word_embeddings == written.config.tie_word_embeddings
    odd = {"family": family, "model": changes, "architecture": "deci" if case == "deci" else None}
    refused(tmp_path / "odd.gguf", r"\.odd_key is 1, which is not known", keys={"{arch}.odd_key": 1}, **odd)
    tensor = {"blk.1.odd.weight": torch.ones(4)}
    refused(tmp_path / "odd.gguf", r"1 tensor .*: blk\.1\.odd\.weight", more=tensor, **odd)


def test_old_names_and_missing_keys_have_the_meaning_of_llama_cpp(tmp_path: Path) -> None:
    left_out = {
        f"{{arch}}.{key}": None for key in ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count")
    }
    old = {"{arch}.rope.scaling.type": None, "{arch}.rope.scaling.factor": None, "{arch}.rope.scale_linear": 4.0}
    notes = {"{arch}.rope.scaling.finetuned": True, "{arch}.tensor_data_layout": "Meta AI original pth"}
    same = {"{arch}.attention.scale": 8**-0.5, "{arch}.attention.causal": True, "{arch}.feed_forward_length": [48, 48]}
    changes = {"num_key_value_heads": 4, "rope_parameters": {**LINEAR, "rope_theta": 10000.0}}
    rotary = {"blk.0.attn_rot_embd": torch.ones(4)}
    written = write(tmp_path / "a.gguf", model=changes, keys=left_out | old | notes | same, more=rotary)
    torch.testing.assert_close(logits(read(tmp_path / "a.gguf")[0]), logits(written), rtol=1e-4, atol=1e-4)
    pattern = {"{arch}.attention.sliding_window_pattern": [True, True]}
    written = write(tmp_path / "b.gguf", "gemma2", {**GEMMA, "layer_types": SLIDING[:1] * 2}, keys=pattern)
    torch.testing.assert_close(logits(read(tmp_path / "b.gguf")[0]), logits(written), rtol=1e-4, atol=1e-4)


def test_the_largest_gemma_has_the_scale_that_its_files_do_not_say(tmp_path: Path) -> None:
    changes = {**GEMMA, "num_hidden_layers": 46, "query_pre_attn_scalar": 8, "initializer_range": 0.05}
    written = write(tmp_path / "model.gguf", "gemma2", changes)
    torch.testing.assert_close(logits(read(tmp_path / "model.gguf")[0]), logits(written), rtol=1e-4, atol=1e-4)


ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keys": {"{arch}.logit_scale": 0.5}}, r"llama\.logit_scale is 0\.5; a llama model has 1"),
        ({"keys": {"{arch}.attention.scale": 0.7}}, r"attention\.scale is 0\.7; a llama model has 0\.35"),
        ({"keys": {"{arch}.attention.causal": False}}, r"attention\.causal is False"),
        ({"keys": {"{arch}.attention.value_length": 4}}, r"attention\.value_length is 4; a llama model has 8"),
        ({"keys": {"{arch}.rope.dimension_count": 4}}, r"rope\.dimension_count is 4; a llama model has 8"),
        ({"keys": {"{arch}.vocab_size": 5}}, r"vocab_size is 5; a llama model has 24"),
        ({"keys": {"{arch}.rope.scaling.type": "su"}}, r"rope\.scaling\.type is 'su'"),
        ({"keys": {"{arch}.rope.scaling.attn_factor": 2.0}}, r"rope\.scaling\.type is 'none'"),
        ({"keys": {"{arch}.rope.scaling.alpha": 2.0}}, r"rope\.scaling\.alpha is 2\.0"),
        ({"keys": {"{arch}.feed_forward_length": [48, 32]}}, r"feed_forward_length is \[48, 32\]"),
        ({"keys": {"{arch}.context_length": None}}, r"no field llama\.context_length"),
        ({"keys": {"{arch}.embedding_length": "32"}}, r"embedding_length is '32'"),
        ({"sizes": {"num_hidden_layers": 2 * 10**9}}, r"llama\.block_count is 2000000000; it must lie in 1 … 21"),
        ({"sizes": {"hidden_size": 4 * 10**9}}, r"\.embedding_length is 4000000000; it must lie in 1 … 16777216"),
        ({"sizes": {"num_attention_heads": 0}}, r"llama\.attention\.head_count is 0; it must lie in 1 …"),
        ({"family": "qwen2", "keys": {"{arch}.attention.sliding_window": 8}}, r"sliding_window None, and the file 8"),
        ({"family": "gemma3_text", "keys": {"{arch}.attention.sliding_window": None}}, r"no field .*sliding_window"),
        ({"family": "phi3", "keys": {"{arch}.rope.scaling.factor": 4.0}}, r"a phi3 model has only longrope"),
        ({"family": "qwen2", "left_out": ["model.layers.1.self_attn.q_proj.bias"]}, r"no tensor for .*attn_q\.bias"),
        ({"keys": {"{arch}.embedding_length": 64}}, r"token_embd\.weight has the shape \(24, 32\), not \(24, 64\)"),
        ({"keys": {"{arch}.attention.head_count": 32}}, r"blk\.0\.attn_q\.weight has another shape"),
        ({"more": {"output.bias": ONES}}, r"output\.bias"),
        ({"family": "qwen2", "more": {"blk.0.attn_output.bias": ONES}}, r"blk\.0\.attn_output\.bias"),
        ({"more": {"rope_freqs.weight": torch.tensor([1.0, 2.0, 3.0, 1.0])}}, r"rope_freqs\.weight has other factors"),
        ({"more": {"blk.0.ffn_gate.0.weight": ONES}}, r"blk\.0\.ffn_gate\.0\.weight"),
        ({"architecture": "bloom"}, "a bloom model; of GGUF files draftheads reads deci, falcon"),
        ({"architecture": "clip"}, "no language model but a projector"),
        ({"keys": {"general.type": "adapter"}}, "no language model but of the type adapter"),
        ({"keys": {"adapter.lora.alpha": 8.0}}, r"adapter\.lora\.alpha"),
        ({"keys": {"tokenizer.ggml.odd": True}}, r"tokenizer\.ggml\.odd is True"),
        ({"keys": {"tokenizer.ggml.model": "t5"}}, r"tokenizer\.ggml\.model is t5"),
        ({"keys": {"tokenizer.ggml.pre": "viking"}}, r"tokenizer\.ggml\.pre is viking"),
        ({"keys": {"tokenizer.ggml.add_space_prefix": True}}, r"add_space_prefix is True"),
        ({"keys": {"tokenizer.ggml.eos_token_id": 99}}, "the end token 99"),
        ({"keys": {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}}, "adds bos to texts"),
    ],
)
def test_what_the_model_cannot_have_is_refused_by_its_name(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    refused(tmp_path / "model.gguf", words, **change)


@pytest.mark.parametrize(
    ("packs", "dtype"), [(None, "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_only_quantised_weights_change_their_type(packs: str | None, dtype: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", model={"intermediate_size": 64}, packs=packs and gguf.GGMLQuantizationType[packs])
    folder = source_of(tmp_path / "model.gguf")
    assert folder is not None
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype


def test_keys_of_others_are_counted_and_said(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "general.sampling.xtc_threshold": 0.1}
    write(tmp_path / "model.gguf", keys={**keys, "somebody.quantized_by": "me", "general.name": "tiny"})
    words = r"model\.gguf has 2 keys .*: general\.sampling\.xtc_threshold, somebody\.quantized_by"
    with pytest.warns(GenerationWarning, match=words):
        model, _ = read(tmp_path / "model.gguf")
    assert (model.generation_config.temperature, model.generation_config.top_k) == (0.5, 7)


# --- the tokenizer ---


def ids(path: Path, text: str) -> list[int]:
    found: list[int] = load_tokenizer(str(path)).tokenizer(text)["input_ids"]
    return found


def test_the_beginning_and_the_end_of_texts_are_those_of_the_file(tmp_path: Path) -> None:
    pre, adds = "tokenizer.ggml.pre", "tokenizer.ggml.add_{}_token"
    expected: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [3]),
        ({pre: "qwen2"}, [3]),
        ({pre: "llama-bpe"}, [0, 3]),
        ({pre: "tekken"}, [0, 3]),
        ({pre: "llama-bpe", adds.format("bos"): False}, [3]),
        ({adds.format("bos"): True, adds.format("eos"): True}, [0, 3, 1]),
    ]
    for i, (keys, wanted) in enumerate(expected):
        write(tmp_path / f"{i}.gguf", keys=keys)
        assert ids(tmp_path / f"{i}.gguf", "ab") == wanted, keys
    for rule, wanted in {"llama-bpe": [0, 4], "gpt-2": [5, 6]}.items():
        path, tokens = tmp_path / f"{rule}.gguf", ["<s>", "</s>", "<unk>", "cd", "ab", *LETTERS[:-1]]
        write(path, merges=["c d"], keys={pre: rule, "tokenizer.ggml.tokens": tokens})
        assert ids(path, "ab") == wanted, "words of the vocabulary need no merges, if the rule says so"


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({}, {1}),
        ({"eot": 4}, {1, 4}),
        ({"eom": 4, "eot": 5}, {1, 4, 5}),
        ({"eog": 4}, {1, 4}),
        ({"tokens": ["<s>", "</s>", "<unk>", "ab", *LETTERS[:-1], "<|im_end|>"]}, {1, 23}),
        ({"tokens": ["<s>", "</s>", "<|end|>", "ab", *LETTERS[:-2], "<|return|>", "<|call|>"]}, {1, 22, 23}),
    ],
)
def test_all_tokens_that_end_a_turn_end_an_answer(keys: dict[str, Any], ends: set[int], tmp_path: Path) -> None:
    told = {f"tokenizer.ggml.{key if key == 'tokens' else f'{key}_token_id'}": value for key, value in keys.items()}
    write(tmp_path / "model.gguf", keys=told)
    engine = draftheads.load(tmp_path / "model.gguf", **FP32)
    assert engine.model.eos_ids == ends
    for end in ends:
        [result] = engine.generate([PROMPT], max_new_tokens=5, logit_bias={end: 100.0})
        assert (result.finish_reason, len(result.token_ids)) == ("stop", 1)


def test_a_tokenizer_with_scores_is_that_of_sentencepiece(tmp_path: Path) -> None:
    words = ["▁", "a", "b", "c", "▁a", "ab", "abc", "bc", "▁ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<own>"]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -1.0, -0.5, -4.0] + [0.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(words) + [4]
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "merges": None, "pre": None}
    roles = dict.fromkeys(f"{role}_token_id" for role in ROLES)
    told = {f"tokenizer.ggml.{key}": value for key, value in (keys | roles).items()}
    place = {token: i for i, token in enumerate(tokens)}
    for prefix in (True, False):
        path = tmp_path / f"{prefix}.gguf"
        extra = {} if prefix else {"tokenizer.ggml.add_space_prefix": False}
        write(path, model={"vocab_size": len(tokens)}, keys=told | extra)
        start = ["▁", "abc"] if prefix else ["abc"]
        wanted = ["<s>", *start, "<own>", *(["▁a"] if prefix else ["a"]), "<0xC3>", "<0xA9>", "▁", "b"]
        found = load_tokenizer(str(path))
        assert ids(path, "abc<own>aé b") == [place[token] for token in wanted]
        assert found.tokenizer.decode(ids(path, "abc aé b")[1:]) == "abc aé b"
        assert found.eos_ids == {2}
    write(tmp_path / "phi.gguf", "phi3", {"vocab_size": len(tokens)}, keys=told)
    assert ids(tmp_path / "phi.gguf", "a</s>  \nb")[2:] == [2, place["▁"], place["b"]], "Phi-3's own tokens take spaces"


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("gpt-2", ["I", "'", "LL", " ", " say", " 12345", " naïve", "!!", "\n\n", " ab"]),
        ("smollm", ["I", "'", "LL", " ", " say", " ", "1", "2", "3", "4", "5", " naïve", "!!", "\n\n", " ab"]),
        ("llama-bpe", ["I", "'LL", " ", " say", " ", "123", "45", " naïve", "!!\n\n", " ab"]),
        ("qwen2", ["I", "'LL", " ", " say", " ", "1", "2", "3", "4", "5", " naïve", "!!\n\n", " ab"]),
        ("tekken", ["I", "'LL", " ", " say", " ", "1", "2", "3", "4", "5", " naïve", "!!\n\n", " ab"]),
        ("gpt-4o", ["I'LL", " ", " say", " ", "123", "45", " naïve", "!!\n\n", " ab"]),
        ("falcon", ["I", "'", "LL", " ", " say", " ", "123", "45", " naïve", "!!", "\n\n", " ab"]),
        ("deepseek-v3", ["I", "'LL", " ", " say", " ", "123", "45", " naïve", "!!\n\n", " ab"]),
        ("deepseek-coder", ["I", "'", "LL", " ", " say", " ", *"12345", " naïve", "!!", "\n", "\n", " ab"]),
    ],
)
def test_texts_are_cut_by_the_rule_that_the_file_names(rule: str, wanted: list[str], tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", keys={"tokenizer.ggml.pre": rule})
    cut = load_tokenizer(str(tmp_path / "model.gguf")).tokenizer.backend_tokenizer.pre_tokenizer
    text = "I'LL  say 12345 naïve!!\n\n ab"
    assert [text[slice(*place)] for _, place in cut.pre_tokenize_str(text)] == wanted


def test_chat_templates_with_names_stay(tmp_path: Path) -> None:
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    write(tmp_path / "model.gguf", template="usual", keys=named)
    found = load_tokenizer(str(tmp_path / "model.gguf")).tokenizer.chat_template
    assert found == {"default": "usual", "tool_use": "tools"}


# --- files ---


def split(path: Path, told: int | None = None) -> list[Path]:
    """The file's tensors in two parts, as llama-gguf-split writes them."""
    reader, parts = gguf.GGUFReader(path), [path.with_name(f"part-0000{i}-of-00002.gguf") for i in (1, 2)]
    for number, part in enumerate(parts):
        writer: Any = gguf.GGUFWriter(part, "llama")
        for name, field in reader.fields.items():
            if number == 0 and not name.startswith("GGUF.") and name != "general.architecture":
                writer.add_key_value(
                    name, field.contents(), field.types[0], sub_type=field.types[-1] if len(field.types) > 1 else None
                )
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", told or len(reader.tensors))
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def test_the_parts_of_a_split_model_are_read_together(tmp_path: Path) -> None:
    written = write(tmp_path / "whole.gguf")
    first, second = split(tmp_path / "whole.gguf", told=99)
    with pytest.raises(ModelNotFound, match="tensors, not 99"):
        read(first)
    first, second = split(tmp_path / "whole.gguf")
    (tmp_path / "whole.gguf").unlink()
    for path in (first, second, tmp_path):  # a folder with one model
        torch.testing.assert_close(logits(read(path)[0]), logits(written), rtol=1e-5, atol=1e-5)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"2 GGUF files: name one of other\.gguf, part-00001-of-00002\.gguf"):
        read(tmp_path)
    moved = second.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelNotFound, match=r"split into 2 files; beside it are missing: part-00002-of-00002\.gguf"):
        read(first)
    with pytest.raises(UnsupportedModel, match=r"renamed\.gguf is part 2 of 2 of a split model"):
        read(moved)


def test_files_in_other_forms_are_refused_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path)
    whole = path.read_bytes()
    wrong: dict[str, tuple[bytes, str]] = {
        "version 1": (whole[:4] + struct.pack("<I", 1) + whole[8:], "version 1 of the format"),
        "big-endian": (whole[:4] + struct.pack(">I", 3) + whole[8:], "big-endian"),
        "another file": (b"PK" + whole[2:], "is damaged"),
        **{f"{size} bytes": (whole[:size], "is damaged") for size in (0, 10, len(whole) // 8, len(whole) - 100)},
    }
    for name, (content, words) in wrong.items():
        path.write_bytes(content)
        with pytest.raises((UnsupportedModel, ModelNotFound), match=rf"model\.gguf is .*{words.removeprefix('is ')}"):
            read(path)
        assert name
    reader = gguf.GGUFReader(path := _written(tmp_path), "r+")
    field = reader.tensors[1].field
    for kind, words in ((999, "a type that gguf does not know"), (gguf.GGMLQuantizationType.Q8_K, "Q8_K")):
        field.parts[4][0] = kind
        reader.data.flush()
        with pytest.raises((UnsupportedModel, ModelNotFound), match=rf"kinds\.gguf.*({words}|is damaged)"):
            read(path)


def _written(folder: Path) -> Path:
    write(folder / "kinds.gguf")
    return folder / "kinds.gguf"


def test_it_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    write(file)
    assert find_passes(str(file)).name == str(file)
    assert not cache.exists(), "doctor needs no weights"
    first = source_of(file)
    assert capsys.readouterr().err == "", "no bar in a file of messages"
    assert [path for path in (cache / "gguf").iterdir() if path.is_dir()] == [first]
    assert source_of(file) == first
    os.utime(file, ns=(1, 1))
    assert source_of(file) != first
    assert main(["generate", "a b", "--model", str(file), "--max-new-tokens", "3"]) == 0
    assert main(["cache", "clear", "gguf"]) == 0
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]
    capsys.readouterr()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_drafts_leave_the_text_as_it_is(family: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", family, {**GEMMA} if family == "gemma2" else None)
    plain = draftheads.load(tmp_path / "model.gguf", copy=False, **FP32)
    copying = draftheads.load(tmp_path / "model.gguf", copy=True, **FP32)
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    assert copying.generate([PROMPT], **options)[0].token_ids == plain.generate([PROMPT], **options)[0].token_ids
    assert plain.model.model_id == str(tmp_path / "model.gguf")
