"""Merging: the weights of the definition, and a model that decodes losslessly with its head."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import draftheads
from adapter_world import saved_adapter
from draftheads.cli import commands
from draftheads.errors import CheckpointCorrupt, CheckpointMismatch, InvalidSettings, ModelNotFound, StorageError
from draftheads.models.adapter import load_merged
from draftheads.models.adapter import merged as merged_by_peft
from draftheads.models.fingerprint import difference
from draftheads.models.model import TargetModel
from draftheads.train.options import MergeOptions
from draftheads.train.run import train
from draftheads.train.tuned_model import merge, merged_model
from fake_progress import FakeProgress
from families import fitting
from joint_world import harness, joint_options, on_disk
from thorough import some_rows
from training_world import VOCAB, chat_model


def tuned_weights(target: TargetModel) -> dict[str, Tensor]:
    """W + (α/r) B A of every layer, by the definition."""
    state, weights = target.model.state_dict(), {}
    for name, tensor in state.items():
        if "lora_" not in name:
            stem = name.removesuffix("base_layer.weight")
            down, up = state.get(f"{stem}lora_A.default.weight"), state.get(f"{stem}lora_B.default.weight")
            product = torch.zeros(()) if down is None else up @ down
            weights[name.replace(".base_layer", "")] = tensor + 8 / 4 * product
    return weights


@pytest.mark.parametrize(("tied", "targets"), [(False, ()), (True, ()), (True, ("lm_head", "o_proj"))])
def test_merging_gives_the_weights_of_the_definition(chats: Path, tied: bool, targets: tuple[str, ...]):
    target = chat_model(tie_word_embeddings=tied)
    joint, batch = harness(target, chats, targets=targets)
    joint.eval()
    expected = tuned_weights(target)
    with torch.no_grad():
        logits = target.model(input_ids=batch["token_ids"]).logits
    assert torch.allclose(joint.tuned.weights.lm_head, expected["lm_head.weight"], atol=1e-6)
    prints = joint.tuned.layers_fingerprint
    assert prints != chat_model(tie_word_embeddings=tied).layers_fingerprint
    model = merged_by_peft(joint.adapter.peft_model)
    assert difference(prints, TargetModel(model, target.tokenizer, "merged").layers_fingerprint) < 1e-3
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    assert torch.equal(found["model.embed_tokens.weight"], chat_model().model.get_input_embeddings().weight)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=batch["token_ids"]).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.usefixtures("cheap_nodes")
@pytest.mark.parametrize(
    ("method", "tied"),
    some_rows(
        product(["medusa", "hydra", "hydra++", "amphista", "eagle", "eagle3", "small-llama"], [False, True]),
        *[("hydra", True), ("eagle3", False)],
    ),
)
def test_the_merged_model_decodes_losslessly_with_its_head(
    chats: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str, tied: bool
):
    model = on_disk(tmp_path / "base", tie_word_embeddings=tied)
    out, merged = tmp_path / "out", tmp_path / "merged"
    heads = fitting(method, num_heads=3)
    settings = joint_options(out, chats, method=method, model=model, epochs=6, learning_rate=0.01, **heads)
    train(settings, FakeProgress())
    capfd.readouterr()
    merge(MergeOptions(model=model, adapter=out, out=merged))
    assert capfd.readouterr() == ("", "")  # no bar of transformers
    tuned = TargetModel.load(str(merged), dtype=torch.float32)
    assert tuned.config.tie_word_embeddings == tied
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (Path(model), merged)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    assert tuned.model.generation_config.temperature == 0.7
    # the folder holds the very model that was tuned
    again = TargetModel.load(model, dtype=torch.float32)
    texts = torch.tensor([[7, 8, 9, 10, 11, 12, 13, 2]])
    original = again.logits(again.hidden_states(texts))
    again = replace(again, model=load_merged(again.model, out / "adapter"))
    found = tuned.logits(tuned.hidden_states(texts))
    torch.testing.assert_close(found, again.logits(again.hidden_states(texts)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, original, atol=0.1)
    prompts = [f"w{i} w{i + 1}" for i in range(12)]
    plain = draftheads.load(merged, precision="fp32").generate(prompts, max_new_tokens=24)
    # a fixed tree: what the profiles draft for so small a model depends on the machine
    engine = draftheads.load(merged, head=merged / "head", precision="fp32", tree=draftheads.Tree.chain(3))
    headed = engine.generate(prompts, max_new_tokens=24)
    assert [result.token_ids for result in headed] == [result.token_ids for result in plain]
    assert max(result.tokens_per_step for result in headed) > 1.2  # an untrained head makes 1.0
    # the run itself is loaded as the same model
    of_run = draftheads.load(out, precision="fp32").generate(prompts, max_new_tokens=24)
    assert of_run[0].token_ids == plain[0].token_ids
    assert draftheads.load(out, head=out / "head", tree=[[0]], precision="fp32").model.model_id == str(out)
    saved = json.loads((merged / "head" / "config.json").read_text())["base"]
    assert saved["model_id"] == str(merged)
    assert saved["fingerprints"] == vars(tuned.fingerprints)
    with pytest.raises(StorageError, match="already exists"):
        merge(MergeOptions(model=model, adapter=out, out=merged))


def test_an_lm_head_that_is_the_embedding_becomes_two_matrices_only_if_it_was_adapted(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = on_disk(tmp_path / "base", tie_word_embeddings=True)
    progress = FakeProgress()
    train(joint_options(tmp_path / "out", chats, model=model, epochs=1), progress)
    assert "the lm_head is not adapted: its matrix is the embedding's, too" in progress.stages
    base = TargetModel.load(model, dtype=torch.float32)
    asked = saved_adapter(base, tmp_path / "asked", targets=("q_proj", "lm_head"))
    for adapter, are_two in ((tmp_path / "out", False), (asked, True)):
        merged = tmp_path / f"merged-{are_two}"
        commands.merge(MergeOptions(model=model, adapter=adapter, out=merged))
        assert ("lm_head.weight" in load_file(merged / "model.safetensors")) == are_two
        told = f"are two now: {len(VOCAB) * 32 * 4 / 1e6:,.0f} MB more than the base"
        assert (told in capsys.readouterr().out) == are_two


def test_merging_keeps_the_dtype_of_the_model_files(chats: Path, tmp_path: Path):
    base = on_disk(tmp_path / "base", dtype=torch.bfloat16)
    train(joint_options(tmp_path / "out", chats, model=base, epochs=1), FakeProgress())
    for name, dtype in ((None, torch.bfloat16), ("fp32", torch.float32)):
        out = tmp_path / f"merged-{name}"
        merge(MergeOptions(model=base, adapter=tmp_path / "out", out=out, dtype=name))
        assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {dtype}
    with pytest.raises(InvalidSettings, match="dtype is 'int8'"):
        MergeOptions(model="", adapter=tmp_path, out=tmp_path, dtype="int8")


def test_an_adapter_for_another_base_is_refused(tuned: Path, tmp_path: Path):
    out = shutil.copytree(tuned, tmp_path / "out")

    def assert_refused(error: type[Exception], words: str, target: TargetModel | None = None, run: Path = out) -> None:
        with pytest.raises(error, match=words):
            merged_model(target or chat_model(), run, dtype=torch.float32, model_id="merged")

    words = "tuned for tiny-chat; this model is another, whose embedding and lm_head"
    assert_refused(CheckpointMismatch, words, replace(chat_model(seed=1), model_id="another"))
    assert_refused(CheckpointMismatch, "this model is larger", replace(chat_model(vocab_size=80), model_id="larger"))
    assert_refused(ModelNotFound, "no adapter at", run=tmp_path / "nowhere")
    file = out / "adapter" / "adapter_model.safetensors"
    whole = load_file(file)
    save_file({name: whole[name] for name in list(whole)[1:]}, file)
    assert_refused(CheckpointCorrupt, r"does not fit the model: .*missing")
    file.write_bytes(b"nonsense")
    assert_refused(CheckpointCorrupt, "cannot be read")
    (out / "adapter" / "base.json").write_text("{}")
    assert_refused(CheckpointCorrupt, "format_version is None")
