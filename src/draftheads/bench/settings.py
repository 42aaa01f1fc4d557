"""What a comparison of drafters measures, and on how much."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from draftheads.search.settings import ReplaySettings
from draftheads.settings import SamplingSettings
from draftheads.utils.option_group import FROM_1, OptionGroup, at_least


@dataclass(frozen=True)
class BenchSettings(OptionGroup):
    """What is compared, and on how much."""

    num_nodes: Annotated[int, at_least(2)] = 24
    """Nodes of every head's tree, root included."""
    max_new_tokens: Annotated[int, at_least(2)] = 128
    """Tokens of each answer."""
    temperature: float = 0.7
    """Also count tokens per step at this temperature; 0: not. By acceptance rule: exact; typical (changes the
    distribution); rejection (drafts drawn from the head on a static tree, speculative sampling of the papers); block (a
    drawn chain, block verification)."""
    num_speed_prompts: Annotated[int, at_least(3)] = 16
    """Prompts that are timed, spread over all prompts."""
    num_sampled_prompts: Annotated[int, at_least(3)] = 40
    """Prompts that are answered at the temperature, spread over all."""
    batch_size: Annotated[int, FROM_1] = 8
    """Prompts that are answered together. While tokens per step are counted."""
    num_calibration_prompts: Annotated[int, at_least(2)] = 64
    """Built-in prompts on which the heads' trees are found."""

    def __post_init__(self) -> None:
        super().__post_init__()
        SamplingSettings(temperature=self.temperature)  # raises where it is impossible

    @property
    def replay(self) -> ReplaySettings:
        """Settings of the search for trees."""
        return ReplaySettings(
            num_prompts=self.num_calibration_prompts, max_new_tokens=self.max_new_tokens, max_nodes=self.num_nodes
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that all findings depend on. Findings' names hold temperature and prompts, where they matter."""
        of_some = ("num_speed_prompts", "num_sampled_prompts", "temperature")
        return {name: value for name, value in asdict(self).items() if name not in of_some}
