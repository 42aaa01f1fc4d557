"""Heads and backbone tuned together: who learns when, what is learned, and that the merged model decodes losslessly."""

import builtins
import importlib.util
import json
import math
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.train.test_train import KilledError, Silent, lines, stop_by_crash, stop_by_ctrl_c
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

import draftheads
from draftheads.checkpoint import load_head, read_head, save_head
from draftheads.cli import merge as merge_command
from draftheads.cli import train_joint as command
from draftheads.data.batches import split_held_out
from draftheads.data.extract import load_texts
from draftheads.data.live import LiveStore
from draftheads.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    DataError,
    InvalidSettings,
    MissingDependency,
    ModelNotFound,
    NonFiniteLoss,
    StorageError,
)
from draftheads.files import locked
from draftheads.models.fingerprint import Fingerprints
from draftheads.models.model import TargetModel
from draftheads.train import run
from draftheads.train.joint import train_jointly, train_jointly_for
from draftheads.train.joint_learner import JointLearner
from draftheads.train.joint_options import JointOptions
from draftheads.train.joint_schedule import JointSchedule
from draftheads.train.learner import Learner
from draftheads.train.lora import Adapter, TunedModel, linear_layers, update_of
from draftheads.train.losses import objective
from draftheads.train.measure import measure
from draftheads.train.merge import MergeOptions, merge, merged_model
from draftheads.train.movement import Movement, compare
from draftheads.train.new_head import new_head
from draftheads.train.trainer import TrainingInterrupted
from draftheads.tree import Tree
from families import fitting, tiny_head
from training_world import chat_model, counting_chats, distilled_chats, write_chats


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = distilled_chats(chat_model()) + counting_chats(20)
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", records)


def options(out: Path, data: Path, **changes: Any) -> JointOptions:
    values: dict[str, Any] = {
        "model": "tiny-chat",
        "num_heads": 3,
        "draft_vocab_size": 48,
        "epochs": 2,
        "batch_tokens": 128,
        "learning_rate": 0.005,
        "tree_nodes": 8,
        "held_out": 0.2,
        "log_steps": 1,
        "save_steps": 1000,
        "lora_rank": 4,
        "lora_alpha": 8,
    }
    return JointOptions(out=out, data=(data,), **{**values, **changes})


def harness(
    target: TargetModel,
    data: Path,
    *,
    moved: bool = True,
    dropout: float = 0.0,
    backbone_loss: Any = "text",
    **changes: Any,
) -> tuple[JointLearner, dict[str, Tensor]]:
    """A learner with an adapter that says something (or nothing), and a batch."""
    settings = options(data.parent, data, **changes)
    store = LiveStore(target, load_texts(target, [data], max_length=64))
    head = new_head(settings, target.weights, store, range(len(store)), target.eos_ids)
    for parameter in head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    adapter = Adapter.attach(target.model, rank=4, alpha=8, dropout=dropout)
    for parameter in adapter.parameters if moved else ():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tuned = TunedModel(target.model, target.tokenizer, target.model_id)
    learner = Learner(head, target.weights, objective=objective(settings.loss), depth_decay=0.5)
    joint = JointLearner(learner, tuned, adapter, backbone_loss=backbone_loss)
    batch = joint_batch(store, [0, 1, 2, 60, 61])
    return joint.train(), batch


def joint_batch(store: LiveStore, documents: list[int]) -> dict[str, Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "token_ids": pad([store.token_ids[i] for i in documents], batch_first=True),
        "loss_mask": pad([store.loss_masks[i] for i in documents], batch_first=True),
    }


def tuned_weights(target: TargetModel) -> dict[str, Tensor]:
    """W + (α/r) B A of every layer, by the definition."""
    state = target.model.state_dict()
    found = {}
    for name, tensor in state.items():
        if "lora_" in name:
            continue
        plain = name.replace(".base_layer", "")
        stem = name.removesuffix("base_layer.weight")
        down, up = state.get(f"{stem}lora_A.default.weight"), state.get(f"{stem}lora_B.default.weight")
        found[plain] = tensor.clone() if down is None else tensor + 8 / 4 * up @ down
    return found


# --- the parts ---


