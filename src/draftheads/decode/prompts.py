"""Prompts as callers give them: texts, messages or token ids; and their token ids."""

import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from draftheads.errors import ChatTemplateWarning, InvalidPrompt
from draftheads.models.chat_template import BUILT_IN, render, template_of, token_ids_of
from draftheads.models.model import TargetModel
from draftheads.utils.messages import Message, half_character, message_problem, short

Prompt = str | Sequence[Message] | Sequence[int]  # a user's text, a list of messages, or token ids as they are


def prompt_list(prompts: Any) -> list[Prompt]:
    """The prompts of any iterable but a single prompt.

    Raises:
        InvalidPrompt: it is a single prompt, or not iterable.
    """
    try:
        if not isinstance(prompts, str | bytes | Mapping):
            return list(prompts)
    except TypeError:
        pass
    raise InvalidPrompt(f"give a list of prompts: write [prompt] for a single one; found {described(prompts)}")


def described(value: object) -> str:
    return f"{type(value).__name__}: {short(' '.join(repr(value).split()))}"


def prompt_ids(
    model: TargetModel,
    prompt: Prompt,
    variables: Mapping[str, Any] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Token ids of a prompt of any length, with the model's chat template where it has one, which reads ``tools``."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise InvalidPrompt(f"a prompt is a text, a list of messages or a list of token ids, not {described(prompt)}")
    ids = [int(item) for item in prompt if isinstance(item, Integral) and not isinstance(item, bool)]
    if len(ids) == len(prompt):
        return ids
    messages: Sequence[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for number, message in enumerate(messages):
        if not isinstance(prompt, str) and (problem := message_problem(message)):
            raise InvalidPrompt(f"message {number}{problem}")
    if not any(message["content"].strip() for message in messages):
        raise InvalidPrompt("the prompt is empty: there is nothing to answer")
    if has_no_template := template_of(model) is None:
        warnings.warn(
            f"{model.model_id} has no chat template: it reads prompts as plain text. For a chat model give one by "
            f"--chat-template or chat_template=…: a file, or {', '.join(BUILT_IN)}",
            ChatTemplateWarning,
            stacklevel=2,
        )
        text = "\n".join(message["content"] for message in messages)
    else:
        try:
            text = render(model, messages, add_generation_prompt=True, variables=variables, tools=tools)
        except Exception as error:  # a template is a program of the model's author: it may refuse in any way
            raise InvalidPrompt(f"the model's chat template refuses these messages: {error}") from error
    if problem := half_character(text):
        raise InvalidPrompt(f"the prompt as the model reads it {problem}")
    return token_ids_of(model, text, add_special_tokens=has_no_template)
