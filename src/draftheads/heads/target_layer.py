"""A layer of the target's own class, as ``transformers`` has it. No other file of heads knows that package.

Its attention is given a cache, a mask and positions, so it can read texts, and draft tokens that see those above them.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.cpu.attention import GROUPED_ATTENTION
from draftheads.errors import InvalidSettings
from draftheads.heads.kv_cache import KeysValues

Keep = Callable[[KeysValues], KeysValues]  # stores keys and values (B, S, G, d), and returns all (B, C, G, d)
# families whose layers are tested, and their names in transformers
FAMILIES = {name: name for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen2", "qwen3", "llama")}
FAMILIES |= {"glm4_moe": "glm4_moe", "deepseek_v3": "deepseek_v3", "mimo": "qwen2"}
# full attention, and experts if the family has them; no embedding
_ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0}
_ONE_LAYER |= {"mlp_only_layers": [], "decoder_sparse_step": 1, "vocab_size": 1}
_ONE_LAYER |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


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
        turns = self.rotary[0](x, positions)
        named: dict[str, Any] = {self.cache_name: _Cache(keep), "position_embeddings": turns, "position_ids": positions}
        out: Tensor = self.block(x, attention_mask=mask[:, None], **named)
        return out


class _Cache:
    """What attention of transformers takes for a cache."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        """Keeps (B, G, S, d) and returns what is kept, (B, G, C, d)."""
        kept = self.keep(KeysValues(keys.transpose(1, 2), values.transpose(1, 2)))
        return tuple(part.transpose(1, 2) for part in kept)
