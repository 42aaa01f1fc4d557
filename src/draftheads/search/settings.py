"""The settings of a measurement of tokens per step."""

from dataclasses import dataclass

from draftheads.errors import InvalidSettings


@dataclass(frozen=True)
class ReplaySettings:
    """Which answers are recorded, and which trees are measured on them."""

    num_prompts: int = 64
    """Prompts that the model answers."""
    max_new_tokens: int = 128
    """Tokens of each answer."""
    temperature: float = 0.0
    """Temperature of the answers. Above 0 the model's probabilities of draft tokens count, not only its choice."""
    max_nodes: int = 64
    """Nodes of the largest tree, root included."""
    top_k: int = 10
    """Draft tokens of each head, the best ones, for trees."""
    beam: int = 6
    """In growing trees: nodes of a depth that get children. For heads that read the draft tokens above them."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_new_tokens", "max_nodes", "top_k", "beam"):
            least = 2 if name in ("num_prompts", "max_nodes", "max_new_tokens") else 1
            if getattr(self, name) < least:
                raise InvalidSettings(f"{name} is {getattr(self, name)}; it must be at least {least}")
