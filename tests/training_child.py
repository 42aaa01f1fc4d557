"""A training run in a process of its own, which reports all that it does, so that it can be stopped at any moment."""

import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from draftheads.data import features
from draftheads.errors import DraftHeadsError
from draftheads.models.model import TargetModel
from draftheads.train.options import TrainOptions
from draftheads.train.run import train
from training_world import chat_model, chat_options


class Reports:
    """Sends stages and progress to another process."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.what = connection, ""

    def stage(self, what: str) -> None:
        self.what = what
        self.connection.send(("stage", what, 0))

    def progress(self, done: int, total: int, note: str = "") -> None:
        self.connection.send(("progress", self.what, done))


def settings(out: Path, data: Path, **changes: Any) -> TrainOptions:
    return chat_options(out, data=(data,), save_steps=4, epochs=2, features=out / "features", **changes)


def child(connection: Connection, options: TrainOptions) -> None:
    """Trains; sends an error's message, or that it is complete."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    torch.set_num_threads(1)
    features.TOKENS_PER_SHARD = 100
    TargetModel.load = lambda *_, **__: chat_model()  # type: ignore[method-assign, assignment]
    try:
        train(options, Reports(connection))
        connection.send(("end", "complete", 0))
    except DraftHeadsError as error:
        connection.send(("end", str(error), 0))
