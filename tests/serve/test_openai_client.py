"""The official client against the server: what it gets is the offline engine's plain answer."""

from typing import Any

import openai
import pytest

from serve_world import NAME, USER, Running

CHAT = {"model": NAME, "messages": [USER], "max_tokens": 24, "temperature": 0}
TEXT = {"model": NAME, "prompt": "the cat sat", "max_tokens": 24, "temperature": 0}
either = pytest.mark.parametrize("stream", [False, True])


def plain(server: Running, prompt: Any = (USER,), **settings: Any) -> str:
    return server.plain_answer(list(prompt), **{"max_new_tokens": 24, **settings}).text


def said(answer: Any) -> list[tuple[Any, Any]]:
    """The choices of an answer or of the chunks of a stream, each with its message or a part of it."""
    parts = answer if isinstance(answer, openai.Stream) else [answer]
    return [(choice, getattr(choice, "delta", None) or choice.message) for part in parts for choice in part.choices]


@pytest.mark.parametrize("nodes", [None, 0, 8])
def test_chats(client: openai.OpenAI, server: Running, nodes: int | None):
    sampling = {"temperature": 1.3, "top_p": 0.8, "seed": 1}
    answer = client.chat.completions.create(**CHAT | sampling, extra_body={"draft_nodes": nodes})
    result = server.plain_answer([USER], max_new_tokens=24, **sampling)
    assert answer.choices[0].message.content == result.text
    assert (answer.choices[0].finish_reason, answer.model) == (result.finish_reason, NAME)
    assert answer.usage.completion_tokens == len(result.token_ids)
    draft = answer.usage.model_extra["draft"]
    assert draft["tokens_per_step"] == round(23 / draft["steps"], 4)
    if nodes is not None:
        assert draft["steps"] * max(0, nodes - 1) == sum(draft["drafted_by_depth"])


@either
def test_log_probabilities_of_chats(client: openai.OpenAI, server: Running, stream: bool):
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3, stream=stream)
    content = [entry for choice, _ in said(answer) if choice.logprobs for entry in choice.logprobs.content]
    expected = server.plain_answer([USER], max_new_tokens=24, logprobs=3)
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == expected.text
    assert [entry.logprob for entry in content] == pytest.approx(expected.logprobs, abs=1e-5)
    for entry, top in zip(content, expected.top_logprobs, strict=True):
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx([value for _, value in top], abs=1e-5)


def test_a_conversation_with_roles_and_parts(client: openai.OpenAI, server: Running):
    parts = [{"type": "text", "text": word} for word in ("the", "cat")]
    brief, sat = {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "sat"}
    expected = plain(server, [brief, {"role": "user", "content": "the\ncat"}, sat, USER])
    for role in ("system", "developer"):
        chat = [{**brief, "role": role}, {"role": "user", "content": parts}, sat, USER]
        answer = client.chat.completions.create(**{**CHAT, "messages": chat})
        assert answer.choices[0].message.content == expected


def test_drafted_pieces_of_streams(client: openai.OpenAI, server: Running):
    options = {"include_usage": True, "include_draft": True}
    *texts, _, usage = client.chat.completions.create(**CHAT, stream=True, stream_options=options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == plain(server)
    pieces = [piece for chunk in texts for piece in chunk.choices[0].model_extra.get("pieces", [])]
    assert "".join(text for text, _ in pieces) == plain(server)
    assert 0 < sum(drafted for _, drafted in pieces) <= sum(usage.usage.model_extra["draft"]["accepted_by_depth"])


def test_completions_of_several_prompts(client: openai.OpenAI, server: Running):
    prompts = ["the cat", "naïve café", "日本語"]
    ids = [server.ids(prompt) for prompt in prompts]
    expected = [plain(server, each) for each in ids]
    answer = client.completions.create(**{**TEXT, "prompt": prompts})
    assert [choice.text for choice in answer.choices] == expected
    twice = client.completions.create(**{**TEXT, "prompt": ids}, n=2)
    assert [choice.text for choice in twice.choices] == [text for text in expected for _ in range(2)]
    assert [choice.index for choice in twice.choices] == list(range(6))
    chunks = client.completions.create(**{**TEXT, "prompt": ids[1]}, stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == prompts[1] + expected[1]


def test_completions_have_sixteen_tokens_and_temperature_one_by_default(client: openai.OpenAI, server: Running):
    answer = client.completions.create(model=NAME, prompt="the cat", seed=9)
    ids = server.ids("the cat")
    assert answer.choices[0].text == plain(server, ids, max_new_tokens=16, temperature=1.0, seed=9)


def test_echo_with_log_probabilities_scores_the_prompt(client: openai.OpenAI, server: Running):
    ids = server.ids("the cat sat on the mat")
    answer = client.completions.create(**{**TEXT, "prompt": ids, "max_tokens": 1}, echo=True, logprobs=2)
    found = answer.choices[0].logprobs
    for place, token in enumerate(ids):  # the answer of one token to the text before it, which may be any other token
        if place == 0:
            assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
            continue
        bias = {token: 100.0}
        forced = server.plain_answer(ids[:place], max_new_tokens=1, logprobs=2, logit_bias=bias)
        assert forced.token_ids == (token,)
        assert found.token_logprobs[place] == pytest.approx(forced.logprobs[0], abs=1e-4)
        best = max(found.top_logprobs[place].values())
        assert best == pytest.approx(forced.top_logprobs[0][0][1], abs=1e-4)
    assert answer.choices[0].text == "the cat sat on the mat" + plain(server, ids, max_new_tokens=1)
    assert found.text_offset[:2] == [0, 3]
    only = client.completions.create(**{**TEXT, "prompt": ids, "max_tokens": 0}, echo=True, logprobs=2)
    assert only.choices[0].logprobs.token_logprobs == found.token_logprobs[:-1]
    assert only.usage.completion_tokens == 0
