"""``response_format``: the grammar of an answer."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from draftheads.serve.body import depth_of
from draftheads.serve.fields import Fields, wrong
from draftheads.settings import Grammar

_MOST_BYTES, _DEEPEST = 64 << 10, 32


def check_schema(schema: Any) -> Any:
    """A JSON schema, or a list of tools with theirs.

    Raises:
        ValueError: it is too large, or nested too deeply.
    """
    if (size := len(json.dumps(schema))) > _MOST_BYTES:
        raise ValueError(f"has {size} bytes; it must have at most {_MOST_BYTES}")
    if (depth := depth_of(schema)) > _DEEPEST:
        raise ValueError(f"is nested {depth} levels deep; it must be at most {_DEEPEST}")
    return schema


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
