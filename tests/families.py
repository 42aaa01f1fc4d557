"""Tiny random models of many families, an integer tokenizer and untrained heads: the world of the tests."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftheads.cpu.native_library import load_library
from draftheads.decode.request import GenerationResult
from draftheads.decode.step_costs import StepCosts
from draftheads.heads import head_classes
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.drafter import Drafter, DraftSession
from draftheads.speculation.shapes import BestFirst, Shape
from draftheads.speculation.tree import Tree

needs_library = pytest.mark.skipif(
    load_library() is None, reason="the native library is off, or was not built: no C++ compiler"
)

# few enough tokens that untrained heads are right now and then, so that paths of all lengths are accepted
VOCAB = 24
# the range is far above the usual 0.02, so that logits are well apart and greedy text is not one token for ever
COMMON = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.4}
SMALL = {
    **COMMON,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
ALTERNATING: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": SMALL,
    "qwen3": {**SMALL, "head_dim": 8},
    "mistral": {**SMALL, "sliding_window": 8},
    "mixtral": {**SMALL, **LOCAL_MOE, "sliding_window": None},
    "phi3": SMALL,
    "olmo2": SMALL,
    "granite": {**SMALL, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "gpt2": GPT2,
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "gemma2": {**SMALL, "head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": {**SMALL, **ALTERNATING, "head_dim": 8},
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED_MOE = {**MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
DEEPSEEK = {**GROUPED_MOE, **LATENT, "q_lora_rank": 16}
NOTHING: dict[str, Any] = {}
HEADS_OF_8 = {"head_dim": 8}
PARTIAL_GPT = {**GPT2, "n_ctx": 256, "rotary_dim": 4}
LINEAR_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
LINEAR: dict[str, Any] = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 8),
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, **LINEAR_LAYERS,
}  # fmt: skip
MAMBA2 = {
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state"), 8),
    "mamba_n_groups": 2, "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
SHARED_EXPERT = {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 16}
# earlier versions of transformers have no functions that can be followed in trees
HAS_RECURRENT = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**SMALL, **LINEAR},
    "granitemoehybrid": {
        **SMALL, **MAMBA2, **LOCAL_MOE, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16,
    },
}  # fmt: skip
FURTHER_RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64, "head_dim": 8, "lm_head_multiplier": 0.5},
    "falcon_mamba": {"state_size": 4},
    "jamba": {
        **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
        **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
        **dict.fromkeys(("num_experts", "mamba_d_state", "mamba_dt_rank"), 4),
    },
    "kimi_linear": {
        **MOE, **LATENT, **LINEAR_LAYERS, "num_experts": 4,
        "linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**MOE, "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 16},
    "nemotron_h": {
        **GROUPED_MOE, "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "head_dim"), 8),
        "n_groups": 2, "chunk_size": 16, "moe_shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, **SHARED_EXPERT},
    "qwen3_next": {**LINEAR, **SHARED_EXPERT},
    "zamba2": {
        "num_key_value_heads": 4, "n_mamba_heads": 4, "mamba_d_state": 8, "mamba_ngroups": 1, "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1],
    },
}  # fmt: skip
if not HAS_RECURRENT:
    RECURRENT_FAMILIES, FURTHER_RECURRENT = {}, {}
LAYER_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "head_dim": 8}
# options beyond SMALL of families that make test-thorough compares with transformers
FURTHER_FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("apertus", "arcee", "biogpt", "cohere", "diffllama", "ernie4_5_moe", "nemotron"), NOTHING),
    **dict.fromkeys(("olmo", "persimmon", "phi", "smollm3", "stablelm", "starcoder2"), NOTHING),
    **dict.fromkeys(("ernie4_5", "gemma", "glm", "glm4", "helium", "hunyuan_v1_dense", "seed_oss"), HEADS_OF_8),
    **dict.fromkeys(("granitemoe", "phimoe"), LOCAL_MOE),
    **dict.fromkeys(("cohere2", "exaone4", "olmo3"), ALTERNATING),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), DEEPSEEK),
    **dict.fromkeys(("codegen", "gptj"), PARTIAL_GPT),
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {**GROUPED_MOE, "n_shared_experts": 1},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ALTERNATING["layer_types"] * 2, "sliding_window": 8,
        "num_kv_shared_layers": 2, "intermediate_size": [48, 48, 32, 48], **LAYER_INPUTS,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0], "laurel_rank": 8, "altup_num_inputs": 2,
    },
    "gemma4_text": {**ALTERNATING, **LAYER_INPUTS, "global_head_dim": 16, "final_logit_softcapping": 5.0},
    "glm4_moe": {**GROUPED_MOE, "head_dim": 8},
    "gpt_bigcode": GPT2,
    "gpt_oss": {**ALTERNATING, **LOCAL_MOE, "head_dim": 8},
    "granitemoeshared": {**LOCAL_MOE, "shared_intermediate_size": 16},
    "jetmoe": {"num_local_experts": 4, "kv_channels": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen2_moe": SHARED_EXPERT,
    "qwen3_moe": {**MOE, "num_experts": 4, "head_dim": 8},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
}  # fmt: skip
FURTHER_FAMILIES |= FURTHER_RECURRENT
ALL_FAMILIES = {
    **FAMILIES,
    **RECURRENT_FAMILIES,
    **{name: {**SMALL, **options} for name, options in FURTHER_FAMILIES.items()},
}
Answer = tuple[int, ...]  # token ids
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [3]]
# for batches: no two rows alike, lengths from 1 to 14
EIGHT = [*PROMPTS, [4, 5], [22, 3, 9, 4], [8, 8, 8, 8, 8, 8], [20, 19, 18], [6, 21]]
TREES = {
    "chain": Tree.chain(3),
    "cartesian": Tree.cartesian([3, 2, 2]),
    "ragged": Tree.from_paths([(0,), (1,), (4,), (0, 0), (0, 2), (4, 1), (0, 2, 0), (4, 1, 3)]),
    "64 nodes": Tree.from_paths(
        [(a,) for a in range(10)]
        + [(a, b) for a in range(6) for b in range(6)]
        + [(0, a, b) for a in range(6) for b in range(3)][:17]
    ),
}

# rules by which each row's tree grows at each step
GROWING: dict[str, BestFirst] = {
    "best first": BestFirst(24, top_k=6, beam=4),
    "sure ones": BestFirst(40, top_k=VOCAB, beam=6, threshold=0.03),
    "fewer nodes than depths": BestFirst(3, top_k=2),
}


class IntegerTokenizer:
    """Token 65 is the text "<65>"; enough of a tokenizer for the engine."""

    eos_token_id = None
    chat_template = None

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(f"<{token}>" for token in token_ids)

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % (VOCAB - 3) for letter in text]}


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> TargetModel:
    """A random model of the family, a few thousand parameters."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**ALL_FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(requires_grad=False)
    return TargetModel(model, IntegerTokenizer(), f"tiny-{family}")


