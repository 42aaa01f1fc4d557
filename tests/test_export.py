"""An exported EAGLE-3 head is the head itself, in the layout that other engines read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from draftheads import export_head
from draftheads.checkpoints.checkpoint import save_head
from draftheads.cli.main import main
from draftheads.errors import InvalidSettings, StorageError
from draftheads.export import eagle3_layout
from draftheads.heads.eagle3 import Eagle3Config, Eagle3Head
from draftheads.models.model import TargetModel
from draftheads.speculation.tree import Tree
from families import VOCAB, tiny_head, tiny_model, tiny_profile
from joint_world import on_disk

DEEP = {"num_hidden_layers": 8}  # three different layers are read
SCALED = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_parameters": SCALED, "max_position_embeddings": 256}
PLACES = torch.tensor([4, 9, 2, 20, 21, 23, 7, 10, 12, 13])  # draft tokens, in no order


def eagle3(target: TargetModel, **options: Any) -> Eagle3Head:
    """A head for the model with weights that are not its starting values."""
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, **target.head_sizes}
    config = Eagle3Config(**{**sizes, "num_heads": 3, "draft_vocab_size": len(PLACES), **options})
    torch.manual_seed(1)
    head = Eagle3Head(config)
    head.initialise(target.weights, PLACES if config.draft_vocab_size else None)
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.data = parameter.data.bfloat16().float()  # as it is saved
    return head.eval().requires_grad_(requires_grad=False)


class Published(nn.Module):
    """The layer of the published heads, of transformers' parts; its tensors have the published names."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        config = LlamaConfig(**{**given, "dtype": torch.float32}, attn_implementation="eager")
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.midlayer = nn.Module()
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self.midlayer, name, LlamaRMSNorm(size, epsilon))
        self.midlayer.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.midlayer.self_attn, name).out_features
            setattr(self.midlayer.self_attn, name, nn.Linear(2 * size, rows, bias=False))
        self.midlayer.mlp = LlamaMLP(config)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(size, epsilon) for _ in range(3 * given["fc_norm"]))
        self.norm = LlamaRMSNorm(size, epsilon)
        self.lm_head = nn.Linear(size, given["draft_vocab_size"], bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.norm_output: bool = given["norm_output"]

    def states(self, hidden: Tensor) -> Tensor:
        """What ``fc`` makes of three hidden states, (…, 3·D) -> (…, D)."""
        if self.fc_norm:
            parts = hidden.chunk(3, -1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(hidden)
        return fused

    def forward(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the last place (V',), and what the next place reads as its state (D,): inputs are (T, D)."""
        layer, positions = self.midlayer, torch.arange(len(states))[None]
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(states)], -1)[None]
        mask = torch.full((len(states), len(states)), -torch.inf).triu(1)[None, None]
        x = states + layer.self_attn(x, position_embeddings=self.rotary(x, positions), attention_mask=mask)[0][0]
        x = (x + layer.mlp(layer.post_attention_layernorm(x)))[-1]
        normed = self.norm(x)
        return self.lm_head(normed), normed if self.norm_output else x


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("llama", {}, {}),
        ("qwen3", {}, {"lm_head": "own"}),
        ("llama", YARN, {"lm_head": "low_rank", "lm_head_rank": 4}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 4}, {"fc_norm": True}),
        ("granite", {}, {"norm_output": True, "draft_vocab_size": None}),
    ],
)
@torch.no_grad()
def test_it_predicts_the_same(family: str, changes: dict[str, Any], options: dict[str, Any]) -> None:
    target = tiny_model(family, **DEEP, **changes)
    head = eagle3(target, **options)
    config, tensors = eagle3_layout(head, target)
    published = Published(config)
    ids_of = torch.arange(config["draft_vocab_size"]) + tensors.pop("d2t", 0)
    is_drafted = tensors.pop("t2d", torch.ones(target.vocab_size, dtype=torch.bool))
    assert sorted(ids_of.tolist()) == is_drafted.nonzero()[:, 0].tolist()
    assert ids_of.tolist() == (PLACES if "draft_vocab_size" not in options else torch.arange(VOCAB)).tolist()
    published.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    torch.manual_seed(2)
    hidden, ids = torch.randn(1, 20, 3 * target.hidden_size), torch.randint(3, VOCAB, (1, 20))
    expected = [head.logits(features, i)[0] for i, features in enumerate(head(hidden, ids))]
    states, embedding = published.states(hidden[0]), target.weights.embedding.float()
    for read in (1, 5, 14):  # hidden states of so many tokens are known; then it goes on from its own
        known = states[:read]
        for depth in range(3):
            logits, state = published(embedding[ids[0, 1 : len(known) + 1]], known)
            torch.testing.assert_close(logits, expected[depth][read - 1], rtol=2e-2, atol=2e-2)
            known = torch.cat([known, state[None]])


def test_types_and_settings_are_the_published_ones() -> None:
    """Names and shapes are those of :class:`Published`."""
    target = tiny_model("llama", **DEEP)
    config, tensors = eagle3_layout(eagle3(target), target)
    assert (tensors["d2t"].shape, tensors["t2d"].shape) == ((len(PLACES),), (VOCAB,))
    assert tensors["d2t"].tolist()[:4] == [4, 8, 0, 17]  # 4 - 0, 9 - 1, 2 - 2, 20 - 3
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, len(PLACES))
    assert config["hidden_size"] == config["target_hidden_size"] == 32
    assert (config["norm_before_residual"], config["tie_word_embeddings"]) == (False, False)


def test_what_the_layout_cannot_hold_is_an_error() -> None:
    target = tiny_model("llama", **DEEP)
    with pytest.raises(InvalidSettings, match=r"reads layers \[0, 3, 5\], but engines agree only on \[2, 4, 5\]"):
        eagle3_layout(eagle3(target, layers=[0, 3, 5]), target)
    shallow = tiny_model("llama")
    with pytest.raises(InvalidSettings, match="the model has 2 layers, but the layout needs the hidden states of 3"):
        eagle3_layout(eagle3(shallow), shallow)
    target.model.lm_head.bias = nn.Parameter(torch.ones(VOCAB))
    with pytest.raises(InvalidSettings, match=r"lm_head has a bias.*--lm-head own"):
        eagle3_layout(eagle3(target), TargetModel(target.model, target.tokenizer, "biased"))


def test_a_folder_for_other_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = on_disk(tmp_path / "model", **DEEP)
    target = TargetModel.load(name, dtype=torch.float32)
    head = eagle3(target)
    save_head(head, tmp_path / "head", base=target, profile=tiny_profile(Tree.chain(3)))
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "head"), "--model", name, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    speculative = json.loads(said.partition("--speculative-config '")[2].rstrip("'\n"))
    assert speculative == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 4}
    config, tensors = eagle3_layout(head, target)
    assert json.loads((out / "config.json").read_text()) == config
    found = load_file(out / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    with pytest.raises(StorageError, match="already exists"):
        export_head(tmp_path / "head", out, model=name)
    save_head(tiny_head("medusa", target), tmp_path / "medusa", base=target, profile=tiny_profile(Tree.chain(3)))
    with pytest.raises(InvalidSettings, match="is of the method medusa: only eagle3 heads can be exported"):
        export_head(tmp_path / "medusa", tmp_path / "other", model=name)
