"""The loop of ``generate`` on a device other than the CPU: no mixed devices, and the CPU's text."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from draftheads.decode.engine import Engine
from draftheads.interop.generate_loop import DraftedRows, Texts
from draftheads.models.model import StepMode, TargetModel
from fake_device import DEVICE, FakeDevice
from families import PROMPTS, TREES, tiny_head, tiny_model

END = 10


def texts_of(engine: Engine, device: torch.device, *, together: bool) -> tuple[Tensor, Tensor]:
    longest = max(map(len, PROMPTS))
    prompts = torch.tensor([[0] * (longest - len(ids)) + ids for ids in PROMPTS], device=device)
    texts = Texts(
        prompts=prompts,
        processors=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]),
        criteria=StoppingCriteriaList([EosTokenCriteria(END), MaxLengthCriteria(longest + 10)]),
        samples=False,
        pad_id=0,
        keeps_scores=True,
        together=together,
    )
    DraftedRows(engine, texts, PROMPTS, most_tokens=longest + 10).run()
    assert texts.token_ids.device == device
    assert texts.scores is not None
    return texts.token_ids.cpu(), torch.stack([scores.cpu() for scores in texts.scores])


@pytest.mark.few(3)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("graphs", [True, False], ids=["static", "ordinary"])
@pytest.mark.parametrize("method", ["hydra", "eagle3"])
def test_rows_on_a_device_have_the_text_of_the_cpu(method: str, graphs: bool, together: bool) -> None:
    """With texts there, and with texts on the host."""
    model = tiny_model("llama")
    head = tiny_head(method, model)
    expected = texts_of(Engine(model, head, shape=TREES["ragged"]), torch.device("cpu"), together=together)
    assert (expected[0][:, 14:] == END).any(), "a row ends before the others"
    with FakeDevice():
        mode = StepMode(graphs)
        there = TargetModel(copy.deepcopy(model.model).to(DEVICE), model.tokenizer, "there", step_mode=mode)
        moved = copy.deepcopy(head).to(DEVICE)
        moved.bind(there.weights)
        engine = Engine(there, moved, shape=TREES["ragged"])
        for place in (DEVICE, torch.device("cpu")):
            found = texts_of(engine, place, together=together)
            assert torch.equal(found[0], expected[0])
            torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
