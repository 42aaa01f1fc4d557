"""/openapi.json has every route, and the fields that are read."""

from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from draftheads.serve.app import create_app
from draftheads.serve.chat_completions import ChatFields
from draftheads.serve.completions import CompletionFields
from draftheads.serve.guard import Access
from draftheads.serve.head_replacement import HeadFields
from draftheads.serve.openapi import OPERATIONS, document
from draftheads.serve.response_input import ResponseFields
from draftheads.serve.state import Service
from serve_world import Running

BODIES = {
    "/v1/chat/completions": ChatFields,
    "/v1/responses": ResponseFields,
    "/v1/completions": CompletionFields,
    "/admin/head": HeadFields,
}


def document_of(access: Access | None = None) -> dict[str, Any]:
    service = Service(access=access)
    try:
        return document(create_app(service), service.access)
    finally:
        service.close()


@pytest.fixture(scope="module")
def served(server: Running) -> dict[str, Any]:
    response = httpx2.get(f"{server.url}/openapi.json")
    assert response.headers["content-type"] == "application/json"
    content: dict[str, Any] = response.json()
    return content


def test_every_route_is_in_it_and_nothing_else(served: dict[str, Any]):
    service = Service()
    routes = create_app(service).routes
    service.close()
    assert all(isinstance(route, Route) for route in routes)
    real = {(method, route.path.replace(":path", "")) for route in routes for method in route.methods - {"HEAD"}}
    listed = {(method.upper(), path) for path, methods in served["paths"].items() for method in methods}
    assert listed == real
    of_page = {(method, path) for method, path in real if "." in path or path == "/"} - {("GET", "/openapi.json")}
    assert real - of_page == OPERATIONS.keys()


def test_requests_have_the_fields_that_are_read(served: dict[str, Any]):
    schemas = served["components"]["schemas"]
    for path, body in BODIES.items():
        content = served["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        assert {field.alias or name for name, field in body.model_fields.items()} <= schema["properties"].keys()
        assert schema["additionalProperties"] is False
    assert schemas["CompletionFields"]["required"] == ["prompt"]
    assert schemas["Message"]["required"] == ["role"]
    assert schemas["CompletionFields"]["properties"]["best_of"]["anyOf"][0]["enum"] == [1]
    assert {"type": "null"} in schemas["ChatFields"]["properties"]["n"]["anyOf"]


def test_all_references_lead_somewhere(served: dict[str, Any]):
    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    names = {name.removeprefix("#/components/schemas/") for name in references(served)}
    assert names == served["components"]["schemas"].keys(), "and all schemas are used"


def test_errors_are_those_of_the_route_and_their_form_is_given(served: dict[str, Any], server: Running):
    chat = served["paths"]["/v1/chat/completions"]["post"]
    asked: list[httpx2.Response] = [server.chat(n=0), server.chat(model="none"), server.chat({"host": "evil"})]
    asked.append(server.chat({"content-type": "text/plain"}))
    asked.append(server.chat(messages=[{"role": "user", "content": "a" * (3 << 20)}]))
    assert {response.status_code for response in asked} == {400, 403, 404, 413, 415}
    assert {str(response.status_code) for response in asked} <= chat["responses"].keys()
    schema = served["components"]["schemas"]["ErrorFields"]
    for response in asked:
        assert response.json()["error"].keys() == schema["properties"].keys() == set(schema["required"])


def test_keys_are_in_it_where_they_are_needed():
    free, with_keys = document_of(), document_of(Access(("key",)))
    for path, needs in (("/v1/models", True), ("/metrics", True), ("/health", False), ("/openapi.json", False)):
        assert "security" not in free["paths"][path]["get"]
        described = with_keys["paths"][path]["get"]
        assert ("security" in described, "401" in described["responses"]) == (needs, needs)
    assert free["paths"]["/admin/head"]["post"]["security"] == [{"key": []}]


def test_it_can_be_switched_off():
    service = Service(schema=False)
    routes = create_app(service).routes
    service.close()
    assert "/openapi.json" not in {route.path for route in routes if isinstance(route, Route)}
