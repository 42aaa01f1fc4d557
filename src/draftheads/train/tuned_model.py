"""A model with LoRA layers in it: trained, switched off, saved, merged; its distance to the original.

LoRA (Hu et al. 2021) adds to a frozen matrix W a product of two thin ones: W + (α/r) B A, with A at random and
B = 0 at the start, so that the tuned model starts as the original. In training, dropout comes before A.

If embedding and lm_head are one matrix and one of them was adapted, the merged model has two matrices: the adapter did
not change the other.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.checkpoints.checkpoint import load_head, read_head, save_head
from draftheads.checkpoints.head_files import HEAD_FOLDER
from draftheads.data.features import Documents
from draftheads.errors import DataError, InvalidSettings, ModelNotFound
from draftheads.models.adapter import check_adapter_base, is_tied, quiet, require_peft
from draftheads.models.fingerprint import sampled_layers
from draftheads.models.gguf_models import without_bars
from draftheads.models.model import TargetModel
from draftheads.models.model_config import DTYPES, put_back_towers
from draftheads.models.model_names import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    BASE_FILE,
    TUNED_FOLDER,
    base_of,
    find_adapter,
    kind_of_folder,
)
from draftheads.models.pretrained import cast_weights, load_pretrained, stored_dtype, with_adapter
from draftheads.speculation.draft import TargetWeights
from draftheads.train.learner import LowRankUpdate
from draftheads.train.losses import CHUNK_SIZE, precedes_answer
from draftheads.train.options import MergeOptions
from draftheads.train.report import Movement
from draftheads.utils.counts import counted
from draftheads.utils.files import atomic_directory, user_path

RANK, ALPHA, DROPOUT = 32, 16, 0.05  # of Medusa, section 4
_Off = Callable[[], AbstractContextManager[None]]  # within it an adapter is not used


class Adapter:
    """Untrained LoRA layers in place of a model's linear layers; the model object stays the same.

    They are drawn from torch's global generator. ``targets`` are ends of the names of layers; :func:`linear_layers`
    when left out. The model's own weights are frozen.
    """

    def __init__(
        self, model: Any, *, rank: int = RANK, alpha: int = ALPHA, dropout: float = DROPOUT, targets: Sequence[str] = ()
    ) -> None:
        peft = require_peft()
        names = list(targets) or linear_layers(model)
        config = peft.LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, bias="none", task_type="CAUSAL_LM"
        )
        with quiet():
            try:
                self.peft_model = peft.get_peft_model(model, config)
            except ValueError as error:
                raise InvalidSettings(f"the layers {' '.join(names)} cannot be adapted: {error}") from error
        self.set_dropout(on=False)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The A and B of all layers."""
        return [parameter for name, parameter in self.peft_model.named_parameters() if "lora_" in name]

    @property
    def left_out(self) -> dict[str, int]:
        """Matrices that are not adapted, such as experts in one tensor: numbers of parameters by name, * for numbers.

        Embeddings, and an lm_head whose matrix is the embedding, are not among them.
        """
        model, found = self.peft_model.get_base_model(), Counter[str]()
        known = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        known |= {id(p) for m in model.modules() if hasattr(m, "lora_A") for p in m.parameters()}
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and id(parameter) not in known:
                found[re.sub(r"\b\d+\b", "*", name)] += parameter.numel()
        return dict(found)

    @contextmanager
    def off(self) -> Iterator[None]:
        """A ``with`` block in which the model is the original one."""
        layers = self.peft_model.base_model  # peft's disable_adapter() does the same after a slow look at every module
        layers.disable_adapter_layers()
        try:
            yield
        finally:
            layers.enable_adapter_layers()

    def set_dropout(self, *, on: bool) -> None:
        """Dropout before A as in training, or none."""
        for name, module in self.peft_model.named_modules():
            if "lora_dropout" in name:
                module.train(on)

    def save(self, folder: Path) -> None:
        """Writes the adapter in peft's format, without any of the model's own weights."""
        with quiet():  # peft would add the embeddings as soon as it sees that the lm_head is adapted
            self.peft_model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # an empty template

    def remove(self) -> None:
        """Gives the model its own layers back."""
        self.peft_model.unload()


