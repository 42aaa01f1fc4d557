"""Muon: which parameters it moves, and by how much."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draftheads.heads import HEADS
from draftheads.heads.dspark import MarkovBias
from draftheads.models.model import TargetModel
from draftheads.train.trainer import MuonAdamW, hidden_matrices
from fake_progress import FakeProgress
from families import fitting, tiny_head, tiny_model
from training_world import KilledError, lines, stop_by_crash, train_for, train_options


@pytest.mark.parametrize("lm_head", ["shared", "own", "low_rank"])
@pytest.mark.parametrize("method", HEADS)
def test_matrices_between_hidden_states_are_muons(method: str, lm_head: Any):
    """Not embeddings, norms, biases, nor what leads to the vocabulary."""
    options = {**fitting(method), **({} if method == "small-llama" else {"lm_head": lm_head, "lm_head_rank": 8})}
    head = tiny_head(method, tiny_model("llama"), **options).requires_grad_()
    names = {id(weight): name for name, weight in head.named_parameters()}
    found = {names[id(weight)] for weight in hidden_matrices(head)}
    assert found
    apart = [f"{name}." for name, module in head.named_modules() if isinstance(module, nn.Embedding)]
    apart += ["lm_heads.", *(["up."] if isinstance(head, MarkovBias) else [])]
    matrices = [name for name, weight in head.named_parameters() if weight.ndim == 2]
    assert found == {name for name in matrices if not name.startswith(tuple(apart))}
    optimizer = MuonAdamW(head, lr=1e-3, weight_decay=0.1)
    moved = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
    assert sorted(moved) == sorted(names), "each parameter once"
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]


def reference(weight: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor, *, lr: float) -> torch.Tensor:
    """A step of Muon in float64: Jordan's quintic iteration on Nesterov's momentum, at the size of AdamW's steps."""
    momentum.mul_(0.95).add_(0.05 * grad)
    found = 0.05 * grad + 0.95 * momentum
    tall = found.shape[0] > found.shape[1]
    found = (found.T if tall else found) / found.norm()
    for _ in range(5):
        gram = found @ found.T
        found = 3.4445 * found + (-4.7750 * gram + 2.0315 * gram @ gram) @ found
    return weight - lr * 0.2 * max(weight.shape) ** 0.5 * (found.T if tall else found)


def test_steps_equal_the_reference():
    head = tiny_head("hydra", tiny_model("llama"), lm_head="own").requires_grad_()
    torch.manual_seed(1)
    optimizer = MuonAdamW(head, lr=0.01, weight_decay=0.0, betas=(0.9, 0.99))
    matrices = hidden_matrices(head)
    wanted = [(one.detach().double(), torch.zeros_like(one, dtype=torch.float64)) for one in matrices]
    others = [one for group in optimizer.param_groups[1:] for one in group["params"]]
    copies = [one.detach().clone().requires_grad_() for one in others]
    adamw = torch.optim.AdamW(copies, lr=0.01, weight_decay=0.0, betas=(0.9, 0.99))
    for _ in range(3):
        for one in (*matrices, *others):
            one.grad = torch.randn_like(one)
        pairs = zip(wanted, (one.grad.double() for one in matrices), strict=True)
        wanted = [(reference(weight, momentum, grad, lr=0.01), momentum) for (weight, momentum), grad in pairs]
        for one, copy in zip(others, copies, strict=True):
            copy.grad = one.grad
        before = [one.detach().clone() for one in matrices]
        optimizer.step()
        adamw.step()
        for old, one, (weight, _) in zip(before, matrices, wanted, strict=True):
            step = float((one.detach() - old).norm())
            assert float((one.detach() - weight).norm()) < 0.05 * step  # the iteration computes in bf16
            assert step / one.numel() ** 0.5 == pytest.approx(0.2 * 0.01, rel=0.3)  # 0.2 of the rate for each number
    assert all(torch.equal(one, copy) for one, copy in zip(others, copies, strict=True))


def test_heads_learn_with_muon_also_after_a_crash(target: TargetModel, features: Path, tmp_path: Path):
    whole = train_options(tmp_path / "a", features, method="hydra", optimizer="muon", learning_rate=0.05, save_steps=4)
    report = train_for(target, whole)
    first = lines(whole.out, "validation.jsonl")[0]
    assert all(after < 0.85 * before for after, before in zip(report.losses, first["losses"], strict=True))
    parts = replace(whole, out=tmp_path / "b", resume=True)
    with pytest.raises(KilledError):
        train_for(target, parts, FakeProgress(6, stop_by_crash, stage="training"))
    train_for(target, parts)
    assert (parts.out / "model.safetensors").read_bytes() == (whole.out / "model.safetensors").read_bytes()
    assert lines(parts.out) == lines(whole.out)
