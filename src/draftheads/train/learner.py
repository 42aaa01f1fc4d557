"""A head in its training harness: a batch goes in, losses come out.

Knows heads and objectives; knows nothing of files, schedules or the Trainer that calls it.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.draft import TargetWeights
from draftheads.heads.base import DraftHead
from draftheads.train.objectives import Guesses, LabelMaker, depth_weights, find_guesses, head_losses

LossKind = Literal["teacher", "hard"]


class Learner(nn.Module):
    """A bound head and what it learns from; its state dict holds the head's tensors under ``head.``."""

    draft_index: Tensor  # (V,) int64: where a token stands in the draft vocabulary
    in_vocab: Tensor  # (V,) bool: whether it does
    teacher: Tensor  # (V', D): the target's lm_head
    teacher_bias: Tensor | None  # (V',)
    depth_weights: Tensor  # (K,) λ

    def __init__(self, head: DraftHead, weights: TargetWeights, *, loss: LossKind, depth_decay: float) -> None:
        super().__init__()
        self.head = head
        self.loss = loss
        self.logit_scale = weights.logit_scale
        device, config = weights.lm_head.device, head.config
        vocab = head.to_target_ids(torch.arange(config.num_draft_tokens, device=device))
        draft_index = torch.zeros(config.vocab_size, dtype=torch.long, device=device)
        draft_index[vocab] = torch.arange(len(vocab), device=device)
        in_vocab = torch.zeros(config.vocab_size, dtype=torch.bool, device=device)
        in_vocab[vocab] = True
        lm_head, bias = weights.lm_head.detach(), weights.lm_head_bias
        constants = {
            "draft_index": draft_index,
            "in_vocab": in_vocab,
            "teacher": lm_head if config.draft_vocab_size is None else lm_head[vocab],
            "teacher_bias": None if bias is None else bias.detach()[vocab],
            "depth_weights": depth_weights(config.num_heads, depth_decay).to(device),
        }
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, hidden: Tensor, token_ids: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
        """Losses of a batch.

        Args:
            hidden: (B, T, D), any float type.
            token_ids: (B, T) int64.
            loss_mask: (B, T) bool.

        Returns:
            ``loss``, to differentiate, and ``head_losses`` (K,), to look at.

        Raises:
            DataError: the batch has nothing to guess.
        """
        hidden = hidden.to(self.teacher.dtype)
        guesses, labels = self.task(hidden, token_ids, loss_mask)
        loss, means = head_losses(
            self.head(hidden, token_ids).flatten(1, 2),  # (K, S, D)
            guesses,
            labels=labels,
            logits=self.head.logits,
            weights=self.depth_weights,
            parameters=list(self.head.lm_heads.parameters()),
        )
        return {"loss": loss, "head_losses": means}

    def task(self, hidden: Tensor, token_ids: Tensor, loss_mask: Tensor) -> tuple[Guesses, LabelMaker]:
        """What is to be guessed in a batch, and the labels for it."""
        guesses = find_guesses(loss_mask, self.head.config.num_heads)
        if self.loss == "teacher":
            return guesses, self._teacher_labels(hidden.flatten(0, 1))
        flat = token_ids.flatten()  # (S,)
        known = self.in_vocab[flat[guesses.positions + 1]]
        return guesses.only(known), lambda positions: self.draft_index[flat[positions + 1]]

    def _teacher_labels(self, hidden: Tensor) -> LabelMaker:
        """The target's distribution at flat positions of ``hidden`` (S, D), within V' and renormalised."""

        @torch.no_grad()
        def labels(positions: Tensor) -> Tensor:
            logits = F.linear(hidden[positions], self.teacher, self.teacher_bias)  # (n, V')
            return (logits if self.logit_scale == 1.0 else logits * self.logit_scale).softmax(-1)

        return labels
