"""Requests that schemathesis makes from /openapi.json, valid ones and others: none is an error of the server."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from draftheads.serve.guard import HttpLimits
from serve_world import NAME, Running, running, tiny_engines

pytestmark = pytest.mark.page
ANSWERS = ("/v1/chat/completions", "/v1/completions")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """Its answers are short, whatever is asked for."""
    with running(tiny_engines(positions=256), HttpLimits(choices=4), max_waiting=64) as one:
        yield one


def readable(value: Any) -> Any:
    """With what no schema tells: the arguments of calls are JSON, and 5.0 is no integer."""
    if isinstance(value, dict):
        fixed = {name: readable(inner) for name, inner in value.items()}
        return {**fixed, "arguments": "{}"} if isinstance(value.get("arguments"), str) else fixed
    if isinstance(value, list):
        return [readable(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@st.composite
def cases(draw: st.DrawFn, schema: Any) -> Any:
    """A request to any route. Most of them could be answered: they name the served model."""
    operations = [operation.ok() for operation in schema.get_all_operations()]
    answering = [operation for operation in operations if operation.path in ANSWERS]
    operation = draw(st.sampled_from(answering if draw(st.integers(0, 3)) else operations))
    mode = GenerationMode.POSITIVE if draw(st.integers(0, 3)) else GenerationMode.NEGATIVE
    case = draw(operation.as_strategy(generation_mode=mode))
    if isinstance(case.body, dict) and draw(st.integers(0, 7)):
        case.body = {**readable(case.body), "model": NAME}
    return case


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.thorough)])
def test_no_request_is_an_error_of_the_server(small: Running, count: int):
    statuses: Counter[str] = Counter()

    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=HealthCheck
    )
    @given(cases(schemathesis.openapi.from_url(f"{small.url}/openapi.json")))
    def check(case: schemathesis.Case) -> None:
        response = case.call_and_validate(checks=CHECKS)
        statuses[f"{case.method} {case.operation.path} {response.status_code}"] += 1

    check()
    assert all(statuses[f"POST {path} 400"] for path in ANSWERS), statuses
    assert count < 1000 or all(statuses[f"POST {path} 200"] for path in ANSWERS), statuses
