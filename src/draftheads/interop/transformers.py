"""Draft heads in transformers: a decoding loop for ``model.generate(…, custom_generate=…)``."""

import hashlib
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftheads.checkpoints.registry import head_name
from draftheads.decode.engine import Engine
from draftheads.errors import GenerationWarning, InvalidSettings, PromptTooLong, require_bool
from draftheads.interop.drafted_rows import DraftedRows
from draftheads.interop.generate_arguments import (
    check_supported,
    custom_generate_of,
    left_out_by,
    looks_at_one_row,
    prompts_of,
)
from draftheads.interop.generate_texts import GenerateRules, Texts
from draftheads.loading import Loadable, load
from draftheads.settings import Precision
from draftheads.speculation.drafting import Drafting, TreeChoice
from draftheads.speculation.shapes import Sampled

_SAMPLED_WEIGHTS = 16  # numbers of each weight by which a change of the model is found


@dataclass
class DraftedOutput(GenerateDecoderOnlyOutput):
    """What ``generate`` returns with ``return_dict_in_generate=True``; without a cache and hidden states."""

    num_steps: int | None = None  # passes of the model after the prompts were read


def custom_generate(
    head: str | PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    draft_model: Loadable | None = None,
    tree: TreeChoice = "auto",
    copy: bool = True,
    precision: Precision = "auto",
    fast: bool = True,
    rows_together: bool | None = None,
) -> "CustomGenerate":
    """A decoding loop with a draft head for transformers: ``model.generate(**inputs, custom_generate=…)``.

    The text is that of ``generate`` without it: greedy in fp32 the same tokens, sampled the same distribution. All of
    ``generate``'s own settings hold, also logits processors, stopping criteria and a streamer. The first call prepares
    the model, as :func:`draftheads.load` does; the next calls with this object and the same model take that over, until
    the model's weights change.

    Args:
        head: a bundled head's name, a folder, or a Hugging Face id. ``prompt-lookup`` and ``lookahead`` need no head.
        tokenizer: of the model, or the name of its model; when left out that of the name by which the model was loaded.
        draft_model: a smaller model of the same tokenizer drafts in place of a head; a name, or a loaded model.
        tree: as for :func:`draftheads.load`, but no ``Sampled`` tree.
        copy: whether drafts also hold copies from the text so far.
        precision: ``int8`` or ``int4``, for CPUs, holds the linear layers in 8 or 4 bits: faster, but another model.
        fast: on a CPU, packed weights and the native library; off is the stock model.
        rows_together: whether all rows of a batch get their next tokens in one call of the processors and criteria, as
            in ``generate``. Then no row is ahead of another, and drafts gain less. None: only where a processor or
            criterion is not one of transformers' own that look at each row alone. Give False if yours look at each row
            alone and keep no state, and True for the same random numbers as in ``generate``.

    Raises:
        InvalidSettings: a wrong value. What concerns the model is found by the first call: it raises the errors of
            :func:`draftheads.load`, and InvalidSettings by name for what ``generate`` is asked and drafts cannot do.
    """
    require_bool(fast=fast)
    if rows_together is not None:
        require_bool(rows_together=rows_together)
    drafting = Drafting(None if head is None else head_name(head), draft_model, tree, copy)  # type: ignore[arg-type]
    if isinstance(drafting.shape, Sampled):
        raise InvalidSettings(
            "a Sampled tree needs an acceptance rule of its own, which generate has not: give another"
        )
    options = {
        **vars(drafting),
        "tokenizer": tokenizer,
        "precision": precision,
        "fast": fast,
    }
    return CustomGenerate(options, rows_together=rows_together)


