"""The fields that both routes have: model, sampling, streaming, the grammar of an answer."""

from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, create_model

from draftheads.decode.engine import Engine
from draftheads.decode.grammar import in_llguidance
from draftheads.decode.request import Lane, Request
from draftheads.errors import DraftHeadsError, InvalidPrompt, InvalidSettings
from draftheads.serve.fields import (
    ApiError,
    Fields,
    NoEffect,
    Unsupported,
    api_error_of,
    check_schema,
    text_or_list,
    wrong,
)
from draftheads.serve.guard import HttpLimits
from draftheads.serve.state import Service, Untried
from draftheads.settings import MOST_BIAS, Grammar, SamplingSettings

_OTHERWISE = {"max_new_tokens", "min_new_tokens", "logprobs", "grammar"}  # their fields have other names or forms
# memory and threads of Ollama, which Open WebUI sends to all servers; they have no effect
_OF_OLLAMA = ("keep_alive", "num_batch", "num_gpu", "num_thread", "use_mlock", "use_mmap")
_OF_TYPICAL = ("typical_epsilon", "typical_delta")
_SETTINGS = {field.name: field for field in dataclass_fields(SamplingSettings)}
_SMALLER = "use smaller or fewer numbers in multipleOf, and fewer nested repetitions"
_SAMPLING = [name for name in _SETTINGS if name not in _OTHERWISE]  # these have fields of the same name


_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Stops = Annotated[list[_Stop], Field(max_length=16)]
_TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
# of the longest answer: -1 is no limit of the request's own
Unlimited = BeforeValidator(lambda length: None if length == -1 else length, json_schema_input_type=int)
_Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]


class NamedSchema(Fields):
    """What changes no answer in a schema of answers: schemas are always strict."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _JsonSchema(NamedSchema):
    of_answers: Annotated[dict[str, Any], AfterValidator(check_schema)] = Field({}, alias="schema")


class ResponseFormat(Fields):
    """What answers must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


def grammar_of(kind: str, schema: dict[str, Any] | None, place: str) -> Grammar | None:
    """The grammar of answers of a kind: text, json_object or json_schema; None for free text."""
    if (schema is None) == (kind == "json_schema"):
        raise wrong(place, "is missing" if schema is None else "is for the type json_schema only")
    if schema is not None:
        return Grammar.json_schema(schema)
    return Grammar.json_object() if kind == "json_object" else None


class StreamOptions(Fields):
    """What the chunks of a stream have besides the answer."""

    include_usage: bool = False  # a last chunk with the counts
    continuous_usage_stats: bool = False  # counts so far in every chunk
    include_draft: bool = False  # which text of a chunk was drafted
    include_obfuscation: NoEffect = None


class _CacheOptions(Fields):
    """The server keeps what it has memory for."""

    mode: NoEffect = None
    ttl: NoEffect = None
    comparison_response_id: NoEffect = None
    prewarm: Annotated[Any, Unsupported("ask for an answer of one token", only=False)] = None


def _field_of_setting(name: str) -> tuple[Any, bool | None]:
    """Its type and default; that of numbers is the model's."""
    setting = _SETTINGS[name]
    return get_args(setting.type)[0] | None, setting.default if isinstance(setting.default, bool) else None


if TYPE_CHECKING:
    _OfSettings = Fields
else:
    _FIELDS = {name: _field_of_setting(name) for name in _SAMPLING} | dict.fromkeys(_OF_OLLAMA, (NoEffect, None))
    _OfSettings = create_model("_OfSettings", __base__=Fields, **_FIELDS)


