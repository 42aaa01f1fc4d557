"""Prompts from files, in the forms that evaluation sets have."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftheads.data.jsonl import json_value
from draftheads.decode.text import half_character
from draftheads.errors import DataError

TextPrompt = str | list[dict[str, str]]


def read_prompts(path: Path) -> Iterator[TextPrompt]:
    """The prompt of each line: ``prompt`` (text or messages), ``messages`` (a list), or ``turns`` (the first one).

    Raises:
        DataError: no such file, a line that is not JSON, or one without any of the three.
    """
    try:
        # not splitlines(): JSON may hold other line separators, such as U+2028, as they are
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", path=path) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _prompt_of(line, path, number)


def _prompt_of(line: str, path: Path, number: int) -> TextPrompt:
    record = json_value(line, path, number)
    prompt = _found_in(record) if isinstance(record, dict) else None
    if not prompt:
        forms = '"prompt" (text), "messages" (a list of objects with "role" and "content") or "turns" (a list of texts)'
        raise DataError(f"needs {forms}, and not an empty one", path=path, line_number=number)
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    for problem in filter(None, map(half_character, texts)):
        raise DataError(problem, path=path, line_number=number)
    return prompt


def _found_in(record: dict[str, Any]) -> TextPrompt | None:
    prompt, messages, turns = record.get("prompt"), record.get("messages"), record.get("turns")
    if isinstance(prompt, str):
        return prompt.strip() and prompt
    for conversation in (prompt, messages):
        if isinstance(conversation, list) and all(_is_message(message) for message in conversation):
            return conversation
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return turns[0].strip() and turns[0]
    return None


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
