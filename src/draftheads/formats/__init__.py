"""How other projects store draft heads: read into heads of this package, and written from them.

One file for each outside project. A format is told by the names and shapes of its tensors.
"""

from typing import Literal, get_args

from draftheads.errors import no_such

ExportFormat = Literal[
    "eagle3",
    "speculators",
    "eagle",
    "eagle-sglang",
    "small-llama",
    "medusa",
    "vllm-medusa",
    "hydra",
    "mlp-speculator",
    "arctic",
]


def check_layout(name: str | None) -> None:
    """Raises :class:`InvalidSettings` for a name of no layout; None is the default."""
    if name not in (None, *get_args(ExportFormat)):
        raise no_such("layout", str(name), get_args(ExportFormat), other_names={})
