"""Draft heads make a language model answer faster. The text of its answers does not change.

>>> import draftheads
>>> engine = draftheads.load("smollm2-135m", head="hydra")  # doctest: +SKIP
>>> engine.generate(["Why is the sky blue?"], max_new_tokens=128)[0].text  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `draftheads --help` must not wait two seconds for torch
    from draftheads.bench.compare import compare_heads
    from draftheads.checkpoints.checkpoint import load_head, save_head
    from draftheads.decode.engine import Engine
    from draftheads.decode.request import GenerationResult, StreamEvent
    from draftheads.errors import DraftHeadsError
    from draftheads.heads import register
    from draftheads.heads.base import DraftHead, HeadConfig
    from draftheads.interop.export import export_head, import_head
    from draftheads.interop.transformers import custom_generate
    from draftheads.loading import load
    from draftheads.models.model import TargetModel
    from draftheads.search.tune import tune_head
    from draftheads.settings import Grammar, SamplingSettings
    from draftheads.speculation.acceptance_profile import AcceptanceProfile
    from draftheads.speculation.drafter import Drafter
    from draftheads.speculation.shapes import BestFirst, Sampled
    from draftheads.speculation.tree import Tree
    from draftheads.train.run import train_head

__all__ = [
    "AcceptanceProfile",
    "BestFirst",
    "DraftHead",
    "DraftHeadsError",
    "Drafter",
    "Engine",
    "GenerationResult",
    "Grammar",
    "HeadConfig",
    "Sampled",
    "SamplingSettings",
    "StreamEvent",
    "TargetModel",
    "Tree",
    "compare_heads",
    "custom_generate",
    "export_head",
    "import_head",
    "load",
    "load_head",
    "register",
    "save_head",
    "train_head",
    "tune_head",
]

_HOMES = {
    "AcceptanceProfile": "draftheads.speculation.acceptance_profile",
    "BestFirst": "draftheads.speculation.shapes",
    "DraftHead": "draftheads.heads.base",
    "DraftHeadsError": "draftheads.errors",
    "Drafter": "draftheads.speculation.drafter",
    "Engine": "draftheads.decode.engine",
    "GenerationResult": "draftheads.decode.request",
    "Grammar": "draftheads.settings",
    "HeadConfig": "draftheads.heads.base",
    "Sampled": "draftheads.speculation.shapes",
    "SamplingSettings": "draftheads.settings",
    "StreamEvent": "draftheads.decode.request",
    "TargetModel": "draftheads.models.model",
    "Tree": "draftheads.speculation.tree",
    "compare_heads": "draftheads.bench.compare",
    "custom_generate": "draftheads.interop.transformers",
    "export_head": "draftheads.interop.export",
    "import_head": "draftheads.interop.export",
    "load": "draftheads.loading",
    "load_head": "draftheads.checkpoints.checkpoint",
    "register": "draftheads.heads",
    "save_head": "draftheads.checkpoints.checkpoint",
    "train_head": "draftheads.train.run",
    "tune_head": "draftheads.search.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'draftheads' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
