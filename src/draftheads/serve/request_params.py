"""The fields that both routes have: model, sampling, streaming, the grammar of an answer."""

import re
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from draftheads.decode.engine import Engine
from draftheads.decode.request import Request
from draftheads.decode.waiting import Lane
from draftheads.errors import DraftHeadsError, InvalidPrompt, InvalidSettings
from draftheads.serve.api_error import ApiError, api_error_of
from draftheads.serve.fields import Fields, check_schema, other_fields, text_or_list, wrong
from draftheads.serve.http_limits import HttpLimits
from draftheads.serve.state import Service
from draftheads.settings import MOST_BIAS, Grammar, SamplingSettings

_FROM_MODEL = ("temperature", "top_p", "top_k", "repetition_penalty")
_SAMPLING = {*_FROM_MODEL, "seed", "stop", "logit_bias", "ignore_eos"}  # fields that are settings of the same name
_OUR_NAMES = {"max_new_tokens": "max_tokens"}
_NAMES = {"draft_nodes", *(field.name for field in dataclass_fields(SamplingSettings))}
_MOST_STOP_CHARACTERS = 256
_TOKEN_ID = re.compile(r"[0-9]{1,9}")


def _short_stops(stops: list[str]) -> list[str]:
    if (longest := max(map(len, stops), default=0)) > _MOST_STOP_CHARACTERS:
        raise ValueError(f"has a string of {longest} characters; it must have at most {_MOST_STOP_CHARACTERS}")
    return stops


_Stop = Annotated[str, Field(min_length=1, max_length=_MOST_STOP_CHARACTERS)]
_BIASES: dict[str, Any] = {
    "propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"},
    "additionalProperties": {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS},
}


def _by_token_id(biases: dict[Any, Any]) -> dict[Any, Any]:
    for key in biases:
        if not _TOKEN_ID.fullmatch(key):
            raise ValueError(f"has the key {key[:20]!r}; keys are token ids")
    return {int(key): bias for key, bias in biases.items()}


class _JsonSchema(Fields):
    of_answers: Annotated[dict[str, Any], AfterValidator(check_schema)] = Field(alias="schema")
    # change no answer: schemas are always strict
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """What answers must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @property
    def grammar(self) -> Grammar | None:
        """None for free text.

        Raises:
            ApiError: there is no schema, or one that has no use.
        """
        if (self.json_schema is None) == (self.type == "json_schema"):
            problem = "is missing" if self.json_schema is None else "is for the type json_schema only"
            raise wrong("response_format.json_schema", problem)
        if self.json_schema is not None:
            return Grammar.json_schema(self.json_schema.of_answers)
        return Grammar.json_object() if self.type == "json_object" else None


class _StreamOptions(Fields):
    include_usage: bool = False  # a last chunk with the counts
    include_draft: bool = False  # which text of a chunk was drafted


class CommonFields(Fields):
    """Types and sizes. :class:`SamplingSettings` has the ranges of its settings, and models have their defaults."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[
        list[str],
        AfterValidator(_short_stops),
        BeforeValidator(text_or_list, json_schema_input_type=_Stop | Annotated[list[_Stop], Field(max_length=16)]),
    ] = Field([], max_length=16)
    logit_bias: Annotated[dict[Any, Any], AfterValidator(_by_token_id)] = Field(
        {}, max_length=1024, json_schema_extra=_BIASES
    )
    ignore_eos: bool = False
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    draft_nodes: int | None = None
    n: Annotated[int, Field(ge=1, le=HttpLimits.choices)] = 1  # answers to each prompt
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    store: bool = True  # the answers may be recorded
    cache_salt: Annotated[str, Field(max_length=256)] = ""  # with the same, prompts share caches
    response_format: ResponseFormat = ResponseFormat(type="text", json_schema=None)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the fields that change no answer."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        of_object = handler.resolve_ref_schema(schema)
        of_object["properties"] = {**other_fields(), **of_object["properties"]}
        return schema


