"""Draft heads, one architecture a file; this table is the only place that lists them."""

from draftheads.errors import UnknownMethod
from draftheads.heads.base import DraftHead, HeadConfig
from draftheads.heads.hydra import HydraConfig, HydraHead
from draftheads.heads.medusa import MedusaConfig, MedusaHead

HEADS: dict[str, tuple[type[HeadConfig], type[DraftHead]]] = {
    "hydra": (HydraConfig, HydraHead),
    "medusa": (MedusaConfig, MedusaHead),
}


def head_classes(method: str) -> tuple[type[HeadConfig], type[DraftHead]]:
    """The configuration and module of a method.

    Raises:
        UnknownMethod: no architecture of that name.
    """
    try:
        return HEADS[method]
    except KeyError:
        raise UnknownMethod(f"unknown method {method!r}; choose one of {', '.join(HEADS)}") from None
