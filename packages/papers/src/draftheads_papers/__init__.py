"""Tables and figures of papers on draft heads, rebuilt for a model and its heads; the command ``reproduce``."""

from draftheads.cli.main import Command

REPRODUCE = Command(
    "rebuild tables and figures of papers for your model",
    "draftheads_papers.options",
    continues=True,
    module="draftheads_papers.command",
)
