"""The settings of a measurement of tokens per step."""

from dataclasses import dataclass
from typing import Annotated

from draftheads.utils.option_group import FROM_1, OptionGroup, at_least


@dataclass(frozen=True)
class ReplaySettings(OptionGroup):
    """Which answers are recorded, and which trees are measured on them."""

    num_prompts: Annotated[int, at_least(2)] = 64
    """Prompts that the model answers."""
    max_new_tokens: Annotated[int, at_least(2)] = 128
    """Tokens of each answer."""
    temperature: float = 0.0
    """Temperature of the answers. Above 0 the model's probabilities of draft tokens count, not only its choice."""
    max_nodes: Annotated[int, at_least(2)] = 64
    """Nodes of the largest tree, root included."""
    top_k: Annotated[int, FROM_1] = 10
    """Draft tokens of each head, the best ones, for trees."""
    beam: Annotated[int, FROM_1] = 6
    """In growing trees: nodes of a depth that get children. For heads that read the draft tokens above them."""
