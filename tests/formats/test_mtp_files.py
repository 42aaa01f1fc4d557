"""MTP layers of models' own files: what they compute, with a history and in trees; losslessness; training; errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config

import draftheads
from draftheads.checkpoints.checkpoint import load_head, read_head
from draftheads.cli.main import main
from draftheads.decode.engine import Engine
from draftheads.errors import CheckpointCorrupt, CheckpointMismatch, UnsupportedModel
from draftheads.formats.reading import convert, is_published
from draftheads.heads import head_classes
from draftheads.heads.base import DraftHead
from draftheads.heads.stateful import StatefulSession
from draftheads.models.model import TargetModel
from draftheads.models.model_config import layer_settings
from draftheads.speculation.draft import Context
from draftheads.train.losses import depth_weights
from draftheads.train.new_head import Start
from draftheads.train.recipes import RECIPES
from families import GROWING, HAS_RECURRENT, PROMPTS, SMALL, TREES, VOCAB, tiny_model
from mtp_files import KINDS, SlowMtp, Tensors, model_for, random_layer
from training_world import VOCAB as WORDS
from training_world import chat_tokenizer, counting_chats, lines, write_chats

RECURRENT = [kind for kind in KINDS if KINDS[kind].family.startswith("qwen3_")]
USED = [kind for kind in KINDS if HAS_RECURRENT or kind not in RECURRENT]


def write(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def files(kind: str, model: TargetModel, folder: Path) -> tuple[Path, Tensors]:
    """Of a whole model, of which the layer is a part."""
    tensors = random_layer(kind)
    copies = {}
    if kind == "deepseek-v3":
        prefix = KINDS[kind].layer
        copies[f"{prefix}embed_tokens.weight"] = model.weights.embedding.clone()
        copies[f"{prefix}shared_head.head.weight"] = model.weights.lm_head.clone()
    rest = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    write(folder, {**rest, **tensors, **copies})
    told = json.loads(model.model.config.to_json_string())
    named = {"speculators_model_type": "mtp", "transformer_layer_config": told, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(named if kind == "speculators" else told))
    return folder, tensors


def imported(kind: str, model: TargetModel, folder: Path) -> tuple[DraftHead, Tensors]:
    source, tensors = files(kind, model, folder / "theirs")
    assert is_published(source)
    assert convert(source, folder / "ours", base=model).config.method == "mtp"
    return load_head(folder / "ours", model), tensors


def log_probs(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def text(length: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, length, 32, generator=chance)
    return hidden, torch.randint(0, VOCAB, (rows, length), generator=chance)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", USED)
@torch.no_grad()
def test_training_sees_what_the_equations_say(kind: str, tmp_path: Path) -> None:
    """At all places, at all depths."""
    model = model_for(kind)
    head, tensors = imported(kind, model, tmp_path)
    slow, (hidden, ids) = SlowMtp(kind, tensors, model), text(9)
    features, following = head(hidden, ids), ids[0].tolist()
    assert head.config.num_heads == 3
    for depth in range(3):
        for t in range(9 - 1 - depth):
            expected = slow.logits(hidden[0, : t + 1], following[1 : t + 2], following[t + 2 : t + 2 + depth])
            close(log_probs(head.logits(features[depth, 0, t], depth)), log_probs(expected))


@pytest.mark.parametrize("steps", [[(7, 1)], [(3, 1), (5, 4), (7, 9)]], ids=["at once", "in steps"])
@pytest.mark.parametrize("kind", USED)
@torch.inference_mode()
def test_every_node_of_a_tree_is_what_the_equations_say(
    kind: str, steps: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Two rows of different lengths, read at once or in steps; drafts in between leave nothing behind."""
    model = model_for(kind)
    head, tensors = imported(kind, model, tmp_path)
    slow, (hidden, ids) = SlowMtp(kind, tensors, model), text(12, rows=2)
    session, before = head.start(), (0, 0)
    assert isinstance(session, StatefulSession)
    for number, ends in enumerate(steps):
        counts = torch.tensor(ends) - torch.tensor(before)
        places = (torch.tensor(before)[:, None] + torch.arange(int(counts.max()))).clamp_max(11)
        rows = torch.arange(2)[:, None]
        context = Context(hidden[rows, places], ids[rows, places], counts, ids[torch.arange(2), torch.tensor(ends)])
        before = ends
        if number == 1:
            session.observe(context)  # it is read with the next one
            continue
        state, paths = head.begin(session.root(context), 5), [[[]], [[]]]
        for depth in range(5):
            ours = log_probs(head.predict(state, depth))
            for row, end in enumerate(ends):
                for node, path in enumerate(paths[row]):
                    close(
                        ours[row, node], log_probs(slow.logits(hidden[row, :end], ids[row, 1 : end + 1].tolist(), path))
                    )
            best = ours.topk(3).indices
            parents = torch.tensor([[len(paths[0]) - 1, 0, 0]] * 2)  # not in order, and one node has two children
            tokens = best[rows, parents, torch.tensor([[0, 1, 2]] * 2)]
            paths = [
                [paths[r][p] + [t] for p, t in zip(parents[r].tolist(), tokens[r].tolist(), strict=True)]
                for r in range(2)
            ]
            state = head.descend(state, depth, parents, tokens)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", USED)
