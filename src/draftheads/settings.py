"""Settings that more than one part of the package has. Nothing slow is imported here: every ``--help`` needs it."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from reprlib import repr as short_repr
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin

from draftheads.errors import InvalidSettings
from draftheads.utils.messages import keep_variables
from draftheads.utils.strict_json import depth_of

Precision = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"]
ROUNDED_BITS = {"int8": 8, "int4": 4}  # of a weight, for the precisions of CPUs that change the model
LmHeadKind = Literal["shared", "own", "low_rank"]
LossKind = Literal["teacher", "hard", "amphista", "dspark", "eagle"]
LOWEST_TEMPERATURE = 1e-6  # a lower one overflows, and would choose the same tokens as greedy
MOST_LOGPROBS = 20  # as in the APIs of OpenAI and vLLM
MOST_GRAMMAR_CHARACTERS = 65_536
DEEPEST_SCHEMA = 64  # objects and arrays inside each other, in the text of a JSON schema
MOST_BIAS = 100.0  # as in OpenAI's API
MOST_PENALTY = 2.0  # the same
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # OpenAI's
AcceptanceRule = Literal["exact", "rejection", "block", "typical"]
_ACCEPTANCE = get_args(AcceptanceRule)
GrammarKind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """What an answer may be: JSON of a schema, or a text of a regular expression or of a Lark grammar.

    The answer ends where the grammar does. A schema's JSON is on one line, with ``", "`` and ``": "`` between values.

    Raises:
        InvalidSettings: longer or nested deeper than the limits, or not JSON. What the grammar means is checked when a
            request is made.
    """

    kind: GrammarKind
    """The language of the text."""
    text: str
    """The JSON schema, regular expression or Lark grammar."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InvalidSettings(f"kind is {self.kind!r}; it must be {' or '.join(map(repr, get_args(GrammarKind)))}")
        if not isinstance(self.text, str):
            raise InvalidSettings(f"a grammar is a text, not {type(self.text).__name__}")
        if len(self.text) > MOST_GRAMMAR_CHARACTERS:
            raise InvalidSettings(
                f"the grammar has {len(self.text):,} characters; {MOST_GRAMMAR_CHARACTERS:,} are allowed"
            )
        if self.kind == "json_schema":
            _check_schema(self.text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Self:
        """JSON that a schema describes; the schema as a dictionary or as its text."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(dict(schema), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidSettings(f"the JSON schema cannot be written as JSON: {error}") from None

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that a regular expression matches as a whole. Without look-around and references."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Text of a context-free grammar in the notation of Lark, as llguidance reads it."""
        return cls("lark", grammar)


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSettings(f"the JSON schema is not JSON: {error}") from None
    if (depth := depth_of(schema)) > DEEPEST_SCHEMA:
        raise InvalidSettings(f"the JSON schema is nested {depth} deep; {DEEPEST_SCHEMA} is allowed")
    if not isinstance(schema, dict | bool):
        raise InvalidSettings(f"a JSON schema is an object, not {short_repr(schema)}")


class Rule(NamedTuple):
    """What a setting may be, in ``Annotated`` after its type."""

    convert: Callable[[Any], Any]  # to its type; raises TypeError, ValueError or OverflowError
    holds: Callable[[Any], bool]  # whether the converted value is in its range
    words: str  # the end of "it must be …"


_ACCEPTED: dict[type, type] = {int: Integral, float: Real, str: str}


def _as(kind: type, value: Any) -> Any:
    """Numbers and texts, NumPy's too, as Python's; a bool is no number."""
    if isinstance(value, bool) or not isinstance(value, _ACCEPTED[kind]):
        raise TypeError
    return kind(value)


_integer, _number, _name = partial(_as, int), partial(_as, float), partial(_as, str)


def _flag(value: Any) -> bool:
    if value not in (True, False):
        raise TypeError
    return bool(value)


def _strings(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else _several(_name, value)


def _several(convert: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError
    return tuple(map(convert, value))


def _grammar(value: Any) -> Grammar:
    if isinstance(value, Grammar):
        return value
    if not isinstance(value, Mapping):
        raise TypeError
    return Grammar.json_schema(value)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else _several(tuple, value)
    return tuple(sorted((_integer(token), _number(bias)) for token, bias in pairs))


def _seed(value: Any) -> int | None:
    """-1 is a random seed, as in vLLM and llama.cpp."""
    return None if (seed := _integer(value)) == -1 else seed


def _integers(least: int, most: float = math.inf, also: str = "") -> Rule:
    words = f"an integer of at least {least}" if most == math.inf else f"an integer from {least} to {most}"
    return Rule(_integer, lambda number: least <= number <= most, words + also)


_FLAG = Rule(_flag, lambda _: True, "True or False")
_SHARE = Rule(_number, lambda share: 0.0 < share <= 1.0, "a number above 0 and at most 1")
_POSITIVE = Rule(_number, lambda number: 0.0 < number < math.inf, "a positive number, or None")
_DELTA = Rule(_number, lambda delta: delta > 0.0, "a positive number, or None")
_PENALTY = Rule(_number, lambda p: abs(p) <= MOST_PENALTY, f"a number from {-MOST_PENALTY:g} to {MOST_PENALTY:g}")
_SEED = Rule(_seed, lambda n: n is None or 0 <= n < 2**64, "an integer from 0 to 2**64 - 1; -1 or None is random")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling, and where an answer ends.

    The settings of a request that are options of ``draftheads chat``, too. Values are checked and converted: one string
    for ``stop``, lists, and the numbers of NumPy are valid, too.

    Raises:
        InvalidSettings: a value of another type or out of its range, or more tokens at least than at most.
    """

    max_new_tokens: Annotated[int, _integers(1)] = 256
    """Stop after this many new tokens."""
    temperature: Annotated[
        float,
        Rule(
            _number,
            lambda t: t == 0.0 or LOWEST_TEMPERATURE <= t < math.inf,
            f"0 (greedy) or a number of at least {LOWEST_TEMPERATURE}",
        ),
    ] = 0.0
    """0 takes the most likely token (greedy); above 0 samples."""
    seed: Annotated[int | None, _SEED] = None
    """Makes sampling repeatable. It is drawn at random if it is -1 or left out."""

    def __post_init__(self) -> None:
        for name, annotated in ((field.name, field.type) for field in fields(self)):
            value, (kind, rule) = getattr(self, name), get_args(annotated)
            if value is None and NoneType in get_args(kind):
                continue
            try:
                converted = rule.convert(value)
                valid = rule.holds(converted)
            except (TypeError, ValueError, OverflowError):
                valid = False
            if not valid:
                shown = " ".join(short_repr(value).split())  # one line
                raise InvalidSettings(f"{name} is {shown}; it must be {rule.words}")
            object.__setattr__(self, name, converted)


@dataclass(frozen=True, kw_only=True)
class GenerateSampling(SamplingOptions):
    """Sampling, and where an answer ends.

    Further settings, that are options of ``draftheads generate``.
    """

    top_k: Annotated[int | None, _integers(1, also=", or None for all tokens")] = None
    """Sample among the k most likely tokens only."""
    top_p: Annotated[float, _SHARE] = 1.0
    """Sample among the top tokens up to this probability. They are the fewest tokens that together reach it."""
    repetition_penalty: Annotated[float | None, _POSITIVE] = None
    """Above 1 makes tokens already in the text less likely. The prompt counts, too. Default: that of the model's
    generation configuration, else 1."""
    stop: Annotated[tuple[str, ...], Rule(_strings, all, "a string or a list of strings, none of them empty")] = ()
    """Strings that end the answer. They are not part of it. With a grammar, they end it only where the grammar may."""
    acceptance: Annotated[
        AcceptanceRule,
        Rule(_name, lambda rule: rule in _ACCEPTANCE, " or ".join(map(repr, _ACCEPTANCE))),
    ] = "exact"
    """Acceptance. exact keeps the model's distribution (greedy: its text). So do rejection and block
    (chains only), which are for drafts of sampled tokens. typical is faster but changes the distribution: it
    accepts draft tokens that are likely enough, and the token after them is the most likely one, whatever the seed."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(GenerateSampling):
    """How one request is decoded.

    Values are checked and converted: one string for ``stop``, lists, a dictionary for ``logit_bias`` or as the JSON
    schema of ``grammar``, and the numbers of NumPy are valid, too.

    Raises:
        InvalidSettings: as the options, or a grammar with ``ignore_eos`` or ``min_new_tokens``.
    """

    min_p: Annotated[float, Rule(_number, lambda p: 0.0 <= p <= 1.0, "a number from 0 to 1")] = 0.0
    """Leave out tokens below this share of the best probability. After temperature; 0 leaves none out."""
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    """Lowers a token's logit by this for each time in the answer. From -2 to 2, as in OpenAI's API. The prompt does not
    count."""
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    """Lowers a token's logit by this if it is in the answer. From -2 to 2, as in OpenAI's API. The prompt does not
    count."""
    stop_token_ids: Annotated[
        tuple[int, ...],
        Rule(partial(_several, _integer), lambda ids: min(ids, default=0) >= 0, "a list of token ids, such as [7]"),
    ] = ()
    """Token ids that end the answer. The model's own end of text ends it, too."""
    ignore_eos: Annotated[bool, _FLAG] = False
    """Go on after the model's own end of text."""
    min_new_tokens: Annotated[int | None, _integers(0, also=", or None")] = None
    """The answer has at least this many tokens before it can end. Until then no token ends it, and stop strings are not
    looked for. Default: that of the model's generation configuration, else 0."""
    logprobs: Annotated[int | None, _integers(0, MOST_LOGPROBS, ", or None for no log-probabilities")] = None
    """Log-probabilities of the answer's and the k top tokens. 0 gives those of the answer's tokens only; k, at most 20,
    also those of the k most likely tokens at each place. They are the log-softmax of the model's logits in float32,
    before logit biases, penalties, temperature, top-k, top-p and min-p."""
    typical_epsilon: Annotated[float, _SHARE] = 0.09
    """ε of typical acceptance. A draft token above this probability is always typical."""
    typical_delta: Annotated[float | None, _DELTA] = None
    """δ of typical acceptance; √ε if left out."""
    grammar: Annotated[
        Grammar | None, Rule(_grammar, lambda _: True, "a Grammar, a dictionary with a JSON schema, or None")
    ] = None
    """The answer is a text of this grammar. A dictionary is a JSON schema."""
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        Rule(
            _biases,
            lambda pairs: all(token >= 0 and abs(bias) <= MOST_BIAS for token, bias in pairs),
            f"token ids with numbers from {-MOST_BIAS:g} to {MOST_BIAS:g}, such as {{7: -100}}",
        ),
    ] = ()
    """Numbers from -100 to 100 that are added to the logits of tokens: {token id: bias}. -100 in effect bans a token.
    They are added before penalties and temperature."""
    include_stop_str_in_output: Annotated[bool, _FLAG] = False
    """Whether the stop string, or the text of a token of ``stop_token_ids``, that ends the answer is part of it."""
    skip_special_tokens: Annotated[bool, _FLAG] = True
    """Whether special tokens, such as ``<|im_start|>``, are left out of the text, except tags of calls and thoughts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.min_new_tokens or 0) > self.max_new_tokens:
            raise InvalidSettings(
                f"min_new_tokens is {self.min_new_tokens}; it must be at most max_new_tokens, {self.max_new_tokens}"
            )
        for name in ("ignore_eos", "min_new_tokens"):
            if self.grammar is not None and (value := getattr(self, name)):
                raise InvalidSettings(
                    f"{name} is {value}, but an answer with a grammar ends where the grammar ends: leave {name} out"
                )


# --- settings of several jobs ---


HELD_OUT = 0.05  # part of the texts that training does not read, by default


@dataclass(frozen=True)
class LoadSettings:
    """How the model is loaded."""

    chat_template: str | None = None
    """Chat template in place of the head's or the tokenizer's. A Jinja file, or chatml, hermes, llama-2 or vicuna."""
    precision: Precision = "auto"
    """Number format. auto is bf16 if the processor or GPU computes in it, else fp16 on a GPU and fp32 on a CPU. int8
    and int4 are for CPUs: they are faster and change the model, int8 a little and int4 more."""
    device: str | None = None
    """Where the model runs: cpu, cuda or cuda:1. Default: CUDA if there is one."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models that you trust."""

    def given(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as arguments of :func:`draftheads.load`."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


@dataclass(frozen=True)
class TemplateSettings(LoadSettings):
    """How the model is loaded, and its chat template's variables."""

    template_variables: tuple[str, ...] = ()
    """Values of variables of the chat template, NAME=VALUE. Such as enable_thinking=false. A head keeps them."""

    def __post_init__(self) -> None:
        keep_variables(self)


# --- groups of settings, and the ranges of their values ---


@dataclass(frozen=True)
class Range:
    """The range of a setting, given as ``Annotated[float, Range(…)]``. None is in every range."""

    fix: str  # the end of the error message
    has: Callable[[float], bool]


def at_least(least: int) -> Range:
    """Of a whole number."""
    return Range(f"must be at least {least}", lambda value: value >= least)


ABOVE_0 = Range("must be above 0", lambda value: value > 0)
FROM_0, FROM_1 = at_least(0), at_least(1)
FRACTION = Range("must be at least 0 and below 1", lambda value: 0 <= value < 1)


def up_to(most: int) -> Range:
    """From 1 to ``most``: larger values would only take long to fail."""
    return Range(f"must lie in 1 … {most}", lambda value: 1 <= value <= most)


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Settings that belong together. Their ranges and choices are checked when a group is made."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kinds = getattr(self, field.name), get_args(field.type)
            for kind in (field.type, *kinds):
                if get_origin(kind) is Literal and not (value is None and NoneType in kinds):
                    choices, values = get_args(kind), value if get_origin(field.type) is tuple else (value,)
                    is_known = all(each in choices for each in values)
                    self._require(field.name, fine=is_known, fix=f"choose among {', '.join(choices)}")
            for limit in getattr(field.type, "__metadata__", ()):  # of Annotated
                if value is not None and isinstance(limit, Range):
                    is_whole = kinds[0] in (int, int | None)
                    is_number = isinstance(value, Integral if is_whole else Real) and not isinstance(value, bool)
                    self._require(field.name, fine=is_number, fix=f"must be {'a whole' if is_whole else 'a'} number")
                    self._require(field.name, fine=limit.has(value), fix=limit.fix)

    def _require(self, name: str, *, fine: bool, fix: str) -> None:
        """Raises InvalidSettings with the option's name, its value and how to fix it, unless the value is ``fine``."""
        if not fine:
            value = getattr(self, name)
            several = " ".join(map(str, value)) if isinstance(value, tuple) and value else repr(value)
            shown = str(value) if isinstance(value, Path) else several
            flag = f"--{name.replace('_', '-')}"
            raise InvalidSettings(f"{flag} is {shown}: {fix}")
