"""Defaults of the options of ``train``, and the options of ``show-batch``."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from draftheads.data.files import KINDS
from draftheads.settings import FRACTION, FROM_0, FROM_1, OptionGroup
from draftheads.train.options import TrainOptions
from draftheads.train.recipes import defaults_from
from draftheads.utils.messages import keep_variables


def defaults(arguments: Sequence[str]) -> TrainOptions:
    """Default values of the options, which depend on the recipe and the head to start from in these arguments.

    >>> defaults(["--recipe=hydra", "--epochs", "3"]).method
    'hydra'
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("recipe", "start-from", "method", "model", "joint"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", nargs="?")
    for name in ("data", "text"):
        parser.add_argument(f"--{name}", nargs="*", type=Path, default=[])
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_known_args(arguments)[0]
    model = given.model or TrainOptions.model
    if not {"-h", "--help"}.intersection(arguments):  # the options themselves import torch
        from draftheads.cli.config import check_names  # noqa: PLC0415 - `--help` does not need it

        named = {**vars(given), "model": model, "data": tuple(given.data), "text": tuple(given.text)}
        check_names(named.items())
    settings = defaults_from({**vars(given), "model": model})
    return TrainOptions.of(**{"out": tyro.MISSING, "method": tyro.MISSING, **settings})


@dataclass(frozen=True, kw_only=True)
class ShowBatchOptions(OptionGroup):
    """Show a batch of `draftheads train` with the learned tokens in colour, to check the chat template."""

    data: Annotated[tuple[Path, ...], tyro.conf.arg(help=f"Chats: files ({KINDS}), or folders of them.")]
    model: str = TrainOptions.model
    """The model: a name, a folder or a Hugging Face id. Its tokenizer and chat template are used."""
    chat_template: str | None = TrainOptions.chat_template
    """Chat template in place of the tokenizer's own. A Jinja file, or chatml, hermes, llama-2 or vicuna."""
    template_variables: tuple[str, ...] = ()
    """Values of variables of the chat template, NAME=VALUE. Such as enable_thinking=false."""
    index: Annotated[int, FROM_0] = 0
    """Which batch. A training run with the same settings takes batch 0 in its first step."""
    html: Path | None = None
    """Write the same as a page of HTML into this file."""
    batch_tokens: Annotated[int, FROM_1] = TrainOptions.batch_tokens
    """Tokens in a batch, padding included."""
    max_length: Annotated[int, FROM_1] = TrainOptions.max_length
    """Cut texts after this number of tokens."""
    held_out: Annotated[float, FRACTION] = TrainOptions.held_out
    """Share of held-out texts."""
    seed: int = TrainOptions.seed
    """Seed of the batches and their order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_variables(self)
