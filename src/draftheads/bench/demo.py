"""The comparison of ``draftheads demo``: transformers, plain decoding, and heads as a user loads them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from draftheads.bench.contenders import names_of
from draftheads.bench.margins import Scorer
from draftheads.bench.table import Row, timed_row
from draftheads.bench.timing import PLAIN, STOCK, DecodingMethod, Timings, engine_method, stock_method
from draftheads.cpu.optimise import rows_keep_their_bits
from draftheads.decode.engine import Engine
from draftheads.errors import InvalidSettings
from draftheads.loading import find_template, head_engine, kernels_folder, load_drafter, load_target
from draftheads.models.model import TargetModel
from draftheads.settings import Precision


@dataclass(frozen=True)
class Demo:
    """The models and engines that are compared."""

    stock: TargetModel  # transformers' own model, unchanged
    plain: Engine
    heads: dict[str, Engine]  # by their names in the table

    def ways(self, *, transformers: bool) -> list[DecodingMethod]:
        """All ways of decoding."""
        ours = [engine_method(name, engine) for name, engine in {PLAIN: self.plain, **self.heads}.items()]
        return [stock_method(self.stock), *ours] if transformers else ours

    def rows(self, timings: Timings, prompts: Sequence[list[int]], scorer: Scorer | None) -> list[Row]:
        """The table. Texts are compared with plain decoding by the same kernels.

        Args:
            timings: answers of all ways to single prompts.
            prompts: token ids of all prompts.
            scorer: finds the worst margins; without it there are none.
        """
        margin = cache(scorer.worst_margin) if scorer else None  # ways with the same text need one pass
        plain, stock = timings.answers[PLAIN], timings.answers.get(STOCK)
        exact = self._plain_of_heads(prompts[: len(plain)], timings.max_new_tokens)
        rows = []
        for name, answers in timings.answers.items():
            texts = [one.token_ids[0] for one in answers]
            expected = exact if exact and name in self.heads else [one.token_ids[0] for one in plain]
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
    batch_invariant: bool = False,
    fast: bool = True,
    **load_options: Any,
) -> Demo:
    """Loads transformers' model, ours, and the heads.

    Args:
        model: a name, a folder or a Hugging Face id.
        heads: the same.
        chat_template: as for :func:`draftheads.load`.
        precision: of the models; transformers' model is never int8.
        copy: whether drafts also contain copies from the text.
        batch_invariant: whether heads decode with kernels by which a row's bits do not depend on the number of rows.
        fast: use our faster kernels.
        load_options: other arguments of :func:`draftheads.load` for the model, such as ``device`` or ``four_bit``.

    Raises:
        InvalidSettings: two heads have the same name, or the machine has no such kernels.
    """
    named = names_of(heads, taken=(PLAIN, STOCK))
    template = find_template(chat_template, heads, model)
    if precision == "int8":
        plain = drafted = load_target(model, chat_template=template, precision="int8", **load_options)
        stock = load_target(model, fast=False, **load_options)
    else:
        stock = load_target(model, chat_template=template, precision=precision, fast=False, **load_options)
        plain = drafted = _faster(stock, batch_invariant=False) if fast else stock
        if batch_invariant:
            drafted = _faster(stock, batch_invariant=True)
            if not rows_keep_their_bits(drafted.model):
                raise InvalidSettings(
                    "batch_invariant: this machine's kernels change a row's bits with the number of rows"
                )
    engines = {
        name: head_engine(drafted, load_drafter(head, model, drafted, fast=fast), head=head, model=model, copy=copy)
        for name, head in named.items()
    }
    return Demo(stock, Engine(plain), engines)


def _faster(stock: TargetModel, *, batch_invariant: bool) -> TargetModel:
    return stock.twin().sped_up(batch_invariant=batch_invariant, folder=kernels_folder())