@dataclass(frozen=True)
class RequestParams:
    """What a request asks for, but for its prompt."""

    fields: CommonFields
    engine: Engine
    lane: Lane
    settings: SamplingSettings

    def requests(self, prompt_ids: list[int], *, param: str) -> list[Request]:
        """The n requests of the prompt of a field. Those of a seed have this seed and the ones after it.

        Raises:
            ApiError: the prompt is empty or too long, or a setting is impossible.
        """
        seed = self.settings.seed
        seeds = [None if seed is None else _later(seed, number) for number in range(self.fields.n)]
        try:
            return [self.engine.request(prompt_ids, replace(self.settings, seed=each)) for each in seeds]
        except DraftHeadsError as error:
            raise api_error_of(error, param=param if isinstance(error, InvalidPrompt) else _field_of(error)) from None

    def check_logprobs(
        self, most: int, num_tokens: int, *, tokens: str = "max_tokens", field: str = "top_logprobs"
    ) -> None:
        """Are there at most so many log-probabilities in the answers, if the longest has ``num_tokens``?

        ``tokens`` and ``field`` name the factors in the error.

        Raises:
            ApiError: there may be more.
        """
        if self.settings.logprobs is None:
            return
        num_top = max(1, self.settings.logprobs)  # each token has its own, too
        product = self.fields.n * num_tokens * num_top
        if product > most:
            factors = f"n × {tokens} × {field} is {self.fields.n} × {num_tokens} × {num_top}"
            message = f"{factors} = {product:,} log-probabilities; it must be at most {most:,}: ask for fewer"
            raise ApiError(400, message, param=field)


def _later(seed: int, number: int) -> int:
    return seed + number if seed + number < 2**64 else seed + number - 2**64


def read_params(
    fields: CommonFields,
    service: Service,
    *,
    default_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None,
) -> RequestParams:
    """What the common fields mean for the server's models; without ``logprobs`` not even tokens have theirs.

    Raises:
        ApiError: a field is wrong.
    """
    if not fields.model:
        raise wrong("model", f"is missing; models of this server: {', '.join(service.models)}")
    if fields.n > service.limits.choices:
        raise wrong("n", f"is {fields.n}; it must be at most {service.limits.choices}")
    if len({fields.max_tokens, fields.max_completion_tokens} - {None}) > 1:
        raise wrong("max_tokens", "and max_completion_tokens differ; send one of them")
    if "stream_options" in fields.model_fields_set and not fields.stream:
        raise wrong("stream_options", "is for streams only; send stream: true")
    engine = service.engine(fields.model)
    sampling = {**_defaults_of(engine), **fields.model_dump(include=_SAMPLING, exclude_unset=True)}
    if sampling["top_k"] < 1:  # all tokens, as in vLLM
        sampling["top_k"] = None
    try:
        engine.check_draft_nodes(fields.draft_nodes)
        settings = SamplingSettings(
            **sampling,
            max_new_tokens=fields.max_tokens or fields.max_completion_tokens or default_tokens,
            logprobs=logprobs,
            grammar=grammar,
        )
    except InvalidSettings as error:
        raise api_error_of(error, param=_field_of(error)) from None
    return RequestParams(fields, engine, Lane(fields.model, fields.draft_nodes), settings)


def _defaults_of(engine: Engine) -> dict[str, Any]:
    """OpenAI's defaults, but those that the model's own generation configuration names."""
    config = getattr(engine.model.model, "generation_config", None)
    of_model = {} if config is None else config.to_diff_dict()
    named = {name: of_model[name] for name in _FROM_MODEL if of_model.get(name) is not None}
    return {"temperature": 1.0, "top_k": 0, **named}


def _field_of(error: DraftHeadsError) -> str | None:
    """The field that an error about a setting begins with."""
    name = str(error).partition(" ")[0]
    return _OUR_NAMES.get(name, name) if name in _NAMES else None
