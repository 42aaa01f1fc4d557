"""A frozen causal language model: from token ids to last hidden states and logits.

What a pass needs beside tokens (caches, masks, positions) is in ``runners``.
"""

import copy
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from os import PathLike
from types import MappingProxyType
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from draftheads.cpu.kernels import PackedLinear
from draftheads.cpu.native_step import NativeStep, native_step
from draftheads.cpu.optimise import speed_up
from draftheads.cpu.threads import single_torch_thread
from draftheads.errors import GenerationWarning, InvalidSettings, LengthWarning, UnsupportedModel, require_at_least
from draftheads.models.adapter import check_base, read_lora
from draftheads.models.fingerprint import Fingerprints, fingerprint_of, sampled_layers, tokenizer_fingerprint
from draftheads.models.generation import GenerationRules
from draftheads.models.long_rope import LongRope, use_long_rope
from draftheads.models.lora_layers import add_lora
from draftheads.models.model_config import eos_ids_of, head_sizes, layer_sizes, max_positions_of, rope_kinds
from draftheads.models.model_names import find_adapter, model_id_of
from draftheads.models.pretrained import ATTENTION, DTYPES, LoadOptions, adapter_tokenizer, load_pretrained
from draftheads.models.weight_files import check_quantisation
from draftheads.speculation.draft import TargetWeights
from draftheads.utils.counts import counted
from draftheads.utils.files import user_path
from draftheads.utils.messages import short

# varied text, on which int8 finds the layers' large inputs
TYPICAL_TEXT = """
The committee met on 14 March 2019 to discuss the harbour. "Nobody asked us," said Mrs. Alvarez, who has
fished here since 1987. def mean(values): return sum(values) / len(values)  # raises ZeroDivisionError when
empty. Prices rose by 3.5% in the first quarter, and then fell again. Dear Sir, thank you for your letter; I
am sorry that the parcel never arrived. Photosynthesis turns carbon dioxide and water into glucose and oxygen.
Why did the old lighthouse keeper leave? He loved his daughter more than the sea. SELECT name, age FROM people
WHERE city = 'Oslo' ORDER BY age DESC; Der Zug nach Bern fährt um 7 Uhr. La maison est près de la rivière. 1.
Wash the rice. 2. Boil 400 ml of water."""
_ATTENTION_KINDS = {"full_attention", "sliding_attention"}
_ENDLESS_ROPES = {"default", "linear", "llama3", "yarn"}  # a position has the same cosines in texts of any length
_SLOT_BOUND_TYPES = {"bloom", "gpt_neo", "mpt"}  # they use ALiBi, or their own causal mask


def name_of_loaded(model: Any) -> str:
    """The name by which a ``transformers`` model was loaded; its class if it was made otherwise."""
    name = getattr(model.config, "_name_or_path", None)
    return model_id_of(name) if isinstance(name, str) and name else type(model).__name__


