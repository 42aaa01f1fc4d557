"""Answers with random JSON schemas are valid, whatever a random model would like to write."""

import json
from typing import Any

import jsonschema_rs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftheads.decode.engine import Engine
from draftheads.settings import SamplingSettings
from draftheads.speculation.shapes import BestFirst, Sampled
from draftheads.speculation.tree import Tree
from families import tiny_head
from structured_world import json_model

NAMES = st.sampled_from(["name", "age", "city", "a", "ü", 'quote"d', "tags"])
TEXTS = st.sampled_from(["red", "San Francisco", "ü", '"'])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-99, 999), TEXTS)
PATTERNS = st.sampled_from(["^[a-c]{2,4}$", "^(yes|no)$", "^[0-9]{4}-[0-9]{2}$"])


@st.composite
def bounded(draw: st.DrawFn, *, smallest: int, largest: int) -> tuple[int, int]:
    least = draw(st.integers(smallest, largest))
    return least, draw(st.integers(least, largest))


@st.composite
def strings(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        return {"type": "string", "pattern": draw(PATTERNS)}
    least, most = draw(bounded(smallest=0, largest=6))
    return {"type": "string", "minLength": least, "maxLength": most}


@st.composite
def numbers(draw: st.DrawFn) -> dict[str, Any]:
    least, most = draw(bounded(smallest=-120, largest=1500))
    return {"type": "integer", "minimum": least, "maximum": most}


@st.composite
def arrays(draw: st.DrawFn, items: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    least, most = draw(bounded(smallest=0, largest=3))
    return {"type": "array", "items": draw(items), "minItems": least, "maxItems": most}


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, values, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


LEAVES = st.one_of(
    strings(),
    numbers(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        arrays(inner), objects(inner), st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several})
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(schema=SCHEMAS, temperature=st.sampled_from([0.0, 1.0, 3.0]), drawn=st.booleans())
def test_answers_are_valid_and_the_same_as_plain(schema: dict[str, Any], temperature: float, drawn: bool):
    model = json_model()
    own = SamplingSettings(grammar=schema, max_new_tokens=230, temperature=temperature, seed=1)
    head = tiny_head("hydra", model)
    shape = Sampled(Tree.from_paths([(0,), (1,), (0, 0)])) if drawn else BestFirst(8, top_k=4, beam=4)
    (plain,) = Engine(model).generate([[40, 41]], own)
    (result,) = Engine(model, head, shape=shape).generate([[40, 41]], own)
    assert result.finish_reason == "stop"
    assert jsonschema_rs.is_valid(schema, json.loads(result.text)), result.text
    assert result.token_ids == plain.token_ids