def test_it_decodes_its_own_model_without_changing_a_word(kind: str, tmp_path: Path) -> None:
    """In batches, on a tree and on growing trees, deeper than it was trained; also with faster modules."""
    model = model_for(kind)
    head, _ = imported(kind, model, tmp_path)
    settings: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}
    prompts = [*PROMPTS, [4, 5], [22, 3, 9, 4]]
    plain = [result.token_ids for result in Engine(model, max_batch_size=1).generate(prompts, **settings)]
    for fast in (False, True):
        if fast:
            head.speed_up()
        for shape in (TREES["64 nodes"], GROWING["best first"]):
            results = Engine(model, head, shape=shape, max_batch_size=3).generate(prompts, **settings)
            assert [result.token_ids for result in results] == plain
            assert max(result.tokens_per_step for result in results) > 1.0, "nothing was ever accepted"


@pytest.mark.parametrize("kind", USED)
def test_the_memory_of_a_token_is_what_is_said(kind: str, tmp_path: Path) -> None:
    if kind == "deepseek-v3" and not HAS_RECURRENT:
        pytest.skip("earlier versions of transformers cache whole keys and values")
    model = model_for(kind)
    head, _ = imported(kind, model, tmp_path)
    session, (hidden, ids) = head.start(), text(6)
    assert isinstance(session, StatefulSession)
    session.root(Context(hidden[:, :5], ids[:, :5], torch.tensor([5]), ids[:, 5]))
    (kept,) = session.history.layers
    assert kept is not None
    assert sum(part[0, 0].numel() * part.itemsize for part in kept) == session.head.bytes_per_slot


def with_layer(kind: str, folder: Path) -> Path:
    """A folder of a model that has the layer in its own files."""
    model_for(kind, vocab_size=len(WORDS)).model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **random_layer(kind)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """Of Qwen3.5."""
    if not HAS_RECURRENT:
        pytest.skip("transformers is too old for trees in its recurrent layers")
    return with_layer("qwen3.5", tmp_path / "model")