def _sharing_weights(model: Any) -> Any:
    """A copy of a model's modules with the same weights, packed ones included."""
    products = [module.product for module in model.modules() if isinstance(module, PackedLinear)]
    shared: list[Any] = [*model.parameters(), *model.buffers(), *products]
    return copy.deepcopy(model, memo={id(item): item for item in shared})


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
class TargetModel:
    """The model, its tokenizer and its id. Its weights never change here.

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

    def __post_init__(self) -> None:
        use_long_rope(self.decoder, self.config)
        self._check_length()
        unknown = set(self.layer_kinds) - _ATTENTION_KINDS
        if unknown or getattr(self.model, "_is_stateful", False):
            what = ", ".join(sorted(unknown)) or "a recurrent state"
            raise UnsupportedModel(
                f"{self.model_id} has {what}: "
                "drafts are rewound by removing cache entries, which needs plain attention layers"
            )
        if self.config.model_type in _SLOT_BOUND_TYPES or getattr(self.config, "alibi", False):
            raise UnsupportedModel(
                f"{self.model_id} ({self.config.model_type}) derives positions from cache slots: "
                "trees need attention that depends on positions and masks only"
            )
        attention = str(self.config._attn_implementation)  # noqa: SLF001 - no public name
        if any(kind in attention for kind in ("flash", "flex", "paged")):
            raise UnsupportedModel(
                f"{self.model_id} was loaded with attn_implementation={attention!r}; trees need a mask of four "
                f"dimensions, which {' and '.join(ATTENTION)} take: model.set_attn_implementation('sdpa')"
            )
        places = {str(weight.device) for weight in self.model.parameters()}
        if places != {str(self.device)} or self.device.type == "meta":
            raise UnsupportedModel(
                f"{self.model_id} has weights on {', '.join(sorted(places))}; drafts are verified on one device: "
                "load it with device=…, and with four_bit=True if it is too large"
            )
        if self.facts is None:  # of others, the model that they were made from was checked
            self._check_logits()

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
        target = cls(*parts, chat_template=chat_template, max_length=max_length)
        _warn_of_length(target)
        return target

    @classmethod
    def of(cls, model: Any, tokenizer: Any, *, chat_template: str | None = None, max_length: int | None = None) -> Self:
        """A loaded ``transformers`` model, whose weights are shared. The given model, its mode and flags do not change.

        Args:
            model: a causal language model, in any mode.
            tokenizer: its tokenizer.
            chat_template: replaces the tokenizer's own.
            max_length: most tokens of a text, in place of what the configuration says.

        Raises:
            InvalidSettings: there is no tokenizer, the model has an adapter in it, or ``max_length`` is impossible.
            UnsupportedModel: it has no lm_head, or as for the class.

        Warns:
            LengthWarning: as for :meth:`load`.
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
        shared = _sharing_weights(model).eval()
        target = cls(shared, tokenizer, name_of_loaded(model), chat_template, max_length=max_length)
        _warn_of_length(target)
        return target

    def twin(self) -> Self:
        """A copy of the modules that shares all weights: changes to its modules do not affect this model."""
        return self._with(_sharing_weights(self.model), self._facts())

    def with_adapter(self, folder: str | PathLike[str]) -> Self:
        """This model with a LoRA adapter (peft) on top. It shares all weights with this model, which does not change.

        Args:
            folder: of the adapter. Its own tokenizer is used, if it has one.

        Raises:
            ModelNotFound: no adapter there.
            CheckpointMismatch: it was tuned for another model.
            CheckpointCorrupt: it does not fit the layers, or is damaged.
            UnsupportedModel: it changes more than linear layers, or adds tokens: merge it.
            MissingDependency: no peft.
        """
        place = user_path(folder)
        place = find_adapter(place) or place
        matrices = read_lora(self.model, place)
        check_base(place, self.model_id, self.fingerprints)
        tokenizer = adapter_tokenizer(place) or self.tokenizer
        if hasattr(tokenizer, "__len__") and len(tokenizer) > self._embedding.shape[0]:
            raise UnsupportedModel(
                f"{place} adds tokens: its tokenizer has {len(tokenizer)} and {self.model_id} has embeddings for "
                f"{self._embedding.shape[0]}. Merge it: `draftheads merge --adapter {place} --out …`"
            )
        model = _sharing_weights(self.model)
        add_lora(model, matrices)
        digest = hashlib.sha256(self.weights_fingerprint.encode())
        for name, pair in sorted(matrices.items()):
            digest.update(name.encode() + pair.a.numpy().tobytes() + pair.b.numpy().tobytes())
        facts = WeightFacts(self.dtype, self.precision, digest.hexdigest()[:16], None)  # not the base's
        native = None if self.native is None else native_step(model, self.windows)
        return self._with(model, facts, native=native, tokenizer=tokenizer, model_id=str(place.resolve()))

    def _facts(self) -> WeightFacts:
        return WeightFacts(self.dtype, self.precision, self.weights_fingerprint, self.layers_fingerprint)

    def _with(self, model: Any, facts: WeightFacts, **changes: Any) -> Self:
        return replace(self, model=model, facts=facts, step_mode=replace(self.step_mode), **{"native": None, **changes})

    def sped_up(self, *, int8: bool = False) -> Self:
        """This model with faster kernels on a CPU. It takes the modules of this one over.

        See :func:`draftheads.cpu.optimise.speed_up`.
        """
        facts = self._facts()  # before packing, which changes them
        typical = None
        if int8:
            typical = torch.tensor([self.tokenizer(TYPICAL_TEXT)["input_ids"][: self.max_positions]]) % self.vocab_size
        speed_up(self.model, int8=int8, typical_ids=typical)
        native = native_step(self.model, self.windows)
        return self._with(self.model, replace(facts, precision="int8") if int8 else facts, native=native)

    @property
    def windows(self) -> list[int]:
        """How many tokens a token of each layer sees; 0: all."""
        return [self.sliding_window or 0 if kind == "sliding_attention" else 0 for kind in self.layer_kinds]

    @cached_property
    def precision(self) -> str:
        """``fp32``, ``bf16``, ``fp16`` or ``int8``: the type in which linear layers compute."""
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
        return self._embedding.device

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
        return self.step_mode.graphs

    def set_graphs(self, *, on: bool) -> None:
        """Turns static steps on or off, also for a running batch."""
        self.step_mode.graphs = on

    def computing(self) -> AbstractContextManager[None]:
        """The context of steps of this model: native ones need the cores that torch's threads would keep."""
        return nullcontext() if self.native is None else single_torch_thread()

    @property
    def hidden_size(self) -> int:
        """D."""
        return int(self.lm_head.in_features)

    @property
    def vocab_size(self) -> int:
        """V, the rows of the lm_head (a tokenizer may use fewer)."""
        return int(self.lm_head.out_features)

    @cached_property
    def max_positions(self) -> int | None:
        """The maximal number of tokens in a text; None if it is not known."""
        return self.max_length or max_positions_of(self.config, switches=self.long_rope is not None)

    def _check_length(self) -> None:
        require_at_least(1, max_length=self.max_length)
        longest, kinds = max_positions_of(self.config, switches=self.long_rope is not None), rope_kinds(self.config)
        if longest and (self.max_length or 0) > longest and not (kinds and kinds <= _ENDLESS_ROPES):
            raise InvalidSettings(
                f"max_length is {self.max_length:,}; {self.model_id} takes at most {longest:,} tokens: it has no "
                "positions for longer texts, or they change with the length"
            )

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
    def generation(self) -> GenerationRules:
        """What its generation configuration does to its texts. Warns of what is not applied."""
        rules = GenerationRules(self.model, vocab_size=self.vocab_size, device=self.device)
        if rules.not_applied:
            named = ", ".join(f"{name}={value!r}" for name, value in rules.not_applied.items())
            warnings.warn(
                f"{self.model_id}: its generation configuration has {short(named)}, not applied here: texts are those "
                "of generate without it",
                GenerationWarning,
                stacklevel=2,
            )
        return rules

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
        return "cache" if "cache" in signature(type(self.decoder).forward).parameters else "past_key_values"

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer: ``full_attention``, ``sliding_attention``, or another name in the configuration."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds:
            return tuple(kinds)
        kind = "sliding_attention" if self.sliding_window else "full_attention"
        return (kind,) * int(self.config.num_hidden_layers)

    @property
    def sliding_window(self) -> int | None:
        """The number of tokens in the window of a sliding layer, the token itself included."""
        if getattr(self.config, "use_sliding_window", True) is False:
            return None
        return getattr(self.config, "sliding_window", None)

    @property
    def weights(self) -> TargetWeights:
        """The weights that a draft head may read. A packed lm_head unpacks its weight at each call: do not keep it."""
        lm_head = self.lm_head
        return TargetWeights(
            self._embedding,
            lm_head.weight,
            lm_head.bias,
            self._logit_scale,
            self._softcap,
            lm_head.product if isinstance(lm_head, PackedLinear) else None,
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

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers. Raises :class:`UnsupportedModel` if they are not found."""
        count = len(self.layer_kinds)
        for module in self.decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise UnsupportedModel(f"{self.model_id} has no list of {count} layers")

    def shard(self, device: torch.device) -> None:
        """Splits each layer over all processes of a run (FSDP), which must then make the same number of passes.

        Each process has the whole embedding, last norm and lm_head on its device. Before, the model is on the CPU.

        Raises:
            UnsupportedModel: the list of layers is not found.
        """
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - not in all builds of PyTorch
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        inside = set(self.layers.modules())
        for module in self.model.modules():
            if module not in inside:  # layers are split before they move to the device
                module._apply(lambda tensor: tensor.to(device), recurse=False)  # noqa: SLF001 - what .to() calls
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)

    def check_layers(self, layers: Sequence[int]) -> None:
        """Raises :class:`InvalidSettings` if the model has fewer layers than those whose inputs a drafter reads."""
        count = len(self.layer_kinds)
        if wrong := [layer for layer in layers if not 0 <= layer < count]:
            raise InvalidSettings(
                f"hidden states of layer {wrong[0]} are to be read, but {self.model_id} has {counted(count, 'layer')}: "
                f"choose among 0 … {count - 1}"
            )

    def run(self, layers: Sequence[int], **inputs: Any) -> tuple[Tensor, Tensor]:
        """One pass of the decoder, with its inputs for B rows of T tokens.

        Returns:
            h_t (B, T, D), and what a drafter reads: the inputs of n layers side by side (B, T, n·D); without any, h_t.

        Raises:
            UnsupportedModel: a layer's input does not have the size of h_t.
        """
        if not layers:
            last: Tensor = self.decoder(**inputs).last_hidden_state
            return last, last
        with layer_inputs([self.layers[layer] for layer in layers]) as read:
            last = self.decoder(**inputs).last_hidden_state
        for layer, states in zip(layers, read, strict=True):
            if states is None or states.shape != last.shape:
                shape = None if states is None else tuple(states.shape)
                raise UnsupportedModel(
                    f"{self.model_id}: the input of layer {layer} is {shape} and the last hidden state "
                    f"{tuple(last.shape)}; a head that reads several layers needs states of one size"
                )
        return last, torch.cat([states for states in read if states is not None], -1)

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
        logits: Tensor = self.lm_head(hidden)
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    @cached_property
    def _softcap(self) -> float | None:
        return getattr(self.config, "final_logit_softcapping", None)

    @cached_property
    def _logit_scale(self) -> float:
        if getattr(self.config, "logits_scaling", None):  # Granite divides
            return 1.0 / float(self.config.logits_scaling)
        return float(getattr(self.config, "logit_scale", None) or 1.0)  # Cohere multiplies

    @torch.inference_mode()
    def _check_logits(self) -> None:
        """Checks that :meth:`logits` of the last hidden state gives the model's own logits, which heads rely on."""
        states: list[Tensor] = []
        handle = self.decoder.register_forward_hook(lambda *given: states.append(given[-1].last_hidden_state))
        try:
            probe = torch.arange(4, device=self.device)[None] % self.vocab_size
            expected = self.model(input_ids=probe, use_cache=False).logits.float()
        finally:
            handle.remove()
        hidden = states[0] if states else self.hidden_states(probe)
        if not hidden.isfinite().all():  # sums may be too large for fp16: nothing can be said
            return
        error = float((expected - self.logits(hidden).float()).abs().max())
        if not error <= 1e-2 * max(1.0, float(expected.abs().max())):
            raise UnsupportedModel(
                f"{self.model_id}: its logits differ by {error:.3g} from lm_head(last hidden state); "
                "this model computes its logits in an unsupported way"
            )


def _warn_of_length(target: TargetModel) -> None:
    changing = rope_kinds(target.config) & {"dynamic", "longrope"}
    if changing and target.long_rope is None and target.max_length is None:
        warnings.warn(
            f"{target.model_id} has {min(changing)} rotary positions: prompt and answer together have at most "
            f"{target.max_positions:,} tokens. In longer texts the positions of all tokens change with the length, "
            "which drafts cannot follow",
            LengthWarning,
            stacklevel=3,
        )


@contextmanager
def layer_inputs(layers: Sequence[nn.Module]) -> Iterator[list[Tensor | None]]:
    """Notes the input of each layer in the passes within the context; None where a layer was not called.

    Passes of other threads, which may use the same model, are not noted.
    """
    thread = threading.get_ident()
    inputs: list[Tensor | None] = [None] * len(layers)

    def noting(place: int) -> Any:
        # another thread may call a hook that is just being removed, and then without ``named``
        def note(_: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any] = MappingProxyType({})) -> None:
            if threading.get_ident() == thread:
                inputs[place] = arguments[0] if arguments else named["hidden_states"]

        return note

    handles = [layer.register_forward_pre_hook(noting(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
