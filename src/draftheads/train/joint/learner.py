"""Heads and model in one module: a batch of tokens goes in, the combined loss comes out.

Letters as in ``losses``: S = B·T flat positions, P of which are used. As in the paper, the backbone is the model
under the heads.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from draftheads.errors import CheckpointCorrupt
from draftheads.train.joint.model import Adapter, TunedModel
from draftheads.train.learner import Learner
from draftheads.train.losses import Labels, Predictions, head_losses, precedes_answer, teacher_loss, text_loss

BackboneLoss = Literal["text", "original"]


class JointLearner(nn.Module):
    """L = L_LM + λ0 Σ λ_k L_k with λ_k = decay^k, k from 1 (Medusa, equations 1 and 2).

    The heads read the backbone's live hidden states. The state dict has only what is trained: the head and the adapter.
    """

    def __init__(self, learner: Learner, tuned: TunedModel, adapter: Adapter, *, backbone_loss: BackboneLoss) -> None:
        super().__init__()
        self.learner = learner
        self.backbone = tuned.model
        self.tuned = tuned
        self.adapter = adapter
        self.backbone_loss = backbone_loss
        config = learner.head.config
        self.vocab = learner.head.to_target_ids(torch.arange(config.num_draft_tokens, device=tuned.device))  # (V',)

    def forward(
        self,
        token_ids: Tensor,
        loss_mask: Tensor,
        *,
        lengths: Tensor | None = None,
        head_weight: float = 1.0,
        only_heads: bool = False,
    ) -> dict[str, Tensor]:
        """Losses of a batch; other results and errors as of :meth:`~draftheads.train.learner.Learner.forward`.

        Args:
            token_ids: (B, T) int64.
            loss_mask: (B, T) bool, False on padding.
            lengths: (B,) tokens of each text.
            head_weight: λ0.
            only_heads: the backbone is the original model and is not trained.

        Returns:
            Also ``backbone_loss`` without gradients, unless ``only_heads``.
        """
        head_weight = head_weight * self.learner.depth_decay  # λ0 λ_1: the learner's first head weighs 1
        layers = self.learner.head.hidden_layers
        if only_heads:
            with torch.no_grad(), self.adapter.off():
                hidden = self.tuned.live_states(token_ids, layers)
            losses = self.learner(hidden, token_ids, loss_mask, lengths=lengths)
            return {**losses, "loss": head_weight * losses["loss"]}
        hidden = self.tuned.live_states(token_ids, layers)  # (B, T, D or (n+1)·D), with gradients
        backbone_loss = self._backbone(self.learner.head.split(hidden)[1], token_ids, loss_mask)
        update = self.tuned.update
        rows = update.rows(self.vocab) if update else None
        losses = self.learner(hidden, token_ids, loss_mask, rows, lengths=lengths)
        loss = backbone_loss + head_weight * losses["loss"]
        return {**losses, "loss": loss, "backbone_loss": backbone_loss.detach()}

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's own signature
        """Only the adapter has dropout: with its own, the backbone would not be the model that decodes."""
        super().train(mode)
        self.backbone.eval()
        self.adapter.set_dropout(on=mode)
        return self

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # torch overloads it
        """The head's and the adapter's tensors."""
        trained = set(map(id, self.adapter.parameters))
        named = self.backbone.named_parameters()
        kept = {f"backbone.{name}" for name, parameter in named if id(parameter) in trained}
        whole: dict[str, Any] = super().state_dict(*arguments, **options)
        return {name: value for name, value in whole.items() if name.startswith("learner.") or name in kept}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's own signature
        """Loads what :meth:`state_dict` returned; the backbone's own tensors are not in it."""
        if differing := sorted(self.state_dict().keys() ^ state_dict.keys()):
            raise CheckpointCorrupt(
                f"a checkpoint of another run, or a damaged one: {differing[0]} is missing or unexpected"
            )
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        result.missing_keys.clear()
        return result

    def _backbone(self, hidden: Tensor, token_ids: Tensor, loss_mask: Tensor) -> Tensor:
        """L_LM per assistant token: cross-entropy with the text, or KL(original || tuned) (section 3.3.2).

        The lm_head predicts x_{p+1} from h_p, as head 0 predicts x_{q+1} from h_{q-1}: it is head 0 at q = p + 1.
        """
        flat = token_ids.flatten()  # (S,)
        positions = precedes_answer(loss_mask)  # (P,)
        predictions = Predictions(positions + 1, torch.ones_like(positions, dtype=torch.bool)[None])
        original = _OriginalLabels(self, token_ids) if self.backbone_loss == "original" else None
        loss, _ = head_losses(
            hidden.flatten(0, 1)[None],  # (1, S, D)
            predictions,
            labels=original or (lambda q: Labels(token_ids=flat[q])),
            row_loss=text_loss if original is None else teacher_loss,
            logits=lambda features, _: self.tuned.logits(features),
            weights=torch.ones(1),
            parameters=[parameter for parameter in self.tuned.lm_head.parameters() if parameter.requires_grad],
        )
        return loss if original is None else loss - original.entropy_sum / len(positions)


class _OriginalLabels:
    """The model's distributions with its adapter off. Sums their entropies: KL is cross-entropy less entropy."""

    def __init__(self, learner: JointLearner, token_ids: Tensor) -> None:
        self.learner = learner
        with torch.no_grad(), learner.adapter.off():
            self.hidden = learner.tuned.live_states(token_ids).flatten(0, 1)  # (S, D)
        self.entropy_sum = torch.zeros((), device=token_ids.device)

    @torch.no_grad()
    def __call__(self, positions: Tensor) -> Labels:
        """Of (n,) flat q = p + 1."""
        with self.learner.adapter.off():
            logits = self.learner.tuned.logits(self.hidden[positions - 1])
        log_probs = logits.float().log_softmax(-1)
        probs = log_probs.exp()
        self.entropy_sum -= (probs * log_probs).sum()
        return Labels(probs)
