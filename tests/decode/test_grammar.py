"""Grammars: what is refused, what states allow, and what becomes of a request whose grammar exceeds a limit."""

import copy
import json
import time
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import llguidance.hf
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import draftheads.decode.grammar as module
from byte_tokenizers import byte_fallback, byte_level
from draftheads.decode.engine import Engine
from draftheads.decode.grammar import GrammarState, compiler_for, tokens_of
from draftheads.errors import GrammarFailed, InvalidSettings, MissingDependency
from draftheads.settings import DEEPEST_SCHEMA, MOST_GRAMMAR_CHARACTERS, Grammar, SamplingSettings
from draftheads.speculation.draft import AFTER_END, FORBIDDEN
from families import tiny_head, tiny_model
from scheduler_world import join
from structured_world import EOS, GRAMMARS, PERSON, VOCAB, SlowGrammar, json_model, json_tokenizer

BIG = 2**53 + 1
SECONDS = 20.0  # far more than a refusal takes; a hostile grammar that is not limited takes hours


def state_of(grammar: Grammar) -> GrammarState:
    return compiler_for(json_tokenizer(), vocab_size=VOCAB, eos_ids=frozenset({EOS})).start(grammar)


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grammar.json_schema("{"), "not JSON"),
        (lambda: Grammar.json_schema("[1]"), r"a JSON schema is an object, not \[1\]"),
        (lambda: Grammar.json_schema(nested(DEEPEST_SCHEMA)), f"nested {DEEPEST_SCHEMA + 1} deep; {DEEPEST_SCHEMA} is"),
        (lambda: Grammar.json_schema(nested(100_000)), "cannot be written as JSON"),
        (lambda: Grammar.json_schema("[" * 30_000 + "]" * 30_000), "is not JSON: maximum recursion"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "cannot be written as JSON"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "cannot be written as JSON"),
        (lambda: Grammar.json_schema({"enum": ["x" * MOST_GRAMMAR_CHARACTERS]}), r"65,5\d\d characters; 65,536 are"),
        (lambda: Grammar("gbnf", "root ::= x"), "kind is 'gbnf'"),
        (lambda: Grammar.regex(7), "a grammar is a text, not int"),
        (lambda: SamplingSettings(grammar="{}"), "grammar is '{}'; it must be a Grammar"),
        (lambda: SamplingSettings(grammar=GRAMMARS["person"], ignore_eos=True), "ends where the grammar ends"),
    ],
)
def test_what_is_refused_at_once(make: Any, words: str):
    with pytest.raises(InvalidSettings, match=words):
        make()


def test_brackets_in_strings_do_not_nest():
    Grammar.json_schema({"const": "[{" * 100 + '"' + "\\" * 3})


HOSTILE = {
    "unknown type": Grammar.json_schema({"type": "strin"}),
    "a file": Grammar.json_schema({"$ref": "file:///etc/passwd"}),
    "itself": Grammar.json_schema({"$ref": "#"}),
    "a number too low": Grammar.json_schema({"type": "integer", "minimum": -(10**30)}),
    "unsatisfiable": Grammar.json_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}),
    "product": Grammar.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(6)]} for i in range(8)]}
    ),
    "nested repetitions": Grammar.regex("((a{1000}){1000}){1000}"),
    "repetitions after a letter": Grammar.regex("(yes|no) (a{1000}){1000}"),
    "half a character": Grammar.regex("\ud800"),
    "no text": Grammar.regex(""),
    "many properties": Grammar.json_schema({"properties": {f"p{i}": {} for i in range(2500)}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_when_a_request_is_made(name: str):
    start = time.monotonic()
    with pytest.raises(InvalidSettings, match="grammar"):
        Engine(json_model()).request([5], SamplingSettings(grammar=HOSTILE[name]))
    assert time.monotonic() - start < SECONDS


@pytest.mark.parametrize("in_lark", [False, True])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"enum": [BIG]}, f"enum has {BIG}, and integers of grammars are exact up to 2\\^53"),
        ({"properties": {"a": {"items": {"const": {"b": [-BIG]}}}}}, f"const has -{BIG}"),
        ({"anyOf": [{"type": "integer", "minimum": BIG}]}, f"minimum has {BIG}"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
    ],
)
def test_what_a_grammar_cannot_hold_is_named(schema: dict[str, Any], words: str, in_lark: bool):
    with pytest.raises(InvalidSettings, match=words):
        state_of(
            Grammar.lark(f'start: "%json" %json {json.dumps(schema)} "."') if in_lark else Grammar.json_schema(schema)
        )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "format": "path", "title": "a", "default": BIG}, '"not a path"'),
        ({"type": "array", "items": {"format": "password", "type": "string"}, "uniqueItems": False}, '["a", "a"]'),
        ({"properties": {"format": {"enum": ["x"]}, "enum": {"type": "integer"}}}, '{"format": "x", "enum": 1}'),
        ({"type": "integer", "maximum": 2**63 - 1}, str(2**63 - 1)),
        ({"enum": [2**53, 0.1234567890123456789]}, str(2**53)),
    ],
)
def test_annotations_of_a_schema_change_nothing(schema: dict[str, Any], text: str):
    assert state_of(Grammar.json_schema(schema)).is_whole(text)
    assert state_of(Grammar.lark(f"start: %json {json.dumps({**schema, 'x-guidance': module.ONE_LINE})}")).is_whole(
        text
    )