def fitting(method: str, **options: Any) -> dict[str, Any]:
    """The options as far as the method has them: one layer where there can be one."""
    if method in ("eagle3", "mlp-speculator", "mtp"):
        options.pop("num_layers", None)
    return options


def saved_model(target: TargetModel, folder: Path) -> Path:
    """The folder, with the model and its tokenizer."""
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(str(folder))
    return folder


def tiny_head(method: str, model: TargetModel, *, num_heads: int = 3, seed: int = 0, **options: Any) -> DraftHead:
    """An untrained head with weights that are not its starting values."""
    config_class, head_class = head_classes(method)
    sizes: dict[str, Any] = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    if method in ("eagle3", "dflash", "dflash2", "dspark", "p-eagle"):
        sizes["layers"] = [0, 1]
    config = config_class(**{**sizes, **fitting(method, num_heads=num_heads, **options)})
    torch.manual_seed(seed)
    head = head_class(config)
    vocab = torch.arange(model.vocab_size)[-config.draft_vocab_size :] if config.draft_vocab_size else None
    head.initialise(model.weights, vocab)
    for parameter in head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return head.eval().requires_grad_(requires_grad=False)


def tiny_profile(tree: Tree, num_heads: int = 3, **changes: Any) -> AcceptanceProfile:
    """A profile whose static tree of that many nodes is the given one."""
    paths = [list(path) for path in tree.paths[1:]]
    values: dict[str, Any] = {
        "temperature": 0.0, "num_texts": 4, "num_tokens": 80, "top_k": 6, "beam": 4,
        "temperatures": [1.0] * num_heads, "paths": paths,
        "static_tokens": [round(1.0 + 0.5 * n / (n + 2), 4) for n in range(len(paths) + 1)],
        "dynamic_tokens": [round(1.0 + 0.6 * n / (n + 2), 4) for n in range(24)],
    }  # fmt: skip
    return AcceptanceProfile(**{**values, **changes})


def by_hand(points: Iterable[tuple[str, int, int, float]]) -> StepCosts:
    """Costs of ("verify", rows, nodes, milliseconds) and (any kind of tree, rows, levels, milliseconds)."""
    passes = {rows * nodes: ms for part, rows, nodes, ms in points if part == "verify"}
    drafts = sorted((rows, levels, ms) for part, rows, levels, ms in points if part != "verify")
    return StepCosts(tuple(sorted(passes.items())), tuple(drafts))


