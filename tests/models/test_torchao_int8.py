"""Eight-bit layers by torchao, on the CPU."""

import sys

import pytest
import torch

from draftheads.decode.engine import Engine
from draftheads.errors import MissingDependency
from draftheads.models.torchao_int8 import quantise
from families import PROMPTS, TREES, tiny_head, tiny_model


def test_without_torchao_the_error_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(MissingDependency, match="pip install torchao"):
        quantise(tiny_model("llama").model)


@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_the_quantised_model_is_close_and_decodes_losslessly() -> None:
    pytest.importorskip("torchao")
    model = tiny_model("llama")
    prompt = torch.tensor(PROMPTS[1:2])
    before = model.logits(model.hidden_states(prompt))
    lm_head = model.lm_head.weight
    assert quantise(model.model) == "int8"
    assert model.lm_head.weight is lm_head
    after = model.logits(model.hidden_states(prompt))
    gap = (after - before).norm() / before.norm()
    assert 0 < gap < 0.1
    plain, drafted = (
        [result.token_ids for result in engine.generate(PROMPTS, max_new_tokens=20, ignore_eos=True)]
        for engine in (Engine(model), Engine(model, tiny_head("hydra", model), shape=TREES["ragged"]))
    )
    assert drafted == plain