class CommonFields(_OfSettings):
    """Fields of all routes, with their types and sizes.

    :class:`SamplingSettings` has the ranges of its settings, and models have their defaults.
    """

    names: ClassVar[dict[str, str]] = {"form": "response_format"}  # in errors
    default_tokens: ClassVar[int] = 2048  # of the longest answer, where a request names no limit

    model: str = ""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop: Annotated[_Stops, BeforeValidator(text_or_list, json_schema_input_type=_Stop | _Stops)] = Field([])
    stop_token_ids: Annotated[list[int], Field(max_length=128)] = Field([])
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=1024)] = Field({})
    max_completion_tokens: Annotated[Annotated[int, Field(ge=1)] | None, Unlimited] = None
    max_tokens: Annotated[Annotated[int, Field(ge=1)] | None, Unlimited] = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    draft_nodes: int | None = None
    n: Annotated[int, Field(ge=1, le=HttpLimits.choices)] = 1  # answers to each prompt
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    store: bool = True  # the answers may be recorded
    cache_salt: Annotated[str, Field(max_length=256)] = ""  # with the same, prompts share caches, whatever their keys
    prompt_cache_key: NoEffect = None
    prompt_cache_options: _CacheOptions = _CacheOptions()
    prompt_cache_retention: NoEffect = None
    safety_identifier: NoEffect = None
    service_tier: NoEffect = None
    user: NoEffect = None
    moderation: Annotated[Any, Unsupported("leave it out")] = None

    @property
    def num_logprobs(self) -> int | None:
        """How many top log-probabilities of each token are asked for; None: not even its own."""
        raise NotImplementedError

    @property
    def grammar(self) -> Grammar | None:
        """Of the answer's text; None for free text."""
        raise NotImplementedError


def _all_of_them(best_of: int, info: ValidationInfo) -> int:
    if best_of not in (1, num := info.data.get("n", best_of)):
        raise ValueError(f"is {best_of}; it must be n ({num}): send n and choose among the answers")
    return best_of


class ChoiceFields(Fields):
    """Fields of the two older routes, chats and completions."""

    response_format: ResponseFormat = ResponseFormat(type="text", json_schema=None)
    metadata: NoEffect = None
    prediction: NoEffect = None
    num_ctx: Annotated[Any, Unsupported("leave it out: the longest text is the model's own")] = None
    audio: Annotated[Any, Unsupported("leave it out")] = None
    best_of: Annotated[int, AfterValidator(_all_of_them)] = 1
    function_call: Annotated[Any, Unsupported("use tool_choice", only="none")] = None
    functions: Annotated[Any, Unsupported("use tools", only=[])] = None
    modalities: Annotated[Any, Unsupported("leave it out", only=["text"])] = None
    suffix: Annotated[Any, Unsupported("leave it out", only="")] = None
    verbosity: Annotated[Any, Unsupported("leave it out")] = None
    web_search_options: Annotated[Any, Unsupported("leave it out")] = None

    @property
    def grammar(self) -> Grammar | None:
        form = self.response_format
        schema = None if form.json_schema is None else form.json_schema.of_answers
        return grammar_of(form.type, schema, "response_format.json_schema")


@dataclass(frozen=True)
class RequestParams:
    """What a request asks for, but for its prompt."""

    fields: CommonFields
    engine: Engine
    lane: Lane
    settings: SamplingSettings
    service: Service

    def requests(self, prompt_ids: list[int], *, param: str) -> list[Request]:
        """The n requests of the prompt of a field. Those of a seed have this seed and the ones after it."""
        seed, count = self.settings.seed, self.fields.n
        seeds: list[int | None] = [None] * count
        if seed is not None:  # after the largest seed comes 0
            seeds = [each if each < 2**64 else each - 2**64 for each in range(seed, seed + count)]
        try:
            return [self.engine.request(prompt_ids, replace(self.settings, seed=each)) for each in seeds]
        except DraftHeadsError as error:
            raise api_error_of(error, param=param if isinstance(error, InvalidPrompt) else _field_of(error)) from None

    def check_logprobs(
        self, most: int, num_tokens: int, *, tokens: str = "max_tokens", field: str = "top_logprobs"
    ) -> None:
        """Are there at most so many log-probabilities in the answers, if the longest has ``num_tokens``?

        ``tokens`` and ``field`` name the factors in the error.
        """
        num_top = max(1, self.settings.logprobs or 0)  # each token has its own, too
        product = self.fields.n * num_tokens * num_top
        if self.settings.logprobs is not None and product > most:
            factors = f"n × {tokens} × {field} is {self.fields.n} × {num_tokens} × {num_top}"
            message = f"{factors} = {product:,} log-probabilities; it must be at most {most:,}: ask for fewer"
            raise ApiError(400, message, param=field)


