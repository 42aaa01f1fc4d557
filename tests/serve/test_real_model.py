"""The command with the real model and two heads: answers are the offline engine's plain ones."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftheads.loading import load
from draftheads.settings import SamplingSettings
from draftheads.utils.cache import cache_folder
from serve_process import ServerProcess

pytestmark = pytest.mark.real

# of the seeds 5 to 9 this one draws no token so near another that rounding errors of 0.003 in logits change it
SEED = 8
QUESTIONS = {"Why is the sky blue?": 0.0, "Write a haiku about rain.": 0.7, "List three prime numbers.": 0.0}
CITY = {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}}
WEATHER = {"type": "object", "properties": CITY, "required": ["city", "unit"], "additionalProperties": False}
FUNCTION = {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER}


def test_answers_beside_each_other_are_plain_decodings(tmp_path: Path):
    offline = load("smollm2-135m", precision="fp32", chat_template="hermes")
    (tmp_path / "cache").mkdir()
    for part in cache_folder().iterdir():
        if part.name == "costs":  # what the server measures goes to no user's cache
            shutil.copytree(part, tmp_path / "cache" / part.name)
        else:  # the converted model
            (tmp_path / "cache" / part.name).symlink_to(part)
    lanes = ({"model": "small"}, {"model": "small:medusa", "draft_nodes": 8})
    cases = [(question, lane) for question in QUESTIONS for lane in lanes]
    arguments = ("smollm2-135m", "--head", "hydra", "medusa", "--precision", "fp32", "--name", "small")
    with ServerProcess(tmp_path, *arguments, "--chat-template", "hermes") as server:

        def answer(question: str, lane: dict[str, object]) -> str:
            pieces = server.stream(question, max_tokens=16, seed=SEED, **{"temperature": QUESTIONS[question], **lane})
            return "".join(piece for _, piece in pieces)

        with ThreadPoolExecutor(len(cases)) as pool:
            found = list(pool.map(lambda case: answer(*case), cases))
        tool = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
        asked = server.chat("What is the weather in Paris in Celsius?", model="small", max_tokens=60, **tool)
    settings = [SamplingSettings(max_new_tokens=16, temperature=QUESTIONS[each], seed=SEED) for each, _ in cases]
    assert found == [result.text for result in offline.generate([each for each, _ in cases], settings)]
    (call,) = asked["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "unit": "C"}
