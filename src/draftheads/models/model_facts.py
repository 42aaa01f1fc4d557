"""What a loaded model says of itself: its types and sizes, its layers and weights, and its fingerprints."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.cpu.kernels import PackedLinear
from draftheads.cpu.native_step import NativeStep
from draftheads.cpu.optimise import RoundedEmbedding
from draftheads.errors import InvalidSettings, UnsupportedModel
from draftheads.models.chat_template import unused_token
from draftheads.models.fingerprint import Fingerprints, fingerprint_of, sampled_layers, tokenizer_fingerprint
from draftheads.models.long_rope import LongRope
from draftheads.models.model_config import eos_ids_of, head_sizes, layer_sizes, max_positions_of
from draftheads.models.pretrained import DTYPES
from draftheads.models.recurrent import FAMILIES, KINDS, recurrent_modules
from draftheads.speculation.draft import TargetWeights
from draftheads.utils.counts import counted


@dataclass(frozen=True)
class WeightFacts:
    """What faster modules do not show of the weights that they were made from."""

    dtype: torch.dtype
    precision: str
    weights_fingerprint: str
    layers_fingerprint: str | None


@dataclass
class StepMode:
    """How steps are run. A capture that fails changes it."""

    graphs: bool = False  # steps have static shapes, which on CUDA are captured as graphs


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """A model, its tokenizer and its id, and all that follows from them without a pass."""

    model: Any  # a transformers causal LM in eval mode
    tokenizer: Any  # its tokenizer
    model_id: str  # its id on the Hub, or its folder: a head records it as its base model
    chat_template: str | None = None  # replaces the tokenizer's own
    step_mode: StepMode = field(default_factory=StepMode)
    facts: WeightFacts | None = None  # of a model with faster modules
    native: NativeStep | None = None  # computes all layers of a pass on a CPU
    max_length: int | None = None  # most tokens of a text, in place of what the configuration says

    @property
    def windows(self) -> list[int]:
        """How many tokens a token of each layer sees; 0: all."""
        return [self.sliding_window or 0 if kind == "sliding_attention" else 0 for kind in self.layer_kinds]

    @cached_property
    def precision(self) -> str:
        """``fp32``, ``bf16``, ``fp16``, ``int8`` or ``int4``: the type in which linear layers compute."""
        if self.facts is not None:
            return self.facts.precision
        return next((name for name, dtype in DTYPES.items() if dtype == self.dtype), str(self.dtype))

    @property
    def config(self) -> Any:
        """The configuration of the text model."""
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        embedding = self.model.get_input_embeddings()
        return torch.device("cpu") if isinstance(embedding, RoundedEmbedding) else embedding.weight.device

    @property
    def is_quantised(self) -> bool:
        """Whether ``transformers`` loaded it with quantised weights."""
        return getattr(self.model.config, "quantization_config", None) is not None

    @cached_property
    def dtype(self) -> torch.dtype:
        """In which type the model computes."""
        return self._embedding.dtype if self.facts is None else self.facts.dtype

    @property
    def has_static_steps(self) -> bool:
        """Whether steps have static shapes, which can be captured. On a CPU static steps are slower; tests use them."""
        return self.step_mode.graphs and not self.is_recurrent

    @property
    def hidden_size(self) -> int:
        """D, the size of a hidden state."""
        return int(self.lm_head.in_features)

    @property
    def vocab_size(self) -> int:
        """V, the rows of the lm_head (a tokenizer may use fewer)."""
        return int(self.lm_head.out_features)

    @cached_property
    def max_positions(self) -> int | None:
        """The maximal number of tokens in a text; None if it is not known."""
        return self.max_length or max_positions_of(self.config, switches=self.long_rope is not None)

    @cached_property
    def long_rope(self) -> LongRope | None:
        """What has the factors of LongRoPE; None without it."""
        rotary = getattr(self.decoder, "rotary_emb", None)
        return rotary if isinstance(rotary, LongRope) else None

    def is_long(self, num_tokens: int) -> bool:
        """Whether a text of that many tokens at most has the long factors of LongRoPE. Its last token is not read."""
        return self.long_rope is not None and num_tokens - 1 > self.long_rope.original

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a text."""
        sources = getattr(self.model, "generation_config", None), self.config, self.tokenizer
        return eos_ids_of(*sources, vocab_size=self.vocab_size)

    @cached_property
    def weights_fingerprint(self) -> str:
        """A digest of some numbers of every weight, which identifies the model's version. 4-bit weights: as stored."""
        if self.facts is not None:
            return self.facts.weights_fingerprint
        digest = hashlib.sha256()
        for name, weight in self.model.named_parameters():
            places = torch.linspace(0, weight.numel() - 1, 16, dtype=torch.float64).long().to(weight.device)
            digest.update(name.encode() + weight.detach().reshape(-1)[places].double().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def layers_fingerprint(self) -> str | None:
        """A sample of the layers' matrices, see :class:`draftheads.models.fingerprint.Fingerprints`."""
        if self.facts is not None:
            return self.facts.layers_fingerprint
        if any(isinstance(module, PackedLinear) for module in self.decoder.modules()):
            return None  # modules that another model packed
        return sampled_layers(self.layer_matrices())

    @property
    def fingerprints(self) -> Fingerprints:
        """Equal in fp32 and bf16, and on all devices."""
        weights = self.weights
        matrices = fingerprint_of(weights.embedding), fingerprint_of(weights.lm_head)
        return Fingerprints(*matrices, tokenizer_fingerprint(self.tokenizer), self.layers_fingerprint)

    def layer_matrices(self) -> list[Tensor]:
        """The matrices between embedding and lm_head."""
        return [
            weight
            for name, module in self.decoder.named_modules()
            if "lora_" not in name and not isinstance(module, nn.Embedding)  # no adapter's
            for weight in module.parameters(recurse=False)
            if weight.dim() > 1
        ]

    @property
    def lm_head(self) -> nn.Linear:
        """The output embedding."""
        head: nn.Linear = self.model.get_output_embeddings()
        return head

    @cached_property
    def decoder(self) -> Any:
        """The model below the lm_head."""
        return self.model.get_decoder()

    @cached_property
    def cache_name(self) -> str:
        """The decoder's argument for its KV cache: transformers 5.24 renamed ``past_key_values``."""
        names = signature(type(self.decoder).forward).parameters
        return next((name for name in ("cache", "cache_params") if name in names), "past_key_values")

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer: ``full_attention``, ``sliding_attention``, or another name in the configuration."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds:
            return tuple(kinds)
        kind = "sliding_attention" if self.sliding_window else "full_attention"
        return (kind,) * int(self.config.num_hidden_layers)

    @cached_property
    def attention_kinds(self) -> frozenset[str]:
        """Kinds of layers that have a mask."""
        kinds = {"full_attention" if kind == "hybrid" else kind for kind in self.layer_kinds}
        return frozenset(kinds - KINDS if self.is_recurrent else kinds)

    @property
    def num_attention_layers(self) -> int:
        """How many layers have keys and values."""
        return sum(kind == "hybrid" or kind in self.attention_kinds for kind in self.layer_kinds)

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether it has recurrent layers or short convolutions, of a family whose trees are proved."""
        return self.config.model_type in FAMILIES

    @cached_property
    def recurrent_modules(self) -> list[ModuleType]:
        """:func:`draftheads.models.recurrent.recurrent_modules` of this model."""
        return recurrent_modules(self.decoder)

    @property
    def sliding_window(self) -> int | None:
        """The number of tokens in the window of a sliding layer, the token itself included."""
        if getattr(self.config, "use_sliding_window", True) is False:
            return None
        return getattr(self.config, "sliding_window", None)

    @property
    def weights(self) -> TargetWeights:
        """The weights that a draft head may read. Packed ones are unpacked at each call: do not keep them."""
        lm_head = self.lm_head
        return TargetWeights(
            self._embedding,
            lm_head.weight,
            lm_head.bias,
            self._logit_scale,
            self._softcap,
            lm_head.product if isinstance(lm_head, PackedLinear) else None,
            getattr(self.model.get_input_embeddings(), "product", None),
        )

    @property
    def _embedding(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @cached_property
    def layer_sizes(self) -> dict[str, Any]:
        """:func:`draftheads.models.model_config.layer_sizes` of this model."""
        return layer_sizes(self.config, self.hidden_size)

    @property
    def head_sizes(self) -> dict[str, Any]:
        """:func:`draftheads.models.model_config.head_sizes` of this model."""
        return head_sizes(self.config, self.hidden_size)

    @property
    def mask_token_id(self) -> int:
        """A token that texts do not have and whose embedding is not zero, for the masks of block drafters.

        From zeros attention has no queries, and their layers no gradients.
        """
        zero = (~self.weights.embedding.any(1)).nonzero()[:, 0].tolist()
        return unused_token(self, self.vocab_size, {*self.eos_ids, *zero})

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers. Raises :class:`UnsupportedModel` if they are not found."""
        count = len(self.layer_kinds)
        for module in self.decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise UnsupportedModel(f"{self.model_id} has no list of {count} layers")

    def check_layers(self, layers: Sequence[int]) -> None:
        """Raises :class:`InvalidSettings` if the model has fewer layers than those whose inputs a drafter reads."""
        count = len(self.layer_kinds)
        if wrong := [layer for layer in layers if not 0 <= layer < count]:
            raise InvalidSettings(
                f"hidden states of layer {wrong[0]} are to be read, but {self.model_id} has {counted(count, 'layer')}: "
                f"choose among 0 … {count - 1}"
            )

    @cached_property
    def _softcap(self) -> float | None:
        return getattr(self.config, "final_logit_softcapping", None)

    @cached_property
    def _logit_scale(self) -> float:
        if getattr(self.config, "logits_scaling", None):  # Granite divides
            return 1.0 / float(self.config.logits_scaling)
        scales = (getattr(self.config, name, None) for name in ("logit_scale", "lm_head_multiplier"))
        return float(next(filter(None, scales), 1.0))  # Cohere and Falcon-H1 multiply
