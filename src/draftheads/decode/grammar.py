"""Grammars as masks: which tokens may come next in an answer. The only file that imports llguidance.

A place is an index of a point of one answer in this step: 0 is after the accepted tokens, and each allowed draft token
leads to a place of its own.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate, takewhile
from operator import eq
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from draftheads.decode.answer_forms.form import ONE_LINE
from draftheads.errors import GrammarFailed, InvalidSettings, MissingDependency
from draftheads.models.chat_template import TokenBytes, continuing_ids
from draftheads.settings import Grammar
from draftheads.speculation.draft import AFTER_END, FORBIDDEN

try:
    import llguidance
except ImportError:
    llguidance = None  # type: ignore[assignment]

Mask = npt.NDArray[np.int32]  # one bit per token, the lowest first

# What a grammar may cost; other limits are llguidance's. Beyond one a grammar is refused, or its request fails.
_LIMITS = {
    "initial_lexer_fuel": 100_000,  # nested repetitions such as (a{1000}){1000} took over a second
    "step_lexer_fuel": 100_000,  # about 10 ms for a mask
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,  # about 100 MB
    "verbose_errors": False,
}
_FORCED_TEXTS = 4096  # whose tokens are kept
_COMPILED = 64  # grammars of a tokenizer that stay compiled, those used last
# Schemas that take long have multipleOf, large numbers, patterns or products of schemas. A multipleOf below 100 takes
# milliseconds. Factors of 10 make others no cheaper: 2^19 takes 0.7 s, 864 × 10^5 takes 5 s, 300,007 takes 11 s.
_COSTLY = re.compile(r'"multipleOf": (?!\d\d?[,}])|\d{4}|\de|"(\$ref|allOf|anyOf|oneOf|format|pattern\w*)"')
_SIMPLE = 4096  # characters
# where JSON schemas have further schemas: by name, or a schema or a list of them
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_PARTS = {"items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf"}
_NUMBERS = {"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_EXACT = 2**53  # llguidance reads numbers as 64 bits of floating point
_SCHEMA = re.compile(r"%json\s*(?={)")  # in Lark


class GrammarState:
    """How far one answer has come in its grammar, and the draft tokens that are tried below it.

    The tokens ``end_ids`` end the answer. They are allowed where the grammar may end, and only there.
    """

    def __init__(self, matcher: Any, table: Any, *, end_ids: frozenset[int]) -> None:
        self._table, self._end_ids = table, end_ids
        self._whole, self._num_whole = matcher.deep_copy(), 0  # after so many characters: see is_whole()
        self._matcher = matcher.deep_copy()  # after the accepted tokens
        self._ends: Mask = np.zeros(-(-table.vocab_size // 32), np.int32)
        for token in end_ids:
            self._ends.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
        self._restart()

    def is_whole(self, text: str) -> bool:
        """Whether the grammar has this text as a whole. It begins with the text of the call before."""
        new = self._table.greedy_tokenize(text[self._num_whole :])
        self._num_whole = len(text)
        return bool((not new or self._whole.consume_tokens(new)) and self._whole.is_accepting())

    def read(self, token_ids: Sequence[int]) -> None:
        """Adds accepted tokens, which the grammar allows, and forgets all draft tokens."""
        self._matcher.consume_tokens(list(token_ids))
        self._restart()

    def _restart(self) -> None:
        self._probe = self._matcher.deep_copy()
        self._at: tuple[int, ...] = ()  # draft tokens that the probe has read
        self._paths: list[tuple[int, ...]] = [()]
        self._places: dict[tuple[int, int], int] = {}
        root = self._probe_mask()
        if root is None:
            problem = _first_line(self._probe.get_error()) or "without stop_token_ids it allows no token here"
            raise GrammarFailed(f"the grammar of the answer is too complex: {problem}")
        self.masks: list[Mask] = [root]  # of each place

    def place_below(self, place: int, token: int) -> int:
        """The place after a token, or what else it leads to: ``FORBIDDEN`` or ``AFTER_END``."""
        if place < 0 or not self.masks[place][token >> 5] >> (token & 31) & 1:
            return FORBIDDEN
        if token in self._end_ids:
            return AFTER_END
        known = self._places.get((place, token))
        if known is None:
            known = self._places[place, token] = self._new_place((*self._paths[place], token))
        return known

    def num_allowed(self, token_ids: Iterable[int]) -> int:
        """How many of these tokens may follow one after the other below place 0."""
        places = accumulate(token_ids, self.place_below, initial=0)
        return sum(1 for _ in takewhile(lambda place: place != FORBIDDEN, places)) - 1  # without the root's place

    def _new_place(self, path: tuple[int, ...]) -> int:
        """``FORBIDDEN`` where a limit is exceeded: if the answer gets there, its next step fails."""
        common = sum(1 for _ in takewhile(bool, map(eq, path, self._at)))
        if len(self._at) > common:
            self._probe.rollback(len(self._at) - common)
        self._probe.consume_tokens(list(path[common:]))
        self._at = path
        mask = self._probe_mask()
        if mask is None:
            self._probe, self._at = self._matcher.deep_copy(), ()
            return FORBIDDEN
        self._paths.append(path)
        self.masks.append(mask)
        return len(self.masks) - 1

    def _probe_mask(self) -> Mask | None:
        """Where the probe is; None if it allows nothing, as after an error, from which a matcher does not recover."""
        mask = np.zeros_like(self._ends)
        if not self._probe.is_error():
            self._probe.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._probe.is_error():
            return None
        mask = mask | self._ends if self._probe.is_accepting() else mask & ~self._ends
        return mask if mask.any() else None


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: a tokenizer of transformers whose tokens are bytes.
        vocab_size: V of the model; the tokenizer may have fewer or more tokens.
        eos_ids: tokens that end a text.

    Raises:
        InvalidSettings: another kind of tokenizer, or no token that ends a text.
        MissingDependency: llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        if llguidance is None:
            raise MissingDependency("grammars need llguidance", pip_install="llguidance")
        self._eos_ids = frozenset(token for token in eos_ids if 0 <= token < vocab_size)
        if not self._eos_ids:
            raise InvalidSettings("the model has no token that ends a text: an answer with a grammar needs one")
        vocabulary = _Vocabulary(tokenizer, vocab_size, min(self._eos_ids))
        self._vocabulary = vocabulary
        self._missing = {name: token for name, token in tokenizer.get_vocab().items() if token >= vocab_size}
        wrapper = llguidance.TokenizerWrapper(vocabulary)
        self._table = llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=sorted(self._eos_ids))
        vocabulary.split = self._table.greedy_tokenize
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = Lock()

    def start(self, grammar: Grammar, stop_ids: Iterable[int] = ()) -> GrammarState:
        """The state of an answer without tokens, which ``stop_ids`` may end, too."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
        try:
            return self._state(self.compile(grammar) if matcher is None else matcher, stop_ids)
        except GrammarFailed:  # copies share their lexer: it exceeded a limit in another answer
            return self._state(self.compile(grammar), stop_ids)

    def compile(self, grammar: Grammar) -> Any:
        """Compiles a grammar, which may take long; meanwhile others are compiled and started."""
        matcher = self._checked(grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def may_be_slow(self, grammar: Grammar) -> bool:
        """Whether the start of a grammar may take long: it is not compiled, and is more than a simple schema."""
        is_simple = grammar.kind == "json_schema" and len(grammar.text) <= _SIMPLE and not _COSTLY.search(grammar.text)
        return not is_simple and grammar not in self._compiled

    @property
    def parts(self) -> tuple[dict[str, Any], int, list[int], dict[str, Any]]:
        """For another process that compiles: tokens, their number, those that end a text, and the limits."""
        names = ("tokens", "special_token_ids", "eos_token_id")
        tokens = {name: getattr(self._vocabulary, name) for name in names}
        return tokens, self._table.vocab_size, sorted(self._eos_ids), _LIMITS

    def _state(self, matcher: Any, stop_ids: Iterable[int] = ()) -> GrammarState:
        stop_ids = (token for token in stop_ids if token < self._table.vocab_size)
        return GrammarState(matcher, self._table, end_ids=self._eos_ids.union(stop_ids))

    def _checked(self, grammar: Grammar) -> Any:
        """A matcher that has computed its first masks without an error."""
        for name in re.findall(r"<[^<>\s]+>", grammar.text) if grammar.kind == "lark" else ():
            if (token := self._missing.get(name)) is not None:
                raise InvalidSettings(f"the grammar needs token {token}, {name}, which the model does not have")
        limits = llguidance.LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
        try:
            matcher = llguidance.LLMatcher(self._table, in_llguidance(grammar), log_level=0, limits=limits)
        except ValueError as error:
            raise InvalidSettings(f"the grammar cannot be used: {_first_line(error)}") from None
        if matcher.is_error():
            raise InvalidSettings(f"the grammar cannot be used: {_first_line(matcher.get_error())}")
        try:
            trial = self._state(matcher)
            allowed = [token for token in tokens_of(trial.masks[0]) if token not in self._eos_ids]
            if not allowed:
                raise InvalidSettings("the grammar allows no text")
            trial.read(allowed[:1])
            self._state(matcher)  # the lexer, which copies share, may be at its limit now
        except GrammarFailed as error:
            raise InvalidSettings(str(error)) from None
        return matcher


class _Vocabulary:
    """A tokenizer as llguidance reads it. Its own reading of a file with 262,144 tokens takes ten times as long."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, eos_id: int) -> None:
        known = TokenBytes(tokenizer)
        if not known.are_known:
            raise InvalidSettings("grammars cannot be used with the model's tokenizer: its tokens are not bytes")
        self.eos_token_id = eos_id
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        tags = {token for token, each in added if each.special or each.content[:1] + each.content[-1:] == "<>"}
        self.special_token_ids = sorted(token for token in tags if token < vocab_size)
        self.tokens = [known.of(token) for token in range(vocab_size)]
        self.split: Callable[[str], list[int]] | None = None  # for texts with tokens that the model does not have
        self._ids_of = lru_cache(_FORCED_TEXTS)(partial(continuing_ids, tokenizer))

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a text that a grammar leaves no choice about."""
        ids = self._ids_of(text.decode())
        return self.split(text.decode()) if self.split and max(ids, default=0) >= len(self.tokens) else ids


def tokens_of(mask: Mask) -> list[int]:
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return tokens


_COMPILERS: WeakKeyDictionary[Any, dict[tuple[int, frozenset[int]], GrammarCompiler]] = WeakKeyDictionary()
_ONE_AT_A_TIME = Lock()


def compiler_for(tokenizer: Any, *, vocab_size: int, eos_ids: frozenset[int]) -> GrammarCompiler:
    """The compiler of a tokenizer, made once: it may take a second. Arguments and errors as for the class."""
    with _ONE_AT_A_TIME:
        known = _COMPILERS.setdefault(tokenizer, {})
        key = (vocab_size, eos_ids)
        if key not in known:
            known[key] = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids)
        return known[key]


