"""Heads of other projects are read as they were meant, decode without changing a word, and come back equal."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import published_heads as published
from draftheads import import_head, load
from draftheads.checkpoints.checkpoint import load_head, read_head, save_head
from draftheads.checkpoints.registry import find_published
from draftheads.cli.main import main
from draftheads.decode.engine import Engine
from draftheads.errors import (
    BaseModelWarning,
    CheckpointCorrupt,
    CheckpointMismatch,
    DraftHeadsError,
    ModelNotFound,
    StorageError,
    UnsupportedModel,
)
from draftheads.formats.reading import convert, is_published
from draftheads.interop.export import export_head
from draftheads.models.model import TargetModel
from draftheads.runners import runner_for
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.tree import Tree
from families import PROMPTS, VOCAB, tiny_head, tiny_model
from joint_world import on_disk
from published_heads import CASES, HEADS, LLAMA3, YARN, made, written

DEEP = {"num_hidden_layers": 8}  # three different layers are read


@pytest.fixture
def target() -> TargetModel:
    return tiny_model("llama", **DEEP)


@pytest.fixture
def stored(tmp_path: Path) -> TargetModel:
    """One in a folder, which is its name."""
    return TargetModel.load(on_disk(tmp_path / "model", **DEEP), dtype=torch.float32)


IDS = "eagle_aux_hidden_state_layer_ids"
PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ONE_WAY = {"eagle without a bias", *list(CASES)[list(CASES).index("eagle3 with a layer of Qwen3") :]}
BACK = ("accelerator", "eagle", "speculators")  # the layouts that are written again with all their parts
ASSUMED = pytest.mark.filterwarnings("ignore:.*it is assumed that half of its draft tokens")
OWN_EMBEDDING = pytest.mark.filterwarnings("ignore:.*so it is read as the head's own")


@OWN_EMBEDDING
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_it_computes_what_its_project_computes(case: str, target: TargetModel, tmp_path: Path) -> None:
    head = made(case, target)
    layout = convert(written(head, tmp_path / "theirs"), tmp_path / "ours", base=target)
    assert layout.config.method == head.method
    ours = load_head(tmp_path / "ours", target)
    torch.manual_seed(2)
    length = 12
    hidden, ids = torch.randn(1, length, head.states * target.hidden_size), torch.randint(3, VOCAB, (1, length))
    expected, features = head.logits(hidden, ids), ours(hidden, ids)
    for depth, theirs in enumerate(expected[: ours.config.num_heads]):
        places = min(theirs.shape[1], length - 2 - depth)
        torch.testing.assert_close(
            ours.logits(features[depth], depth)[:, :places], theirs[:, :places], rtol=2e-3, atol=2e-3
        )


@OWN_EMBEDDING
@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(10)
def test_it_decodes_without_changing_a_word(case: str, target: TargetModel, tmp_path: Path) -> None:
    convert(written(made(case, target), tmp_path / "theirs"), tmp_path / "ours", base=target)
    head = load_head(tmp_path / "ours", target)
    plain = [answer.token_ids for answer in Engine(target).generate(PROMPTS, max_new_tokens=24)]
    for shape in (Tree.chain(HEADS), Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])):
        drafted = Engine(target, head, shape=shape).generate(PROMPTS, max_new_tokens=24)
        assert [answer.token_ids for answer in drafted] == plain


@pytest.mark.filterwarnings("ignore:the head has:UserWarning")  # options that some engines do not know
@OWN_EMBEDDING
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(BACK) and case not in ONE_WAY])
@pytest.mark.few(12)
def test_it_comes_back_equal(case: str, stored: TargetModel, tmp_path: Path) -> None:
    head = made(case, stored)
    first = import_head(written(head, tmp_path / "theirs"), tmp_path / "ours", model=stored.model_id)
    folder = export_head(tmp_path / "ours", tmp_path / "again", model=stored.model_id, to=head.back).folder
    second = import_head(folder, tmp_path / "second", model=stored.model_id)
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("ours", "second"))
    assert second.config == first.config
    assert set(before) == set(after)
    for tensor, values in before.items():
        assert torch.equal(values.bfloat16(), after[tensor].bfloat16()), tensor


GPT_OSS = "gpt_oss"
AUX = {"use_aux_hidden_state": True}
OF_GPT_OSS: dict[str, tuple[Callable[..., Any], dict[str, Any], list[int]]] = {  # a head, more keys, layers it reads
    "nvidia, v3": (  # the last boundary, both places of the ids alike, and a window
        lambda target: published.eagle3(target, norm_before_fc=True, window=5, rope=YARN),
        {IDS: [4, 6, 8], "eagle_config": {IDS: [4, 6, 8], "norm_before_fc": True, **AUX}, "target_layer_count": 8},
        [4, 6, 8],
    ),
    "nvidia, v3 in eagle_config alone": (
        lambda target: published.eagle3(target, norm_before_fc=True, rope=YARN),
        {"norm_before_fc": None, "eagle_config": {IDS: [4, 6, 8], "norm_before_fc": True, **AUX}},
        [4, 6, 8],
    ),
    "nvidia, long context": (
        lambda target: published.eagle3(target, rope=YARN, trimmed=False),
        {"eagle_config": {IDS: [1, 3, 4], "parallel_draft_step": 1, "use_last_layernorm": True, **AUX}},
        [2, 4, 5],
    ),
    "nvidia, short context": (
        lambda target: published.eagle3(target, has_fc=False, trimmed=False),
        {"eagle_config": {"use_aux_hidden_state": False, IDS: []}},
        [],
    ),
    "lmsys (SpecForge)": (
        published.eagle3,
        {"model_type": GPT_OSS, "num_local_experts": 16, "experts_per_token": 4, "eagle_config": {IDS: [1, 4, 5]}},
        [2, 5, 6],
    ),
    "nebius": (
        lambda target: published.eagle3(target, rope=YARN),
        {"architectures": ["LlamaForCausalLM"], "truncated_vocab_size": 10},
        [2, 4, 5],
    ),
    "RedHatAI": (
        lambda target: published.eagle3(target, form="layers.0.", norm_before_fc=True, norm_before_residual=True),
        {"architectures": ["Eagle3DraftModel"], IDS: [2, 4, 5]},
        [2, 4, 5],
    ),
    "Dogacel, 3.1": (
        lambda target: published.eagle3(target, fc_norm=True, norm_output=True),
        {"norm_output": None, "eagle_config": {"norm_output": True, "num_aux_hidden_states": 3, IDS: [2, 4, 5]}},
        [2, 4, 5],
    ),
}


@pytest.mark.parametrize("publisher", OF_GPT_OSS)
@torch.no_grad()
def test_a_head_of_gpt_oss_is_read_and_decodes_without_changing_a_word(publisher: str, tmp_path: Path) -> None:
    """On a small model of the family, whatever the publisher's keys; against the modules of transformers."""
    target = tiny_model(GPT_OSS, num_hidden_layers=8, layer_types=["sliding_attention", "full_attention"] * 4)
    make, keys, layers = OF_GPT_OSS[publisher]
    torch.manual_seed(0)
    theirs = make(target)
    theirs.config |= keys
    convert(written(theirs, tmp_path / "theirs"), tmp_path / "ours", base=target)
    head = load_head(tmp_path / "ours", target)
    assert head.hidden_layers == tuple(layers)
    ids = torch.randint(3, VOCAB, (1, 12))
    hidden, last = head.split(target.hidden_states(ids, head.hidden_layers))
    hidden = hidden if layers else last
    expected, features = theirs.logits(hidden, ids), head(hidden, ids)
    for depth, logits in enumerate(expected):
        places = min(logits.shape[1], 10 - depth)
        ours = head.logits(features[depth], depth)[:, :places]
        torch.testing.assert_close(ours, logits[:, :places], rtol=2e-3, atol=2e-3)
    plain = [answer.token_ids for answer in Engine(target).generate(PROMPTS, max_new_tokens=12)]
    drafted = Engine(target, head, shape=Tree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)]))
    assert [answer.token_ids for answer in drafted.generate(PROMPTS, max_new_tokens=12)] == plain


