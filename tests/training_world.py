"""A tiny chat model of 64 words and chats that it can learn from: the world of the training tests."""

import gzip
import importlib.util
import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftheads.data.batches import split_held_out
from draftheads.data.features import FeatureStore, build_shards, claim
from draftheads.data.texts import EncodedChat
from draftheads.decode.engine import Engine
from draftheads.models.model import TargetModel
from draftheads.train.learner import Learner
from draftheads.train.new_head import new_head
from draftheads.train.options import TrainOptions
from draftheads.train.report import Measurement, measure
from draftheads.train.training import Run
from draftheads.utils.progress import NoProgress
from families import tiny_model

EOS = 2
VOCAB = ["<unk>", "<s>", "<e>", "\n", "user", "assistant", "system", *(f"w{i}" for i in range(57))]
TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} \n {{ m['content'] }} <e> \n {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant \n {% endif %}"
)


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    """One token a word; a line break is a word."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCAB)}, unk_token="<unk>"))
    splits = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", unk_token="<unk>")
    fast.chat_template = template
    return fast


def chat_model(*, seed: int = 0, **changes: Any) -> TargetModel:
    """A random two-layer Llama of hidden size 32 with that tokenizer."""
    sizes = {"vocab_size": len(VOCAB), "max_position_embeddings": 2048, "pad_token_id": None}
    model = tiny_model("llama", seed=seed, **{**sizes, **changes}).model
    return TargetModel(model, chat_tokenizer(), "tiny-chat")


def chat(*words: str, finished: bool = True) -> dict[str, Any]:
    """A record: question, answer, question, answer, …"""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": content} for i, content in enumerate(words)]
    return {"messages": messages, "finished": finished}


def counting_chats(number: int) -> list[dict[str, Any]]:
    """Answers that count upwards from a word of the question: easy to guess ahead."""
    chats = []
    for i in range(number):
        start = (7 * i) % 50
        answer = " ".join(f"w{(start + 1 + j) % 57}" for j in range(5 + i % 9))
        chats.append(chat(f"w{start}", answer, finished=i % 4 != 0))
    return chats


def distilled_chats(target: TargetModel) -> list[dict[str, Any]]:
    """The model's own greedy answers to every question of one word, cut off after 12 tokens."""
    questions = [f"w{i}" for i in range(57)]
    answers = Engine(target, max_batch_size=57).generate(
        [chat(question)["messages"] for question in questions], max_new_tokens=12
    )
    said = [answer.token_ids for answer in answers]
    words = [" ".join(VOCAB[token] for token in ids if token != EOS) for ids in said]
    return [chat(*pair, finished=EOS in ids) for *pair, ids in zip(questions, words, said, strict=True)]


def write_chats(path: Path, records: list[dict[str, Any]]) -> Path:
    """A JSON lines file, zipped if its name says so."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def train_options(out: Path, features: Path | None, **changes: Any) -> TrainOptions:
    """Of a small run on finished features, or on ``data``."""
    heads = {"method": "medusa", "model": "tiny-chat", "num_heads": 3, "draft_vocab_size": 48}
    steps = {"epochs": 2, "batch_tokens": 128, "learning_rate": 0.02, "held_out": 0.2, "save_steps": 1000}
    return TrainOptions.of(out=out, features=features, **{**heads, **steps, **changes})


def tensors(out: Path) -> dict[str, torch.Tensor]:
    """Of the head in a folder."""
    return load_file(out / "model.safetensors")


def lines(out: Path, name: str = "log.jsonl") -> list[dict[str, Any]]:
    """Of a log."""
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def without_time(report: Any) -> Any:
    """The report without measurements of time."""
    return replace(report, reading_seconds=0.0, training_seconds=0.0, tokens_per_second=0.0)


def stop_by_ctrl_c() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


class KilledError(Exception):
    """Stands for whatever ends a process."""


def stop_by_crash() -> None:
    """An error that nothing handles."""
    raise KilledError


def measured(
    target: TargetModel, features: Path, settings: TrainOptions, *, head: Any = None, on: str = "held out"
) -> Measurement:
    """What is measured of a head (an untrained one by default) on the texts that a run holds out or trains on."""
    store = FeatureStore(features)
    training, held_out = split_held_out(
        store.token_ids, store.loss_masks, fraction=settings.held_out, seed=settings.seed
    )
    head = head or new_head(settings, target, store, training)
    learner = Learner(head, target.weights, loss=settings.loss)
    return measure(learner, store, training if on == "training" else held_out, batch_tokens=100)


def build_features(
    target: TargetModel, texts: Sequence[EncodedChat], folder: Path, progress: Any = None, *, layers: Sequence[int] = ()
) -> FeatureStore:
    """The store of these texts, made or completed."""
    claim(target, texts, folder, layers)
    build_shards(target, texts, folder, progress or NoProgress())
    return FeatureStore(folder)


def train_for(target: TargetModel, options: TrainOptions, progress: Any = None) -> Any:
    """A run with a model that is loaded already."""
    return Run(options, progress or NoProgress()).run_for(target)


def tool_module(name: str) -> Any:
    """``tools/NAME.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chat_options(out: Path, **changes: Any) -> TrainOptions:
    """Of a small run on chats or text."""
    heads = {"method": "hydra", "num_heads": 2, "draft_vocab_size": 0}
    steps = {"batch_tokens": 128, "max_length": 64, "learning_rate": 0.02, "epochs": 1, "precision": "fp32"}
    return TrainOptions.of(out=out, **{**heads, **steps, "save_steps": 10, **changes})
