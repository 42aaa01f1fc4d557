"""What a distillation asks of whoever answers: our engine, or a server."""

from collections.abc import Callable, Sequence
from typing import Protocol

from draftheads.distill.dialogue import Dialogue

Heard = Callable[[int, int], None]  # tokens and conversations that were done since it was called last


class Source(Protocol):
    """Somebody who answers."""

    @property
    def identity(self) -> dict[str, str]:
        """What the answers depend on, besides the options: a run goes on only with the same."""

    def converse(self, dialogues: Sequence[Dialogue], heard: Heard) -> None:
        """Leads all dialogues to their end."""