@pytest.mark.filterwarnings("ignore:.*it is assumed that half of its draft tokens")
def test_a_model_drafts_with_the_layer_of_its_own_folder(
    own_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, out = str(own_folder), tmp_path / "head"
    assert main(["import", name, "--model", name, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "read an MTP layer; saved in" in said
    assert f"draftheads tune --model {name} --head" in said
    saved = read_head(out)
    assert (saved.method, saved.config.num_heads, saved.profile.temperatures) == ("mtp", 3, [1.0] * 3)
    layer = saved.config.options()["layer"]
    assert (layer["model_type"], layer["intermediate_size"], layer["head_dim"]) == ("qwen3_5_text", 48, 8)
    assert not {"vocab_size", "layer_types", "eos_token_id", "dtype"} & set(layer)
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    (plain,) = draftheads.load(name, precision="fp32").generate([PROMPTS[0]], **settings)
    for head in (str(out), name):
        (drafted,) = draftheads.load(name, head=head, precision="fp32").generate([PROMPTS[0]], **settings)
        assert drafted.token_ids == plain.token_ids


def test_a_model_is_loaded_whose_configuration_does_not_name_the_layer(tmp_path: Path) -> None:
    """As MiMo, if its configuration names the family whose layers it has."""
    model = TargetModel.load(with_layer("mimo", tmp_path / "model"), tokenizer=chat_tokenizer())
    assert model.config.model_type == "qwen2"


def test_training_it_further_lowers_its_loss(own_folder: Path, tmp_path: Path) -> None:
    """The run takes depths, draft vocabulary and the order in fc from the layer, and its first loss is the layer's."""
    name = str(own_folder)
    assert main(["import", name, "--model", name, "--out", str(tmp_path / "head")]) == 0
    data = write_chats(tmp_path / "chats.jsonl", counting_chats(60))
    common = ["train", "--recipe", "mtp", "--model", name, "--data", str(data), "--start-from", str(tmp_path / "head")]
    settings = ["--batch-tokens", "256", "--learning-rate", "0.01", "--epochs", "3"]
    assert main([*common, *settings, "--out", str(tmp_path / "out")]) == 0
    before, after = read_head(tmp_path / "head").config, read_head(tmp_path / "out").config
    assert before == after
    losses = [sum(line["head_losses"]) for line in lines(tmp_path / "out")]
    assert losses[-1] < 0.8 * losses[0]
    begun = lines(tmp_path / "out", "validation.jsonl")[0]["losses"]
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert sum(metrics["losses"]) < 0.8 * sum(begun)


def test_the_weights_of_depths_are_those_of_the_paper() -> None:
    weights = depth_weights(3, RECIPES["mtp"].settings["depth_decay"])
    assert [round(float(weight), 2) for weight in weights / weights.sum()] == [0.51, 0.31, 0.18]


@pytest.mark.parametrize("kind", ["glm-4.5"])
def test_a_new_head_starts_as_the_layer_with_its_router(kind: str, tmp_path: Path) -> None:
    """The router's bias is no parameter, and is copied all the same."""
    model = model_for(kind)
    _, tensors = imported(kind, model, tmp_path)
    start = Start.read(str(tmp_path / "ours"), model)
    config = head_classes("mtp")[0](32, VOCAB, num_heads=3, layer=model.head_sizes["layer"])  # type: ignore[call-arg]
    head = head_classes("mtp")[1](config)
    head.initialise(model.weights)
    start.copy_into(head)
    assert all(torch.equal(tensor, start.tensors[name]) for name, tensor in head.state_dict().items())
    bias = head.get_buffer("layer.block.mlp.gate.e_score_correction_bias")
    assert torch.equal(bias, tensors[f"{KINDS[kind].layer}mlp.gate.e_score_correction_bias"])


def test_a_new_layer_starts_at_the_size_of_hidden_states() -> None:
    for family in ("qwen2", *(["qwen3_5_text"] if HAS_RECURRENT else [])):  # norms of both kinds
        model = tiny_model(family)
        head = head_classes("mtp")[1](head_classes("mtp")[0](32, VOCAB, layer=model.head_sizes["layer"]))  # type: ignore[call-arg]
        head.initialise(model.weights)
        hidden, ids = text(30)
        head.start_near(iter([(7 * hidden[0], ids[0])]))
        size = float(head(hidden, ids).detach().square().mean().sqrt())
        assert size == pytest.approx(7, rel=0.05)


def test_a_family_whose_configuration_extends_another_has_the_settings_of_both() -> None:
    """As MiMo's own code does."""

    class MiMoConfig(Qwen2Config):
        model_type = "mimo"

        def __init__(self, *args: Any, num_nextn_predict_layers: int = 0, **named: Any) -> None:
            super().__init__(*args, **named)
            self.num_nextn_predict_layers = num_nextn_predict_layers

    plain = layer_settings(Qwen2Config(**SMALL))
    found = layer_settings(MiMoConfig(**SMALL, num_nextn_predict_layers=1))
    assert found == {**plain, "model_type": "mimo"}
    assert head_classes("mtp")[0](32, VOCAB, layer=found).layer == found  # type: ignore[call-arg, attr-defined]


# --- errors ---


def test_a_family_that_is_not_known(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    with pytest.raises(CheckpointCorrupt, match=r"layer of the model's own class; mixtral is none of .*qwen3_next"):
        convert(write(tmp_path / "model", random_layer("mimo")), tmp_path / "out", base=model)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model.layers.3.eh_proj.weight": (32, 64)}, UnsupportedModel, "has several MTP layers; a head has one"),
        ({"mtp.layers.1.input_layernorm.weight": (32,)}, UnsupportedModel, "has several MTP layers; a head has one"),
        ({"model.layers.2.mlp.experts.3.up_proj.weight": None}, CheckpointCorrupt, r"missing tensor .*\.3\.up_proj"),
        ({"adapter.weight": (32, 32)}, CheckpointCorrupt, r"surplus tensor adapter\.weight: read as an MTP layer"),
        ({"lm_head.weight": (VOCAB, 32)}, CheckpointMismatch, "its lm_head.weight differs .* from the lm_head"),
        ({"model.layers.2.embed_tokens.weight": (VOCAB, 32)}, CheckpointMismatch, r"embed_tokens.weight differs by"),
        ({"model.layers.2.shared_head.head.weight": (VOCAB, 32)}, CheckpointMismatch, r"differs .* from the lm_head"),
    ],
)
def test_files_that_are_not_the_layer(
    change: dict[str, tuple[int, ...] | None], error: Any, message: str, tmp_path: Path
) -> None:
    tensors: dict[str, Any] = {
        **random_layer("glm-4.5"),
        **{name: torch.ones(shape) if shape else None for name, shape in change.items()},
    }
    folder = write(tmp_path / "model", {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(error, match=message):
        convert(folder, tmp_path / "out", base=model_for("glm-4.5"))


@pytest.mark.parametrize("where", ["", "text_config", "transformer_layer_config"])
@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({"rms_norm_eps": 0.5}, CheckpointMismatch, "rms_norm_eps is 0.5, and 1e-0. in .*: give the model that"),
        ({"num_attention_heads": 8}, CheckpointMismatch, "num_attention_heads is 8, and 4 in"),
        ({"rope_theta": 7.0}, CheckpointMismatch, "'rope_theta': 7.0.*, and .*'rope_theta': 10000.0"),
        ({"mtp_scale": 2.0}, UnsupportedModel, "unknown key mtp_scale"),
    ],
)
def test_configurations_of_another_layer(
    told: dict[str, Any], where: str, error: Any, message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", {"mtp_layers.0.input_proj.weight": torch.ones(32, 64)})
    (folder / "config.json").write_text(json.dumps({where: told} if where else told))
    with pytest.raises(error, match=message):
        convert(folder, tmp_path / "out", base=model_for("mimo"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2 is none of"),
        ({"attn_implementation": "some/kernels"}, "layer has attn_implementation, which is no setting"),
        ({"quantization_config": {}}, "layer has quantization_config"),
        ({"num_attention_heads": 0}, "layer makes no layer of qwen2"),
    ],
)
def test_a_saved_head_whose_layer_is_impossible(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    imported("mimo", model_for("mimo"), tmp_path)
    path = tmp_path / "ours" / "config.json"
    config = json.loads(path.read_text())
    config["head"]["layer"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointCorrupt, match=message):
        read_head(tmp_path / "ours")
