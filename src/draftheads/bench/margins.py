"""How far a greedy text is from the model's best tokens: one fp32 pass over the whole text scores each token again."""

from collections.abc import Sequence
from typing import Any

import torch

from draftheads.models.model import TargetModel


class Scorer:
    """Scores texts again with transformers' model in fp32, one pass for each text."""

    def __init__(self, stock: TargetModel) -> None:
        self.model: Any = stock.model
        if stock.dtype != torch.float32:
            self.model = type(stock.model)(stock.model.config).to(stock.device)
            self.model.load_state_dict(stock.model.state_dict())
            self.model = self.model.float().eval()

    @torch.inference_mode()
    def worst_margin(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
        """The largest gap between the best logit and the emitted token's logit; 0 where every token is the best."""
        if not token_ids:
            return 0.0
        text = torch.tensor([[*prompt_ids, *token_ids]], device=self.model.device)
        logits = self.model(input_ids=text[:, :-1], logits_to_keep=len(token_ids)).logits[0].float()  # (T, V)
        chosen = logits.gather(1, text[0, len(prompt_ids) :, None])[:, 0]
        return float((logits.amax(-1) - chosen).max())
