"""A head with its objective in one module: a batch goes in, losses come out."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.errors import DataError
from draftheads.heads.base import DraftHead
from draftheads.settings import LossKind
from draftheads.speculation.draft import TargetWeights, as_logits
from draftheads.train.losses import (
    NUM_ROWS,
    ROW_LOSSES,
    LabelMaker,
    Labels,
    Predictions,
    depth_weights,
    find_predictions,
    head_losses,
    random_places,
)

FEATURE_WEIGHT = 10.0  # of EAGLE's loss on features, relative to that on tokens


@dataclass(frozen=True)
class LowRankUpdate:
    """What an adapter adds to the outputs of a layer, such as the lm_head of a model that is tuned with its heads."""

    down: Tensor  # (r, D) A
    up: Tensor  # (V, r) B
    scaling: float  # α/r
    dropout: nn.Module

    def rows(self, ids: Tensor) -> "LowRankUpdate":
        """The update of some outputs only, (V',) of them."""
        return replace(self, up=self.up[ids])

    def constant(self) -> "LowRankUpdate":
        """The same without dropout and gradients; autocast keeps copies of tensors that have gradients."""
        return LowRankUpdate(self.down.detach(), self.up.detach(), self.scaling, nn.Identity())

    def __call__(self, features: Tensor) -> Tensor:
        """(…, D) -> (…, V)."""
        return F.linear(F.linear(self.dropout(features), self.down), self.up) * self.scaling

    @property
    def matrix(self) -> Tensor:
        """(V, D): what merging adds to W."""
        return self.up @ self.down * self.scaling


class Learner(nn.Module):
    """A bound head and the target's weights; its state dict has the head's tensors under ``head.``."""

    draft_index: Tensor  # (V,) int64: index of a token in the draft vocabulary
    in_vocab: Tensor  # (V,) bool: whether a token is in the draft vocabulary
    teacher: Tensor  # (V', D): the target's lm_head
    teacher_bias: Tensor | None  # (V',)
    depth_weights: Tensor  # (K,) λ

    def __init__(
        self,
        head: DraftHead,
        weights: TargetWeights,
        *,
        loss: LossKind = "teacher",
        depth_decay: float = 0.8,
        noise_alpha: float = 0.0,
    ) -> None:
        super().__init__()
        self.head = head
        self.loss = loss
        self.depth_decay = depth_decay
        self.noise_alpha = noise_alpha
        self.trained_rows: list[Tensor] = []  # of the target's lm_head, where :meth:`follow` was called
        self.logit_scale = weights.logit_scale
        self.logit_softcap = weights.logit_softcap
        config, lm_head, bias = head.config, weights.lm_head.detach(), weights.lm_head_bias
        draft_ids = torch.arange(config.num_draft_tokens, device=lm_head.device)
        vocab = head.to_target_ids(draft_ids)
        depths = depth_weights(config.num_heads, depth_decay)
        if head.is_same_at_all_depths:  # then it is trained only at the first depth
            depths[1:] = 0.0
        zeros = vocab.new_zeros(config.vocab_size)
        self.register_buffer("draft_index", zeros.scatter(0, vocab, draft_ids), persistent=False)
        self.register_buffer("in_vocab", zeros.bool().scatter(0, vocab, value=True), persistent=False)
        self.register_buffer(
            "teacher", lm_head if config.draft_vocab_size is None else lm_head[vocab], persistent=False
        )
        self.register_buffer("teacher_bias", None if bias is None else bias.detach()[vocab], persistent=False)
        self.register_buffer("depth_weights", depths.to(lm_head.device), persistent=False)

    @property
    def reads_teacher(self) -> bool:
        """Whether the loss has the target's distribution, and so works without the text's tokens."""
        return self.loss != "hard"

    def follow(self, weights: TargetWeights) -> None:
        """Reads the weights of a target as they are now, all of which are trained: the loss has gradients of them."""
        self.head.bind(weights)
        rows = slice(None) if self.head.config.draft_vocab_size is None else self.head.draft_vocab
        lm_head, bias = (None if part is None else part[rows] for part in (weights.lm_head, weights.lm_head_bias))
        assert lm_head is not None
        self.teacher, self.teacher_bias = lm_head.detach(), None if bias is None else bias.detach()
        self.head.target_embedding = weights.embedding[:]  # no parameter, which would become one of the head's
        if self.head.config.lm_head == "shared":
            self.head.lm_heads.shared, self.head.lm_heads.shared_bias = lm_head, bias
            self.trained_rows = [lm_head] if bias is None else [lm_head, bias]

    def forward(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        loss_mask: Tensor,
        update: LowRankUpdate | None = None,
        *,
        lengths: Tensor | None = None,
        numbers: Tensor | None = None,
        places: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Losses of a batch, or the part of a batch in the losses of a step.

        Args:
            hidden: (B, T, D), or for a head that reads n layers (B, T, (n+1)·D), any float type; may have gradients.
            token_ids: (B, T) int64.
            loss_mask: (B, T) bool.
            update: what an adapter adds to the target's lm_head, for V' outputs; it is trained, too.
            lengths: (B,) tokens of each text, which scale its noise; T when left out.
            numbers: (K,) predictions in the whole step, the sum of those of :meth:`count`; this batch's when left out.
            places: as of :meth:`count`.

        Returns:
            ``loss``, to differentiate, and ``head_losses`` without gradients: (K,), or (1,) for a head that is trained
            once for all depths. The loss is 0, with gradients of 0, if only the text is a label and the draft
            vocabulary has none of its tokens.
        """
        read, hidden = self.head.split(hidden.to(self.teacher.dtype))
        if numbers is None:
            places, numbers = map(self.count(token_ids, loss_mask).get, ("places", "numbers"))
        assert numbers is not None, "a count has numbers"
        predictions = self._predictions(token_ids, loss_mask, places)
        seen = with_noise(read, self.noise_alpha, lengths) if self.training else read
        features = self.head(seen, token_ids, *(() if places is None else [places])).flatten(1, 2)  # (K, S, F)
        added = update if self.head.config.lm_head == "shared" else None

        def logits(inputs: Tensor, head_index: int) -> Tensor:
            base = self.head.logits(inputs, head_index)
            return base if added is None else base + added(self.head.lm_head_inputs(inputs)) * self.logit_scale

        loss, means = head_losses(
            features,
            predictions,
            labels=self.labels(hidden.detach(), token_ids, update),
            row_loss=ROW_LOSSES[self.loss],
            logits=logits,
            weights=self.depth_weights,
            numbers=numbers,
            parameters=[*self.head.logit_parameters(), *self.trained_rows, *((added.down, added.up) if added else ())],
            multiple=NUM_ROWS,
        )
        if self.loss == "eagle":
            loss = loss + FEATURE_WEIGHT * self._feature_loss(
                features, hidden.detach().flatten(0, 1), predictions, numbers
            )
        return {"loss": loss, "head_losses": means[:1] if self.head.is_same_at_all_depths else means}

    def count(self, token_ids: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
        """What :meth:`forward` needs to know of a batch beforehand: ``numbers`` (K,), the predictions of each head.

        Also ``places`` (B, A) in training, for heads that read blocks: the drawn positions before them.
        """
        drawn = {}
        if self.training and (shares := self.head.place_shares):
            drawn["places"] = random_places(loss_mask, max(1, int(loss_mask.shape[1] * shares[0])))
        return {**drawn, "numbers": self._predictions(token_ids, loss_mask, drawn.get("places")).numbers}

    def _predictions(self, token_ids: Tensor, loss_mask: Tensor, places: Tensor | None) -> Predictions:
        predictions = find_predictions(loss_mask, self.head.config.num_heads)
        if not predictions.counts.any():
            raise DataError("nothing to train on: no two assistant tokens in a row")
        if not self.reads_teacher:  # then only the text is a label
            predictions = predictions.only(self.in_vocab[token_ids.flatten()[predictions.positions + 1]])
        if places is None:
            return predictions
        return predictions.behind(places, loss_mask.shape[1], self.head.place_numbers(places.shape[1]))

    def _feature_loss(self, features: Tensor, hidden: Tensor, predictions: Predictions, numbers: Tensor) -> Tensor:
        """Σ λ_i · smooth L1 between head i's features at t and h_{t+1+i}, which the target reads (EAGLE's loss)."""
        total = features.new_zeros(())
        for i, weight in enumerate(self.depth_weights):
            counted = predictions.counts[i]
            if counted.any():
                inputs = self.head.lm_head_inputs(features[i, predictions.sources(i)[counted]]).float()
                expected = hidden[predictions.positions[counted]].float()
                total = total + weight * F.smooth_l1_loss(inputs, expected, reduction="sum") / (
                    numbers[i] * inputs.shape[1]
                )
        return total

    def labels(self, hidden: Tensor, token_ids: Tensor, update: LowRankUpdate | None = None) -> LabelMaker:
        """The labels at flat positions of a batch."""
        flat_hidden, flat_ids = hidden.flatten(0, 1), token_ids.flatten()  # (S, D), (S,)
        added = update.constant() if update else None

        def labels(positions: Tensor) -> Labels:
            next_ids = flat_ids[positions + 1]
            probs = self._teacher_probs(flat_hidden[positions], added) if self.reads_teacher else None
            return Labels(probs, self.draft_index[next_ids], self.in_vocab[next_ids])

        return labels

    @torch.no_grad()
    def _teacher_probs(self, hidden: Tensor, update: LowRankUpdate | None) -> Tensor:
        """The target's distribution after hidden states (n, D), within V' and renormalised: (n, V')."""
        logits = F.linear(hidden, self.teacher, self.teacher_bias)
        if update is not None:
            logits = logits + update(hidden)
        return as_logits(logits, self.logit_scale, self.logit_softcap).softmax(-1)


def with_noise(hidden: Tensor, alpha: float, lengths: Tensor | None = None) -> Tensor:
    """Hidden states with uniform noise of ±α / √(L·D) on every number (NEFTune; Hydra, appendix A.1).

    Args:
        hidden: (B, T, D).
        alpha: α; 0 for no noise.
        lengths: (B,) L, tokens of each text; T when left out.

    >>> torch.equal(with_noise(torch.ones(1, 2, 2), 0.0), torch.ones(1, 2, 2))
    True
    """
    if alpha == 0:
        return hidden
    batch, width, size = hidden.shape
    if lengths is None:
        lengths = torch.full((batch,), width, device=hidden.device)
    bounds = (alpha / (lengths * size).sqrt()).to(hidden.dtype)  # (B,)
    noise: Tensor = torch.empty_like(hidden).uniform_(-1, 1) * bounds[:, None, None]
    return hidden + noise
