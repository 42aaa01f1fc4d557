"""``POST /admin/head``: replaces the draft head of a model while it is served. The guard checks the admin key."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field

from draftheads.errors import CheckpointError, DraftHeadsError, ModelNotFound
from draftheads.serve.api_error import ApiError, api_error_of
from draftheads.serve.body import read_body, read_json
from draftheads.serve.fields import Fields, read_fields
from draftheads.serve.head_replacement import Busy
from draftheads.serve.state import Service


class _HeadFields(Fields):
    model: Annotated[str, Field(min_length=1)]
    head: Annotated[str, Field(min_length=1)]
    force: bool = False


def add_admin_routes(app: FastAPI, service: Service) -> None:
    """Adds the route to the application."""

    @app.post("/admin/head")
    async def head(request: Request) -> dict[str, Any]:
        _ = service.scheduler
        assert service.heads is not None, "a service with an admin key can replace heads"
        fields = read_fields(_HeadFields, read_json(await read_body(request, service.limits), service.limits))
        name, wanted = fields.model, fields.head
        weights = service.model(name).weights
        try:
            result = await asyncio.to_thread(service.heads.replace, name, wanted, weights=weights, force=fields.force)
        except DraftHeadsError as error:
            raise _refusal(error) from None
        if result.replaced:
            service.set_head(name, wanted)
        counts = asdict(result)
        old, new = counts.pop("old"), counts.pop("new")
        return {"model": name, "head": wanted, "tokens_per_step": {"old": old, "new": new}, **counts}


def _refusal(error: DraftHeadsError) -> ApiError:
    match error:
        case Busy():
            return ApiError(409, str(error), code="busy", retry_after=10)
        case ModelNotFound():
            return ApiError(404, str(error), param="head", code="head_not_found")
        case CheckpointError():
            return ApiError(400, str(error), param="head", code="head_does_not_fit")
        case _:
            return api_error_of(error)
