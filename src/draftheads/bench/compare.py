"""Drafters side by side with one engine: tokens per step on all prompts, speed on some of them.

Each head drafts on its best tree of a given number of nodes, found on other prompts. Tokens per step do
not depend on the clock: they are counted with several prompts at a time. Speeds are measured with one prompt at a time,
the drafters in turn; on a few prompts also with each drafter as ``draftheads.load`` makes it.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from draftheads.bench.contenders import DRAFT_MODEL, Contender, heads_for, load_contenders, names_of
from draftheads.bench.settings import BenchSettings
from draftheads.bench.table import DEFAULT_FIELDS, SAMPLED_FIELDS, Row, timed_row
from draftheads.bench.timing import PLAIN, Answers, answers_of, engine_way, over_plain, spread, take_turns
from draftheads.checkpoints.registry import head_name
from draftheads.data.corpus_files import load_corpus
from draftheads.data.records import own_prompts, prompts_in
from draftheads.decode.cost_profile import machine_of
from draftheads.decode.engine import Engine, Prompt, prompt_list
from draftheads.errors import DataError, InvalidSettings
from draftheads.heads.base import DraftHead
from draftheads.loading import find_template, load_target
from draftheads.models.model import TargetModel
from draftheads.models.model_names import model_name
from draftheads.search.replay import Replay, encoded, own_answers
from draftheads.settings import Precision, SamplingSettings
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import BestFirst, Sampled, Shape, in_words
from draftheads.speculation.tree import Path as RankPath
from draftheads.speculation.tree import Tree
from draftheads.utils.cache import cache_folder
from draftheads.utils.counts import counted
from draftheads.utils.estimates import ratio_with_error
from draftheads.utils.files import locked
from draftheads.utils.identity import identity_digest, saved_json
from draftheads.utils.progress import Progress, counted_stage, shown
from draftheads.utils.provenance import provenance

MIN_PROMPTS = 3  # for a standard error
_SEED = 1 << 30  # of the first sampled answer


@dataclass(frozen=True)
class Comparison:
    """A finished comparison."""

    rows: list[Row]  # one for each drafter; their tokens per step are compared with those of the first one
    record: dict[str, Any]  # as in ``bench.json``


def compare_heads(
    model: str | PathLike[str] = "smollm2-135m",
    heads: Sequence[str | PathLike[str]] = (),
    prompts: Sequence[Prompt] | None = None,
    *,
    chat_template: str | PathLike[str] | None = None,
    draft_model: str | PathLike[str] | None = None,
    corpus: str | PathLike[str] | None = None,
    settings: BenchSettings | None = None,
    precision: Precision = "auto",
    fresh: bool = False,
    progress: Progress | bool = True,
    **load_options: Any,
) -> Comparison:
    """Compares draft heads, and drafters without a head, on the same prompts; what ``draftheads bench`` does.

    Tokens per step are saved in the user's cache by model, drafter, settings, machine and versions. So a comparison
    that was stopped continues, and another drafter can be added later. Speeds are measured each time.

    Args:
        model: ``smollm2-135m``, a folder, or a Hugging Face id.
        heads: bundled heads' names, folders or Hugging Face ids; also ``prompt-lookup`` and ``lookahead``. When left
            out, these two and all bundled heads of the model.
        prompts: at least 3, better 80; six built-in ones when left out.
        chat_template: as for :func:`draftheads.load`.
        draft_model: a smaller model of the same tokenizer, compared as well.
        corpus: as for :func:`draftheads.load`; each head is also compared with copies, without and with the corpus.
        settings: what is measured, and on how much.
        precision: as for :func:`draftheads.load`.
        fresh: ignore what was saved.
        progress: True shows bars in a notebook or on a terminal; or receives each stage.
        load_options: other arguments of :func:`draftheads.load` for the model, such as ``device`` or ``four_bit``.

    Raises:
        ModelNotFound, CheckpointError: the model or a head cannot be loaded.
        DataError: fewer than 3 prompts, or the corpus cannot be read.
        InvalidSettings: two drafters have the same name.
        StorageError: another process makes the same comparison.
    """
    model, settings, progress = model_name(model), settings or BenchSettings(), shown(progress)
    prompts = prompts_in(own_prompts("demo")) if prompts is None else prompt_list(prompts)
    if len(prompts) < MIN_PROMPTS:
        raise DataError(f"{counted(len(prompts), 'prompt')}: give at least {MIN_PROMPTS}, better 80")
    if isinstance(heads, str | PathLike) or not isinstance(heads, Sequence):
        raise InvalidSettings(f"heads is {heads!r}; give a list, such as ['medusa']")
    names = [head_name(head) for head in heads] or heads_for(model)
    named = names_of(names, taken=(PLAIN, DRAFT_MODEL) if draft_model else (PLAIN,))
    template = find_template(chat_template, named.values(), model)  # raises before the model is loaded
    target = load_target(model, chat_template=template, precision=precision, **load_options)
    texts = None
    if corpus is not None:
        texts = load_corpus(corpus, target.tokenizer, vocab_size=target.vocab_size, progress=progress)
    more: dict[str, Any] = {"draft_model": draft_model, "corpus": texts, "precision": precision, **load_options}
    contenders = list(load_contenders(named, model, target, num_nodes=settings.num_nodes, **more))
    calibration = encoded(target, prompts_in(own_prompts("calibration")), settings.replay)
    identity = {
        "model": [target.model_id, target.weights_fingerprint],
        "settings": settings.identity,
        "machine": machine_of(target),
        **({"load": {name: str(value) for name, value in load_options.items()}} if load_options else {}),
        "calibration": calibration,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = _saved_folder(identity) or Path(temporary)
        with locked(folder, "set DRAFTHEADS_CACHE"):
            if fresh:
                shutil.rmtree(folder / "found", ignore_errors=True)
            ids = [Engine(target).encode(prompt) for prompt in prompts]
            bench = Bench(target, contenders, ids, calibration, settings, folder=folder / "found", progress=progress)
            rows = bench.run()
    record = {
        "format_version": 1,
        "model": model,
        "precision": target.precision,
        "threads": torch.get_num_threads(),
        "num_prompts": len(prompts),
        "prompts": None,  # their file, which only the command knows
        "settings": asdict(settings),
        "drafters": {contender.name: contender.identity for contender in contenders},
        "rows": [asdict(row) for row in rows],
        "provenance": provenance(),
    }
    return Comparison(rows, record)


def _saved_folder(identity: dict[str, Any]) -> Path | None:
    """The folder of what is saved; None where the user has no cache."""
    try:
        return cache_folder() / "bench" / identity_digest(identity)
    except InvalidSettings:
        return None


class Bench:
    """A comparison of drafters for one model.

    Args:
        target: the model.
        contenders: each with a name of its own; tokens per step are compared with the first one's.
        prompts: to answer, as token ids.
        calibration: other prompts, on which trees are found.
        settings: what is compared.
        folder: where findings are saved; they are used again.
        progress: receives each stage.
    """

    def __init__(
        self,
        target: TargetModel,
        contenders: Sequence[Contender],
        prompts: Sequence[list[int]],
        calibration: Sequence[list[int]],
        settings: BenchSettings,
        *,
        folder: Path,
        progress: Progress,
    ) -> None:
        self.target, self.contenders, self.settings = target, contenders, settings
        self.prompts, self.calibration = prompts, calibration
        self.folder, self.progress = folder, progress
        self._shapes: dict[str, Shape | None] = {}  # what each contender drafts, by its name

    def run(self) -> list[Row]:
        """The table, a row for each drafter."""
        trees = {contender.name: self._prepare(contender) for contender in self.contenders}
        plain = self._count(f"{PLAIN}: greedy answers", f"greedy-{PLAIN}", self._engine(None), self.prompts)
        greedy = {contender.name: self._greedy(contender) for contender in self.contenders}
        sampled = {contender.name: self._sampled(contender, trees[contender.name]) for contender in self.contenders}
        timed, defaults = self._timed(), self._with_defaults()
        first = greedy[self.contenders[0].name].step_shares
        rows = []
        for contender in self.contenders:
            name = contender.name
            answers = greedy[name]
            tokens_per_step, error = ratio_with_error(answers.step_shares)
            over_first, over_first_error = ratio_with_error(answers.step_shares, first)
            rows.append(
                replace(
                    timed_row(name, timed[name], timed[PLAIN]),
                    **defaults.get(name, {}),
                    num_parameters=contender.num_parameters,
                    tree=trees[name]["words"],
                    tokens_per_step=tokens_per_step,
                    tokens_per_step_error=error,
                    over_first=over_first,
                    over_first_error=over_first_error,
                    predicted_tokens_per_step=trees[name]["predicted"],
                    num_different=sum(a != b for a, b in zip(answers.token_ids, plain.token_ids, strict=True)),
                    **sampled[name],
                )
            )
        return rows

    # --- what each drafts on ---

    def _prepare(self, contender: Contender) -> dict[str, Any]:
        """Decides on a drafter's shape. Returns it in words, and what the search for the tree predicts."""
        head, nodes = contender.head, self.settings.num_nodes
        self._shapes[contender.name] = contender.shape
        if contender.shape is not None:
            return {"words": in_words(contender.shape), "predicted": None}
        if head is None:
            return {"words": f"its own, up to {contender.drafter.most_nodes}", "predicted": None}
        find = partial(self._tree, contender.name, head)
        tree: dict[str, Any] = saved_json(self._path(f"tree-{contender.identity}"), find)
        beam, confidence = self.settings.replay.beam, tuple(tree["confidence"])
        self._shapes[contender.name] = (
            BestFirst(nodes, top_k=tree["top_k"], beam=beam, temperatures=confidence)
            if tree["grows"]
            else Tree.from_paths(tree["paths"])
        )
        return tree

    def _tree(self, name: str, head: DraftHead) -> dict[str, Any]:
        """The better one of a growing and a static tree."""
        settings = self.settings.replay
        answers = own_answers(
            self.target, self.calibration, settings, folder=self.folder / "answers", progress=self.progress
        )
        self.progress.stage(f"{name}: finding its tree")
        replay = Replay(self.target, head, settings, progress=self.progress)
        replayed = replay.run(answers)
        static, dynamic = replayed["static"]["expected"], replayed["dynamic"]["expected"]
        grows = dynamic[-1] >= static[-1]
        return {
            "confidence": replayed["confidence"]["temperatures"],
            "top_k": replay.top_k,
            "grows": grows,
            "paths": replayed["static"]["paths"],
            "words": f"{'growing' if grows else 'static'}, {len(dynamic) if grows else len(static)}",
            "predicted": (dynamic if grows else static)[-1],
        }

    # --- tokens per step ---

    def _engine(self, drafter: Drafter | None, shape: Shape | None = None, *, batch_size: int | None = None) -> Engine:
        """An engine whose drafter drafts that shape."""
        return Engine(self.target, drafter, shape=shape, max_batch_size=batch_size or self.settings.batch_size)

    def _greedy(self, contender: Contender) -> Answers:
        engine = self._engine(contender.drafter, self._shapes[contender.name])
        return self._count(f"{contender.name}: greedy answers", f"greedy-{contender.identity}", engine, self.prompts)

    def _sampled(self, contender: Contender, best_tree: dict[str, Any]) -> dict[str, Any]:
        """Tokens per step at the temperature, by acceptance rule, as fields of a row."""
        temperature = self.settings.temperature
        shape = self._shapes[contender.name]
        shapes = {"exact": shape, "typical": shape, **self._drawn(contender, best_tree)}
        fields: dict[str, Any] = {}
        for rule, shape in shapes.items() if temperature else ():
            answers = self._count(
                f"{contender.name}: {rule} acceptance, answers at temperature {temperature:g}",
                f"{rule}-acceptance-at-{temperature:g}-{contender.identity}",
                self._engine(contender.drafter, shape),
                spread(self.prompts, self.settings.num_sampled_prompts),
                temperature=temperature,
                acceptance=rule,
            )
            fields.update(zip(SAMPLED_FIELDS[rule], ratio_with_error(answers.step_shares), strict=True))
        return fields

    def _drawn(self, contender: Contender, best_tree: dict[str, Any]) -> dict[str, Shape]:
        """The shapes of drawn drafts, by acceptance rule; none for drafters that do not draw.

        Rejection sampling has the head's static tree (a draft model: a chain), block verification a chain.
        """
        if not contender.draws:
            return {}
        chain = Tree.chain(min(contender.drafter.max_depth, self.settings.num_nodes - 1))
        tree = numbered(Tree.from_paths(best_tree["paths"])) if "paths" in best_tree else chain
        return {"rejection": Sampled(tree), "block": Sampled(chain)}

    def _count(self, stage: str, name: str, engine: Engine, prompts: Sequence[list[int]], **sampling: Any) -> Answers:
        """Answers to prompts, several at a time, saved."""

        def find() -> dict[str, Any]:
            first = SamplingSettings(max_new_tokens=self.settings.max_new_tokens, seed=_SEED, **sampling)
            each = [replace(first, seed=_SEED + number) for number in range(len(prompts))]
            return asdict(answers_of(engine, prompts, each))

        self.progress.stage(f"{stage} to {counted(len(prompts), 'prompt')}")
        return Answers.from_json(saved_json(self._path(f"{name}-{identity_digest(prompts)}"), find))

    # --- speed ---

    def _timed(self) -> dict[str, list[Answers]]:
        """Answers of plain decoding and of all contenders to each prompt that is timed."""
        prompts = spread(self.prompts, self.settings.num_speed_prompts)
        engines = {PLAIN: self._engine(None, batch_size=1)}
        for contender in self.contenders:
            engines[contender.name] = self._engine(contender.drafter, self._shapes[contender.name], batch_size=1)
        ways = {name: engine_way(engine) for name, engine in engines.items()}
        key = identity_digest([prompts, [contender.identity for contender in self.contenders]])
        stage = f"timing {len(ways)} ways on {counted(len(prompts), 'prompt')}"
        advance = counted_stage(self.progress, stage, len(prompts))

        def saved(number: int, find: Callable[[], Any]) -> Any:
            answers = saved_json(self._path(f"timed-{key}-{number}"), find)
            advance()
            return answers

        groups = [[prompt] for prompt in prompts]
        timings = take_turns(ways, groups, max_new_tokens=self.settings.max_new_tokens, saved=saved)
        for number in range(len(prompts)):
            self._path(f"timed-{key}-{number}").unlink()  # measured anew by the next comparison
        return timings.answers

    def _with_defaults(self) -> dict[str, dict[str, Any]]:
        """By drafter the speed of an engine as users have it, as fields of a row."""
        engines = {each.name: each.defaults for each in self.contenders if each.defaults is not None}
        if not engines:
            return {}
        self.progress.stage(f"timing {counted(len(engines), 'drafter')} with the defaults")
        speeds = over_plain(engines, self.prompts)
        return {name: dict(zip(DEFAULT_FIELDS, measured, strict=True)) for name, measured in speeds.items()}

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def numbered(tree: Tree) -> Tree:
    """The tree in which the children of each node have the ranks 0, 1, 2 …, as drawn siblings have.

    >>> numbered(Tree.from_paths([(0,), (2,), (2, 1)])).paths
    ((), (0,), (1,), (1, 0))
    """
    new: dict[RankPath, RankPath] = {(): ()}
    num_children: dict[RankPath, int] = {}
    for path in tree.paths[1:]:  # parents come first, siblings by rank
        parent = path[:-1]
        rank = num_children[parent] = num_children.get(parent, -1) + 1
        new[path] = (*new[parent], rank)
    return Tree.from_paths(list(new.values())[1:])