class AllWeights:
    """All weights of a model, which are trained: what an :class:`Adapter` is without one."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.parameters: list[nn.Parameter] = list(model.requires_grad_(True).parameters())  # noqa: FBT003 - torch's own

    def off(self) -> AbstractContextManager[None]:
        """Only as long as no weight has changed: there is no second model in memory."""
        return nullcontext()

    def set_dropout(self, *, on: bool) -> None:
        """There is none."""

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes the model in another type; the one in memory stays as it is."""
        own = [weight.data for weight in self.parameters]
        try:
            cast_weights(self.model, dtype)
            with without_bars():
                self.model.save_pretrained(folder)
        finally:
            for weight, data in zip(self.parameters, own, strict=True):
                weight.data = data

    def remove(self) -> None:
        """The model keeps its new weights."""
        self.model.requires_grad_(False)  # noqa: FBT003 - torch's own signature


def linear_layers(model: Any) -> list[str]:
    """Last parts of the names of all linear layers; the whole name if the last part is a number.

    The lm_head is among them if its matrix is its own: where it is the embedding, too, merging would make it a second
    matrix, and the model larger.
    """
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415 - two seconds that --help need not pay

    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    names = [name for name, module in linear if not (is_tied(model) and module is model.get_output_embeddings())]
    return sorted({name if name.rpartition(".")[2].isdigit() else name.rpartition(".")[2] for name in names})


class TunedModel(TargetModel):
    """A model with an adapter in it. Its weights are those of the merged model."""

    @property
    def update(self) -> LowRankUpdate | None:
        """The adapter's part of the lm_head as it is now; None if the lm_head is not adapted."""
        adapted: Any = self.lm_head
        if not hasattr(adapted, "lora_A"):
            return None
        (name,) = adapted.active_adapters
        return LowRankUpdate(
            adapted.lora_A[name].weight, adapted.lora_B[name].weight, adapted.scaling[name], adapted.lora_dropout[name]
        )

    @property
    def weights(self) -> TargetWeights:  # not cached, unlike those of the original: they change
        """The weights that a draft head reads; the tuned lm_head in fp32."""
        original, update = super().weights, self.update
        if update is None:
            return original
        with torch.no_grad():
            lm_head = original.lm_head.float() + update.matrix.float()
        return replace(original, lm_head=lm_head, lm_head_product=None)

    @property
    def layers_fingerprint(self) -> str | None:
        return sampled_layers(self.layer_matrices())

    def layer_matrices(self) -> list[Tensor]:
        """W + (α/r) B A of the adapted layers, and the others."""
        adapted = {id(layer.base_layer.weight): layer for layer in self.decoder.modules() if hasattr(layer, "lora_A")}

        def merged(weight: Tensor) -> Tensor:
            layer: Any = adapted.get(id(weight))
            if layer is None or not weight.is_floating_point():
                return weight.detach()
            (active,) = layer.active_adapters
            added: Tensor = layer.get_delta_weight(active).detach()
            return weight.detach() + added.to(weight.dtype)

        return list(map(merged, super().layer_matrices()))


@torch.no_grad()
def measure_movement(
    tuned: TargetModel, original: TargetModel, store: Documents, documents: Sequence[int], *, off: _Off = nullcontext
) -> Movement:
    """The movement on these documents. Both models read the true text, the original one while an adapter is ``off``."""
    sums = torch.zeros(4, dtype=torch.float64)
    num_tokens = 0
    for index in documents:
        positions = precedes_answer(store.loss_masks[index][None])
        token_ids = store.token_ids[index].to(tuned.device)
        after = tuned.hidden_states(token_ids[None])[0]  # (T, D)
        with off():
            before = original.hidden_states(token_ids[None])[0]
        for chunk in positions.to(tuned.device).split(CHUNK_SIZE):
            with off():
                logits = original.logits(before[chunk])
            sums += compare(logits, tuned.logits(after[chunk]), token_ids[chunk + 1])
        num_tokens += len(positions)
    if num_tokens == 0:
        raise DataError(f"no assistant token in {counted(len(documents), 'held-out text')}: give more data")
    kl, loss_before, loss_after, agreed = (sums / num_tokens).tolist()
    return Movement(num_tokens, kl, math.exp(loss_before), math.exp(loss_after), agreed)