@torch.no_grad()  # as in decoding
def propose(drafter: Drafter, context: Context, shape: Shape | None = None) -> Draft:
    """The first draft of a new batch; in the drafter's default shape where none is given."""
    shape = shape or drafter.default_shape
    assert shape is not None
    return drafter.start().propose(context, shape)


class PlantedDrafter(Drafter, DraftSession):
    """A drafter that knows the answers and plants them along a random path of its tree; the other nodes are noise.

    So every length of accepted path, every sibling and every rank comes up.
    """

    needs_history = True

    def __init__(self, tree: Tree | None, answers: dict[tuple[int, ...], tuple[int, ...]], *, seed: int = 0) -> None:
        self.default_shape = tree
        self.answers = answers  # prompt -> plain answer
        self.generator = torch.Generator().manual_seed(seed)
        self.texts: list[list[int]] = []  # of the rows, roots included, as the contexts told

    def start(self) -> Self:
        self.texts = []
        return self

    def propose(self, context: Context, shape: Shape) -> Draft:
        """Also checks that the context says what was accepted."""
        assert isinstance(shape, Tree)
        self._note(context)
        batch, nodes = len(context.root_ids), shape.num_nodes
        token_ids = torch.randint(0, VOCAB, (batch, nodes), generator=self.generator)
        for row in range(batch):
            path = shape.paths[self._any_node(nodes)]
            self._plant(token_ids[row], [shape.paths.index(path[:depth]) for depth in range(1, len(path) + 1)], row)
        token_ids[:, 0] = context.root_ids
        return Draft.on_tree(shape, token_ids)

    def observe(self, context: Context) -> None:
        self._note(context)

    def keep(self, rows: torch.Tensor) -> None:
        self.texts = [self.texts[row] for row in rows.tolist()]

    def _note(self, context: Context) -> None:
        counts, roots = context.num_accepted.tolist(), context.root_ids.tolist()
        self.texts += [[] for _ in roots[len(self.texts) :]]  # rows that joined: their context is the whole prompt
        for row, (count, root) in enumerate(zip(counts, roots, strict=True)):
            assert count >= 1
            self.texts[row] = [*self.texts[row][:-1], *context.token_ids[row, :count].tolist(), root]

    def _any_node(self, nodes: int) -> int:
        return int(torch.randint(0, nodes, (1,), generator=self.generator))

    def _plant(self, token_ids: torch.Tensor, path: list[int], row: int) -> None:
        for node, token in zip(path, self._coming(self.texts[row]), strict=False):
            token_ids[node] = token

    def _coming(self, text: list[int]) -> tuple[int, ...]:
        """How plain decoding goes on."""
        prompt, answer = next((p, a) for p, a in self.answers.items() if tuple(text[: len(p)]) == p)
        done = len(text) - len(prompt)
        assert tuple(text[len(prompt) :]) == answer[:done]
        return answer[done:]


class PlantedRandomTrees(PlantedDrafter):
    """The same on trees that no rule explains: of any size at each step, and in each row with any parents."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], *, max_nodes: int, seed: int = 0) -> None:
        super().__init__(None, answers, seed=seed)
        self.max_nodes = max_nodes

    def propose(self, context: Context, shape: Shape) -> Draft:
        self._note(context)
        batch, nodes = len(context.root_ids), 1 + self._any_node(self.max_nodes)
        token_ids = torch.randint(0, VOCAB, (batch, nodes), generator=self.generator)
        chances = torch.rand(batch, nodes, generator=self.generator) ** 0.5  # rather deep than flat
        parents = (chances * torch.arange(nodes)).long()
        ancestors = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
        for row in range(batch):
            for node in range(1, nodes):
                ancestors[row, node] |= ancestors[row, parents[row, node]]
            path = ancestors[row, self._any_node(nodes)].nonzero()[1:, 0].tolist()  # parents come first
            self._plant(token_ids[row], path, row)
        token_ids[:, 0] = context.root_ids
        depths = ancestors.sum(-1) - 1
        deepest = int(depths.max())
        # it may say that the tree is deeper than it is, as who has not asked the device must
        return Draft(token_ids, parents, depths, ancestors, deepest + self._any_node(nodes - deepest))


def ids(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    """The tokens of several answers."""
    return [result.token_ids for result in results]


def tokens_per_step(results: Sequence[GenerationResult]) -> float:
    """Of several answers together."""
    return sum(len(result.token_ids) - 1 for result in results) / sum(result.num_steps for result in results)
