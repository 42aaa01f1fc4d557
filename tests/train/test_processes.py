"""Several real processes (gloo on the CPU), started as users start them: the same head as one process makes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftheads.data.features import Texts
from joint_world import on_disk
from training_world import counting_chats, lines, write_chats

# shards that both processes have to read, batches that are accumulated, and no dropout, which each process draws
PROGRAM = """
import sys
from draftheads.cli.main import main
from draftheads.data import features as stores
from draftheads.train import training_data
from draftheads.train import tuned_model as model
stores.TOKENS_PER_SHARD = 256
training_data.MOST_BATCH_TOKENS = 96
model.Adapter.__init__.__kwdefaults__["dropout"] = 0.0
write = stores.Texts.write
stores.Texts.write = lambda *arguments: print("tokenized here") or write(*arguments)
sys.exit(main())
"""
HEADS = ("--method", "hydra", "--num-heads", "3", "--epochs", "2", "--batch-tokens", "96", "--max-length", "64")
COMMON = ("--draft-vocab-size", "0", "--save-steps", "10", "--precision", "fp32")


@pytest.fixture(scope="module")
def world(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, chats and the program."""
    folder = tmp_path_factory.mktemp("world")
    on_disk(folder / "model")
    shutil.copy(chats, folder)
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    return folder