def test_what_pydantic_writes_is_held_or_named():
    class Everything(pydantic.BaseModel):
        path: Path
        secret: pydantic.SecretStr
        raw: bytes
        parsed: pydantic.Json[list[int]]
        when: datetime | None = None
        took: timedelta = timedelta(1)
        number: Annotated[int, pydantic.Field(gt=0, lt=2**53, multiple_of=3)]
        names: dict[str, Annotated[str, pydantic.Field(min_length=1, pattern="^[a-z]+$")]]
        pair: tuple[UUID, Decimal, Literal["a", "b"], pydantic.HttpUrl]
        unique: set[int]
        either: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]

    found = {}
    for name, schema in (whole := Everything.model_json_schema())["properties"].items():
        try:
            state_of(Grammar.json_schema({**schema, "$defs": whole["$defs"]}))
        except InvalidSettings as error:
            found[name] = str(error)
    assert found.keys() == {"unique"}
    assert "uniqueItems" in found["unique"]


@pytest.mark.parametrize(
    ("grammar", "is_slow"),
    [
        (Grammar.json_schema(PERSON), False),
        (Grammar.json_schema({"type": "integer", "multipleOf": 97}), False),
        (Grammar.json_schema({"type": "integer", "multipleOf": 103}), True),
        (Grammar.json_schema({"type": "number", "multipleOf": 1e-9}), True),
        (Grammar.json_schema({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}), True),
        (Grammar.json_schema({"type": "string", "pattern": "(a{99}){99}"}), True),
        (Grammar.json_schema({"type": "array", "maxItems": 1000}), True),
        (Grammar.json_schema({"enum": ["x" * 5000]}), True),
        (Grammar.regex("a"), True),
    ],
)
def test_only_simple_schemas_are_certain_to_be_fast(grammar: Grammar, is_slow: bool):
    compiler = compiler_for(json_tokenizer(), vocab_size=VOCAB, eos_ids=frozenset({EOS}))
    compiler._compiled.pop(grammar, None)
    assert compiler.may_be_slow(grammar) == is_slow
    compiler.compile(grammar)
    assert not compiler.may_be_slow(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"enum": [f"value {i}" for i in range(4000)]}),
        Grammar.json_schema({"type": "string", "minLength": 1_000_000}),
        Grammar.json_schema(nested(DEEPEST_SCHEMA - 1)),
        Grammar.regex(".*a.{40}"),
        Grammar.regex("(a|aa)*b(a|aa)*c(a+)+"),
    ],
)
def test_costly_grammars_work(grammar: Grammar):
    (result,) = Engine(json_model()).generate([[5]], grammar=grammar, max_new_tokens=20)
    assert SlowGrammar(grammar).allows(list(result.token_ids))


def test_a_grammar_that_exceeds_a_limit_later_fails_its_own_request_only():
    """Each answer is decoded as if the other were not there; without isolation the error is raised."""
    hidden = Grammar.lark('start: WORD ":" REST\nWORD: /[a-z]{6,12}/\nREST: /(a{1000}){1000}/')
    prompts = [[5], [40, 41, 42]]
    each = [SamplingSettings(grammar=hidden), SamplingSettings(grammar=GRAMMARS["person"], max_new_tokens=30)]
    engine = Engine(json_model(), tiny_head("hydra", json_model()))
    with pytest.raises(GrammarFailed, match="too complex"):
        engine.generate(prompts, each)
    assert engine.generate(prompts, each, max_new_tokens=3)  # the same grammar can be used again
    bad, good = engine.requests(prompts, each)
    batch = engine.batch()
    join(batch, [bad, good])
    while batch.requests:
        batch.step()
    assert isinstance(bad.failure, GrammarFailed)
    assert bad.finish_reason is None
    assert good.result().token_ids == Engine(json_model()).generate(prompts[1:], each[1])[0].token_ids