def compare(original: Tensor, tuned: Tensor, next_ids: Tensor) -> Tensor:
    """Sums over n positions, (4,) fp64 on the CPU: KL(original || tuned), losses of both models, agreements.

    Of logits (n, V) of both, and the true next tokens (n,).
    """
    before, after = original.float().log_softmax(-1), tuned.float().log_softmax(-1)
    kl = (before.exp() * (before - after)).sum()
    losses = [-log_probs.gather(1, next_ids[:, None]).sum() for log_probs in (before, after)]
    agreed = (original.argmax(-1) == tuned.argmax(-1)).sum()
    return torch.stack([kl, *losses, agreed.to(kl)]).double().cpu()


# --- merging ---


def merge(options: MergeOptions) -> int:
    """Merges in fp32 on the CPU, and writes the folder whole or not at all. Returns the bytes of a new second matrix.

    The adapter is that of a joint run, with its head, or any other adapter of peft that can be merged.
    """
    out, run = user_path(options.out), user_path(options.adapter)
    adapter = _adapter_in(run)
    name = options.model or base_of(str(adapter))
    dtype = DTYPES[options.dtype] if options.dtype else stored_dtype(name)
    base = TargetModel.load(name, dtype=torch.float32, device="cpu")
    was_tied = is_tied(base.model)
    merged = merged_model(base, run, dtype=dtype, model_id=str(out.resolve()))
    if getattr(merged.model, "towers", ()):  # what reads images comes with it
        put_back_towers(merged.model, load_pretrained(name, dtype=dtype, device="cpu", whole=True)[0])
    added = merged.model.get_output_embeddings().weight.nbytes if was_tied and not is_tied(merged.model) else 0
    with atomic_directory(out) as staged, without_bars():
        merged.model.save_pretrained(staged)
        merged.tokenizer.save_pretrained(staged)
        if (run / ADAPTER_FOLDER).is_dir() or (run / HEAD_FOLDER).is_dir():  # of a joint run: its head comes with it
            saved = read_head(run / HEAD_FOLDER)
            head = load_head(saved.folder, merged, dtype=torch.float32)
            base = replace(merged, chat_template=saved.chat_template)
            save_head(head, staged / HEAD_FOLDER, base=base, card=saved.card, profile=saved.profile)
    return added


def merged_model(base: TargetModel, run: Path, *, dtype: torch.dtype, model_id: str) -> TargetModel:
    """The tuned model of a run as an ordinary one; it takes over the modules of the base."""
    adapter = _adapter_in(run)
    if adapter != run or (adapter / BASE_FILE).exists():
        check_adapter_base(adapter, base.model_id, base.fingerprints)
    model, tokenizer = with_adapter(base.model, base.tokenizer, adapter)
    cast_weights(model, dtype)
    return TargetModel(model.eval().requires_grad_(requires_grad=False), tokenizer, model_id)


def _adapter_in(run: Path) -> Path:
    if (found := find_adapter(run)) is not None:
        return found
    if (whole := run / TUNED_FOLDER).is_dir():
        raise InvalidSettings(f"{run} is of `train --joint full`: {whole} is the whole model, nothing is to be merged")
    kind = kind_of_folder(run)
    what = f"{run} is a {kind}" if kind else f"no {ADAPTER_CONFIG} in {run}"
    raise ModelNotFound(f"no adapter at {run}: {what}; give the folder of a PEFT adapter, or of a joint run")
