"""A frozen causal language model: from token ids to last hidden states and logits.

What a pass needs beside tokens (caches, masks, positions) is in ``runners``.
"""

import copy
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from types import MappingProxyType
from typing import Any, Self, Unpack

import torch
import transformers
from torch import Tensor, nn

from draftheads.cpu.kernels import Native, NativeInt8, PackedLinear
from draftheads.cpu.native_step import native_step
from draftheads.cpu.optimise import TYPICAL_TEXT, speed_up
from draftheads.cpu.threads import single_torch_thread
from draftheads.errors import GenerationWarning, InvalidSettings, LengthWarning, UnsupportedModel, require_at_least
from draftheads.models.adapter import check_base, read_lora
from draftheads.models.generation import GenerationRules
from draftheads.models.long_rope import use_long_rope
from draftheads.models.lora_layers import add_lora
from draftheads.models.model_config import max_positions_of, rope_kinds
from draftheads.models.model_facts import ModelFacts, WeightFacts
from draftheads.models.model_names import find_adapter, name_of_loaded
from draftheads.models.pretrained import ATTENTION, LoadOptions, adapter_tokenizer, load_pretrained
from draftheads.models.recurrent import FAMILIES, KINDS, missing_functions
from draftheads.models.weight_files import check_quantisation
from draftheads.utils.files import user_path
from draftheads.utils.messages import short

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}
_ENDLESS_ROPES = {"default", "linear", "llama3", "yarn"}  # a position has the same cosines in texts of any length
_SLOT_BOUND_TYPES = {"bloom", "gpt_neo", "mpt"}  # they use ALiBi, or their own causal mask


def _sharing_weights(model: Any) -> Any:
    """A copy of a model's modules with the same weights, packed ones included."""
    products = [module.product for module in model.modules() if isinstance(module, PackedLinear)]
    shared: list[Any] = [*model.parameters(), *model.buffers(), *products]
    return copy.deepcopy(model, memo={id(item): item for item in shared})


@dataclass(frozen=True, eq=False)
class TargetModel(ModelFacts):
    """The model, its tokenizer and its id. Its weights never change here.

    Raises:
        UnsupportedModel: on construction, if the model's state cannot be rewound, or if its logits are not a known
            function of its last hidden state.
    """

    def __post_init__(self) -> None:
        use_long_rope(self.decoder, self.config)
        self._check_length()
        self._check_layer_kinds()
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

    def sped_up(self, *, bits: int | None = None) -> Self:
        """This model with faster kernels on a CPU. It takes the modules of this one over.

        See :func:`draftheads.cpu.optimise.speed_up`.
        """
        facts = self._facts()  # before packing, which changes them
        typical = None
        if bits is not None:
            typical = torch.tensor([self.tokenizer(TYPICAL_TEXT)["input_ids"][: self.max_positions]]) % self.vocab_size
        speed_up(self.model, bits=bits, typical_ids=typical)
        native = native_step(self.model, self.windows)
        facts = facts if bits is None else replace(facts, precision=f"int{bits}")
        return self._with(self.model, facts, native=native)

    def set_graphs(self, *, on: bool) -> None:
        """Turns static steps on or off, also for a running batch."""
        self.step_mode.graphs = on

    def computing(self) -> AbstractContextManager[None]:
        """The context of steps of this model: native ones need the cores that torch's threads would keep."""
        return nullcontext() if self.native is None else single_torch_thread()

    def _check_layer_kinds(self) -> None:
        family = self.config.model_type
        unknown = set(self.layer_kinds) - _ATTENTION_KINDS - (KINDS if self.is_recurrent else set())
        if unknown or (getattr(self.model, "_is_stateful", False) and not self.is_recurrent):
            what = ", ".join(sorted(unknown)) or "a recurrent state"
            raise UnsupportedModel(
                f"{self.model_id} ({family}) has {what}: "
                "drafts are rewound by removing cache entries, or by states that follow a tree in families that are "
                f"tested: {', '.join(sorted(FAMILIES))}"
            )
        if self.is_recurrent and (missing := missing_functions(family, self.decoder)):
            raise UnsupportedModel(
                f"{self.model_id} ({family}): its layers do not call {' and '.join(missing)} in transformers "
                f"{transformers.__version__}, which trees need: install another version of transformers, such as 5.24"
            )

    def _check_length(self) -> None:
        require_at_least(1, max_length=self.max_length)
        longest, kinds = max_positions_of(self.config, switches=self.long_rope is not None), rope_kinds(self.config)
        if longest and (self.max_length or 0) > longest and not (kinds and kinds <= _ENDLESS_ROPES):
            raise InvalidSettings(
                f"max_length is {self.max_length:,}; {self.model_id} takes at most {longest:,} tokens: it has no "
                "positions for longer texts, or they change with the length"
            )

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

    def run(self, layers: Sequence[int], **inputs: Any) -> tuple[Tensor, Tensor]:
        """One pass of the decoder, with its inputs for B rows of T tokens.

        Returns:
            h_t (B, T, D), and what a drafter reads: the inputs of n layers side by side (B, T, n·D); without any, h_t.

        Raises:
            UnsupportedModel: a layer's input does not have the size of h_t.
        """
        if not layers:
            last: Tensor = self._in_own_type(self.decoder(**inputs).last_hidden_state)
            return last, last
        with layer_inputs([self.layers[layer] for layer in layers]) as read:
            last = self._in_own_type(self.decoder(**inputs).last_hidden_state)
        for layer, states in zip(layers, read, strict=True):
            if states is None or states.shape != last.shape:
                shape = None if states is None else tuple(states.shape)
                raise UnsupportedModel(
                    f"{self.model_id}: the input of layer {layer} is {shape} and the last hidden state "
                    f"{tuple(last.shape)}; a head that reads several layers needs states of one size"
                )
        return last, self._in_own_type(torch.cat([states for states in read if states is not None], -1))

    def _in_own_type(self, states: Tensor) -> Tensor:
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
        logits: Tensor = self.lm_head(hidden)
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

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
        hidden = self._in_own_type(states[0]) if states else self.hidden_states(probe)
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
