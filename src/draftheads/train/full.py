"""Medusa-2 with all weights of the model in place of an adapter: chats to a new model and its heads.

The output folder also holds ``tuned/``, a model folder with the head in its ``head/``; so does ``best/``.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from draftheads.checkpoints.head_files import HEAD_FOLDER
from draftheads.errors import InvalidSettings
from draftheads.models.file_checks import check_quantisation
from draftheads.models.model import TargetModel
from draftheads.models.model_config import wrapper_class
from draftheads.models.model_names import TUNED_FOLDER
from draftheads.models.pretrained import stored_dtype
from draftheads.train.joint import JointRun
from draftheads.train.new_head import BYTES_PER_PARAMETER, check_sizes
from draftheads.train.report import Movement
from draftheads.train.training import Run
from draftheads.train.tuned_model import AllWeights, measure_movement
from draftheads.utils.counts import byte_size, short_count
from draftheads.utils.files import atomic_directory


class FullRun(JointRun):
    """Trains all weights of the model, in fp32, together with heads that read its live hidden states."""

    head_folder = f"{TUNED_FOLDER}/{HEAD_FOLDER}"

    def check_packages(self) -> None:
        """Not those of adapters."""
        Run.check_packages(self)

    def check_files(self) -> None:
        """Also refuses to write over a model of another origin."""
        super().check_files()
        place = self.folder.path / TUNED_FOLDER
        if place.exists() and not (self.folder.path / "run.json").exists():
            raise InvalidSettings(f"--out is {self.folder.path}, and {place} is there already: name another --out")

    def check_model(self, config: Any) -> None:
        """Also whether its weights can be trained and written. Says what that takes."""
        name, fix = self.options.model, "give --joint text, which trains an adapter"
        if check_quantisation(name, config):
            raise InvalidSettings(f"--joint full: {name} has quantised weights, which cannot be trained; {fix}")
        if wrapper_class(config) is not None:
            raise InvalidSettings(f"--joint full: {name} reads more than text, and only its text model is here; {fix}")
        if (count := check_sizes(self.options, config)) is None:
            return
        each = BYTES_PER_PARAMETER[self.options.optimizer]
        disk = byte_size(count * (each - 4))  # without gradients
        self.progress.stage(
            f"all weights of the model are trained, with its heads {short_count(count)} parameters: weights, gradients "
            f"and optimizer take {byte_size(count * each)} of memory, and each checkpoint {disk} of the disk"
        )

    def dtype(self, config: Any) -> torch.dtype:
        """Steps of a low learning rate are lost in bf16."""
        return torch.float32

    def make_adapter(self) -> AllWeights:
        return AllWeights(self.target.model)

    @cached_property
    def original(self) -> TargetModel:
        """The model as it was, loaded again after training."""
        return TargetModel.load(self.options.model, dtype=torch.float32)

    def movement(self) -> Movement:
        return measure_movement(self.tuned, self.original, self.data.store, self.data.held_out)

    def base_in(self, folder: Path) -> TargetModel:
        return replace(self.tuned, model_id=str((folder / TUNED_FOLDER).resolve()))

    def write_model(self, folder: Path) -> None:
        """A whole model folder in the type of the model's files, to which the head is added."""
        with atomic_directory(folder / TUNED_FOLDER, replace=True) as staged:
            self.adapter.save(staged, stored_dtype(self.options.model))
            self.tuned.tokenizer.save_pretrained(staged)