def larger_tokenizer() -> Any:
    """With tokens that no model of the tests has."""
    tokenizer = copy.deepcopy(json_tokenizer())
    tokenizer.add_tokens([f"<{number}>" for number in range(VOCAB)] + ["perhaps"], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("vocab_size", [VOCAB, VOCAB - 7, 288, 320])
def test_a_tokenizer_may_have_more_tokens_than_the_model(vocab_size: int):
    state = compiler_for(larger_tokenizer(), vocab_size=vocab_size, eos_ids=frozenset({EOS})).start(GRAMMARS["choice"])
    known = state_of(GRAMMARS["choice"])
    assert tokens_of(state.masks[0]) == [token for token in tokens_of(known.masks[0]) if token < vocab_size]
    assert len(state.masks[0]) == -(-vocab_size // 32)


def test_a_grammar_that_needs_a_missing_token_names_it():
    tokenizer = larger_tokenizer()
    compiler = compiler_for(tokenizer, vocab_size=VOCAB, eos_ids=frozenset({EOS}))
    token = tokenizer.convert_tokens_to_ids("<5>")
    with pytest.raises(InvalidSettings, match=f"needs token {token}, <5>, which the model does not have"):
        compiler.start(Grammar.lark("start: <5>"))


def test_places_follow_the_draft_tokens():
    state = state_of(Grammar.regex("ab?"))
    a, b = (json_tokenizer()(letter)["input_ids"][0] for letter in "ab")
    assert a in tokens_of(state.masks[0])
    after_a = state.place_below(0, a)
    assert after_a == 1
    assert tokens_of(state.masks[after_a]) == sorted([EOS, b])
    assert state.place_below(0, b) == FORBIDDEN
    assert state.place_below(FORBIDDEN, a) == FORBIDDEN
    assert state.place_below(after_a, EOS) == AFTER_END
    assert state.place_below(AFTER_END, EOS) == FORBIDDEN
    assert tokens_of(state.masks[state.place_below(after_a, b)]) == [EOS]
    assert state.place_below(0, a) == after_a
    assert (state.num_allowed([a, b, a]), state.num_allowed([a, EOS, a]), state.num_allowed([b])) == (2, 2, 0)
    state.read([a])
    assert tokens_of(state.masks[0]) == sorted([EOS, b])
    assert len(state.masks) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(grammar=st.sampled_from(sorted(GRAMMARS)), data=st.data())
def test_masks_equal_those_of_a_grammar_read_from_its_beginning(grammar: str, data: st.DataObject):
    """Draft tokens are tried in any order, and some are accepted."""
    state, slow = state_of(GRAMMARS[grammar]), SlowGrammar(GRAMMARS[grammar])
    text: list[int] = []
    paths: dict[int, list[int]] = {0: []}
    for _ in range(data.draw(st.integers(1, 12))):
        place = data.draw(st.sampled_from(sorted(paths)))
        going = [token for token in tokens_of(state.masks[place]) if token != EOS]
        if not going:
            continue
        if data.draw(st.integers(0, 3)) == 0:  # accepted
            state.read(paths[place])
            text += paths[place]
            paths = {0: []}
        else:
            token = data.draw(st.sampled_from(going))
            below = state.place_below(place, token)
            assert below not in paths or paths[below] == [*paths[place], token]
            paths[below] = [*paths[place], token]
        for own, path in paths.items():
            expected = slow.allowed(text + path).nonzero()[:, 0].tolist()
            assert tokens_of(state.masks[own]) == expected


def test_a_compiler_and_its_grammars_are_made_once(monkeypatch: pytest.MonkeyPatch):
    key: dict[str, Any] = {"vocab_size": VOCAB, "eos_ids": frozenset({EOS})}
    compiler = compiler_for(json_tokenizer(), **key)
    assert compiler_for(json_tokenizer(), **key) is compiler
    monkeypatch.setattr(module, "_COMPILED", 2)
    for text in ("xa", "xb", "xa", "xc"):
        compiler.start(Grammar.regex(text))
    assert [grammar.text for grammar in compiler._compiled][-2:] == ["xa", "xc"]
    assert compiler.start(Grammar.regex("xa")) is not compiler.start(Grammar.regex("xa"))


def test_models_that_cannot_have_grammars():
    grammar = SamplingSettings(grammar=GRAMMARS["choice"])
    with pytest.raises(InvalidSettings, match="cannot be used with the model's tokenizer"):
        Engine(tiny_model("llama")).request([5], grammar)
    with pytest.raises(InvalidSettings, match="no token that ends a text"):
        compiler_for(json_tokenizer(), vocab_size=VOCAB, eos_ids=frozenset())
    with pytest.raises(InvalidSettings, match="no token that ends a text"):
        compiler_for(json_tokenizer(), vocab_size=VOCAB, eos_ids=frozenset({VOCAB}))


@pytest.mark.parametrize("vocab_size", [257, 300, 400])
def test_tokenizers_of_another_size_than_the_model(vocab_size: int):
    """Forced texts, too, have only tokens of the model."""
    compiler = compiler_for(json_tokenizer(), vocab_size=vocab_size, eos_ids=frozenset({EOS, 10**6}))
    state, text = compiler.start(GRAMMARS["call"]), list[int]()
    while AFTER_END not in (ends := [state.place_below(0, EOS)]):
        assert ends == [FORBIDDEN]
        text.append(tokens_of(state.masks[0])[-1])
        assert text[-1] < min(vocab_size, len(json_tokenizer()))
        state.read(text[-1:])
    assert json_tokenizer().decode(text) == '{"city": "San Francisco"}'


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_vocabulary_is_that_of_llguidance(make: Any):
    """The slow twin reads the tokenizer's own file."""
    tokenizer = make()
    tokenizer.add_tokens(["<think>", "◁é▷", "<b", "  x"])
    slow = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[tokenizer.eos_token_id])
    ends = frozenset({tokenizer.eos_token_id})
    table = compiler_for(tokenizer, vocab_size=len(tokenizer), eos_ids=ends)._table
    for token in range(len(tokenizer)):
        assert table.decode_bytes([token]) == slow.decode_bytes([token])
        assert table.is_special_token(token) == slow.is_special_token(token)


def letter_id(letter: str) -> int:
    return int(json_tokenizer()(letter)["input_ids"][0])


TEXTS = Grammar.regex('"[a-z]{2,9}"')


@pytest.mark.parametrize("kind", ["eos", "stop"])
def test_tokens_of_texts_end_an_answer_only_where_its_grammar_may_end(kind: str):
    """An end token that is no special token of the tokenizer could be text in the middle of a value."""
    ends = {letter_id("b")}
    eos_ids = frozenset({EOS, *(ends if kind == "eos" else ())})
    compiler = compiler_for(json_tokenizer(), vocab_size=VOCAB, eos_ids=eos_ids)
    state = compiler.start(TEXTS, ends if kind == "stop" else ())
    for text, may_end in (('"ac', False), ('"', True)):
        state.read(json_tokenizer()(text)["input_ids"])
        for end in {EOS, *ends}:
            assert state.place_below(0, end) == (AFTER_END if may_end else FORBIDDEN)


def test_stop_tokens_that_the_grammar_needs_are_an_error_of_the_request():
    compiler = compiler_for(json_tokenizer(), vocab_size=VOCAB, eos_ids=frozenset({EOS}))
    with pytest.raises(GrammarFailed, match="without stop_token_ids it allows no token"):
        compiler.start(Grammar.regex("x"), [letter_id("x")])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stop", ["e", "a", '"age', " ", "}"])
def test_stop_strings_in_the_middle_of_a_value_do_not_end_it(stop: str, keep: bool):
    model = json_model()
    settings = SamplingSettings(grammar=GRAMMARS["person"], stop=stop, include_stop_str_in_output=keep)
    for drafter in (None, tiny_head("hydra", model)):
        [result] = Engine(model, drafter).generate([[5, 6]], settings)
        assert (result.finish_reason, set(json.loads(result.text))) == ("stop", {"name", "age", "tags"})


def test_stop_strings_end_an_answer_where_the_grammar_may_end():
    grammar = Grammar.lark('start: WORD ("\\n" WORD)*\nWORD: /[a-z]{1,3}/')
    [result] = Engine(json_model()).generate([[5, 6]], grammar=grammar, stop="\n", max_new_tokens=60)
    assert result.finish_reason == "stop"
    assert "\n" not in result.text
    assert 1 <= len(result.text) <= 3


def test_without_llguidance_there_is_the_line_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "llguidance", None)
    with pytest.raises(MissingDependency, match="grammars need llguidance; install it with: pip install llguidance"):
        compiler_for(json_tokenizer(), vocab_size=VOCAB + 1, eos_ids=frozenset({EOS}))


@pytest.mark.parametrize("bias", [{VOCAB: 1.0}, {5: 1.0, 10**9: -1.0}])
def test_biases_of_tokens_that_the_model_does_not_have(bias: dict[int, float]):
    with pytest.raises(InvalidSettings, match=r"logit_bias has token \d+; the model has 330 tokens"):
        Engine(json_model()).request([5], SamplingSettings(logit_bias=bias))


def test_a_growing_text_is_whole_where_it_would_be_alone():
    compiler = compiler_for(json_tokenizer(), vocab_size=VOCAB, eos_ids=frozenset({EOS}))
    text, grammar = '{"a": [1, 22], "b": "x}y"}', Grammar.json_schema({"type": "object"})
    growing, found = compiler.start(grammar), []
    for end in (0, 1, 5, 5, 6, 13, 14, 22, len(text) - 1, len(text), len(text)):
        assert growing.is_whole(text[:end]) == compiler.start(grammar).is_whole(text[:end])
        found.append(compiler.start(grammar).is_whole(text[:end]))
    assert found == [False] * 9 + [True] * 2
