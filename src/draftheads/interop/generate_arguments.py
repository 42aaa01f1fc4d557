"""What ``generate`` of transformers hands to a loop: what drafts cannot do, the prompts, and what it leaves out."""

from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from draftheads.errors import InvalidPrompt, InvalidSettings

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


def check_supported(model: Any, config: Any, arguments: Mapping[str, Any], *, assistant_model: Any = None) -> None:
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
    if model.config.is_encoder_decoder:
        kind = type(model).__name__
        raise InvalidSettings(f"draft heads cannot decode with {kind}, an encoder with a decoder: {_LEAVE_OUT}")
    for what in (*_unsupported(config), *_foreign(arguments)):
        raise InvalidSettings(f"draft heads cannot decode with {what}: {_LEAVE_OUT}")


def _unsupported(config: Any) -> Iterator[str]:
    """What a generation configuration asks for and drafts cannot do."""
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


def prompts_of(input_ids: Tensor, arguments: Mapping[str, Any]) -> list[list[int]]:
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


def looks_at_one_row(rule: object) -> bool:
    """Whether it is a rule of transformers that does not depend on the other rows, and keeps no state."""
    kind = type(rule)
    return kind.__name__ in _OF_ONE_ROW and kind.__module__.startswith("transformers.generation.")


def custom_generate_of(frame: FrameType | None) -> str | None:
    """The name that the calling ``generate`` was given as ``custom_generate``."""
    while frame is not None:
        name = frame.f_locals.get("custom_generate")
        if frame.f_code.co_name == "generate" and isinstance(name, str | PathLike):
            return fspath(name)
        frame = frame.f_back
    return None


def left_out_by(frame: FrameType | None) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What ``generate`` is about to drop, and the dictionary of arguments from which a loop gets its own.

    None where the caller is not ``generate``.
    """
    while frame is not None:
        if frame.f_code.co_name == "_extract_generation_mode_kwargs":
            given, kwargs = (frame.f_locals.get(name) for name in ("generation_mode_kwargs", "kwargs"))
            return (given, kwargs) if isinstance(given, dict) and isinstance(kwargs, dict) else None
        frame = frame.f_back
    return None
