"""``response_format``: the grammar of an answer."""

from draftheads.serve.fields import Fields
from draftheads.serve.http_limits import HttpLimits
from draftheads.serve.tools import check_schema
from draftheads.settings import Grammar


def read_response_format(fields: Fields, limits: HttpLimits) -> Grammar | None:
    """The grammar that a request asks for; None for free text.

    Raises:
        ApiError: a field is wrong.
    """
    given = fields.object("response_format")
    if given is None:
        return None
    kind = given.text("type")
    outer = given.object("json_schema") if kind == "json_schema" else None
    given.finish()
    match kind:
        case "text":
            return None
        case "json_object":
            return Grammar.json_object()
        case "json_schema" if outer is not None:
            schema = outer.any("schema")
            if not isinstance(schema, dict):
                raise outer.wrong("schema", "must be a JSON schema")
            for ignored in ("name", "description", "strict"):  # answers always keep to the schema
                outer.any(ignored)
            outer.finish()
            check_schema(fields, "response_format", schema, limits)
            return Grammar.json_schema(schema)
        case "json_schema":
            raise given.wrong("json_schema", "is missing")
    raise given.wrong("type", "must be text, json_object or json_schema")
