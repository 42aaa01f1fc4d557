"""The comparison of ``draftheads demo``: transformers, plain decoding, and heads as a user loads them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from draftheads.bench.contenders import names_of
from draftheads.bench.table import Row, timed_row
from draftheads.bench.timing import PLAIN, STOCK, Timings, Way, engine_way, stock_way
from draftheads.checkpoints.checkpoint import resolve_head
from draftheads.decode.engine import Engine
from draftheads.loading import engine_on, load_target, template_of
from draftheads.models.model import TargetModel
from draftheads.runners.structure import checked
from draftheads.settings import ROUNDED_BITS, Precision
from draftheads.speculation.drafting import Drafting


class Scorer:
    """Scores greedy texts again with transformers' model in fp32: how far are they from its best tokens?"""

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


@dataclass(frozen=True)
class Demo:
    """The models and engines that are compared."""

    stock: TargetModel  # transformers' own model, unchanged
    plain: Engine
    heads: dict[str, Engine]  # by their names in the table

    def ways(self, *, transformers: bool) -> dict[str, Way]:
        """All ways of decoding, by name."""
        ours = {name: engine_way(engine) for name, engine in {PLAIN: self.plain, **self.heads}.items()}
        return {STOCK: stock_way(self.stock), **ours} if transformers else ours

    def rows(self, timings: Timings, prompts: Sequence[list[int]], scorer: Scorer | None) -> list[Row]:
        """The table, from answers to single prompts. Texts are compared with plain decoding by the same kernels.

        ``prompts`` are token ids of all prompts. Without a scorer there are no worst margins.
        """
        margin = cache(scorer.worst_margin) if scorer else None  # ways with the same text need one pass
        plain, stock = timings.answers[PLAIN], timings.answers.get(STOCK)
        plain_texts = [answer.token_ids[0] for answer in plain]
        plain_of_heads = self._plain_of_heads(prompts[: len(plain)], timings.max_new_tokens) or plain_texts
        rows = []
        for name, answers in timings.answers.items():
            texts = [answer.token_ids[0] for answer in answers]
            expected = plain_of_heads if name in self.heads else plain_texts
            pairs = zip(prompts, texts, strict=False)  # a time box leaves out the last prompts
            margins = [margin(tuple(prompt), text) for prompt, text in pairs] if margin else []
            rows.append(
                replace(
                    timed_row(name, answers, plain, stock),
                    num_different=sum(text != other for text, other in zip(texts, expected, strict=True)),
                    worst_margin=max(margins, default=None),
                )
            )
        return rows

    def _plain_of_heads(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[tuple[int, ...]] | None:
        """Plain decoding by the heads' model, where that is another one than plain decoding's (with exact bits)."""
        model = next((engine.model for engine in self.heads.values()), self.plain.model)
        if model is self.plain.model:
            return None
        engine = Engine(model, max_batch_size=1)
        return [result.token_ids for result in engine.generate(prompts, max_new_tokens=max_new_tokens)]


def load_demo(
    model: str,
    heads: Sequence[str],
    *,
    chat_template: str | None = None,
    precision: Precision = "auto",
    copy: bool = True,
    fast: bool = True,
    **load_options: Any,
) -> Demo:
    """Loads transformers' model (never in int8 or int4), ours, and the heads. Arguments: :func:`draftheads.load`'s."""
    named = names_of(heads, taken=(PLAIN, STOCK))
    resolved = {name: resolve_head(head, model) for name, head in named.items()}
    template = template_of(chat_template, *resolved.values())
    if precision in ROUNDED_BITS:
        plain = load_target(model, chat_template=template, precision=precision, **load_options)
        stock = load_target(model, fast=False, **load_options)
    else:
        stock = load_target(model, chat_template=template, precision=precision, fast=False, **load_options)
        plain = checked(stock.twin(), stock.twin, fast=True) if fast else stock
    engines = {name: engine_on(plain, head, Drafting(name, copy=copy), fast=fast) for name, head in resolved.items()}
    return Demo(stock, Engine(plain), engines)
