"""Whether a text is JSON of a schema. The only file that knows jsonschema-rs."""

import json
from collections.abc import Mapping
from typing import Any

from draftheads.errors import InvalidSettings, MissingDependency, first_line


def json_problem(text: str, schema: Mapping[str, Any]) -> str | None:
    """Why a text is not JSON of the schema; None if it is.

    >>> schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    >>> json_problem('{"a": 1}', schema), json_problem('{"a": "1"}', schema)
    (None, 'a: "1" is not of type "integer"')

    Raises:
        InvalidSettings: it is no schema.
    """
    try:
        import jsonschema_rs  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingDependency("audit needs jsonschema-rs", pip_install="'draftheads[endpoint]'") from None
    try:
        validator = jsonschema_rs.validator_for(dict(schema))
    except (ValueError, jsonschema_rs.ValidationError) as error:
        raise InvalidSettings(f"the schema of the json checks is no JSON schema: {first_line(error)}") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    problem = next(validator.iter_errors(value), None)
    return None if problem is None else f"{'.'.join(map(str, problem.instance_path)) or 'the text'}: {problem.message}"
