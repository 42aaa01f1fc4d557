"""/openapi.json has every route, the fields that are read, and the form of errors."""

from typing import Any

import httpx2
import pytest

from draftheads.serve.app import create_app
from draftheads.serve.chat_completions import ChatFields
from draftheads.serve.completions import CompletionFields
from draftheads.serve.guard import Access
from draftheads.serve.load_models import HeadFields
from draftheads.serve.responses import ResponseFields
from draftheads.serve.state import Service
from serve_world import Running, error_of

BODIES = {
    "/v1/chat/completions": ChatFields,
    "/v1/responses": ResponseFields,
    "/v1/completions": CompletionFields,
    "/admin/head": HeadFields,
}


@pytest.fixture(scope="module")
def served(server: Running) -> dict[str, Any]:
    content: dict[str, Any] = httpx2.get(f"{server.url}/openapi.json", timeout=600).json()
    return content


def test_every_route_is_in_it(served: dict[str, Any]):
    listed = {(method, path) for path, methods in served["paths"].items() for method in methods}
    state = ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/{name}")
    assert listed == {("get", path) for path in state} | {("post", path) for path in BODIES}


def test_requests_have_the_fields_that_are_read(served: dict[str, Any]):
    schemas = served["components"]["schemas"]
    for path, body in BODIES.items():
        content = served["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        assert {field.alias or name for name, field in body.model_fields.items()} <= schema["properties"].keys()
        assert schema["additionalProperties"] is False
    assert schemas["CompletionFields"]["required"] == ["prompt"]
    assert schemas["Message"]["required"] == ["role"]
    assert {"type": "null"} in schemas["ChatFields"]["properties"]["n"]["anyOf"]
    tools = schemas["ChatFields"]["properties"]["tools"]["anyOf"][0]
    assert tools["items"]["$ref"].rpartition("/")[2] in schemas, "tools have their own form"


def test_errors_have_the_form_that_is_given(served: dict[str, Any], server: Running):
    schema = served["components"]["schemas"]["ErrorFields"]
    assert error_of(server.chat(n=0)).keys() == schema["properties"].keys() == set(schema["required"])
    assert served["paths"]["/v1/chat/completions"]["post"]["responses"].keys() == {"200", "4XX", "5XX"}


def test_keys_are_in_it_where_they_are_needed():
    free, with_keys = (create_app(Service(access=Access(keys))).openapi() for keys in ((), ("key",)))
    for path, needs in (("/v1/models", True), ("/metrics", True), ("/health", False)):
        assert "security" not in free["paths"][path]["get"]
        assert ("security" in with_keys["paths"][path]["get"]) == needs
    assert free["paths"]["/admin/head"]["post"]["security"] == [{"HTTPBearer": []}]
