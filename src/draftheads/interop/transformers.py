"""Draft heads in transformers: a decoding loop for ``model.generate(…, custom_generate=…)``."""

import hashlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from threading import Lock
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftheads.checkpoints.registry import head_name
from draftheads.decode.engine import Engine
from draftheads.errors import GenerationWarning, InvalidPrompt, InvalidSettings, PromptTooLong, require_bool
from draftheads.interop.generate_loop import DraftedRows, Texts
from draftheads.loading import Loadable, load
from draftheads.settings import Precision, SamplingSettings
from draftheads.speculation.shapes import Drafting, Sampled, TreeChoice

_SAMPLED_WEIGHTS = 16  # numbers of each weight by which a change of the model is found
# transformers' own rules that look at each text alone and keep no state
_OF_ONE_ROW = {
    *("EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria"),
    *("EpsilonLogitsWarper", "EtaLogitsWarper", "MinPLogitsWarper", "TemperatureLogitsWarper", "TopHLogitsWarper"),
    *("TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper"),
    *("ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor"),
    *("InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor"),
    *("MinNewTokensLengthLogitsProcessor", "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
    *("RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor"),
    *("SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor"),
}
# arguments of a pass of the model that generate makes itself, and that change nothing here
_MADE_BY_GENERATE = {"attention_mask", "cache_position", "logits_to_keep", "position_ids", "use_cache"}
_CACHES = ("cache", "past_key_values", "cache_params")
_LEAVE_OUT = "leave it out, or leave custom_generate out"


@dataclass
class DraftedOutput(GenerateDecoderOnlyOutput):
    """What ``generate`` returns with ``return_dict_in_generate=True``; without a cache and hidden states."""

    num_steps: int | None = None  # passes of the model after the prompts were read


def custom_generate(
    head: str | PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    draft_model: Loadable | None = None,
    tree: TreeChoice = "auto",
    copy: bool = True,
    precision: Precision = "auto",
    fast: bool = True,
    rows_together: bool | None = None,
    acceptance: Literal["exact", "typical"] = "exact",
    typical_epsilon: float | None = None,
    typical_delta: float | None = None,
) -> "CustomGenerate":
    """A decoding loop with a draft head for transformers: ``model.generate(**inputs, custom_generate=…)``.

    The text is that of ``generate`` without it: greedy in fp32 the same tokens, sampled the same distribution. All of
    ``generate``'s own settings hold, also logits processors, stopping criteria and a streamer. The first call prepares
    the model, as :func:`draftheads.load` does; the next calls with this object and the same model take that over, until
    the model's weights change.

    Args:
        head: a bundled head's name, a folder, or a Hugging Face id. ``prompt-lookup`` and ``lookahead`` need no head.
        tokenizer: of the model, or the name of its model; when left out that of the name by which the model was loaded.
        draft_model: a smaller model drafts in place of a head: a name, also of one with another tokenizer, or a loaded
            model with the same.
        tree: as for :func:`draftheads.load`, but no ``Sampled`` tree.
        copy: whether drafts also hold copies from the text so far.
        precision: ``int8`` or ``int4``, for CPUs, holds the linear layers in 8 or 4 bits: faster, but another model.
        fast: on a CPU, packed weights and the native library; off is the stock model.
        rows_together: whether all rows of a batch get their next tokens in one call of the processors and criteria, as
            in ``generate``. Then no row is ahead of another, and drafts gain less. None: only where a processor or
            criterion is not one of transformers' own that look at each row alone. Give False if yours look at each row
            alone and keep no state, and True for the same random numbers as in ``generate``.
        acceptance: ``typical`` (Medusa section 3.3.1) is faster where ``generate`` samples, and **not lossless**: it
            keeps draft tokens that are likely enough, by the scores that the logits processors give, and the token
            after them is the most likely one. Greedy decoding does not change.
        typical_epsilon: ε of typical acceptance; None is the default of :class:`SamplingSettings`.
        typical_delta: δ of typical acceptance; √ε where left out.

    Raises:
        InvalidSettings: a wrong value. What concerns the model is found by the first call: it raises the errors of
            :func:`draftheads.load`, and InvalidSettings by name for what ``generate`` is asked and drafts cannot do.
    """
    require_bool(fast=fast, rows_together=False if rows_together is None else rows_together)
    drafting = Drafting(None if head is None else head_name(head), draft_model, tree, copy)  # type: ignore[arg-type]
    if isinstance(drafting.shape, Sampled):
        raise InvalidSettings(
            "a Sampled tree needs an acceptance rule of its own, which generate has not: give another"
        )
    options = {**drafting.keywords(), "tokenizer": tokenizer, "precision": precision, "fast": fast}
    thresholds = {"typical_epsilon": typical_epsilon, "typical_delta": typical_delta}
    given: dict[str, Any] = {name: value for name, value in thresholds.items() if value is not None}
    if acceptance != "typical" and (given or acceptance != "exact"):
        names = " and ".join(thresholds)
        raise InvalidSettings(f"acceptance is {acceptance!r}; it must be 'exact', or 'typical' for {names}")
    # the processors apply generate's own temperature
    typical = SamplingSettings(temperature=1.0, acceptance="typical", **given) if acceptance == "typical" else None
    return CustomGenerate(options, rows_together=rows_together, typical=typical)


class CustomGenerate:
    """What :func:`custom_generate` returns: ``generate`` calls it in place of its own loop.

    Args:
        options: arguments of :func:`draftheads.load`.
        rows_together: as for :func:`custom_generate`.
        typical: the thresholds of typical acceptance; None accepts exactly.
    """

    def __init__(
        self, options: Mapping[str, Any], *, rows_together: bool | None = None, typical: SamplingSettings | None = None
    ) -> None:
        self.options = dict(options)
        self.rows_together, self.typical = rows_together, typical
        self._engines: WeakKeyDictionary[Any, tuple[bytes, Engine]] = WeakKeyDictionary()
        self._lock = Lock()

    def __call__(  # noqa: PLR0917 - as generate calls it
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        synced_gpus: bool = False,  # noqa: FBT001, FBT002
        streamer: Any = None,
        *,
        tokenizer: Any = None,
        left_out: Mapping[str, Any] | None = None,
        **model_kwargs: Any,
    ) -> DraftedOutput | Tensor:
        """Decodes as ``GenerationMixin._sample`` of transformers, whose arguments these are.

        ``left_out`` are arguments of ``generate`` that it does not hand on itself.
        """
        left_out, config = left_out or {}, generation_config
        further = {"synced_gpus": synced_gpus or left_out.get("synced_gpus"), **model_kwargs}
        _check_supported(model, config, further, assistant_model=left_out.get("assistant_model"))
        prompts = _prompts_of(input_ids, model_kwargs)
        engine = self.engine(model, tokenizer)
        limit = engine.model.max_positions
        if limit is not None and (longest := max(map(len, prompts))) >= limit:
            raise PromptTooLong(f"a prompt has {longest:,} tokens; {engine.model.model_id} takes at most {limit - 1:,}")
        streamer = left_out.get("streamer") if streamer is None else streamer
        pad = getattr(config, "_pad_token_tensor", None)  # which generate prepares
        by_row = all(map(_looks_at_one_row, [*logits_processor, *stopping_criteria]))
        together = not by_row if self.rows_together is None else self.rows_together
        typical = self.typical if config.do_sample else None  # of a greedy text only the likeliest token is typical
        if typical is not None and together:
            raise InvalidSettings(
                "with acceptance='typical' logits processors see the nodes of each row's tree, so rows cannot be kept "
                "together: give rows_together=False if yours look at each row alone, or leave acceptance out"
            )
        texts = Texts(
            prompts=input_ids,
            processors=logits_processor,
            criteria=stopping_criteria,
            samples=bool(config.do_sample),
            typical=typical,
            pad_id=0 if pad is None else int(pad),
            streamer=streamer,
            keeps_scores=bool(config.return_dict_in_generate and config.output_scores),
            keeps_logits=bool(config.return_dict_in_generate and config.output_logits),
            together=together,
        )
        rows = DraftedRows(engine, texts, prompts, most_tokens=stopping_criteria.max_length)
        rows.run()
        if streamer is not None:
            streamer.end()
        if not config.return_dict_in_generate:
            return texts.token_ids
        kept: dict[str, Any] = {"sequences": texts.token_ids, "scores": texts.scores, "logits": texts.logits}
        return DraftedOutput(**kept, num_steps=rows.num_steps)

    @property
    def __signature__(self) -> inspect.Signature:
        """What :func:`inspect.signature` finds.

        ``generate`` looks at it to know which arguments a loop has beyond the usual ones, and then drops ``streamer``,
        ``tokenizer``, ``assistant_model`` and ``synced_gpus`` (transformers 5.10 to 5.24). Without the tokenizer it
        refuses ``stop_strings``, and without its end a streamer's reader waits for ever. So they are put back here,
        among the arguments of this loop.
        """
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name != "_extract_generation_mode_kwargs":
            frame = frame.f_back
        if frame is not None:
            # what it is about to drop, and the dictionary of arguments from which a loop gets its own
            given, kwargs = (frame.f_locals.get(name) for name in ("generation_mode_kwargs", "kwargs"))
            if isinstance(given, dict) and isinstance(kwargs, dict):
                kwargs["left_out"] = given
                if "tokenizer" in given:
                    kwargs["tokenizer"] = given["tokenizer"]
        return inspect.signature(self.__call__)

    def engine(self, model: Any, tokenizer: Any = None) -> Engine:
        """What decodes with this model: made at the first call, and again after its weights have changed.

        Args:
            model: a loaded causal language model. The engine is dropped with it.
            tokenizer: of the model, where none was given before.
        """
        state = _state_of(model)
        with self._lock:
            known = self._engines.get(model)
            if known is None or known[0] != state:
                tokenizer = (
                    self.options["tokenizer"] or tokenizer or getattr(model.config, "_name_or_path", None) or None
                )
                with warnings.catch_warnings():  # generate applies its configuration itself
                    warnings.simplefilter("ignore", GenerationWarning)
                    known = state, load(model, **{**self.options, "tokenizer": tokenizer})
                self._engines[model] = known
            return known[1]


@torch.no_grad()
def _state_of(model: Any) -> bytes:
    """A digest that changes with the weights: what is prepared of them would be wrong then."""
    facts: list[Any] = []
    numbers: list[Tensor] = []
    for weight in model.parameters():
        version = None if weight.is_inference() else weight._version  # noqa: SLF001 - no public name
        facts.append((weight.data_ptr(), version, weight.dtype, tuple(weight.shape), str(weight.device)))
        if not weight.is_meta:
            flat = weight.detach().reshape(-1)
            numbers.append(flat[:: max(1, len(flat) // _SAMPLED_WEIGHTS)][:_SAMPLED_WEIGHTS].float())
    digest = hashlib.sha256(repr(facts).encode())
    if numbers:
        digest.update(torch.cat([part.to(numbers[0].device) for part in numbers]).cpu().numpy().tobytes())
    return digest.digest()


def _check_supported(model: Any, config: Any, arguments: Mapping[str, Any], *, assistant_model: Any = None) -> None:
    """Whether drafts can do what is asked.

    Args:
        model: of ``generate``.
        config: its generation configuration.
        arguments: further ones, of the model or of the loop.
        assistant_model: as given to ``generate``.
    """
    if assistant_model is not None:
        fix = "give it as custom_generate(draft_model=…), or leave custom_generate out"
        raise InvalidSettings(f"draft heads cannot decode with assistant_model: {fix}")
    for what in (*_unsupported(model, config), *_foreign(arguments)):
        raise InvalidSettings(f"draft heads cannot decode with {what}: {_LEAVE_OUT}")


def _unsupported(model: Any, config: Any) -> Iterator[str]:
    """What a generation configuration asks for and drafts cannot do."""
    if model.config.is_encoder_decoder:
        yield f"{type(model).__name__}, an encoder with a decoder"
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        beams = f" (num_beams={config.num_beams})" if (config.num_beams or 1) > 1 else ""
        yield f"{mode.value.replace('_', ' ')}{beams}"
    if config.return_dict_in_generate:
        yield from (name for name in ("output_attentions", "output_hidden_states") if getattr(config, name, None))
    if config.cache_implementation not in (None, "dynamic", "hybrid"):
        yield f"cache_implementation={config.cache_implementation!r}"


def _foreign(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of a pass that change it."""
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        if name in _CACHES:
            kind = type(value).__name__
            if kind != "DynamicCache" or any(map(_was_used, value.layers)):
                yield f"{name} ({'a text that was read before' if kind == 'DynamicCache' else kind})"
        elif name not in _MADE_BY_GENERATE:
            yield name


def _was_used(layer: Any) -> bool:
    """Whether a layer of a cache has tokens, or where it is recurrent a state."""
    has_state = getattr(layer, "has_previous_state", None)
    return any(has_state.values()) if isinstance(has_state, dict) else layer.get_seq_length() > 0


def _prompts_of(input_ids: Tensor, arguments: Mapping[str, Any]) -> list[list[int]]:
    """The prompts of the rows without their padding."""
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    is_text = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device) > 0
    if is_text.shape != input_ids.shape:
        raise InvalidPrompt(f"attention_mask is {tuple(is_text.shape)}; it must be {tuple(input_ids.shape)}")
    if not input_ids.shape[1] or not is_text[:, -1].all() or (is_text[:, :-1] & ~is_text[:, 1:]).any():
        raise InvalidPrompt(
            "attention_mask has a row without tokens at its end: with draft heads prompts are padded on the left "
            "(tokenizer.padding_side = 'left')"
        )
    if positions is not None:
        usual = is_text.long().cumsum(1) - 1
        given = positions.to(input_ids.device)
        if given.shape[-2:] != usual.shape[-2:] or not torch.where(is_text, given == usual, True).all():  # noqa: FBT003
            raise InvalidSettings("draft heads cannot decode with position_ids of your own: leave them out")
    return [ids[there].tolist() for ids, there in zip(input_ids, is_text, strict=True)]


def _looks_at_one_row(rule: object) -> bool:
    """Whether it is a rule of transformers that does not depend on the other rows, and keeps no state."""
    kind = type(rule)
    return kind.__name__ in _OF_ONE_ROW and kind.__module__.startswith("transformers.generation.")