class CustomGenerate:
    """What :func:`custom_generate` returns: ``generate`` calls it in place of its own loop.

    Args:
        options: arguments of :func:`draftheads.load`.
        rows_together: as for :func:`custom_generate`.
    """

    def __init__(self, options: Mapping[str, Any], *, rows_together: bool | None = None) -> None:
        self.options = dict(options)
        self.rows_together = rows_together
        self._engines: WeakKeyDictionary[Any, tuple[bytes, Engine]] = WeakKeyDictionary()
        self._lock = Lock()

    def __call__(  # noqa: PLR0917 - as generate calls it
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        synced_gpus: bool = False,  # noqa: FBT001, FBT002
        streamer: Any = None,
        *,
        tokenizer: Any = None,
        left_out: Mapping[str, Any] | None = None,
        **model_kwargs: Any,
    ) -> DraftedOutput | Tensor:
        """Decodes as ``GenerationMixin._sample`` of transformers, whose arguments these are.

        ``left_out`` are arguments of ``generate`` that it does not hand on itself.
        """
        left_out, config = left_out or {}, generation_config
        further = {"synced_gpus": synced_gpus or left_out.get("synced_gpus"), **model_kwargs}
        check_supported(model, config, further, assistant_model=left_out.get("assistant_model"))
        prompts = prompts_of(input_ids, model_kwargs)
        engine = self.engine(model, tokenizer)
        limit = engine.model.max_positions
        if limit is not None and (longest := max(map(len, prompts))) >= limit:
            raise PromptTooLong(f"a prompt has {longest:,} tokens; {engine.model.model_id} takes at most {limit - 1:,}")
        streamer = left_out.get("streamer") if streamer is None else streamer
        texts = Texts(input_ids, self._rules(logits_processor, stopping_criteria, config, streamer))
        rows = DraftedRows(engine, texts, prompts, most_tokens=stopping_criteria.max_length)
        rows.run()
        if streamer is not None:
            streamer.end()
        if not config.return_dict_in_generate:
            return texts.token_ids
        kept: dict[str, Any] = {"sequences": texts.token_ids, "scores": texts.scores, "logits": texts.logits}
        return DraftedOutput(**kept, num_steps=rows.num_steps)

    def _rules(
        self, processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: Any, streamer: Any
    ) -> GenerateRules:
        together = self.rows_together
        if together is None:
            together = not all(map(looks_at_one_row, [*processors, *criteria]))
        pad = getattr(config, "_pad_token_tensor", None)  # what generate prepares of pad_token_id
        return GenerateRules(
            processors=processors,
            criteria=criteria,
            samples=bool(config.do_sample),
            pad_id=0 if pad is None else int(pad),
            streamer=streamer,
            keeps_scores=bool(config.return_dict_in_generate and config.output_scores),
            keeps_logits=bool(config.return_dict_in_generate and config.output_logits),
            together=together,
        )

    @property
    def __signature__(self) -> inspect.Signature:
        """What :func:`inspect.signature` finds.

        ``generate`` looks at it to know which arguments a loop has beyond the usual ones, and then drops ``streamer``,
        ``tokenizer``, ``assistant_model`` and ``synced_gpus`` (transformers 5.10 to 5.24). Without the tokenizer it
        refuses ``stop_strings``, and without its end a streamer's reader waits for ever. So they are put back here,
        among the arguments of this loop.
        """
        arguments = left_out_by(inspect.currentframe())
        if arguments is not None:
            given, kwargs = arguments
            kwargs["left_out"] = given
            if given.get("tokenizer") is not None:
                kwargs["tokenizer"] = given["tokenizer"]
        return inspect.signature(self.__call__)

    def engine(self, model: Any, tokenizer: Any = None) -> Engine:
        """What decodes with this model: made at the first call, and again after its weights have changed.

        Args:
            model: a loaded causal language model. The engine is dropped with it.
            tokenizer: of the model, where none was given before.
        """
        state = _state_of(model)
        with self._lock:
            known = self._engines.get(model)
            if known is None or known[0] != state:
                named = getattr(model.config, "_name_or_path", None) or None
                tokenizer = self.options["tokenizer"] or tokenizer or named
                with warnings.catch_warnings():  # generate applies its configuration itself
                    warnings.simplefilter("ignore", GenerationWarning)
                    known = state, load(model, **{**self.options, "tokenizer": tokenizer})
                self._engines[model] = known
            return known[1]


def generate_from_repository(model: Any, head: str, **arguments: Any) -> Any:
    """``model.generate`` with the head of a repository: what its ``custom_generate/generate.py`` calls.

    Args:
        model: a loaded causal language model.
        head: the repository. If ``generate`` was given another name or a folder, that is taken.
        **arguments: of ``generate``.
    """
    named = custom_generate_of(inspect.currentframe())
    return model.generate(**arguments, custom_generate=_of_head(named or head))


@lru_cache(maxsize=8)
def _of_head(head: str) -> CustomGenerate:
    """One for each head, so that the model is prepared once."""
    return custom_generate(head)


@torch.no_grad()
def _state_of(model: Any) -> bytes:
    """A digest that changes with the weights: what is prepared of them would be wrong then."""
    facts: list[Any] = []
    numbers: list[Tensor] = []
    for weight in model.parameters():
        version = None if weight.is_inference() else weight._version  # noqa: SLF001 - no public name
        facts.append((weight.data_ptr(), version, weight.dtype, tuple(weight.shape), str(weight.device)))
        if not weight.is_meta:
            flat = weight.detach().reshape(-1)
            numbers.append(flat[:: max(1, len(flat) // _SAMPLED_WEIGHTS)][:_SAMPLED_WEIGHTS].float())
    digest = hashlib.sha256(repr(facts).encode())
    if numbers:
        digest.update(torch.cat([part.to(numbers[0].device) for part in numbers]).cpu().numpy().tobytes())
    return digest.digest()