@pytest.mark.parametrize("prefix", ["medusa_head", "medusa_heads"])
def test_a_full_model_with_heads_is_its_own_base(
    prefix: str, stored: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Medusa 1.0, and as ModelOpt names them."""
    name = stored.model_id
    heads = {f"{prefix}.{key}": tensor for key, tensor in published.medusa(stored).tensors.items()}
    both = {**load_file(tmp_path / "model" / "model.safetensors"), **heads}
    save_file(both, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    assert import_head(name, tmp_path / "ours", model=name).config.num_heads == HEADS
    other = on_disk(tmp_path / "other", **DEEP)
    with pytest.raises(DraftHeadsError, match=f"trained for that model, not for .*: give --model {name}"):
        import_head(name, tmp_path / "more", model=other)
    monkeypatch.chdir(tmp_path)
    assert import_head("./model", "more", model="model").config.num_heads == HEADS
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**config, "medusa_num_heads": HEADS, "medusa_steering": 2}))
    with pytest.raises(UnsupportedModel, match="unknown key medusa_steering"):
        convert(tmp_path / "model", "others", base=stored)


@ASSUMED
def test_load_takes_a_published_head_and_keeps_it(
    stored: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    folder = written(made("hydra", stored), tmp_path / "theirs")
    plain = [answer.token_ids for answer in load(stored.model_id, precision="fp32").generate(PROMPTS, max_new_tokens=8)]
    for source in (folder, folder / "hydra_lm_head.pt"):
        engine = load(stored.model_id, head=source, precision="fp32", tree="static:10")
        assert [answer.token_ids for answer in engine.generate(PROMPTS, max_new_tokens=8)] == plain
    kept = sorted((tmp_path / "cache" / "heads").iterdir())
    assert len(kept) == 2
    times = [(place / "model.safetensors").stat().st_mtime_ns for place in kept]
    load(stored.model_id, head=folder, precision="fp32", tree="static:10")
    assert [(place / "model.safetensors").stat().st_mtime_ns for place in kept] == times
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "topk": 9}))
    load(stored.model_id, head=folder, precision="fp32", tree="static:10")
    assert len(list((tmp_path / "cache" / "heads").iterdir())) == 3, "it is read anew"


def test_trees_of_the_files_are_kept(target: TargetModel, tmp_path: Path) -> None:
    convert(written(made("accelerator", target), tmp_path / "ibm"), tmp_path / "one", base=target)
    paths = read_head(tmp_path / "one").profile.paths
    assert sum(len(path) == HEADS for path in paths) == 5, "n_candidates whole paths"
    assert all(path[-1] < width for path in paths for width in [[5, 4, 3][len(path) - 1]])
    head = made("medusa v0.1", target)
    head.config["medusa_choices"] = [[0], [0, 0], [1], [0, 1], [0, 0, 0, 0, 0]]
    convert(written(head, tmp_path / "medusa"), tmp_path / "two", base=target)
    assert sorted(read_head(tmp_path / "two").profile.paths) == [[0], [0, 0], [0, 1], [1]], "as far as the heads reach"


class Runs:
    """What a pickle with code would do."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path) -> None:
    target, trap = tiny_model("llama", **DEEP), tmp_path / "ran"
    folder = written(made("medusa v0.1", target), tmp_path / "theirs")
    torch.save({"0.0.linear.weight": Runs(trap)}, folder / "medusa_lm_head.pt")
    with pytest.raises(CheckpointCorrupt, match="holds more than tensors, and other objects could run code"):
        convert(folder, tmp_path / "ours", base=target)
    with (folder / "medusa_lm_head.pt").open("wb") as file:
        pickle.dump(Runs(trap), file)
    with pytest.raises(CheckpointCorrupt):
        convert(folder, tmp_path / "ours", base=target)
    assert not trap.exists()
    assert not (tmp_path / "ours").exists()


@OWN_EMBEDDING
@pytest.mark.parametrize("case", CASES)
def test_damaged_files_are_errors_that_name_the_tensor(case: str, target: TargetModel, tmp_path: Path) -> None:
    head = made(case, target)
    whole = dict(head.tensors)
    # a part of the last head: without it the number of heads is another
    name = max(n for n in whole if whole[n].dim() == 2 and any(part in n for part in ("linear", "proj", ".layers.")))
    gone = "speculator.proj.0.weight" if "repeated" in case else name
    for what, damaged in (
        ("surplus tensor strange", {**whole, "strange": torch.zeros(2)}),
        (name, {**whole, name: torch.zeros(3, 5)}),
        ("missing|surplus|of no known format", {key: tensor for key, tensor in whole.items() if key != gone}),
    ):
        head.tensors = damaged
        folder = written(head, tmp_path / f"theirs{len(list(tmp_path.iterdir()))}")
        with pytest.raises((CheckpointCorrupt, ModelNotFound), match=what):
            convert(folder, tmp_path / "ours", base=target)
        assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("form", ["midlayer.", "layers.0."])
def test_an_embedding_of_its_own_may_be_that_of_another_base(form: str, tmp_path: Path) -> None:
    target, other = tiny_model("llama", **DEEP), tiny_model("llama", seed=9, **DEEP)
    torch.manual_seed(0)
    with torch.no_grad():
        head = published.eagle3(target, form=form)
    head.tensors["embed_tokens.weight"] = other.weights.embedding.detach().float()
    with pytest.warns(
        BaseModelWarning, match=r"embed_tokens\.weight differs by \d+% from .* trained for another model"
    ):
        convert(written(head, tmp_path / "theirs"), tmp_path / "ours", base=target)
    options = read_head(tmp_path / "ours").options
    assert options["own_embedding"] is True
    assert "inner_size" not in options


@pytest.mark.parametrize("case", ["hydra", "eagle"])
def test_another_base_is_refused(case: str, tmp_path: Path) -> None:
    target, other = tiny_model("llama", **DEEP), tiny_model("llama", seed=9, **DEEP)
    folder = written(made(case, target), tmp_path / "theirs")
    with pytest.raises(CheckpointMismatch, match=r"differs by \d+% from the embedding of"):
        convert(folder, tmp_path / "ours", base=other)


def test_a_base_of_another_size_is_refused(target: TargetModel, tmp_path: Path) -> None:
    """By what fc reads, and without fc by the layer."""
    other = tiny_model("llama", **DEEP, hidden_size=64)
    for case, found in {
        "eagle3": r"fc reads 96 numbers of a token, .* have 64, .* give the base model that",
        "eagle3 of the last hidden state": r"reads hidden states of 32 numbers, and those of .* have 64",
    }.items():
        head = made(case, target)
        del head.config["target_hidden_size"]  # files need not have it
        with pytest.raises((CheckpointCorrupt, UnsupportedModel), match=found):
            convert(written(head, tmp_path / case), tmp_path / "ours", base=other)


def test_a_draft_vocabulary_may_be_all_tokens_in_another_order(target: TargetModel, tmp_path: Path) -> None:
    head = made("eagle3.1", target)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    head.tensors["d2t"] = order - torch.arange(VOCAB)
    layout = convert(written(head, tmp_path / "theirs"), tmp_path / "ours", base=target)
    assert layout.config.draft_vocab_size == VOCAB
    assert torch.equal(load_head(tmp_path / "ours", target).to_target_ids(torch.arange(VOCAB)), order)


@pytest.mark.parametrize(("case", "told", "depth"), [("speculators", 4, 4), ("speculators", 99, 32), ("eagle3", 4, 5)])
def test_drafts_are_as_deep_as_files_of_speculators_say(
    case: str, told: int, depth: int, *, target: TargetModel, tmp_path: Path
) -> None:
    head = made(case, target)
    if case == "speculators":
        head.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = told
    assert convert(written(head, tmp_path / "theirs"), tmp_path / "ours", base=target).config.num_heads == depth


def test_a_copy_of_the_lm_head_is_compared(target: TargetModel, tmp_path: Path) -> None:
    head = made("eagle", target)
    head.tensors["lm_head.weight"] = target.weights.lm_head.clone()
    convert(written(head, tmp_path / "same"), tmp_path / "ours", base=target)
    head.tensors["lm_head.weight"] += 1
    with pytest.raises(CheckpointMismatch, match=r"its lm_head\.weight differs by \d+% from the lm_head of"):
        convert(written(head, tmp_path / "other"), tmp_path / "more", base=target)


def test_what_is_no_head_is_refused(target: TargetModel, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match="no file that ends in"):
        convert(tmp_path / "empty", tmp_path / "ours", base=target)
    save_file({"a": torch.zeros(1)}, tmp_path / "empty" / "model.safetensors")
    with pytest.raises(ModelNotFound, match="the tensors a: they are of no known format"):
        convert(tmp_path / "empty", tmp_path / "ours", base=target)
    assert not is_published(tmp_path / "empty")


@ASSUMED
def test_a_head_on_the_hub_is_downloaded_whatever_its_files_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path / "cache"))
    name = on_disk(tmp_path / "model", **DEEP)
    repo = written(made("medusa v0.1", TargetModel.load(name, dtype=torch.float32)), tmp_path / "repo")
    asked = []

    def download(repo_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(repo_id)
        place = tmp_path / "snapshot"
        place.mkdir(exist_ok=True)
        for file in repo.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, place)
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert import_head("owner/medusa", tmp_path / "ours", model=name).config.num_heads == HEADS
    assert load(name, head="owner/medusa", precision="fp32", tree="static:10").drafter.name == "medusa with copies"
    assert set(asked) == {"owner/medusa"}
    (repo / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 32}))
    with pytest.raises(ModelNotFound, match="owner/medusa is a model \\(num_hidden_layers: 32\\), not a draft head"):
        import_head("owner/medusa", tmp_path / "more", model=name)
    for about in ({"num_nextn_predict_layers": 1}, {"mtp_num_hidden_layers": 1}, {"model_type": "qwen3_next"}):
        (repo / "config.json").write_text(json.dumps({"num_hidden_layers": 32, **about}))  # its layer may be a head
        assert find_published("owner/medusa", name).is_dir()