def in_llguidance(grammar: Grammar) -> str:
    """The grammar as llguidance reads it."""
    if grammar.kind == "json_schema":
        text = json.dumps(_readable(json.loads(grammar.text)))
        return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=ONE_LINE)  # type: ignore[arg-type]
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    done, text = "", grammar.text
    with suppress(json.JSONDecodeError):  # llguidance finds it, too
        while found := _SCHEMA.search(text):
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
            done, text = done + text[: found.end()] + json.dumps(_readable(schema)), text[end:]
    return llguidance.LLMatcher.grammar_from_lark(done + text)


def _readable(schema: Any) -> Any:
    """A JSON schema without what says nothing or is an annotation for llguidance, too, which refuses it."""
    if isinstance(schema, list):
        return [_readable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _NUMBERS and (number := _inexact(value)) and (key, number) != ("maximum", 2**63 - 1):
            problem = f"{key} has {number}, and integers of grammars are exact up to 2^53 ({_EXACT})"
            raise InvalidSettings(f"the grammar cannot be used: {problem}: use a string for it, or leave it out")
        if key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: _readable(each) for name, each in value.items()}
        elif key in _PARTS:
            found[key] = _readable(value)
        elif (key, value) != ("uniqueItems", False) and (key != "format" or _is_known(str(value))):
            found[key] = value
    return found


def _inexact(value: Any) -> int | None:
    """An integer in a value that llguidance would round."""
    if isinstance(value, dict | list):
        return next(filter(None, map(_inexact, value.values() if isinstance(value, dict) else value)), None)
    return value if isinstance(value, int) and abs(value) > _EXACT else None


@lru_cache
def _is_known(form: str) -> bool:
    """Whether llguidance has a format of strings; JSON Schema calls the others annotations."""
    schema = llguidance.LLMatcher.grammar_from_json_schema({"type": "string", "format": form})
    return not llguidance.LLMatcher.validate_grammar(schema)


def _first_line(message: object) -> str:
    return " ".join(str(message).split("<state>")[0].split())[:300]
