"""What a comparison compares: drafters by the names that they have in the table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from draftheads.bench.timing import PLAIN
from draftheads.checkpoints.checkpoint import ResolvedHead, resolve_head
from draftheads.checkpoints.registry import zoo_heads
from draftheads.decode.engine import Engine
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import LOOKUP_TOKENS, Mixed
from draftheads.errors import CheckpointError, InvalidSettings, InvalidTree
from draftheads.heads.base import DraftHead
from draftheads.loading import engine_on, load_drafter, load_target
from draftheads.models.model import TargetModel
from draftheads.models.model_names import base_of
from draftheads.settings import Precision
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import UNTRAINED_HEADS, Drafting
from draftheads.utils.provenance import identity_digest

DRAFT_MODEL = "draft-model"
_USUAL_NODES = 30  # of lookahead; prompt lookup has fewer
# the untrained drafters, with trees of at most so many nodes
_WITHIN: dict[str, Callable[[int], Drafter]] = {
    "lookahead": Lookahead.within,
    "prompt-lookup": lambda num_nodes: Mixed(None, num_tokens=max(1, min(LOOKUP_TOKENS, num_nodes - 1))),
}


@dataclass(frozen=True)
class Contender:
    """A drafter with its name in the table."""

    name: str
    drafter: Drafter
    identity: str  # differs for other weights, another drafter, or another way of drafting
    num_parameters: int = 0  # of the drafter
    as_loaded: Callable[[bool], Engine | None] = lambda _: None  # by ``draftheads.load``, with copies or without
    head: DraftHead | None = None  # the drafter, where its best tree is to be found
    draws: bool = False  # whether drafts can be drawn from it
    within: Callable[[int], Drafter] | None = None  # the drafter with trees of its own of at most so many nodes

    def sized(self, num_nodes: int | None) -> Drafter:
        """The drafter, for trees of at most so many nodes."""
        return self.drafter if self.within is None else self.within(num_nodes or 0)


def heads_for(model: str) -> tuple[str, ...]:
    """All bundled heads of a model, and drafters that need no training.

    Medusa comes first: others are compared with it.
    """
    base = base_of(model)
    bundled = sorted((head.method for head in zoo_heads() if head.base_name == base), key=lambda m: (m != "medusa", m))
    return (*bundled, *UNTRAINED_HEADS)


def names_of(heads: Sequence[str], *, taken: Sequence[str] = (PLAIN,)) -> dict[str, str]:
    """By its name in the table each head: the last part of a path or Hugging Face id, where that part is unique.

    ``taken`` are names that other rows of the table have.

    >>> names_of(["medusa", "you/hydra", "me/eagle", "you/eagle"])
    {'medusa': 'medusa', 'hydra': 'you/hydra', 'me/eagle': 'me/eagle', 'you/eagle': 'you/eagle'}
    """
    short = [Path(head).resolve().name if Path(head).is_dir() else Path(head).name for head in heads]
    names = [
        head if short.count(name) > 1 or name in ("", *taken) else name for head, name in zip(heads, short, strict=True)
    ]
    if len(set(names)) < len(names) or set(taken) & set(names):
        other = f", other than {' and '.join(taken)}" if taken else ""
        raise InvalidSettings(f"heads are {', '.join(heads)}: each must have a name of its own{other}")
    return dict(zip(names, heads, strict=True))


def load_contenders(
    named: Mapping[str, ResolvedHead | str],
    target: TargetModel,
    *,
    drafting: Drafting | None = None,
    precision: Precision = "auto",
    **load_options: Any,
) -> Iterator[Contender]:
    """The drafters, loaded.

    Args:
        named: by their names in the table what ``resolve`` found.
        target: the target.
        drafting: its draft model drafts as well, and heads as they are loaded also copy from its corpus.
        precision: of the draft model.
        load_options: of the draft model, as for :func:`draftheads.load`.
    """
    drafting = drafting or Drafting()
    for name, saved in named.items():
        if not isinstance(saved, ResolvedHead):
            within = _WITHIN[saved]
            usual = Engine(target, within(_USUAL_NODES), max_batch_size=1)
            yield Contender(name, usual.drafter, saved, as_loaded=partial(_same, usual), within=within)
            continue
        head = load_drafter(saved, target, fast=load_options.get("fast", True))
        identity = f"{saved.method}-{saved.digest}-{identity_digest(saved.config.options())[:8]}"
        size, as_loaded = saved.num_parameters, cache(partial(_as_loaded, target, head, saved, drafting.corpus))
        yield Contender(name, head, identity, size, as_loaded=as_loaded, head=head, draws=True)
    if drafting.draft_model is not None:
        small = load_target(drafting.draft_model, precision=precision, **load_options)
        with torch.device("meta"):  # the loaded layers hold packed weights, not parameters
            count = type(small.model)(small.config).num_parameters()
        identity = f"{DRAFT_MODEL}-{small.weights_fingerprint}"
        drafter = DraftModel(small, target)
        usual = Engine(target, drafter, max_batch_size=1)
        yield Contender(DRAFT_MODEL, drafter, identity, count, as_loaded=partial(_same, usual), draws=True)


def _same(engine: Engine, _copy: bool) -> Engine:  # noqa: FBT001
    return engine


def _as_loaded(
    target: TargetModel,
    head: DraftHead,
    saved: ResolvedHead,
    corpus: str | None,
    copy: bool,  # noqa: FBT001
) -> Engine | None:
    """The engine that users have; None if its profile cannot be read, and loading would fail."""
    try:
        drafting = Drafting(saved.name, copy=copy, corpus=corpus if copy else None)
        return engine_on(target, resolve_head(saved.name, saved.model), drafting, drafter=head, max_batch_size=1)
    except (CheckpointError, InvalidTree):
        return None
