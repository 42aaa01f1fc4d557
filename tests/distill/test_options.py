"""Settings of a distillation that are refused."""

from pathlib import Path
from typing import Any

import pytest

from draftheads.distill.options import DistillOptions
from draftheads.errors import InvalidSettings

SERVER = {"endpoint": ("http://x/v1",), "model": "x"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompts": ()}, "--prompts"),
        ({"temperature": ()}, "--temperature is ()"),
        ({"temperature": (0.0, -1.0)}, "--temperature is 0.0 -1.0"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"out": Path("out.jsonl.gz")}, "--out is out.jsonl.gz"),
        ({**SERVER, "documents": (Path("book.jsonl"),)}, "--documents is book.jsonl"),
        ({**SERVER, "api_key_env": ("A", "B")}, "--api-key-env is A B: 2 names for 1 address of --endpoint"),
        ({**SERVER, "endpoint": ("http://x/v1",) * 3, "api_key_env": ("A", "B")}, "2 names for 3 addresses"),
        ({"api_key_env": ("A",)}, "--api-key-env is A: 1 name for 0 addresses"),
        ({**SERVER, "head": "hydra"}, "--head is 'hydra'"),
        ({**SERVER, "num_self_talk": 2}, "--num-self-talk is 2"),
    ],
)
def test_impossible_options_name_the_flag_and_its_value(changes: dict[str, Any], named: str):
    values: dict[str, Any] = {"out": Path("out.jsonl"), "prompts": (Path("prompts.jsonl"),), **changes}
    with pytest.raises(InvalidSettings) as caught:
        DistillOptions(**values)
    assert named in str(caught.value)
