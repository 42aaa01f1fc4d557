"""Settings of a distillation that are refused."""

from pathlib import Path
from typing import Any

import pytest

from draftheads.distill.options import DistillOptions
from draftheads.errors import InvalidSettings

SERVER = {"endpoint": "http://x/v1", "endpoint_model": "x"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": ()}, "nothing to answer: give --prompts"),
        ({"temperature": ()}, r"--temperature is \(\): give at least one"),
        ({"temperature": (0.0, -1.0)}, "--temperature is .*-1.0"),
        ({"self_talk_temperature": 0.0}, "self_talk_temperature is 0.0"),
        ({"top_p": 0.0}, "--top-p is 0.0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"batch_size": 0}, "--batch-size is 0: must be at least 1"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"num_self_talk": -1}, "--num-self-talk is -1"),
        ({"request_timeout": 0.0}, "request_timeout is 0.0"),
        ({"out": Path("out.jsonl.gz")}, "--out is out.jsonl.gz: compress the file when it is complete"),
        ({"endpoint": "http://x/v1"}, "--endpoint-model is None: give both"),
        ({"endpoint_model": "x"}, "--endpoint is None .*: give both"),
        ({"document_tokens": 0}, "document_tokens is 0: must be at least 1"),
        ({**SERVER, "documents": (Path("book.jsonl"),)}, r"--documents is .*book\.jsonl.* not used with --endpoint"),
        ({**SERVER, "head": "hydra"}, "--head is 'hydra'"),
        ({**SERVER, "num_self_talk": 2}, "--num-self-talk is 2"),
        ({**SERVER, "turns": 2}, "turns is 2: not used with --endpoint"),
        ({"turns": 0}, "turns is 0: must be at least 1"),
        ({"turns": 2, "prompts": (), "num_self_talk": 1}, "turns is 2: give --prompts, too"),
    ],
)
def test_impossible_options_name_the_flag_and_the_fix(changes: dict[str, Any], words: str):
    values: dict[str, Any] = {"out": Path("out.jsonl"), "prompts": (Path("prompts.jsonl"),), **changes}
    with pytest.raises(InvalidSettings, match=words):
        DistillOptions(**values)