@pytest.mark.parametrize("rise", ["constant", "sine"])
@pytest.mark.parametrize("num_head_steps", [0, 7])
def test_the_schedule_is_that_of_the_paper(rise: Any, num_head_steps: int) -> None:
    schedule = JointSchedule(num_steps=40, num_head_steps=num_head_steps, peak=0.3, rise=rise, warmup=0.1)
    both = 40 - num_head_steps
    for step in range(40):
        assert schedule.only_heads(step) == (step < num_head_steps)
        done = step - num_head_steps + 1  # of the second stage, this step included
        is_rising = rise == "sine" and done >= 1
        assert schedule.head_weight(step) == pytest.approx(
            0.3 * math.sin(math.pi * done / both / 2) if is_rising else 0.3
        )
        assert schedule.head_rate(step) == pytest.approx(rate_by_transformers(step, 40, 4))
        expected = rate_by_transformers(step - num_head_steps, both, both // 10) if done >= 1 else 0.0
        assert schedule.backbone_rate(step) == pytest.approx(expected)
    assert schedule.head_weight(39) == pytest.approx(0.3)


def rate_by_transformers(step: int, num_steps: int, num_warmup_steps: int) -> float:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_steps)
    return float(scheduler.lr_lambdas[0](step))


def test_all_linear_layers_and_the_lm_head_are_adapted() -> None:
    target = chat_model()
    names = linear_layers(target.model)
    assert names == ["down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"]
    adapter = Adapter.attach(target.model, rank=2, alpha=4, dropout=0.0)
    assert len(adapter.parameters) == 2 * (7 * 2 + 1)
    assert all(parameter.requires_grad for parameter in adapter.parameters)
    assert update_of(target.lm_head) is not None
    adapter.remove()
    assert update_of(target.lm_head) is None


def test_only_the_named_layers_are_adapted() -> None:
    target = chat_model()
    adapter = Adapter.attach(target.model, rank=2, alpha=4, dropout=0.0, targets=("q_proj",))
    assert len(adapter.parameters) == 2 * 2
    assert TunedModel(target.model, None, "").weights.lm_head is target.model.lm_head.weight
    with pytest.raises(InvalidSettings, match="--lora-targets no_such"):
        Adapter.attach(chat_model().model, rank=2, alpha=4, dropout=0.0, targets=("no_such",))


@pytest.mark.parametrize("backbone_loss", ["text", "original"])
def test_gradients_reach_the_backbone_in_the_second_stage_only(data: Path, backbone_loss: Any) -> None:
    joint, batch = harness(chat_model(), data, backbone_loss=backbone_loss)
    head, adapter = list(joint.learner.head.parameters()), joint.adapter.parameters
    others = [p for p in joint.backbone.parameters() if not any(p is q for q in adapter)]
    joint(**batch, only_heads=True)["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in head)
    assert all(p.grad is None for p in adapter)
    joint(**batch)["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in adapter)
    assert all(p.grad is None and not p.requires_grad for p in others)


@pytest.mark.parametrize("method", ["medusa", "hydra", "hydra++", "eagle", "mlp-speculator"])
def test_the_heads_loss_alone_reaches_the_adapter(data: Path, method: str) -> None:
    target = chat_model()
    joint, batch = harness(target, data, method=method)
    losses = {weight: joint(**batch, head_weight=weight)["loss"] for weight in (0.0, 1.0)}
    (losses[1.0] - losses[0.0]).backward()
    update = update_of(target.lm_head)
    assert update.down.grad.abs().max() > 1e-4  # through the shared lm_head
    assert all(p.grad.abs().max() > 1e-5 for p in joint.adapter.parameters)


@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("loss", ["teacher", "hard"])
@pytest.mark.parametrize("method", ["medusa", "hydra"])
@pytest.mark.parametrize("backbone_loss", ["text", "original"])
def test_losses_and_gradients_are_those_of_the_definition(
    data: Path, method: str, loss: Any, lm_head: Any, backbone_loss: Any
) -> None:
    target = chat_model()
    joint, batch = harness(target, data, method=method, loss=loss, lm_head=lm_head, backbone_loss=backbone_loss)
    found = joint(**batch, head_weight=0.3)
    parameters = [*joint.learner.head.parameters(), *joint.adapter.parameters]
    gradients = torch.autograd.grad(found["loss"], parameters)
    original = chat_model()
    expected_backbone, expected_heads = slow_twin(joint, original, batch)
    assert found["backbone_loss"].item() == pytest.approx(expected_backbone.item(), rel=1e-4)
    means = [mean.item() for mean in expected_heads]
    assert found["head_losses"].tolist() == pytest.approx(means, rel=1e-4)
    expected = expected_backbone + 0.3 * sum(0.5**i * mean for i, mean in enumerate(expected_heads))
    assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-4)
    for one, other in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        # fp32 sums in another order
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-5)


