"""What enters layers of a model, without a change of the model's own code."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn


@contextmanager
def layer_inputs(layers: Sequence[nn.Module]) -> Iterator[list[Tensor | None]]:
    """Notes the input of each layer in the passes within the context; None where a layer was not called.

    Passes of other threads, which may use the same model, are not noted.
    """
    thread = threading.get_ident()
    found: list[Tensor | None] = [None] * len(layers)

    def noting(place: int) -> Any:
        # another thread may call a hook that is just being removed, and then without ``named``
        def note(_: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any] = MappingProxyType({})) -> None:
            if threading.get_ident() == thread:
                found[place] = arguments[0] if arguments else named["hidden_states"]

        return note

    handles = [layer.register_forward_pre_hook(noting(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
