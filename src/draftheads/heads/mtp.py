"""MTP: the layer for multi-token prediction that lies in the target's own checkpoint (DeepSeek-V3, arXiv 2412.19437).

Entry s of its history is fc([norm(E(x_{s+1})); norm(h_s)]) at position s, and its layer is of the target's own class.
From the entries up to t it computes h'_{t+1}, after a norm of its own, and the target's lm_head predicts x_{t+2} from
that. Deeper predictions use entries with h' for h. Norms are the target's, too: some multiply by 1 + w.

The layer is that of ``transformers``, which no other file of heads knows. Its attention is given a cache, a mask and
positions, so it can read texts, and draft tokens that see those above them.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftheads.cpu.optimise import GROUPED_ATTENTION
from draftheads.errors import InvalidSettings
from draftheads.heads.base import HeadConfig
from draftheads.heads.history import HeadKVCache, KeysValues
from draftheads.heads.layers import fusion
from draftheads.heads.stateful import PathHead, last_of, next_tokens
from draftheads.speculation.draft import Context, TargetWeights

Keep = Callable[[KeysValues], KeysValues]  # stores keys and values (B, S, G, d), and returns all (B, C, G, d)
# families whose layers are tested, and their names in transformers
FAMILIES = {name: name for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen2", "qwen3", "llama")}
FAMILIES |= {"glm4_moe": "glm4_moe", "deepseek_v3": "deepseek_v3", "mimo": "qwen2"}
# full attention, and experts if the family has them; no embedding
_ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0}
_ONE_LAYER |= {"mlp_only_layers": [], "decoder_sparse_step": 1, "vocab_size": 1}
_ONE_LAYER |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_LAYER = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
_LAYER |= {"intermediate_size": 128}  # of a model of any size


def decoder_of(layer: Mapping[str, Any], hidden_size: int) -> Any:
    """A model of one layer with random weights. ``layer`` has its family as ``model_type``, and settings of that.

    Raises:
        InvalidSettings: the family is not known, or the settings make no model.
    """
    from transformers import AutoModel, PreTrainedConfig  # noqa: PLC0415 - slow to import
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    settings = {name: value for name, value in layer.items() if name != "model_type"}
    if (family := layer.get("model_type")) not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise InvalidSettings(f"an mtp head has a layer of the model's own class; {family} is none of {known}")
    kind = CONFIG_MAPPING[FAMILIES[family]]
    names = {"head_dim", *signature(kind.__init__).parameters} - signature(PreTrainedConfig.__init__).parameters.keys()
    if unknown := sorted(settings.keys() - names):
        raise InvalidSettings(f"layer has {unknown[0]}, which is no setting of a layer of {family}")
    try:
        config = kind(**{**settings, **_ONE_LAYER, "hidden_size": hidden_size})
        return AutoModel.from_config(config, attn_implementation=GROUPED_ATTENTION, dtype=torch.float32)
    except Exception as error:  # a file may say anything of the layer
        raise InvalidSettings(f"layer makes no layer of {family}: {error}") from error


class TargetLayer(nn.Module):
    """The only layer of a decoder of :func:`decoder_of`."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.block, config = decoder.layers[0], decoder.config
        with torch.device("cpu"):  # in a list, since it has no weights and is no part of a saved head
            self.rotary = [type(decoder.rotary_emb)(config)]
        names = signature(type(self.block).forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # before transformers 5.24
        latent = getattr(config, "kv_lora_rank", None)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kept = latent + config.qk_rope_head_dim if latent else 2 * config.num_key_value_heads * size
        self.kv_numbers = int(kept)  # of a token

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, keep: Keep) -> Tensor:
        """(B, S, D) -> (B, S, D) at positions (1 or B, S); mask (1 or B, S, C), True where seen of what is kept."""

        def update(keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
            """What attention of transformers asks of a cache: (B, G, S, d) in, and all that is kept, (B, G, C, d)."""
            kept = keep(KeysValues(keys.transpose(1, 2), values.transpose(1, 2)))
            return tuple(part.transpose(1, 2) for part in kept)

        named: dict[str, Any] = {self.cache_name: SimpleNamespace(update=update), "position_ids": positions}
        turns = self.rotary[0](x, positions)
        return self.block(x, attention_mask=mask[:, None], position_embeddings=turns, **named)


@dataclass(frozen=True)
class MtpConfig(HeadConfig):
    """MTP: one layer, asked once for each depth; ``num_heads`` is how deep it is trained."""

    hidden_first: bool = False
    """Whether fc reads [h; E(x)], as in MiMo, in place of [E(x); h]."""
    layer: dict[str, Any] = field(default_factory=lambda: dict(_LAYER))
    """The layer's family (model_type) and settings, which training takes from the target's configuration."""

    method: ClassVar[str] = "mtp"
    description: ClassVar[str] = (
        "the layer for multi-token prediction that large models have in their own files, used again at each depth"
    )
    paper: ClassVar[str] = "DeepSeek-V3, 2024; FastMTP, 2025"
    one_layer: ClassVar[str] = "MTP"
    one_lm_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        with torch.device("meta"):
            decoder_of(self.layer, self.hidden_size)


class MtpHead(PathHead):
    """The layer reads fc([norm(E(x_{t+1})); norm(h_t)]), and then the same of draft tokens and its own outputs h'."""

    predicts_hidden_states: ClassVar[bool] = False

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config, num_layers=1)
        decoder = decoder_of(config.layer, config.hidden_size)
        self.hidden_first = config.hidden_first
        self.embedding_norm, self.hidden_norm, self.norm = (deepcopy(decoder.norm) for _ in range(3))
        self.fusion = fusion(config.hidden_size, state_first=config.hidden_first, bias=False)
        self.layer = TargetLayer(decoder)

    @property
    def bytes_per_slot(self) -> int:
        return self.layer.kv_numbers * self.dtype.itemsize

    def bind(self, weights: TargetWeights) -> None:
        super().bind(weights)
        self.layer.rotary[0].to(weights.lm_head.device)

    @torch.no_grad()
    def start_near(self, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Starts h' at the size of h_t: both kinds of norms start by multiplying by 1."""
        for states, _ in texts:
            self.norm.weight.add_(states.float().square().mean().sqrt() - 1.0)
            break

    def inputs(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """What the layer reads, (…, D), of tokens (…) and h or h' of the tokens before them, (…, D)."""
        parts = [self.embedding_norm(self.embedded(token_ids)), self.hidden_norm(states)]
        return self.fusion(torch.cat(parts[::-1] if self.hidden_first else parts, -1))

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T, D), (B, T) -> (K, B, T, D), in K passes: each but the first reads as h what the one before made."""
        length = token_ids.shape[1]
        positions = torch.arange(length, device=hidden.device)[None]
        mask = torch.ones(1, length, length, dtype=torch.bool, device=hidden.device).tril()
        own = torch.eye(length, dtype=torch.bool, device=hidden.device)[None]  # below the text, only the path is seen
        features, passes = [hidden], list[KeysValues]()

        def side_by_side(new: KeysValues) -> KeysValues:
            passes.append(new)
            return KeysValues(*(torch.cat(parts, 1) for parts in zip(*passes, strict=True)))

        for i in range(self.config.num_heads):
            x = self.inputs(token_ids.roll(-(i + 1), dims=1), features[-1])
            features.append(self.norm(self.layer(x, positions + i, mask, side_by_side)))
            mask = torch.cat([mask, own], -1)
        return torch.stack(features[1:])

    def read(self, context: Context, rows: slice, history: HeadKVCache) -> Tensor:
        """The h' after the root, (rows, D)."""
        x = self.inputs(next_tokens(context), context.hidden)
        return last_of(self.step(x, rows, history), context.num_accepted)

    def step(
        self, x: Tensor, rows: slice, history: HeadKVCache, *, depth: int = 0, seen: Tensor | None = None
    ) -> Tensor:
        """(rows, P, D) -> h' (rows, P, D)."""
        at = history.places(rows, x.shape[1], depth=depth, seen=seen)
        keep = partial(history.write, 0, rows, positions=at.slots, longest=at.longest)
        return self.norm(self.layer(x, at.positions, at.back >= 0, keep))