def slow_twin(joint: JointLearner, original: TargetModel, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Token by token: the mean loss of the backbone, and of every head."""
    head, model = joint.learner.head, joint.backbone
    vocab = joint.vocab.tolist()
    backbone: list[Tensor] = []
    heads: list[list[Tensor]] = [[], [], []]
    for token_ids, mask in zip(batch["token_ids"], batch["loss_mask"], strict=True):
        text, said = token_ids.tolist(), mask.tolist()
        hidden = model.model(input_ids=token_ids[None]).last_hidden_state
        logits = model.lm_head(hidden)[0]
        before = original.model(input_ids=token_ids[None]).logits[0].log_softmax(-1)
        features = head(hidden, token_ids[None])[:, 0]
        for p in range(len(text) - 1):
            if said[p + 1]:
                after = logits[p].log_softmax(-1)
                kl = (before[p].exp() * (before[p] - after)).sum()
                backbone.append(kl if joint.backbone_loss == "original" else -after[text[p + 1]])
        for i in range(3):
            for t in range(len(text) - 2 - i):
                if said[t + 1] and said[t + 2 + i]:
                    is_shared = head.config.lm_head == "shared"
                    guess = model.lm_head(features[i, t])[vocab] if is_shared else head.logits(features[i, t], i)
                    log_probs = guess.log_softmax(-1)
                    if joint.learner.objective.reads_teacher:
                        teacher = logits[t + 1 + i][vocab].softmax(-1).detach()
                        heads[i].append(-(teacher * log_probs).sum())
                    elif text[t + 2 + i] in vocab:
                        heads[i].append(-log_probs[vocab.index(text[t + 2 + i])])
    return torch.stack(backbone).mean(), [torch.stack(losses).mean() for losses in heads]


def test_at_the_start_the_tuned_model_is_the_original(data: Path) -> None:
    joint, batch = harness(chat_model(), data, moved=False, dropout=0.5, backbone_loss="original")
    found = joint(**batch)
    assert found["backbone_loss"].item() == pytest.approx(0.0, abs=1e-6)
    frozen = joint(**batch, only_heads=True, head_weight=0.5)
    assert torch.equal(frozen["head_losses"], found["head_losses"])
    assert frozen["loss"].item() == pytest.approx(
        0.5 * sum(0.5**i * x for i, x in enumerate(found["head_losses"].tolist()))
    )


def test_dropout_is_the_adapter_s_and_only_in_training(data: Path) -> None:
    joint, batch = harness(chat_model(attention_dropout=0.9), data, dropout=0.5)
    assert joint(**batch)["loss"].item() != joint(**batch)["loss"].item()
    joint.eval()
    assert joint(**batch)["loss"].item() == joint(**batch)["loss"].item()
    still, _ = harness(chat_model(attention_dropout=0.9), data, dropout=0.0)
    assert still(**batch)["loss"].item() == still(**batch)["loss"].item()


def test_noise_and_the_last_rate_are_heeded(data: Path, tmp_path: Path) -> None:
    runs = {"plain": {}, "noise": {"noise_alpha": 75.0}, "rate": {"final_learning_rate": 0.5}}
    for name, changes in runs.items():
        train_jointly_for(chat_model(), options(tmp_path / name, data, epochs=1, lora_dropout=0.0, **changes), Silent())
    logs = {name: lines(tmp_path / name) for name in runs}
    assert logs["noise"][0]["head_losses"] != logs["plain"][0]["head_losses"]
    assert logs["plain"][-1]["learning_rate"] < 0.1 * logs["plain"][len(logs["plain"]) // 2]["learning_rate"]
    assert logs["rate"][-1]["learning_rate"] > 0.5 * 4 * 0.005 * 0.99  # the heads'


def test_a_checkpoint_holds_what_is_trained_and_no_backbone(data: Path) -> None:
    joint, _ = harness(chat_model(), data)
    state = joint.state_dict()
    parameters = [*joint.learner.head.parameters(), *joint.adapter.parameters]
    pointers = {parameter.data_ptr() for parameter in parameters}
    assert {tensor.data_ptr() for tensor in state.values()} == pointers | {joint.learner.head.draft_vocab.data_ptr()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    joint.load_state_dict(zeros)
    assert not any(parameter.any() for parameter in parameters)
    zeros.pop(next(iter(zeros)))
    with pytest.raises(CheckpointCorrupt, match="is missing or surplus"):
        joint.load_state_dict(zeros)


def test_the_movement_is_that_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    before, after = torch.randn(2, 9, 5, generator=generator).unbind()
    next_ids = torch.randint(0, 5, (9,), generator=generator)
    kl = losses_before = losses_after = agreed = 0.0
    for row in range(9):
        p, q = before[row].softmax(-1).tolist(), after[row].softmax(-1).tolist()
        kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        losses_before -= math.log(p[next_ids[row]])
        losses_after -= math.log(q[next_ids[row]])
        agreed += p.index(max(p)) == q.index(max(q))
    assert 0 < agreed < 9
    assert compare(before, after, next_ids).tolist() == pytest.approx(
        [kl, losses_before, losses_after, agreed], rel=1e-5
    )


# --- a run ---


@pytest.mark.parametrize(
    ("method", "backbone_loss", "rise"), [("medusa", "text", "constant"), ("hydra", "original", "sine")]
)
def test_a_run_tunes_the_model_and_its_heads(
    data: Path, tmp_path: Path, method: str, backbone_loss: Any, rise: Any
) -> None:
    target = chat_model()
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    counting = write_chats(tmp_path / "counting.jsonl", counting_chats(100))  # what can be told of texts not seen
    settings = options(
        tmp_path / "out",
        counting,
        method=method,
        loss="hard",
        backbone_loss=backbone_loss,
        head_weight=0.5,
        head_weight_rise=rise,
        epochs=6,
    )
    report = train_jointly_for(target, settings, Silent())
    store = LiveStore(target, load_texts(target, [counting], max_length=2048))
    training, held_out = split_held_out(store.token_ids, store.loss_masks, fraction=0.2, at_most=200, seed=0)
    untrained = new_head(settings, target.weights, store, training, target.eos_ids)
    learner = Learner(untrained, target.weights, objective=objective("hard"), depth_decay=0.8)
    at_start = measure(learner, store, held_out, batch_tokens=100)
    assert report.heads.tokens_per_step_chain > at_start.tokens_per_step(Tree.chain(3)) + 0.1
    assert sum(report.heads.losses) < 0.8 * float(at_start.losses.sum())
    log = lines(tmp_path / "out")
    second = [line for line in log if "backbone_loss" in line]
    assert len(log) - len(second) == int(0.25 * len(log))  # the first stage
    movement = report.movement
    if backbone_loss == "text":
        kept = [line["backbone_loss"] for line in second]
        assert sum(kept[-3:]) < 0.9 * sum(kept[:3])
        assert movement.tuned_perplexity < 0.8 * movement.original_perplexity
    else:
        assert 0.0 < movement.kl < 0.5
        assert movement.agreement > 0.7
    # the model itself is as it was
    after = target.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_groups_have_their_own_rates_and_stages(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[float]] = []
    original_step = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, *arguments: Any, **named: Any) -> Any:
        seen.append([group["lr"] for group in self.param_groups])
        is_adapter_moving = any(p.grad is not None for p in self.param_groups[1]["params"])
        seen[-1].append(float(is_adapter_moving))
        return original_step(self, *arguments, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    settings = options(tmp_path / "out", data, heads_first=0.5, warmup=0.0, head_rate_factor=3.0, epochs=1)
    train_jointly_for(chat_model(), settings, Silent())
    half = len(seen) // 2
    assert half > 3
    rates = [0.5 * (1 + math.cos(math.pi * step / len(seen))) for step in range(len(seen))]
    assert [group[0] for group in seen] == pytest.approx([0.015 * rate for rate in rates])
    both = len(seen) - half
    rates = [0.5 * (1 + math.cos(math.pi * step / both)) for step in range(both)]
    assert [group[1] for group in seen] == pytest.approx([0.0] * half + [0.005 * rate for rate in rates])
    assert [group[2] for group in seen] == [0.0] * half + [1.0] * both


def test_the_folder_holds_adapter_head_and_movement(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = train_jointly_for(chat_model(), options(out, data, epochs=1), Silent())
    names = {"adapter", "head", "log.jsonl", "metrics.json", "movement.json", "validation.jsonl"}
    assert {path.name for path in out.iterdir()} == names
    metrics = json.loads((out / "metrics.json").read_text())
    assert Movement(**metrics["movement"]) == report.movement
    assert metrics["top1"] == report.heads.top1
    assert metrics["options"]["head_rate_factor"] == 4.0
    movement = json.loads((out / "movement.json").read_text())
    assert movement["kl"] == report.movement.kl
    assert movement["provenance"]["torch"] == torch.__version__
    tensors = load_file(out / "adapter" / "adapter_model.safetensors")
    assert all("lora_" in name for name in tensors)
    with pytest.raises(InvalidSettings, match="holds a trained head"):
        train_jointly(options(out, data), Silent())


def test_measuring_in_between_changes_nothing_and_sees_the_tuned_model(data: Path, tmp_path: Path) -> None:
    often = options(tmp_path / "often", data, epochs=1, heads_first=0.2, eval_steps=2, eval_texts=1000)
    never = replace(often, out=tmp_path / "never", eval_steps=0)
    report = train_jointly_for(chat_model(), often, Silent())
    assert without_time(report) == without_time(train_jointly_for(chat_model(), never, Silent()))
    for name in ("head/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (often.out / name).read_bytes() == (never.out / name).read_bytes()
    last = json.loads((often.out / "validation.jsonl").read_text().splitlines()[-1])
    assert last["losses"] == pytest.approx(report.heads.losses, rel=1e-5)
    assert last["top1"] == report.heads.top1


@pytest.mark.parametrize("stop", [stop_by_ctrl_c, stop_by_crash])
@pytest.mark.parametrize("after", [3, 10])  # in the first stage, in the second
def test_stopped_and_resumed_is_bit_equal_to_uninterrupted(data: Path, tmp_path: Path, stop: Any, after: int) -> None:
    whole = options(tmp_path / "a", data, save_steps=2, epochs=2, heads_first=0.4)
    expected = train_jointly_for(chat_model(), whole, Silent())
    settings = replace(whole, out=tmp_path / "b")
    assert 3 < int(0.4 * expected.heads.num_steps) < 9
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises((TrainingInterrupted, KilledError)):
        train_jointly_for(chat_model(), settings, Silent(after, stop))
    assert signal.getsignal(signal.SIGINT) is before
    assert not (settings.out / "head").exists()
    with pytest.raises(InvalidSettings, match="add --resume"):
        train_jointly(settings, Silent())
    torch.rand(7)  # whatever was drawn before must not matter
    found = train_jointly_for(chat_model(), replace(settings, resume=True), Silent())
    assert without_time(found) == without_time(expected)
    for name in ("head/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (settings.out / name).read_bytes() == (whole.out / name).read_bytes()
    assert lines(settings.out) == lines(whole.out)


def without_time(report: Any) -> Any:
    return replace(report, heads=replace(report.heads, training_seconds=0.0, tokens_per_second=0.0))


def test_resuming_with_other_settings_or_data_is_an_error(data: Path, tmp_path: Path) -> None:
    settings = options(tmp_path / "out", data)
    with pytest.raises(TrainingInterrupted, match=r"after step 2 of \d+; .* --resume goes on"):
        train_jointly_for(chat_model(), settings, Silent(2, stop_by_ctrl_c))
    with pytest.raises(InvalidSettings, match=r"lora_rank was 4 and is 8"):
        train_jointly_for(chat_model(), replace(settings, resume=True, lora_rank=8), Silent())
    other = write_chats(tmp_path / "other.jsonl", counting_chats(60))
    with pytest.raises(DataError, match=r"have changed since \(fingerprint \w{16}, now \w{16}"):
        train_jointly_for(chat_model(), replace(settings, resume=True, data=(other,)), Silent())


def test_the_seed_decides_everything(data: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(7)
        train_jointly_for(chat_model(), options(tmp_path / name, data, seed=seed, epochs=1), Silent())
    files = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]


def test_a_trained_head_is_gone_on_with(data: Path, tmp_path: Path) -> None:
    target = chat_model()
    first = run.TrainOptions(
        method="hydra",
        out=tmp_path / "first",
        data=(data,),
        num_heads=2,
        draft_vocab_size=40,
        batch_tokens=128,
        epochs=4,
        held_out=0.2,
    )
    run.train_for(target, first, Silent())
    settings = options(tmp_path / "out", data, head=first.out, heads_first=0.0, epochs=1, learning_rate=1e-9)
    report = train_jointly_for(target, settings, Silent())
    assert report.heads.method == "hydra"
    metrics = json.loads((first.out / "metrics.json").read_text())
    assert report.heads.top1 == pytest.approx(metrics["top1"], abs=0.03)  # bf16 features there
    assert len(report.heads.top1) == 2


def test_joint_training_goes_on_only_from_the_same_start(data: Path, tmp_path: Path) -> None:
    target, start = chat_model(), tmp_path / "start"
    save_head(tiny_head("hydra", target), start, base=target)
    settings = options(
        *(tmp_path / "out", data), method="hydra++", num_heads=3, start_from=str(start), draft_vocab_size=0
    )
    with pytest.raises(TrainingInterrupted):
        train_jointly_for(chat_model(), settings, Silent(2, stop_by_ctrl_c))
    first = json.loads((settings.out / "run.json").read_text())["start_digest"]
    assert first == read_head(start).digest
    shutil.rmtree(start)
    save_head(tiny_head("hydra", target, seed=1), start, base=target)
    with pytest.raises(InvalidSettings, match=f"start_digest was '{first}' and is '{read_head(start).digest}'"):
        train_jointly_for(chat_model(), replace(settings, resume=True), Silent())


def test_an_exploding_run_is_stopped_with_its_texts(data: Path, tmp_path: Path) -> None:
    settings = options(tmp_path / "out", data, learning_rate=1e37, warmup=0.0, heads_first=0.0)
    with pytest.raises(NonFiniteLoss, match=r"at step \d+, on .*chats\.jsonl:\d+, .*lower --learning-rate"):
        train_jointly_for(chat_model(), settings, Silent())


# --- merging ---


def on_disk(folder: Path, **changes: Any) -> str:
    """The tiny model as an ordinary folder."""
    target = chat_model(**changes)
    target.model.generation_config.temperature = 0.7
    target.model.generation_config.do_sample = True
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_merging_gives_the_weights_of_the_definition(data: Path, tmp_path: Path, tied: bool) -> None:
    target = chat_model(tie_word_embeddings=tied)
    joint, batch = harness(target, data)
    joint.eval()
    expected = tuned_weights(target)
    with torch.no_grad():
        logits = target.model(input_ids=batch["token_ids"]).logits
    assert torch.allclose(joint.tuned.weights.lm_head, expected["lm_head.weight"], atol=1e-6)
    model = joint.adapter.merge()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    assert torch.equal(found["model.embed_tokens.weight"], chat_model().model.get_input_embeddings().weight)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=batch["token_ids"]).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("cheap_nodes")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["medusa", "hydra", "hydra++", "amphista", "eagle", "small-llama"])
def test_the_merged_model_decodes_losslessly_with_its_head(data: Path, tmp_path: Path, method: str, tied: bool) -> None:
    model = on_disk(tmp_path / "base", tie_word_embeddings=tied)
    out, merged = tmp_path / "out", tmp_path / "merged"
    heads = fitting(method, num_heads=3)
    settings = options(out, data, method=method, model=model, epochs=4, learning_rate=0.01, **heads)
    train_jointly(settings, Silent())
    merge(MergeOptions(model=model, adapter=out, out=merged))
    tuned = TargetModel.load(str(merged), dtype=torch.float32)
    assert not tuned.config.tie_word_embeddings
    assert tuned.model.generation_config.temperature == 0.7
    assert tuned.tokenizer.chat_template
    # the folder holds the very model that was tuned
    again = TargetModel.load(model, dtype=torch.float32)
    adapter = Adapter.load(again.model, out / "adapter")
    texts = torch.tensor([[7, 8, 9, 10, 11, 12, 13, 2]])
    unmerged = again.logits(again.hidden_states(texts))
    torch.testing.assert_close(tuned.logits(tuned.hidden_states(texts)), unmerged, rtol=1e-4, atol=1e-4)
    with adapter.off():
        assert not torch.allclose(again.logits(again.hidden_states(texts)), unmerged, atol=0.1)
    prompts = [f"w{i} w{i + 1}" for i in range(12)]
    plain = draftheads.load(merged, precision="fp32").generate(prompts, max_new_tokens=24)
    headed = draftheads.load(merged, head=merged / "head", precision="fp32").generate(prompts, max_new_tokens=24)
    assert [result.token_ids for result in headed] == [result.token_ids for result in plain]
    assert max(result.tokens_per_step for result in headed) > 1.3
    saved = json.loads((merged / "head" / "config.json").read_text())["base"]
    assert saved["model_id"] == str(merged)
    assert saved["fingerprints"] == vars(Fingerprints.of(tuned))
    with pytest.raises(StorageError, match="already exists"):
        merge(MergeOptions(model=model, adapter=out, out=merged))


def test_merging_keeps_the_type_of_the_model_s_files(data: Path, tmp_path: Path) -> None:
    target = chat_model()
    target.model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    target.tokenizer.save_pretrained(tmp_path / "base")
    train_jointly(options(tmp_path / "out", data, model=str(tmp_path / "base"), epochs=1), Silent())
    for name, dtype in ((None, torch.bfloat16), ("fp32", torch.float32)):
        out = tmp_path / f"merged-{name}"
        merge(MergeOptions(model=str(tmp_path / "base"), adapter=tmp_path / "out", out=out, dtype=name))
        assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {dtype}
    with pytest.raises(InvalidSettings, match="--dtype is 'int8'"):
        MergeOptions(model="", adapter=tmp_path, out=tmp_path, dtype="int8")


def test_an_adapter_for_another_base_is_refused(data: Path, tmp_path: Path) -> None:
    train_jointly_for(chat_model(), options(tmp_path / "out", data, epochs=1), Silent())
    other = replace(chat_model(seed=1), model_id="another")
    with pytest.raises(
        CheckpointMismatch, match="tuned for tiny-chat; this model is another, whose embedding and lm_head"
    ):
        merged_model(other, tmp_path / "out", dtype=torch.float32, model_id="merged")
    larger = replace(chat_model(vocab_size=80), model_id="larger")
    with pytest.raises((CheckpointMismatch, CheckpointCorrupt)):
        merged_model(larger, tmp_path / "out", dtype=torch.float32, model_id="merged")
    with pytest.raises(ModelNotFound, match="no adapter at"):
        merged_model(chat_model(), tmp_path / "nowhere", dtype=torch.float32, model_id="merged")
    file = tmp_path / "out" / "adapter" / "adapter_model.safetensors"
    whole = load_file(file)
    save_file({name: whole[name] for name in list(whole)[1:]}, file)
    with pytest.raises(CheckpointCorrupt, match=r"does not fit the model: .*missing"):
        merged_model(chat_model(), tmp_path / "out", dtype=torch.float32, model_id="merged")
    file.write_bytes(b"nonsense")
    with pytest.raises(CheckpointCorrupt, match="does not fit the model"):
        merged_model(chat_model(), tmp_path / "out", dtype=torch.float32, model_id="merged")
    base = tmp_path / "out" / "adapter" / "base.json"
    base.write_text("{}")
    with pytest.raises(CheckpointCorrupt, match="does not say which model"):
        merged_model(chat_model(), tmp_path / "out", dtype=torch.float32, model_id="merged")


def test_the_head_of_a_run_is_refused_by_a_model_that_was_not_tuned(data: Path, tmp_path: Path) -> None:
    target = chat_model()
    train_jointly_for(target, options(tmp_path / "out", data, learning_rate=0.05, epochs=4), Silent())
    with pytest.raises(CheckpointMismatch, match="the lm_head of this model"):
        load_head(tmp_path / "out" / "head", target)


# --- what is missing or wrong ---


def test_without_peft_the_error_says_how_to_install_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = builtins.__import__

    def fail(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "peft":
            raise ImportError(name)
        return importing(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(MissingDependency, match=r"pip install 'draftheads\[lora\]'"):
        train_jointly_for(chat_model(), options(tmp_path / "out", data), Silent())


def test_without_bitsandbytes_four_bits_are_an_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a, **k: None if name == "bitsandbytes" else finding(name, *a, **k)
    )
    settings = options(tmp_path / "out", data, model=on_disk(tmp_path / "base"), four_bit=True)
    with pytest.raises(MissingDependency, match=r"pip install .draftheads\[quantised\]"):
        train_jointly(settings, Silent())


def test_gradients_pass_layers_of_four_bits(data: Path, tmp_path: Path) -> None:
    """QLoRA: the adapter's gradients are those of the same model with the rounded weights in full."""
    base = on_disk(tmp_path / "base", hidden_size=64, intermediate_size=128)
    small = TargetModel.load(base, dtype=torch.float32, four_bit=True)
    full = TargetModel.load(base, dtype=torch.float32)
    layers = dict(full.model.named_modules())
    for name, module in small.model.named_modules():
        if hasattr(getattr(module, "weight", None), "quant_state"):
            rounded = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert not torch.equal(layers[name].weight, rounded)
            layers[name].weight.data.copy_(rounded)
    gradients = []
    for target in (small, full):
        target.hidden_states(torch.tensor([[5, 6, 7]]))  # inference first, as in a run's first stage
        torch.manual_seed(0)
        joint, batch = harness(target, data)
        joint(**batch)["loss"].backward()
        gradients.append([parameter.grad for parameter in joint.adapter.parameters])
    assert len(gradients[0]) > 20
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_a_model_in_four_bits_is_tuned(data: Path, tmp_path: Path) -> None:
    base = on_disk(tmp_path / "base", hidden_size=64, intermediate_size=128)
    settings = options(tmp_path / "out", data, model=base, four_bit=True, optimizer="adamw-8bit", epochs=1)
    report = train_jointly(settings, Silent())
    assert report is not None
    assert report.movement.tuned_perplexity < report.movement.original_perplexity
    merged = tmp_path / "merged"
    merge(MergeOptions(model=base, adapter=tmp_path / "out", out=merged))
    prompts = [f"w{i} w{i + 1}" for i in range(6)]
    plain = draftheads.load(merged, precision="fp32").generate(prompts, max_new_tokens=12)
    headed = draftheads.load(merged, head=merged / "head", precision="fp32").generate(prompts, max_new_tokens=12)
    assert [result.token_ids for result in headed] == [result.token_ids for result in plain]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ()}, "--data FILE"),
        ({"features": Path("x")}, "--features is x"),
        ({"heads_first": 1.0}, "--heads-first is 1.0"),
        ({"lora_dropout": -0.1}, "--lora-dropout is -0.1"),
        ({"head_weight": 0.0}, "--head-weight is 0.0"),
        ({"head_rate_factor": float("nan")}, "--head-rate-factor is nan"),
        ({"lora_alpha": 0}, "--lora-alpha is 0"),
        ({"lora_rank": 0}, "--lora-rank is 0"),
        ({"backbone_loss": "kl"}, "--backbone-loss is 'kl'"),
        ({"head_weight_rise": "cosine"}, "--head-weight-rise is 'cosine'"),
    ],
)
def test_settings_out_of_range_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    values = {**vars(options(tmp_path, tmp_path)), **changes}
    with pytest.raises(InvalidSettings, match=message):
        JointOptions(**values)


def test_the_heads_weigh_what_the_paper_says(tmp_path: Path) -> None:
    assert options(tmp_path, tmp_path).peak_head_weight == 0.2
    assert options(tmp_path, tmp_path, backbone_loss="original").peak_head_weight == 0.01
    assert options(tmp_path, tmp_path, head_weight=0.7).peak_head_weight == 0.7


def test_the_commands_print_what_was_found(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = on_disk(tmp_path / "base")
    command.run(options(tmp_path / "out", data, model=model, epochs=1))
    merge_command.run(MergeOptions(model=model, adapter=tmp_path / "out", out=tmp_path / "merged"))
    printed = capfd.readouterr().out
    for word in ("top-10", "perplexity", "KL(original || tuned)", "same greedy token", "draftheads merge --model"):
        assert word in printed
    assert "draftheads generate --model" in printed
    assert f"wrote {tmp_path / 'out' / 'report.html'}\n" in printed


def test_two_runs_cannot_write_one_folder(data: Path, tmp_path: Path) -> None:
    settings = options(tmp_path / "out", data)
    with locked(settings.out, ""), pytest.raises(StorageError, match="another process is writing"):
        train_jointly(settings, Silent())
