"""Asks a running server with the package openai: an answer, and a stream with draft tokens in brackets.

draftheads serve smollm2-135m --head hydra
python examples/serve_client.py
"""

from typing import Any

import openai
import tyro


def main(model: str = "smollm2-135m", url: str = "http://127.0.0.1:8000/v1", max_tokens: int = 64) -> None:
    client = openai.OpenAI(base_url=url, api_key="unused")
    question: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=max_tokens, temperature=0)
    print(answer.choices[0].message.content)
    assert answer.usage is not None
    print((answer.usage.model_extra or {})["draft"])

    options: Any = {"include_usage": True, "include_draft": True}
    stream = client.chat.completions.create(
        model=model, messages=question, max_tokens=max_tokens, temperature=0, stream=True, stream_options=options
    )
    for chunk in stream:
        for choice in chunk.choices:
            pieces = (choice.model_extra or {}).get("pieces", [])
            print("".join(f"[{text}]" if drafted else text for text, drafted in pieces), end="", flush=True)
    print()


if __name__ == "__main__":
    tyro.cli(main)
