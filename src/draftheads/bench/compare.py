"""Drafters side by side with one engine: every way of decoding answers the same questions in turn, and is timed.

Heads draft on trees of the same size, found on other prompts, and as :func:`draftheads.load` makes them. The answers
are the one record of a comparison: all numbers follow from them.
"""

import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from draftheads.bench.contenders import DRAFT_MODEL, heads_for, load_contenders, names_of
from draftheads.bench.quality import Measure, Perplexity
from draftheads.bench.rounds import Bench
from draftheads.bench.settings import LOADED, MIN_PROMPTS, BenchSettings
from draftheads.bench.table import Row
from draftheads.bench.timing import PLAIN, STOCK
from draftheads.checkpoints.registry import head_name
from draftheads.data.records import Record, own_prompts, prompts_in, read_prompts
from draftheads.decode.prompts import Prompt, prompt_list
from draftheads.decode.step_costs import machine_of
from draftheads.errors import DataError, InvalidSettings
from draftheads.loading import load_target, resolve, template_of
from draftheads.models.model_names import model_name
from draftheads.search.replay import encoded
from draftheads.settings import ROUNDED_BITS, Precision
from draftheads.speculation.shapes import Drafting
from draftheads.utils.cache import cache_folder
from draftheads.utils.counts import counted
from draftheads.utils.files import locked
from draftheads.utils.machine import OtherPrograms
from draftheads.utils.progress import Progress, shown
from draftheads.utils.provenance import identity_digest, provenance

FORMAT_VERSION = 4  # of the record


@dataclass(frozen=True)
class Comparison:
    """A finished comparison."""

    rows: list[Row]  # over all questions, and by category and turn
    record: dict[str, Any]  # as in ``bench.json``
    answers: list[dict[str, Any]]  # as the lines of ``answers.jsonl``
    saved: tuple[Path, ...] = ()  # files in the user's cache by which a stopped comparison continues

    def forget(self) -> None:
        """Deletes what was saved, so that the next comparison measures times anew."""
        for path in self.saved:
            path.unlink(missing_ok=True)