def read_params(fields: CommonFields, service: Service, grammar: Grammar | None) -> RequestParams:
    """What the common fields mean for the server's models; a grammar decides on the form of answers."""
    if not fields.model:
        raise wrong("model", f"is missing; models of this server: {', '.join(service.models)}")
    if fields.n > service.limits.choices:
        raise wrong("n", f"is {fields.n}; it must be at most {service.limits.choices}")
    if fields.min_tokens and grammar is not None:
        problem = "but the form of the answer decides on its end; leave it out"
        raise wrong("min_tokens", f"is {fields.min_tokens}, {problem}")
    if "stream_options" in fields.model_fields_set and not fields.stream:
        raise wrong("stream_options", "is for streams only; send stream: true")
    if fields.stream_options.continuous_usage_stats and not fields.stream_options.include_usage:
        raise wrong("stream_options.continuous_usage_stats", "needs include_usage: true")
    engine = service.engine(fields.model)
    most = [engine.model.max_positions and engine.model.max_positions - 1, service.limits.max_tokens]
    max_tokens = _max_tokens(fields, min(filter(None, most), default=None))
    # OpenAI's defaults, but those that the model's own generation configuration names
    defaults = {"temperature": 1.0, "top_k": 0, **engine.generation.sampling}
    sampling = {**defaults, **fields.model_dump(include={*_SAMPLING}, exclude_unset=True)}
    sampling["logit_bias"] = {int(token): bias for token, bias in fields.logit_bias.items()}
    if sampling["top_k"] < 1:  # all tokens, as in vLLM
        sampling["top_k"] = None
    if sampling.get("top_p") == 0:  # only the most likely token is left
        sampling |= {"temperature": 0.0, "top_p": 1.0}
    sampling |= {"max_new_tokens": max_tokens, "min_new_tokens": fields.min_tokens}
    try:
        engine.check_draft_nodes(fields.draft_nodes)
        settings = SamplingSettings(**sampling, logprobs=fields.num_logprobs, grammar=grammar)
        _check_acceptance(fields, settings, allow_typical=service.limits.allow_typical)
        if grammar is not None and engine.grammars.may_be_slow(grammar):
            field = "tools" if fields.grammar is None else fields.names["form"]
            problem = f"has a schema or grammar that takes more than {{}} to compile: {_SMALLER}"
            # another request may have had the same meanwhile
            job = lambda: in_llguidance(grammar) if engine.grammars.may_be_slow(grammar) else ""  # noqa: E731
            raise Untried(engine.grammars, job, field, problem, lambda _: engine.grammars.start(grammar))
    except InvalidSettings as error:
        raise api_error_of(error, param=_field_of(error)) from None
    lane = Lane(fields.model, fields.draft_nodes)
    return RequestParams(fields, engine, lane, settings, service)


def _check_acceptance(fields: CommonFields, settings: SamplingSettings, *, allow_typical: bool) -> None:
    if settings.acceptance != "typical":
        for name in fields.model_fields_set.intersection(_OF_TYPICAL):
            raise wrong(name, f"is for typical acceptance, and acceptance is {settings.acceptance!r}; leave it out")
    elif not allow_typical:
        raise wrong("acceptance", "is 'typical', which is not lossless; the server needs --allow-typical for it")


def _max_tokens(fields: CommonFields, limit: int | None) -> int:
    """The longest answer that a request wants, within the limit of the server and the model."""
    own, names = type(fields).model_fields, ("max_tokens", "max_completion_tokens")
    asked = {own[name].alias or name: value for name in names if (value := getattr(fields, name))}
    if len(set(asked.values())) > 1:
        raise wrong("max_tokens", "and max_completion_tokens differ; send one of them")
    for name, value in asked.items():
        if limit is not None and value > limit:
            raise wrong(name, f"is {value}; it must be at most {limit} on this server")
    is_open = fields.model_fields_set & set(names) and not asked  # -1: the default of chats
    default = CommonFields.default_tokens if is_open else fields.default_tokens
    max_tokens = next(iter(asked.values()), min(default, limit or default))
    if (fields.min_tokens or 0) > max_tokens:
        limit_name = next(iter(asked), "max_tokens")
        raise wrong("min_tokens", f"is {fields.min_tokens}; it must be at most {limit_name}, which is {max_tokens}")
    return max_tokens


def _field_of(error: DraftHeadsError) -> str | None:
    """The field that an error about a setting begins with."""
    name = str(error).partition(" ")[0]
    return {"max_new_tokens": "max_tokens"}.get(name, name) if name in {"draft_nodes", *_SETTINGS} else None
