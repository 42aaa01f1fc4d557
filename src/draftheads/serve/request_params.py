"""The fields that both routes have: model, sampling, streaming."""

from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any

from draftheads.decode.engine import Engine
from draftheads.decode.request import Request
from draftheads.errors import DraftHeadsError, InvalidPrompt, InvalidSettings
from draftheads.serve.api_error import api_error_of
from draftheads.serve.fields import Fields
from draftheads.serve.scheduler import Lane
from draftheads.serve.state import Service
from draftheads.settings import SamplingSettings

_FROM_MODEL = ("temperature", "top_p", "top_k", "repetition_penalty")
_OUR_NAMES = {"max_new_tokens": "max_tokens"}
_NAMES = {"draft_nodes", *(field.name for field in dataclass_fields(SamplingSettings))}


@dataclass(frozen=True)
class RequestParams:
    """What a request asks for, but for its prompt."""

    engine: Engine
    lane: Lane
    settings: SamplingSettings
    n: int  # answers to each prompt
    stream: bool
    include_usage: bool  # a last chunk with the counts
    include_draft: bool  # which text of a chunk was drafted
    store: bool  # the answers may be recorded
    cache_salt: str  # what was read of prompts is shared among requests with the same one

    def requests(self, prompt_ids: list[int], *, param: str) -> list[Request]:
        """The n requests of one prompt. Those of a seed have this seed and the ones after it.

        Args:
            prompt_ids: the prompt.
            param: the field that it came from.

        Raises:
            ApiError: the prompt is empty or too long, or a setting is impossible.
        """
        seed = self.settings.seed
        each = [self.settings if seed is None else replace(self.settings, seed=_later(seed, i)) for i in range(self.n)]
        try:
            return [self.engine.request(prompt_ids, settings) for settings in each]
        except DraftHeadsError as error:
            raise api_error_of(error, param=param if isinstance(error, InvalidPrompt) else _field_of(error)) from None


def _later(seed: int, number: int) -> int:
    return seed + number if seed + number < 2**64 else seed + number - 2**64


def read_asked(fields: Fields, service: Service, *, default_tokens: int, **settings: Any) -> RequestParams:
    """Reads the common fields.

    Args:
        fields: of the request.
        service: the server's state.
        default_tokens: new tokens where the request names no limit.
        **settings: further fields of :class:`SamplingSettings`.

    Raises:
        ApiError: a field is wrong.
    """
    limits = service.limits
    name = fields.text("model")
    if not name:
        raise fields.wrong("model", f"is missing; models of this server: {', '.join(service.models)}")
    engine = service.engine(name)
    lane = Lane(name, fields.integer("draft_nodes"))
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise fields.wrong("stream_options", "is for streams only; send stream: true")
    include_usage = options is not None and options.flag("include_usage")
    include_draft = options is not None and options.flag("include_draft")
    if options is not None:
        options.any("include_obfuscation")
        options.finish()
    cache_salt = fields.text("cache_salt", "")
    if len(cache_salt) > limits.salt_characters:
        raise fields.wrong("cache_salt", f"has {len(cache_salt)} characters; at most {limits.salt_characters} may be")
    try:
        engine.check_draft_nodes(lane.draft_nodes)
        sampling = SamplingSettings(
            **{**_defaults_of(engine), **_sampling(fields, service)},
            max_new_tokens=_max_tokens(fields, default_tokens),
            **settings,
        )
    except InvalidSettings as error:
        raise api_error_of(error, param=_field_of(error)) from None
    n = fields.integer("n", 1, least=1, most=limits.choices)
    store = fields.flag("store", default=True)
    return RequestParams(engine, lane, sampling, n, stream, include_usage, include_draft, store, cache_salt)


def _defaults_of(engine: Engine) -> dict[str, Any]:
    """OpenAI's defaults, but those that the model's own generation configuration names."""
    config = getattr(engine.model.model, "generation_config", None)
    own = {} if config is None else config.to_diff_dict()
    found = {name: own[name] for name in _FROM_MODEL if own.get(name) is not None}
    return {"temperature": 1.0, **found, "top_k": found.get("top_k") or None}


def _sampling(fields: Fields, service: Service) -> dict[str, Any]:
    """The sampling fields that the request names."""
    limits = service.limits
    values = {
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "seed": fields.integer("seed"),
        "stop": _stop(fields, limits.stop_strings, limits.stop_characters),
        "logit_bias": _logit_bias(fields, limits.logit_biases),
    }
    found = {name: value for name, value in values.items() if value is not None}
    if fields.given("top_k"):
        top_k = fields.integer("top_k", least=-1)
        found["top_k"] = None if top_k < 1 else top_k  # -1 and 0 are all tokens, as in vLLM
    if fields.flag("ignore_eos"):
        found["ignore_eos"] = True
    return found


def _max_tokens(fields: Fields, default: int) -> int:
    names = [name for name in ("max_tokens", "max_completion_tokens") if fields.given(name)]
    values = {name: fields.integer(name, least=1) for name in names}
    if len(set(values.values())) > 1:
        raise fields.wrong("max_tokens", "and max_completion_tokens differ; send one of them")
    fields.any("max_tokens")
    return next(iter(values.values()), default)


def _stop(fields: Fields, most: int, most_characters: int) -> list[str] | None:
    value = fields.any("stop")
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise fields.wrong("stop", "must be a string or a list of strings, none of them empty")
    if len(stops) > most:
        raise fields.wrong("stop", f"has {len(stops)} strings; it must have at most {most}")
    if longest := max((len(stop) for stop in stops if len(stop) > most_characters), default=0):
        raise fields.wrong("stop", f"has a string of {longest} characters; it must have at most {most_characters}")
    return stops


def _logit_bias(fields: Fields, most: int) -> dict[int, float] | None:
    value = fields.any("logit_bias")
    if not value and value in (None, {}):
        return None
    if not isinstance(value, dict):
        raise fields.wrong("logit_bias", "must be an object from token ids to numbers")
    if len(value) > most:
        raise fields.wrong("logit_bias", f"has {len(value)} entries; it must have at most {most}")
    found = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise fields.wrong("logit_bias", f"has the key {key[:20]!r}; keys are token ids")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise fields.wrong("logit_bias", f"of token {key} must be a number from -100 to 100")
        found[int(key)] = float(bias)
    return found


def _field_of(error: DraftHeadsError) -> str | None:
    """The field that an error about a setting begins with."""
    name = str(error).partition(" ")[0]
    return _OUR_NAMES.get(name, name) if name in _NAMES else None