def compare_heads(
    model: str | PathLike[str] = "smollm2-135m",
    heads: Sequence[str | PathLike[str]] = (),
    prompts: Sequence[Prompt | Record] | None = None,
    *,
    chat_template: str | PathLike[str] | None = None,
    drafting: Drafting | None = None,
    settings: BenchSettings | None = None,
    quality: Sequence[Measure | Literal["agreement", "perplexity"]] = (),
    original_model: str | PathLike[str] | None = None,
    transformers: bool = False,
    precision: Precision = "auto",
    fresh: bool = False,
    keep: bool = False,
    max_seconds: float = math.inf,
    progress: Progress | bool = True,
    **load_options: Any,
) -> Comparison:
    """Compares draft heads, and drafters without a head, on the same prompts; what ``draftheads bench`` does.

    Finished answers are saved in the user's cache until the comparison ends. So one that was stopped or killed
    continues with the same arguments.

    Args:
        model: ``smollm2-135m``, a folder, or a Hugging Face id.
        heads: bundled heads' names, folders or Hugging Face ids; also ``prompt-lookup`` and ``lookahead``. When left
            out, these two and all bundled heads of the model.
        prompts: at least 3, better 80; six built-in ones when left out. Records of
            :func:`draftheads.data.records.read_suite` have all turns and categories.
        chat_template: as for :func:`draftheads.load`.
        drafting: its draft model is compared as well; heads as they are loaded also copy from its corpus.
        settings: what is measured, and on how much.
        quality: measures of the answers. ``"agreement"`` compares them with plain decoding's, ``"perplexity"`` is under
            the original model; both are measured for typical acceptance when nothing is given.
        original_model: what the model was tuned from, for the perplexity; the model itself when left out.
        transformers: also time transformers' own ``generate``, one prompt at a time.
        precision: as for :func:`draftheads.load`.
        fresh: ignore what was saved.
        keep: the finished answers stay saved until :meth:`Comparison.forget` is called.
        max_seconds: for all answers; on a slow machine they get shorter (at least 32 tokens), then fewer.
        progress: True shows bars in a notebook or on a terminal; or receives each stage.
        load_options: other arguments of :func:`draftheads.load` for the model, such as ``device`` or ``four_bit``.

    Raises:
        ModelNotFound, CheckpointError: the model or a head cannot be loaded.
        DataError: fewer than 3 prompts that the model takes.
        InvalidSettings: two drafters have the same name, or no drafter can draft these trees.
        StorageError: another process makes the same comparison.
    """
    model, settings, progress = model_name(model), settings or BenchSettings(), shown(progress)
    records: list[Prompt | Record] = [*(read_prompts(own_prompts("demo")) if prompts is None else prompt_list(prompts))]
    if len(records) < MIN_PROMPTS:
        raise DataError(f"{counted(len(records), 'prompt')}: give at least {MIN_PROMPTS}, better 80")
    if isinstance(heads, str | PathLike) or not isinstance(heads, Sequence):
        raise InvalidSettings(f"heads is {heads!r}; give a list, such as ['medusa']")
    names = [head_name(head) for head in heads] or heads_for(model)
    drafting = drafting or Drafting()
    named = names_of(names, taken=(PLAIN, STOCK, DRAFT_MODEL) if drafting.draft_model else (PLAIN, STOCK))
    drafts = {name: resolve(head, model, ignore_profile=True) for name, head in named.items()}
    template = template_of(chat_template, *drafts.values())  # raises before the model is loaded
    target = load_target(model, chat_template=template, precision=precision, **load_options)
    stock = None
    if transformers:
        exact = {"precision": "auto" if precision in ROUNDED_BITS else precision, **load_options, "fast": False}
        stock = load_target(model, chat_template=template, **exact)
    if not quality and "typical" in settings.acceptance:
        quality = ("agreement", "perplexity")  # typical acceptance is never shown without what it costs
    original = target
    if original_model is not None and "perplexity" in quality:
        original = load_target(original_model, chat_template=template, precision=precision, **load_options)
    measures = [Perplexity(original) if measure == "perplexity" else measure for measure in quality]
    more: dict[str, Any] = {"drafting": drafting, "precision": precision, **load_options}
    contenders = list(load_contenders(drafts, target, **more))
    calibration = []
    if not set(settings.trees) <= set(LOADED):  # trees are found on these prompts
        calibration = encoded(target, prompts_in(own_prompts("calibration")), settings.replay(2))
    identity = {
        "model": [target.model_id, target.weights_fingerprint],
        "machine": machine_of(target),
        "calibration": [calibration, settings.max_new_tokens],
        **({"load": {name: str(value) for name, value in load_options.items()}} if load_options else {}),
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with suppress(InvalidSettings):  # the user has no cache
            folder = cache_folder() / "bench" / identity_digest(identity)
        with locked(folder, "set DRAFTHEADS_CACHE"):
            if fresh:
                shutil.rmtree(folder / "found", ignore_errors=True)
            bench = Bench(
                target,
                contenders,
                records,
                calibration,
                settings,
                folder=folder / "found",
                progress=progress,
                stock=stock,
                measures=measures,
                max_seconds=max_seconds,
            )
            others = OtherPrograms()
            rows = bench.run()
            disturbed = target.device.type == "cpu" and others.disturb(torch.get_num_threads())
    record = {
        "format_version": FORMAT_VERSION,
        "model": model,
        "precision": target.precision,
        "threads": torch.get_num_threads(),
        "num_prompts": len({line["question_id"] for line in bench.lines}),
        "prompts": None,  # their file, which only the command knows
        "settings": asdict(settings),
        "drafters": {contender.name: contender.identity for contender in contenders},
        "drafting": bench.drafting,
        "accuracy": bench.trees.accuracy,
        "peak_bytes": _peak_bytes(),
        "disturbed": disturbed,  # other programs used the cores
        "problems": bench.problems,
        "unmeasured": bench.unmeasured,  # a judge failed, and can be asked again
        "judge": next((each.made_by for each in measures if isinstance(each, Measure) and each.made_by), None),
        "example": bench.example,
        "rows": [asdict(row) for row in rows],
        "provenance": provenance(),
    }
    comparison = Comparison(rows, record, bench.lines, tuple(bench.saved))
    if not keep and not bench.unmeasured:
        comparison.forget()
    return comparison


def _peak_bytes() -> int:
    """The most memory that this process has had; what it has now, where that is not known."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return psutil.Process().memory_info().rss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