def test_without_the_hub_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=ConnectionError("no route")))
    assert main(["import", "owner/medusa", "--out", "never"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (
        "no head 'owner/medusa': there is no such folder here, and the download from the Hugging Face Hub failed"
        in said
    )


def test_nothing_is_overwritten(target: TargetModel, tmp_path: Path) -> None:
    folder = written(made("hydra", target), tmp_path / "theirs")
    before = (folder / "config.json").read_text()
    with pytest.raises(StorageError, match="exists already"):
        convert(folder, folder, base=target)
    assert (folder / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("case", "changes", "tensors", "message"),
    [
        ("hydra", {"hidden_state_offset": 2}, {}, "2 layers before the last"),
        ("medusa v0.1", {"medusa_num_heads": 9}, {}, f"medusa_num_heads is 9, and they are of {HEADS}"),
        ("vllm-medusa", {"num_heads": 9}, {}, f"num_heads is 9, and they are of {HEADS}"),
        ("hydra", {"hydra_num_layers": 9}, {}, "hydra_num_layers is 9, and they are of "),
        ("hydra++", {"hydra_head_arch": "mlp"}, {}, "hydra_head_arch is mlp, and the tensors are those of prefix-mlp"),
        ("hydra", {"grounded_heads": False}, {}, "grounded_heads is False, and the tensors are those of True"),
        ("vllm-medusa", {"truncated_vocab_size": 9}, {}, "truncated_vocab_size is 9, and the tensors are those of 10"),
        ("vllm-medusa", {}, {"medusa_heads.blocks.1.layers.0.bias": None}, r"missing tensor .*blocks\.1\.layers\.0\.b"),
        ("vllm-medusa", {}, {"medusa_heads.lm_heads.1.weight": None}, r"missing tensor medusa_heads\.lm_heads\.1\."),
        ("vllm-medusa without biases", {"medusa_fc_bias": True}, {}, r"missing tensors .*layers\.0\.bias"),
        ("eagle", {"num_hidden_layers": 2}, {}, "num_hidden_layers is 2, and the tensors are those of 1"),
        ("eagle", {"hidden_size": 64}, {}, "hidden_size is 64, and that of tiny-llama is 32: give the base model"),
        ("eagle3 of another size", {"hidden_size": 64}, {}, "hidden_size is 64, and the tensors are those of 24"),
        ("eagle", {"hidden_act": "gelu"}, {}, "gelu"),
        ("eagle", {"partial_rotary_factor": 0.5, "rope_scaling": LLAMA3}, {}, "partial_rotary_factor is 0.5"),
        ("speculators", {"transformer_layer_config": {"rope_parameters": PART}}, {}, "partial_rotary_factor is 0.5"),
        ("eagle", {"sliding_window": 16}, {}, "attention within a window"),
        ("hass of speculators", {"layernorms": True}, {}, "unknown key layernorms"),
        (
            "hass of speculators",
            {"transformer_layer_config": {"steering": 2}},
            {},
            r"unknown key transformer_layer_con",
        ),
        ("eagle3", {"norm_before_fc": True}, {}, "norm_before_fc is True, and the tensors are those of False"),
        ("eagle3", {"eagle_config": {"use_mtp_layernorm": True}}, {}, "use_mtp_layernorm is True"),
        ("eagle3 with layers of its own", {"eagle_config": {IDS: [1, 2, 3]}}, {}, "1, 2, 3. in eagle_config"),
        ("eagle3", {"eagle_config": {"norm_output": 2}}, {}, "norm_output is False, and 2 in eagle_config"),
        ("eagle3", {"sliding_window": 4}, {}, r"sliding_window is 4 and layer_types is missing: give \["),
        ("eagle3", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, {}, "give one type and its tokens"),
        ("eagle3", {"layer_types": ["sliding_attention"]}, {}, "sliding_window None: give one type"),
        ("eagle3", {"layer_types": ["chunked_attention"]}, {}, "layer_types has chunked_attention; only full_att"),
        ("eagle3 with a window", {"use_sliding_window": False}, {}, "use_sliding_window is false, and layer_types"),
        ("eagle3", {"hidden_size": 64}, {}, "hidden_size is 64, and that of tiny-llama is 32"),
        ("speculators", {"num_hidden_layers": 2}, {}, "num_hidden_layers is 2, and the tensors are those of 1"),
        ("eagle3", {"use_last_layernorm": False}, {}, "use_last_layernorm is False, and such heads cannot be read"),
        ("eagle", {"rope_scaling": {"rope_type": "su", "factor": 4.0}}, {}, "rope_type is 'su'; only default, dyn"),
        ("eagle3", {"rope_parameters": {"rope_theta": 5e5}}, {}, "rope_theta is .*: give one of them"),
        ("eagle3", {"draft_vocab_size": 12}, {}, "draft_vocab_size is 12, and the tensors are those of 10"),
        ("eagle3", {"truncated_vocab_size": 12}, {}, "truncated_vocab_size is 12, and the tensors are those of 10"),
        ("eagle3", {"num_aux_hidden_states": 4}, {}, "num_aux_hidden_states is 4, and the tensors are those of 3"),
        ("eagle3", {"target_layer_count": 9}, {}, "target_layer_count is 9, and tiny-llama has 8"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state is False, and the t"),
        ("eagle3 of the last hidden state", {"eagle_config": {}}, {}, "use_aux_hidden_state is True, and the tensors"),
        ("accelerator", {"emb_dim": 48}, {}, "emb_dim is 48, and the hidden states of .* have 32"),
        *(
            (case, {"steering": 2}, {}, "unknown key steering")
            for case in ("medusa v0.1", "vllm-medusa", "hydra", "accelerator", "eagle", "eagle3", "speculators")
        ),
        ("eagle3", {"eagle_config": {"steering": 2}}, {}, r"unknown key eagle_config\.steering"),
        ("eagle3", {}, {"d2t": torch.full((10,), 500)}, "d2t makes the ids .* different integers in 0 … 23"),
        ("eagle3", {}, {"t2d": torch.ones(24, dtype=torch.bool)}, "t2d and d2t name different draft tokens"),
        ("eagle3", {}, {"fc.weight": torch.full((32, 96), torch.nan)}, r"the tensor .*fc\.weight has a NaN"),
        (
            "speculators",
            {},
            {"layers.1.input_layernorm.weight": torch.ones(32)},
            "it has several layers, and an EAGLE-3",
        ),
        ("eagle3", {"target_hidden_size": 64}, {}, "states of 64 numbers, and those of .* 32"),
        ("medusa v0.1", {}, {"999999999.0.linear.weight": torch.zeros(2, 2)}, "theirs"),
        ("accelerator", {"scale_input": "false"}, {}, "theirs"),
        ("accelerator", {"n_predict": -1}, {}, "theirs"),
        ("accelerator, tied and scaled", {"n_predict": 10**6}, {}, "theirs"),
        ("accelerator", {"inner_dim": 10**12}, {}, "theirs"),
        ("accelerator", {"n_candidates": 10**12}, {}, "theirs"),
        ("eagle", {"head_dim": 10**12}, {}, "theirs"),
        ("speculators", {"draft_vocab_size": 10**12}, {"lm_head.weight": None}, "theirs"),
        ("eagle", {"num_attention_heads": "4"}, {}, "theirs"),
        ("eagle", {"rope_scaling": "linear"}, {}, "theirs"),
        ("eagle3", {IDS: [1, 2, 9]}, {}, r"layers are \[1, 2, 9\]; they must lie in 0 … 8"),
        (
            "eagle3",
            {IDS: [1, 2]},
            {},
            r"fc reads 96 numbers of a token, .* have 32, .* are \[1, 2\].* the base model",
        ),
        ("eagle3", {"eagle_config": "text"}, {}, "theirs"),
        ("eagle3", {}, {"d2t": torch.zeros(())}, "theirs"),
        ("vllm-medusa", {}, {"medusa_heads.token_map": torch.tensor([500] * 10)}, "theirs"),
    ],
)
def test_what_makes_no_sense_or_is_not_computed_here_is_an_error_of_the_file(
    case: str, changes: dict[str, Any], tensors: dict[str, Any], message: str, *, target: TargetModel, tmp_path: Path
) -> None:
    head = made(case, target)
    head.config |= changes
    changed = {**head.tensors, **tensors}
    head.tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises((CheckpointCorrupt, UnsupportedModel), match=message):
        convert(written(head, tmp_path / "theirs"), tmp_path / "ours", base=target)
    assert not (tmp_path / "ours").exists()


def test_nested_json_and_endless_trees_are_errors_of_the_file(target: TargetModel, tmp_path: Path) -> None:
    head = made("medusa v0.1", target)
    head.config["medusa_choices"] = [path for depth in (1, 2, 3) for path in product(range(20), repeat=depth)]
    convert(written(head, tmp_path / "theirs"), tmp_path / "ours", base=target)
    assert len(read_head(tmp_path / "ours").profile.paths) < 128
    for content, message in (
        ("[" * 100_000, ""),
        ('{"version": "2", "version": "1"}', "the key 'version' is there twice"),
    ):
        (tmp_path / "theirs" / "config.json").write_text(content)
        with pytest.raises(CheckpointCorrupt, match=rf"config\.json.*{message}"):
            convert(tmp_path / "theirs", tmp_path / "more", base=target)


@pytest.mark.parametrize("case", ["medusa v0.1", "hydra", "accelerator", "eagle", "eagle3", "speculators"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int64])
@pytest.mark.few(8)
def test_quantised_tensors_are_refused(dtype: torch.dtype, case: str, target: TargetModel, tmp_path: Path) -> None:
    head = made(case, target)
    name = max(name for name, tensor in head.tensors.items() if tensor.dim() == 2 and "embed" not in name)
    head.tensors[name] = head.tensors[name].to(dtype)
    with pytest.raises(CheckpointCorrupt, match=f"{re.escape(name)} holds {dtype}"):
        convert(written(head, tmp_path / "theirs"), tmp_path / "ours", base=target)


ROPE: dict[str, dict[str, Any]] = {"default": {}, "linear": {"factor": 4.0}}
ROPE |= {"yarn": {"factor": 4.0, "original_max_position_embeddings": 64}}
ROPE |= {"llama3": {**LLAMA3, "original_max_position_embeddings": 1024}}


@pytest.mark.parametrize("rope", ROPE)
@torch.no_grad()
def test_a_small_llama_is_an_ordinary_one(rope: str, tmp_path: Path) -> None:
    """A Llama of transformers with the same weights and positions."""
    positions = {"rope_theta": 10000.0, **ROPE[rope], "rope_type": rope}
    changes = {"rope_parameters": positions, "max_position_embeddings": 256}
    name = on_disk(tmp_path / "model", dtype=torch.bfloat16, **changes)
    target = TargetModel.load(name, dtype=torch.float32)
    head = tiny_head("small-llama", target, **target.layer_sizes, num_layers=2, draft_vocab_size=12)
    for parameter in head.parameters():
        parameter.data = published.numbers(*parameter.shape)
    save_head(head, tmp_path / "head", base=target, profile=AcceptanceProfile.assumed(head.config.num_heads))
    folder = export_head(tmp_path / "head", tmp_path / "out", model=name).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == target.tokenizer.get_vocab()
    ids = torch.randint(3, target.vocab_size, (1, 9))
    features = head(torch.zeros(1, 9, target.hidden_size), ids)
    expected = head.logits(features[0].roll(1, dims=1), 0)  # head 0 at t is the model after t+1 tokens
    torch.testing.assert_close(model(ids).logits[..., head.draft_vocab], expected, rtol=1e-4, atol=1e-4)


def test_the_type_of_the_file_is_kept(target: TargetModel, tmp_path: Path) -> None:
    head = made("vllm-medusa without biases", target)
    head.tensors = {name: tensor.bfloat16() for name, tensor in head.tensors.items()}
    convert(written(head, tmp_path / "theirs"), tmp_path / "ours", base=target)
    assert {tensor.dtype for tensor in load_file(tmp_path / "ours" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_head_beside_its_base_model_is_found(target: TargetModel, tmp_path: Path) -> None:
    folder = written(made("medusa v0.1", target), tmp_path / "theirs")
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    assert is_published(folder)
    assert convert(folder, tmp_path / "ours", base=target).config.num_heads == HEADS


def test_a_whole_model_is_told_from_a_head(tmp_path: Path) -> None:
    name = on_disk(tmp_path / "model", **DEEP)
    for opened in (lambda: import_head(name, tmp_path / "ours", model=name), lambda: load(name, head=name)):
        with pytest.raises(ModelNotFound, match=f"is a whole model, not a draft head: .* --draft-model {name}"):
            opened()


def test_names_do_not_reach_the_terminal_raw(target: TargetModel, tmp_path: Path) -> None:
    head = made("medusa v0.1", target)
    head.tensors["\x1b[2J"] = torch.zeros(1)
    with pytest.raises(CheckpointCorrupt, match=r"surplus tensor '\\x1b\[2J'"):
        convert(written(head, tmp_path / "theirs"), tmp_path / "ours", base=target)
    head.tensors = {"\x1b[2J": torch.zeros(1)}
    with pytest.raises(ModelNotFound, match=r"has the tensors '\\x1b\[2J': they"):
        convert(written(head, tmp_path / "others"), tmp_path / "ours", base=target)


def test_layer_numbers_of_other_engines(target: TargetModel, tmp_path: Path) -> None:
    """At the top they are ours; in ``eagle_config`` the layer before is named."""
    for key, number in (("top", 3), ("eagle_config", 4)):
        head = made("eagle3", target)
        given = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
        head.config |= given if key == "top" else {"eagle_config": given}
        layout = convert(written(head, tmp_path / key), tmp_path / f"{key}_ours", base=target)
        assert layout.config.options()["layers"] == [number - 2, number, number + 3]


def test_what_is_assumed_is_said_when_it_is_imported_and_when_it_is_loaded(
    stored: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = written(made("eagle3", stored), tmp_path / "theirs")
    assert main(["import", str(theirs), "--model", stored.model_id, "--out", str(tmp_path / "ours")]) == 0
    guess = f"it is assumed that it reads the layers [2, 4, 5], as the files do not say it ({IDS}), and that half of"
    assert guess in capsys.readouterr().out
    for head in (tmp_path / "ours", theirs):
        with pytest.warns(BaseModelWarning, match=re.escape(guess)) as said:
            load(stored.model_id, head, precision="fp32")
        assert len(said) == 1


@pytest.mark.parametrize(
    ("case", "given", "guess"),
    [
        ("eagle3 of the last hidden state", {IDS: [1, 3, 6]}, r"not the layers \[1, 3, 6\], as it has no fc"),
        ("eagle3 with layers of its own", {"target_model_type": "qwen3"}, "model_type is llama, and not qwen3"),
        ("eagle3 with layers of its own", {"target_model_type": "llama_with_images"}, None),
    ],
)
def test_what_a_file_names_and_nothing_reads_is_said(
    case: str, given: dict[str, Any], guess: str | None, *, target: TargetModel, tmp_path: Path
) -> None:
    head = made(case, target)
    head.config |= given
    *found, measured = convert(written(head, tmp_path / "theirs"), tmp_path / "ours", base=target).guesses
    assert "half of its draft tokens" in measured
    assert len(found) == (guess is not None)
    assert guess is None or re.search(guess, found[0])


def test_a_head_reads_what_leaves_the_last_layer(stored: TargetModel) -> None:
    """By hooks and in native passes: it is what the final norm makes the last hidden state of."""
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    behind, last = stored.hidden_states(ids, [8]).chunk(2, -1)
    torch.testing.assert_close(stored.decoder.norm(behind), last)
    fast = TargetModel.load(stored.model_id, dtype=torch.float32).sped_up()
    assert fast.native is not None
    _, _, hidden = runner_for(fast, (0, 8)).prefill([ids[0].tolist()])
    torch.testing.assert_close(hidden[0][-1].chunk(2, -1)[1], behind[0, -1], rtol=1e-4, atol=1e-4)


def test_a_bias_behind_the_attention_is_refused_unless_it_is_zero(target: TargetModel, tmp_path: Path) -> None:
    head = made("eagle of qwen2", target)
    bias = head.tensors["layers.0.self_attn.o_proj.bias"] = torch.zeros(target.hidden_size)
    convert(written(head, tmp_path / "zero"), tmp_path / "ours", base=target)
    bias[3] = 1.0
    with pytest.raises(CheckpointCorrupt, match=r"surplus tensor layers\.0\.self_attn\.o_proj\.bias"):
        convert(written(head, tmp_path / "one"), tmp_path / "more", base=target)


@pytest.mark.parametrize("options", [{"norm_heads": True}, {"window": 4}])
def test_what_no_engine_reads_is_not_exported(options: dict[str, Any], stored: TargetModel, tmp_path: Path) -> None:
    head = tiny_head("eagle3", stored, **options, layers=[1, 3, 6])
    save_head(head, tmp_path / "head", base=stored, profile=AcceptanceProfile.assumed(head.config.num_heads))
    for layout in ("eagle3", "speculators"):
        with pytest.raises(DraftHeadsError, match=r"norms queries and keys or has a window.* imported from"):
            export_head(tmp_path / "head", tmp_path / "out", model=stored.model_id, to=layout)