def start(world: Path, *arguments: str, processes: int) -> subprocess.Popen[str]:
    """The command, in that many processes or (with 1) without a launcher."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", free_port()]
    command = [sys.executable, *(launcher if processes > 1 else []), "program.py", *arguments]
    data = ("--model", "model", "--data", "chats.jsonl")
    return subprocess.Popen(
        [*command, *data, *COMMON],
        cwd=world,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def assert_same_training(one: Path, two: Path, *heads: str) -> None:
    """Losses step by step, and tensors."""
    for name in ("log.jsonl", "validation.jsonl"):
        first, second = lines(one, name), lines(two, name)
        for before, after in zip(first, second, strict=True):
            assert before.keys() == after.keys()
            for key, value in before.items():
                assert after[key] == pytest.approx(value, rel=1e-4, abs=1e-7), (name, before["step"], key)
    for name in heads or ("model.safetensors",):
        first, second = load_file(one / name), load_file(two / name)
        assert first.keys() == second.keys()
        for key, tensor in first.items():
            torch.testing.assert_close(second[key], tensor, rtol=1e-3, atol=1e-5, msg=key)


@pytest.fixture(scope="module")
def single(world: Path) -> Path:
    """A head of one process that accumulates two batches for each step."""
    both = ("--batch-tokens", "192", "--features", "features-single")
    finish(start(world, "train", *HEADS, *both, "--out", "single", processes=1))
    return world / "single"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_processes_train_the_same_head_as_one(world: Path, single: Path):
    """Each computes the hidden states of half of the texts."""
    output = finish(start(world, "train", *HEADS, "--features", "features-double", "--out", "double", processes=2))
    double = world / "double"
    assert len(files(world / "features-double")) > 4
    assert files(world / "features-double") == files(world / "features-single")
    assert_same_training(single, double)
    assert output.count("saved in") == output.count("reading data") == 1  # only the first one prints
    assert output.count("tokenized here") == 1
    assert " texts by 2 processes" in output
    assert {path.name for path in double.iterdir()} == {path.name for path in single.iterdir()}
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (single, double)]
    assert metrics[0]["num_steps"] == metrics[1]["num_steps"] == len(lines(double))


@pytest.mark.thorough
def test_two_stopped_processes_resume_and_train_the_same_head(world: Path, single: Path):
    """Ctrl-C reaches the processes at different steps. They stop after the same step and save it."""
    arguments = ("train", *HEADS, "--out", "stopped")
    process = start(world, *arguments, processes=2)
    log = world / "stopped" / "log.jsonl"
    while process.poll() is None and not (log.exists() and len(lines(log.parent)) >= 3):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=600)[0]
    checkpoints = list((world / "stopped" / "checkpoints").glob("checkpoint-*.pt"))
    assert checkpoints, output
    assert 3 <= len(lines(log.parent)) < len(lines(single))
    finish(start(world, *arguments, "--resume", processes=2))
    assert_same_training(single, world / "stopped")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "head", "model"),
    [
        ("text", "head/model.safetensors", "adapter/adapter_model.safetensors"),
        ("full", "tuned/head/model.safetensors", "tuned/model.safetensors"),
    ],
)
def test_two_processes_tune_the_same_model_as_one(world: Path, kind: str, head: str, model: str):
    """It has gradients in the second stage only."""
    sizes = ("--batch-tokens", "96", "--max-length", "64", "--num-heads", "2", "--epochs", "1")
    joint = ("train", "--joint", kind, *sizes)
    one, two = world / f"{kind}-by-one", world / f"{kind}-by-two"
    finish(start(world, *joint, "--batch-tokens", "192", "--out", one.name, processes=1))
    finish(start(world, *joint, "--out", two.name, processes=2))
    assert_same_training(one, two, head, model)
    moved, before = load_file(one / model), load_file(world / "model" / "model.safetensors")
    assert any(float((moved[name] - before.get(name, 0)).abs().max()) > 0 for name in moved if "lora_A" not in name)


# --- hosts without a shared disk: two launchers in two folders, as on two machines ---

# writes its batches as tokens; with GIVEN a process has the batches of two hosts, in turn
HOST = """
import json, sys
from dataclasses import replace
from pathlib import Path
from draftheads.cli.main import main
from draftheads.data import features as stores
from draftheads.train import training, training_data
stores.TOKENS_PER_SHARD = 256
plan_training = training_data.plan_training
def planned(store, options):
    found = plan_training(store, options)
    texts = [list(text.token_ids) for text in store.texts]
    Path("plan.json").write_text(json.dumps([[texts[i] for i in batch] for batch in found.plan]))
    if (given := Path("given.json")).exists():
        plan = [[texts.index(text) for text in batch] for batch in json.loads(given.read_text())]
        found = replace(found, plan=plan, batches_per_step=2, stages=(training_data.Stage(len(plan) // 2),))
    return found
training.plan_training = planned
sys.exit(main())
"""


def start_in(folder: Path, *launcher: str, data: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(HOST, encoding="utf-8")
    arguments = ("train", *HEADS, *COMMON, "--model", "../model", "--data", *data.split(), "--out", "out")
    return subprocess.Popen(
        [sys.executable, *launcher, "program.py", *arguments, "--features", "states"],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("have_equal_files", [False, True])
def test_two_hosts_without_a_shared_disk_train_the_head_of_one(tmp_path: Path, have_equal_files: bool):
    """Each has the hidden states of its own texts only, a part of the files or every second text."""
    on_disk(tmp_path / "model")
    chats = counting_chats(61)
    hosts = [tmp_path / name for name in ("one", "two")]
    endpoint = f"localhost:{free_port()}"
    running = []
    for host, part in zip(hosts, (chats[:35], chats[35:]), strict=True):
        host.mkdir()
        write_chats(host / "chats.jsonl", chats if have_equal_files else part)
        nodes = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
        running.append(
            start_in(host, *nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, data="chats.jsonl")
        )
    outputs = list(map(finish, running))
    texts = [Texts.open(host / "states" / "texts") for host in hosts]
    assert sum(map(len, texts)) == len(chats), outputs
    assert min(map(len, texts)) >= 26
    assert sorted(len(list((host / "out").glob("*.safetensors"))) for host in hosts) == [0, 1]
    assert not any((host / "out" / name).exists() for host in hosts for name in ("texts", "checkpoints", "run.json"))
    first = next(host for host in hosts if (host / "out" / "model.safetensors").exists())
    order = (first, *(host for host in hosts if host != first))
    plans = [json.loads((host / "plan.json").read_text()) for host in order]
    num_texts = sum(len({tuple(text) for batch in plan for text in batch}) for plan in plans)
    assert json.loads((first / "out" / "metrics.json").read_text())["num_training_texts"] == num_texts
    assert f"training hydra on {num_texts} texts by 2 processes" in "".join(outputs)
    assert f"hidden states of {len(chats)} texts\n" in "".join(outputs)
    assert len(plans[0]) == len(plans[1])
    (tmp_path / "both").mkdir()
    write_chats(tmp_path / "both" / "all.jsonl", chats)
    (tmp_path / "both" / "given.json").write_text(
        json.dumps([batch for pair in zip(*plans, strict=True) for batch in pair])
    )
    finish(start_in(tmp_path / "both", data="all.jsonl"))
    own, other = lines(first / "out"), lines(tmp_path / "both" / "out")
    assert len(own) == len(other) == len(plans[0])
    for name in ("loss", "grad_norm"):
        assert own[0][name] == pytest.approx(other[0][name], rel=1e-5), "the gradient of one process"
        assert [line[name] for line in own] == pytest.approx([line[name] for line in other], rel=1e-4)
    tensors, expected = (load_file(folder / "out" / "model.safetensors") for folder in (first, tmp_path / "both"))
    for name, tensor in tensors.items():
        assert float((tensor - expected[name]).abs().max()) < 1e-4, name
    shutil.rmtree(tmp_path)
