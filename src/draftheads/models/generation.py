"""What a model's generation configuration does to its texts: the settings with which ``generate`` of transformers runs.

Penalties, biases of single tokens and shortest lengths are settings of requests here. All else is done by transformers'
own logits processors, which each text gets.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from draftheads.errors import GenerationWarning, InvalidSettings, UnsupportedModel, first_line
from draftheads.models.model_config import eos_ids_of
from draftheads.settings import SamplingSettings
from draftheads.speculation.sampling import FILTERS
from draftheads.utils.messages import short

# settings that are not applied, with the values that switch them off besides None; then those of sampled texts only
_NOT_APPLIED: Mapping[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale"), 1),
    **dict.fromkeys(("penalty_alpha", "token_healing"), 0),
    **dict.fromkeys(
        ("constraints", "dola_layers", "force_words_ids", "max_time", "stop_strings", "watermarking_config")
    ),
}
_NOT_SAMPLED: Mapping[str, Any] = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
# arguments of ``generate`` that sample from all tokens
ALL_TOKENS: Mapping[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": None, **_NOT_SAMPLED}
# defaults of servers; elsewhere texts are greedy, or sampled as the request says
_SAMPLING = ("temperature", *(each.name for each in FILTERS))


class GenerationRules:
    """The rules of a model's generation configuration; none of a model without ``generate``.

    Warns of what is not applied.

    Attributes:
        sampling: the values of ``temperature`` and of our filters (``top_k``, ``top_p``, ``min_p``) that it names.
        bias: numbers that are added to the logits of tokens.
        not_applied: settings that change texts of ``generate`` and are not applied, with their values.
        switched_off: arguments of ``generate`` without these.
    """

    def __init__(self, model: Any, model_id: str, *, vocab_size: int, device: torch.device) -> None:
        self._config = config = getattr(model, "generation_config", None) or GenerationConfig()
        self._build = getattr(model, "_get_logits_processor", None)  # generate's own, which knows the order
        eos_ids = sorted(eos_ids_of(config, vocab_size=vocab_size))
        self._device, self._eos = device, torch.tensor(eos_ids, device=device) if eos_ids else None
        self.sampling = {name: value for name in _SAMPLING if (value := getattr(config, name, None)) is not None}
        try:  # 0 and -1 switch them off
            SamplingSettings(**{name: value for name, value in self.sampling.items() if value not in (0, -1)})
        except InvalidSettings as error:
            raise UnsupportedModel(f"the generation configuration of {model_id} is wrong: {error}") from None
        off = {**_NOT_APPLIED, **(_NOT_SAMPLED if config.do_sample else {})}
        values = {name: getattr(config, name, None) for name in off}
        self.not_applied = {name: value for name, value in values.items() if value not in (None, off[name])}
        if config.cache_implementation == "quantized":
            self.not_applied["cache_implementation"] = "quantized"
        self.switched_off = {name: off.get(name) for name in self.not_applied}
        try:
            biases = [_bias_of(rule, vocab_size) for rule in self._processors([0], 1, 1.0, 0)]
        except (TypeError, ValueError) as error:
            raise UnsupportedModel(f"the model's generation configuration is wrong: {first_line(error)}") from error
        self._is_bias = None not in biases
        self.bias: dict[int, float] = {}
        for token, value in (pair for bias in biases if self._is_bias for pair in (bias or {}).items()):
            self.bias[token] = self.bias.get(token, 0.0) + value
        if self.not_applied:
            named = ", ".join(f"{name}={value!r}" for name, value in self.not_applied.items())
            what = f"its generation configuration has {short(named)}, not applied here"
            words = f"{model_id}: {what}: texts are those of generate without it"
            warnings.warn(words, GenerationWarning, stacklevel=3)

    def settings(self, settings: SamplingSettings, num_prompt_tokens: int) -> SamplingSettings:
        """Settings of a request, with the configuration's values where the request leaves them out."""
        config, least, penalty = self._config, settings.min_new_tokens, settings.repetition_penalty
        if least is None and settings.grammar is None:  # a grammar decides on the end
            least = config.min_new_tokens
            least = (config.min_length or 0) - num_prompt_tokens if least is None else least
            least = min(max(least, 0), settings.max_new_tokens)
        penalty = (
            (1.0 if config.repetition_penalty is None else config.repetition_penalty) if penalty is None else penalty
        )
        return replace(settings, min_new_tokens=least, repetition_penalty=penalty)

    def processors(
        self, prompt_ids: Sequence[int], most_tokens: int, settings: SamplingSettings, *, whole: bool = False
    ) -> LogitsProcessorList | None:
        """What changes the logits of a text; None if the settings and :attr:`bias` are all, unless it must be whole.

        The repetition penalty is among it: rules must come in transformers' order. ``most_tokens`` are those of the
        prompt and the longest answer.
        """
        if self._is_bias and not whole:
            return None
        least = len(prompt_ids) + (settings.min_new_tokens or 0)
        return self._processors(prompt_ids, most_tokens, settings.repetition_penalty, least)

    def _processors(
        self, prompt_ids: Sequence[int], most_tokens: int, penalty: float | None, least: int
    ) -> LogitsProcessorList:
        config = copy(self._config)
        config.do_sample, config.guidance_scale, config.watermarking_config = False, None, None
        config.repetition_penalty, config.max_length = penalty, most_tokens
        config.min_length, config.min_new_tokens = least, None
        config._eos_token_tensor = self._eos  # noqa: SLF001
        if self._eos is None:
            config.exponential_decay_length_penalty = None
        prompt = torch.tensor([list(prompt_ids)], device=self._device)
        options = {"encoder_input_ids": prompt, "device": str(self._device)}
        return LogitsProcessorList(self._build(config, len(prompt_ids), **options) if self._build else [])


def _bias_of(rule: Any, vocab_size: int) -> dict[int, float] | None:
    """What a rule adds to the logits of single tokens; None if that depends on the text."""
    kind = type(rule).__name__
    if kind in ("InfNanRemoveLogitsProcessor", "LogitNormalization"):  # alone they change no text
        return {}
    if kind == "SuppressTokensLogitsProcessor":
        biases = dict.fromkeys(rule.suppress_tokens.tolist(), -math.inf)
    else:
        sequences = getattr(rule, "sequence_bias", None)  # of bad words, too
        if sequences is None or any(len(sequence) > 1 for sequence in sequences):
            return None
        biases = {token: bias for (token,), bias in sequences.items()}
    return {token: bias for token, bias in biases.items() if 0 <= token < vocab_size}


def generation_config(source: Path | str, config: Any) -> Any:
    """The generation configuration of the model at ``source``."""
    from transformers import GenerationConfig  # noqa: PLC0415 - slow to import

    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:  # no such file: transformers derives it from the configuration, too
        return GenerationConfig.from_model_config(config)
