"""A frozen causal language model: its types, sizes and weights, and from token ids to last hidden states and logits.

What a pass needs beside tokens (caches, masks, positions) is in ``runners``.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from os import PathLike
from types import ModuleType
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from draftheads.cpu.kernels import Native, NativeInt8, PackedLinear, RoundedEmbedding
from draftheads.cpu.native_library import single_torch_thread
from draftheads.cpu.native_step import FINAL_NORMS, NativeStep, native_step
from draftheads.cpu.optimise import TYPICAL_TEXT, speed_up
from draftheads.errors import InvalidSettings, UnsupportedModel
from draftheads.models.chat_template import unused_token
from draftheads.models.file_checks import check_quantisation
from draftheads.models.fingerprint import (
    Fingerprints,
    WeightFacts,
    fingerprint_of,
    layer_matrices,
    sampled_layers,
    tokenizer_fingerprint,
    weights_digest,
)
from draftheads.models.generation import GenerationRules
from draftheads.models.model_config import (
    check_length,
    eos_ids_of,
    head_sizes,
    layer_sizes,
    max_positions_of,
    precision_of,
    warn_of_length,
)
from draftheads.models.model_layers import (
    ATTENTION_KINDS,
    FAMILIES,
    LongRope,
    layer_inputs,
    logit_scale,
    problems_of,
    recurrent_modules,
    require_layers,
    sharing_weights,
    use_long_rope,
)
from draftheads.models.model_names import name_of_loaded
from draftheads.models.packed_weights import PackedWeights
from draftheads.models.pretrained import LoadOptions, hide_gpu_advice, load_pretrained
from draftheads.speculation.draft import TargetWeights, as_logits
from draftheads.utils.counts import counted

_NORMS = (*FINAL_NORMS, "layer_norm")  # after the last layer


@dataclass
class StepMode:
    """How steps are run. A capture that fails changes it."""

    graphs: bool = False  # steps have static shapes, which on CUDA are captured as graphs


@dataclass(frozen=True, eq=False)
class TargetModel:
    """The model, its tokenizer and its id, and all that follows from them. Its weights never change here.

    Raises:
        UnsupportedModel: on construction, if the model's state cannot be rewound, or if its logits are not a known
            function of its last hidden state.
    """

    model: Any  # a transformers causal LM in eval mode
    tokenizer: Any  # its tokenizer
    model_id: str  # its id on the Hub, or its folder: a head records it as its base model
    chat_template: str | None = None  # replaces the tokenizer's own
    step_mode: StepMode = field(default_factory=StepMode)
    facts: WeightFacts | None = None  # of a model with faster modules
    native: NativeStep | None = None  # computes all layers of a pass on a CPU
    max_length: int | None = None  # most tokens of a text, in place of what the configuration says
    packed: PackedWeights | None = None  # of the cache, until the model has faster modules
    only_reads: bool = False  # whole texts, over several devices; it verifies no drafts

    def __post_init__(self) -> None:
        check_length(self.config, self.max_length, self.model_id, switches=self.long_rope is not None)
        if problem := next(problems_of(self), None):
            raise UnsupportedModel(f"{self.model_id} ({self.config.model_type}) {problem}")

    @classmethod
    def load(
        cls,
        name: str | PathLike[str],
        *,
        tokenizer: Any = None,
        dtype: torch.dtype | str | Callable[[Any], torch.dtype] | None = None,
        device: str | int | torch.device | None = None,
        chat_template: str | None = None,
        max_length: int | None = None,
        **options: Unpack[LoadOptions],
    ) -> Self:
        """Loads a model by its name, folder or Hub id; see :func:`draftheads.models.pretrained.load_pretrained`.

        Warns:
            LengthWarning: texts must be shorter than the configuration allows.
        """
        parts = load_pretrained(name, tokenizer=tokenizer, dtype=dtype, device=device, **options)
        packed = options.get("packed")
        part = options.get("parts") or packed
        facts: Any = {"packed": packed, "facts": part and part.facts}
        return cls(*parts, chat_template=chat_template, max_length=max_length, **facts).warned()

    @classmethod
    def of(cls, model: Any, tokenizer: Any, *, chat_template: str | None = None, max_length: int | None = None) -> Self:
        """A loaded ``transformers`` model, whose weights are shared. The given model, its mode and flags do not change.

        Raises:
            InvalidSettings: there is no tokenizer, the model has an adapter in it, or ``max_length`` is impossible.
            UnsupportedModel: it has no lm_head, or as for the class.
        """
        if tokenizer is None:
            raise InvalidSettings(
                "a loaded model needs its tokenizer: give tokenizer=AutoTokenizer.from_pretrained(…), or its name"
            )
        kind = type(model).__name__
        if getattr(model, "peft_config", None):
            raise InvalidSettings(
                f"the loaded {kind} has an adapter in it: give peft's model.merge_and_unload(), or the adapter's folder"
            )
        if model.get_output_embeddings() is None:
            raise UnsupportedModel(f"the loaded {kind} has no lm_head: load it with AutoModelForCausalLM")
        check_quantisation(f"the loaded {kind}", model.config)
        if model.device.type == "cpu":
            hide_gpu_advice()
        shared = sharing_weights(model).eval()
        return cls(shared, tokenizer, name_of_loaded(model), chat_template, max_length=max_length).warned()

    def warned(self) -> Self:
        """The model itself, after a warning if texts must be shorter than the configuration allows."""
        if self.long_rope is None and self.max_length is None:
            warn_of_length(self.config, self.max_positions, self.model_id)
        return self

    def twin(self) -> Self:
        """A copy of the modules that shares all weights: changes to its modules do not affect this model."""
        return self.changed(sharing_weights(self.model), self.weight_facts())

    def sped_up(self, *, bits: int | None = None) -> Self:
        """This model with faster kernels, by :func:`draftheads.cpu.optimise.speed_up`; it takes the modules over."""
        facts, packed = self.weight_facts(), self.packed  # before packing, which changes the facts
        if packed is not None and packed.found:
            packed.give(self.model)
        else:
            typical = None
            if bits is not None:
                most = max_positions_of(self.config, switches=self.long_rope is not None)
                typical = torch.tensor([self.tokenizer(TYPICAL_TEXT)["input_ids"][:most]]) % self.vocab_size
                facts = replace(facts, precision=f"int{bits}")
            speed_up(self.model, bits=bits, typical_ids=typical)
            if packed is not None:
                packed.keep(self.model, facts)
        return self.changed(self.model, facts, native=native_step(self.model, self.windows), packed=None)

    def weight_facts(self) -> WeightFacts:
        """Of its modules as they are."""
        return WeightFacts(self.dtype, self.precision, self.weights_fingerprint, self.layers_fingerprint)

    def changed(self, model: Any, facts: WeightFacts, native: NativeStep | None = None, **changes: Any) -> Self:
        """The same with other modules, whose weights have these facts."""
        return replace(self, model=model, facts=facts, native=native, step_mode=replace(self.step_mode), **changes)

    @property
    def config(self) -> Any:
        """The configuration of the text model."""
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        embedding = self.model.get_input_embeddings()
        is_fetched = self.only_reads and embedding.weight.is_meta  # by accelerate, when it is used
        return torch.device("cpu") if is_fetched or isinstance(embedding, RoundedEmbedding) else embedding.weight.device

    @cached_property
    def dtype(self) -> torch.dtype:
        """In which type the model computes."""
        own: torch.dtype = (self.facts or self.model.get_input_embeddings().weight).dtype
        return own

    @cached_property
    def precision(self) -> str:
        """``fp32``, ``bf16``, ``fp16``, ``int8`` or ``int4``: the type in which linear layers compute."""
        return precision_of(self.dtype) if self.facts is None else self.facts.precision

    @property
    def is_quantised(self) -> bool:
        """Whether ``transformers`` loaded it with quantised weights."""
        return getattr(self.model.config, "quantization_config", None) is not None

    @property
    def hidden_size(self) -> int:
        """D, the size of a hidden state."""
        return int(self.lm_head.in_features)

    @property
    def vocab_size(self) -> int:
        """V, the rows of the lm_head (a tokenizer may use fewer)."""
        return int(self.lm_head.out_features)

    @cached_property
    def layer_sizes(self) -> dict[str, Any]:
        """:func:`draftheads.models.model_config.layer_sizes` of this model."""
        return layer_sizes(self.config, self.hidden_size)

    @property
    def head_sizes(self) -> dict[str, Any]:
        """:func:`draftheads.models.model_config.head_sizes` of this model."""
        return head_sizes(self.config, self.hidden_size)

    @cached_property
    def max_positions(self) -> int | None:
        """The maximal number of tokens in a text; None if it is not known."""
        return self.max_length or max_positions_of(self.config, switches=self.long_rope is not None)

    @cached_property
    def long_rope(self) -> LongRope | None:
        """What has the factors of LongRoPE; None without it."""
        return use_long_rope(self.decoder, self.config)

    def is_long(self, num_tokens: int) -> bool:
        """Whether a text of that many tokens at most has the long factors of LongRoPE. Its last token is not read."""
        return self.long_rope is not None and num_tokens - 1 > self.long_rope.original

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a text."""
        sources = getattr(self.model, "generation_config", None), self.config, self.tokenizer
        return eos_ids_of(*sources, vocab_size=self.vocab_size)

    @property
    def mask_token_id(self) -> int:
        """A token that texts do not have and whose embedding is not zero, for the masks of block drafters.

        From zeros attention has no queries, and their layers no gradients.
        """
        zero = (~self.weights.embedding.any(1)).nonzero()[:, 0].tolist()
        return unused_token(self, self.vocab_size, {*self.eos_ids, *zero})

    @cached_property
    def generation(self) -> GenerationRules:
        """What its generation configuration does to its texts. Warns of what is not applied."""
        return GenerationRules(self.model, self.model_id, vocab_size=self.vocab_size, device=self.device)

    @property
    def lm_head(self) -> nn.Linear:
        """The output embedding."""
        head: nn.Linear = self.model.get_output_embeddings()
        return head

    @property
    def weights(self) -> TargetWeights:
        """The weights that a draft head may read. Packed ones are unpacked at each call: do not keep them."""
        lm_head = self.lm_head
        return TargetWeights(
            self.model.get_input_embeddings().weight,
            lm_head.weight,
            lm_head.bias,
            self._logit_scale,
            self._softcap,
            lm_head.product if isinstance(lm_head, PackedLinear) else None,
            getattr(self.model.get_input_embeddings(), "product", None),
        )

    @cached_property
    def weights_fingerprint(self) -> str:
        """A digest of some numbers of every weight, which identifies the model's version. 4-bit weights: as stored."""
        return weights_digest(self.model.named_parameters()) if self.facts is None else self.facts.weights_fingerprint

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
        weights = self.weights  # packed ones are unpacked
        matrices = fingerprint_of(weights.embedding), fingerprint_of(weights.lm_head)
        return Fingerprints(*matrices, tokenizer_fingerprint(self.tokenizer), self.layers_fingerprint)

    def layer_matrices(self) -> list[Tensor]:
        """The matrices between embedding and lm_head."""
        return layer_matrices(self.decoder)

    @cached_property
    def decoder(self) -> Any:
        """The model below the lm_head."""
        return self.model.get_decoder()

    @cached_property
    def has_layers(self) -> bool:
        """Whether its layers are loaded: without them it has logits of hidden states, and reads no text."""
        return bool(self.decoder.config.num_hidden_layers)

    @property
    def final_norm(self) -> nn.Module | None:
        """The module whose output is h_t; None if it has none of the known names."""
        return next((getattr(self.decoder, name) for name in _NORMS if hasattr(self.decoder, name)), None)

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers. Raises :class:`UnsupportedModel` if they are not found."""
        count = len(self.layer_kinds)
        for module in self.decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise UnsupportedModel(f"{self.model_id} has no list of {count} layers")

    def check_layers(self, layers: Sequence[int]) -> None:
        """Raises :class:`InvalidSettings` if the model has fewer layers than those whose inputs a drafter reads.

        The number of its layers stands for what leaves the last one, before the final norm.
        """
        count = len(self.layer_kinds)
        if wrong := [layer for layer in layers if not 0 <= layer <= count]:
            there = f"{self.model_id} has {counted(count, 'layer')}: choose among 0 … {count}"
            raise InvalidSettings(f"hidden states of layer {wrong[0]} are to be read, but {there}")

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer: ``full_attention``, ``sliding_attention``, or another name in the configuration."""
        if kinds := getattr(self.config, "layer_types", None):
            return tuple(kinds)
        kind = "sliding_attention" if self.sliding_window else "full_attention"
        return (kind,) * int(self.config.num_hidden_layers)

    @cached_property
    def attention_kinds(self) -> frozenset[str]:
        """Kinds of layers that have a mask."""
        return ATTENTION_KINDS & {"full_attention" if kind == "hybrid" else kind for kind in self.layer_kinds}

    @property
    def sliding_window(self) -> int | None:
        """The number of tokens in the window of a sliding layer, the token itself included."""
        if getattr(self.config, "use_sliding_window", True) is False:
            return None
        return getattr(self.config, "sliding_window", None)

    @property
    def windows(self) -> list[int]:
        """How many tokens a token of each layer sees; 0: all."""
        return [self.sliding_window or 0 if kind == "sliding_attention" else 0 for kind in self.layer_kinds]

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether it has recurrent layers or short convolutions, of a family whose trees are proved."""
        return self.config.model_type in FAMILIES

    @cached_property
    def recurrent_modules(self) -> list[ModuleType]:
        """:func:`draftheads.models.model_layers.recurrent_modules` of this model."""
        return recurrent_modules(self.decoder)

    @cached_property
    def cache_name(self) -> str:
        """The decoder's argument for its KV cache: transformers 5.24 renamed ``past_key_values``."""
        names = signature(type(self.decoder).forward).parameters
        return next((name for name in ("cache", "cache_params") if name in names), "past_key_values")

    @property
    def has_static_steps(self) -> bool:
        """Whether steps have static shapes, which can be captured. On a CPU static steps are slower; tests use them."""
        return self.step_mode.graphs and not self.is_recurrent

    def computing(self) -> AbstractContextManager[None]:
        """The context of steps of this model: native ones need the cores that torch's threads would keep."""
        return nullcontext() if self.native is None else single_torch_thread()

    def run(self, layers: Sequence[int], **inputs: Any) -> tuple[Tensor, Tensor]:
        """One pass of the decoder, with its inputs for B rows of T tokens.

        Returns:
            h_t (B, T, D), and what a drafter reads: the inputs of n layers side by side (B, T, n·D); without any, h_t.

        Raises:
            UnsupportedModel: a layer's input does not have the size of h_t, or the layers are not loaded.
        """
        require_layers(self)
        if not layers:  # nothing is noted: such a pass can be captured
            last = self.in_own_type(self.decoder(**inputs).last_hidden_state)
            return last, last
        with layer_inputs([[*self.layers, self.final_norm or self.decoder][layer] for layer in layers]) as read:
            last = self.in_own_type(self.decoder(**inputs).last_hidden_state)
        for layer, states in zip(layers, read, strict=True):
            if states is None or states.shape != last.shape:
                shape = None if states is None else tuple(states.shape)
                sizes = f"the input of layer {layer} is {shape} and the last hidden state {tuple(last.shape)}"
                fix = "a head that reads several layers needs states of one size"
                raise UnsupportedModel(f"{self.model_id}: {sizes}; {fix}")
        inputs_read = [states.to(last.device) for states in read if states is not None]
        return last, self.in_own_type(torch.cat(inputs_read, -1))

    def in_own_type(self, states: Tensor) -> Tensor:
        """Mamba adds the outputs of its layers in fp32."""
        return states.to(self.dtype) if self.is_recurrent else states

    @torch.inference_mode()
    def hidden_states(self, token_ids: Tensor, layers: Sequence[int] = ()) -> Tensor:
        """h_t for whole texts in one pass: (B, T) -> (B, T, D). Right padding does not change the tokens before it.

        With n ``layers`` (B, T, (n+1)·D): their inputs, and behind them h_t.
        """
        return self.live_states(token_ids, layers)

    def live_states(self, token_ids: Tensor, layers: Sequence[int] = ()) -> Tensor:
        """The same with gradients."""
        last, states = self.run(layers, input_ids=token_ids, use_cache=False)
        return torch.cat([states, last], -1) if layers else last

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits: (…, D) -> (…, V)."""
        return as_logits(self.lm_head(hidden), self._logit_scale, self._softcap)

    @cached_property
    def _softcap(self) -> float | None:
        return getattr(self.config, "final_logit_softcapping", None)

    _logit_scale = cached_property(logit_scale)

    @cached_property
    def finds_most_likely(self) -> bool:
        """Whether :meth:`most_likely` is for this model: its logits grow with what a native lm_head computes."""
        is_native = type(getattr(self.lm_head, "product", None)) in (Native, NativeInt8)
        is_plain = self._softcap is None and (self._logit_scale == 1.0 or self.dtype == torch.float32)
        return self.native is not None and is_native and is_plain and self._logit_scale > 0.0

    def most_likely(self, hidden: Tensor) -> Tensor:
        """The first of the largest logits at each place, (…, D) -> (…) int64, where :attr:`finds_most_likely`."""
        best: Tensor = self.lm_head.product.largest(hidden.flatten(0, -2), self._logit_scale)  # type: ignore[operator, union-attr]
        return best.view(hidden.shape[:-1])
