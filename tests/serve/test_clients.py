"""Programs of others as clients: calls of each of their interfaces, streamed and not, and loops with tools."""

import asyncio
import gc
import json
import operator
import socket
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import reduce
from importlib import import_module
from typing import Any, Literal, NamedTuple

import openai
import pydantic
import pytest

from draftheads.serve.scheduler import Job, Scheduler
from serve.test_answer_forms import FAMILIES
from serve_world import NAME, Running, events_of, running, tiny_engines

pytestmark = pytest.mark.filterwarnings("ignore")  # of the clients
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is the tide?"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]


class Tide(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    at: Literal["sea", "river"]
    day: Literal[1, 2]


FUNCTION = {"name": "get_tide", "description": "", "parameters": Tide.model_json_schema(), "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
SEA, RIVER = {"at": "sea", "day": 2}, {"at": "river", "day": 1}
FIELDS: dict[str, dict[str, Any]] = {
    "text": {},
    "stop": {"stop": ["."]},
    "n": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "effort": {"reasoning_effort": "none"},
    "tools": {"tools": [TOOL]},
    "forced": {"tools": [TOOL], "tool_choice": "required"},
    "form": {"response_format": Tide},
    "image": {"messages": IMAGE},
}


class Said(NamedTuple):
    """An answer as its client has it."""

    texts: list[str]
    calls: list[tuple[str, str, Any]]  # ids, names, arguments
    back: list[Any]  # the messages or items that the client sends back
    logprobs: Sequence[Any] = ()


def openai_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def chat_said(answer: Any) -> Said:
    message = answer.choices[0].message
    calls = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    logprobs = getattr(answer.choices[0], "logprobs", None)
    texts = [choice.message.content or "" for choice in answer.choices]
    return Said(texts, calls, [message], logprobs.content if logprobs else ())


def openai_chat(url: str, stream: bool, **fields: Any) -> Said:
    chats = openai_of(url).chat.completions
    if not stream:
        return chat_said(chats.parse(model=NAME, max_tokens=400, **fields))
    with chats.stream(model=NAME, max_tokens=400, **fields) as events:
        return chat_said(events.get_final_completion())


def litellm_chat(url: str, stream: bool, **fields: Any) -> Said:
    litellm = import_module("litellm")
    own = {"model": f"openai/{NAME}", "api_base": url, "api_key": "none", "max_tokens": 400, "max_retries": 0}
    answer = litellm.completion(**own, **fields, stream=stream)
    return chat_said(litellm.stream_chunk_builder(list(answer)) if stream else answer)


def for_responses(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of chats in their newer form."""
    given: dict[str, Any] = {"max_output_tokens": 400, "input": fields["messages"]}
    if fields["messages"] == IMAGE:
        given["input"] = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:", "detail": "low"}]}]
    given |= {"tools": [{"type": "function", **tool["function"]} for tool in fields.get("tools", ())]}
    given |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2} if "logprobs" in fields else {}
    given |= {"reasoning": {"effort": "none"}} if "reasoning_effort" in fields else {}
    given |= {"text_format": Tide} if "response_format" in fields else {}
    return given | {name: fields[name] for name in ("tool_choice",) if name in fields}


def response_said(answer: Any) -> Said:
    calls = [item for item in answer.output if item.type == "function_call"]
    parts = [part for item in answer.output if item.type == "message" for part in item.content]
    texts = ["".join(part.text for part in parts)]
    logprobs = [entry for part in parts for entry in getattr(part, "logprobs", None) or []]
    read = [(call.call_id, call.name, json.loads(call.arguments)) for call in calls]
    return Said(texts, read, list(answer.output), logprobs)


def openai_responses(url: str, stream: bool, **fields: Any) -> Said:
    responses = openai_of(url).responses
    if not stream:
        return response_said(responses.parse(model=NAME, **for_responses(fields)))
    with responses.stream(model=NAME, **for_responses(fields)) as events:
        return response_said(events.get_final_response())


def litellm_responses(url: str, stream: bool, **fields: Any) -> Said:
    own = {"model": f"openai/{NAME}", "api_base": url, "api_key": "none", "stream": stream}
    answer = import_module("litellm").responses(**own, **for_responses(fields))
    return response_said([*answer][-1].response if stream else answer)


def litellm_messages(url: str, stream: bool, **fields: Any) -> Said:
    """Anthropic's interface."""
    functions = [tool["function"] for tool in fields.get("tools", ())]
    tools = [{"name": each["name"], "description": "", "input_schema": each["parameters"]} for each in functions]
    given = {"tools": tools} if tools else {}
    system, *messages = fields["messages"]

    async def answered() -> list[dict[str, Any]]:
        own = {"model": f"hosted_vllm/{NAME}", "api_base": url, "api_key": "none", "max_tokens": 400, "stream": stream}
        answer = await import_module("litellm").anthropic_messages(
            **own, **given, system=system["content"], messages=messages
        )
        if not stream:
            return answer["content"]
        blocks: list[dict[str, Any]] = []
        sent = b"".join([chunk async for chunk in answer]).decode()
        for event in (json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: ")):
            if event["type"] == "content_block_start":
                blocks.append({"text": "", **event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                blocks[event["index"]]["text"] += event["delta"].get("text", "")
                blocks[event["index"]]["json"] += event["delta"].get("partial_json", "")
        for block in blocks:
            block["input"] = json.loads(block["json"] or "{}")
        fields = {"text": ("type", "text"), "tool_use": ("type", "id", "name", "input")}
        return [{key: block[key] for key in fields[block["type"]]} for block in blocks]

    blocks = asyncio.run(answered())
    calls = [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return Said([text], calls, [{"role": "assistant", "content": blocks}])


def openai_completions(url: str, stream: bool, **fields: Any) -> Said:
    del fields["messages"]
    given = {**fields, "logprobs": 2 if "logprobs" in fields else None}
    given.pop("top_logprobs", None)
    answer = openai_of(url).completions.create(model=NAME, prompt="the", max_tokens=400, stream=stream, **given)
    texts, logprobs = [""] * fields.get("n", 1), []
    for choice in (choice for part in (answer if stream else [answer]) for choice in part.choices):
        texts[choice.index] += choice.text
        logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
    return Said(texts, [], [], logprobs)


def langchain_chat(url: str, stream: bool, *, responses: bool = False, **fields: Any) -> Said:
    own = {"model": NAME, "base_url": url, "api_key": "none", "max_tokens": 400, "max_retries": 0}
    chat, messages = (
        import_module("langchain_openai").ChatOpenAI(**own, use_responses_api=responses),
        fields["messages"],
    )
    if form := fields.pop("response_format", None):
        chat = chat.with_structured_output(form)
        return Said([([*chat.stream(messages)][-1] if stream else chat.invoke(messages)).model_dump_json()], [], [])
    del fields["messages"]
    answer = reduce(operator.add, chat.stream(messages, **fields)) if stream else chat.invoke(messages, **fields)
    calls = [(call["id"], call["name"], call["args"]) for call in answer.tool_calls]
    logprobs = answer.response_metadata.get("logprobs") or {}
    return Said([answer.text], calls, [answer], logprobs.get("content", []))


def langchain_responses(url: str, stream: bool, **fields: Any) -> Said:
    return langchain_chat(url, stream, responses=True, **fields)


@pytest.fixture(autouse=True, scope="module")
def _end_of_connections() -> Iterator[None]:
    """Those that clients leave open are closed here, where warnings of it are ignored."""
    yield
    import_module("litellm").in_memory_llm_clients_cache.flush_cache()
    gc.collect()


Client = Callable[..., Said]
CALLS: dict[Client, str] = {
    openai_chat: "text stop n logprobs effort tools forced form image",
    openai_responses: "text logprobs effort tools forced form image",
    openai_completions: "text stop n logprobs",
    litellm_chat: "text stop tools forced form image",
    litellm_responses: "text tools",
    litellm_messages: "text tools",
    langchain_chat: "text stop logprobs tools forced form image",
    langchain_responses: "text tools",
}


class Model:
    """What the model says if the form of the answer is free, and the prompt that it read."""

    text = read = ""


@pytest.fixture
def model(server: Running, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Nothing leaves this machine."""
    model, submit, lookup = Model(), Scheduler.submit, socket.getaddrinfo

    def submitted(scheduler: Scheduler, job: Job) -> None:
        model.read = scheduler.engines[NAME].model.tokenizer.decode(job.request.prompt_ids)
        if job.request.settings.grammar is not None:
            submit(scheduler, job)
            return
        for _, event in events_of(scheduler, job.request, model.text, 3):
            job.on_event(event)

    def here(host: Any, *address: Any, **options: Any) -> Any:
        assert host in ("127.0.0.1", "localhost", None), f"asks for {host}"
        return lookup(host, *address, **options)

    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched when the package is imported
    monkeypatch.setattr(Scheduler, "submit", submitted)
    monkeypatch.setattr(socket, "getaddrinfo", here)
    return model


either = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CASES = [(client, name) for client, names in CALLS.items() for name in names.split()]


@either
@pytest.mark.parametrize(("client", "name"), CASES, ids=[f"{client.__name__}-{name}" for client, name in CASES])
def test_calls(client: Client, name: str, stream: bool, server: Running, model: Model):
    model.text = FAMILIES["hermes"].calls(SEA) if name == "tools" else "It is high."
    fields = deepcopy({"messages": CHAT, **FIELDS[name]})  # some clients change them
    if name == "image":
        with pytest.raises(Exception, match=r"\[0\]\.type is '\w+'; the model reads only text"):
            client(f"{server.url}/v1", stream, **fields)
        return
    said = client(f"{server.url}/v1", stream, **fields)
    if name == "form":
        Tide.model_validate_json(said.texts[0])
    elif name in ("tools", "forced"):
        [(_, function, arguments)] = said.calls
        assert (function, said.texts) == ("get_tide", [""])
        assert arguments == SEA if name == "tools" else Tide.model_validate(arguments)
    else:
        text = model.text.removesuffix("." if name == "stop" else "")
        assert (said.texts, said.calls) == ([text] * fields.get("n", 1), [])
        assert (len(said.logprobs or []) > 3) == (name == "logprobs")


def results(client: Client, said: Said) -> list[dict[str, Any]]:
    """The tides, in the form of the client."""
    tides = {call_id: f"the tide of {arguments['at']} is high" for call_id, _, arguments in said.calls}
    if client is litellm_messages:
        parts = [{"type": "tool_result", "tool_use_id": each, "content": tide} for each, tide in tides.items()]
        return [{"role": "user", "content": parts}]
    if client in (openai_responses, litellm_responses):
        return [{"type": "function_call_output", "call_id": each, "output": tide} for each, tide in tides.items()]
    return [{"role": "tool", "tool_call_id": each, "content": tide} for each, tide in tides.items()]


AGENTS = [(client, "hermes") for client, names in CALLS.items() if "tools" in names]
AGENTS += [(openai_chat, family) for family in FAMILIES if family != "hermes"]


@either
@pytest.mark.parametrize(("client", "family"), AGENTS, ids=[f"{client.__name__}-{family}" for client, family in AGENTS])
def test_an_agent_with_tools(client: Client, family: str, stream: bool, model: Model):
    form, messages = FAMILIES[family], list[Any](CHAT)
    turns = [[SEA], [RIVER, SEA] if form.around[1] else [RIVER]]  # some forms have one call in an answer
    with running(tiny_engines(form.template, tokens=form.tokens)) as server:
        for turn in turns:
            model.text = form.calls(*turn)
            said = client(f"{server.url}/v1", stream, messages=messages, tools=deepcopy([TOOL]))
            assert [call[1:] for call in said.calls] == [("get_tide", each) for each in turn]
            messages = [*messages, *said.back, *results(client, said)]
        model.text = "Both are high."
        assert client(f"{server.url}/v1", stream, messages=messages, tools=deepcopy([TOOL]))[:2] == ([model.text], [])
    read = model.read.partition("How is the tide?")[2]
    assert read.count("get_tide") == sum(map(len, turns))
    assert [f"tide of {where} is high" in read for where in ("sea", "river", "lake")] == [True, True, False]
