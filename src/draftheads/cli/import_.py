"""``draftheads import``: a head of another project as one of this package."""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class ImportOptions:
    """Read a head of another project: Medusa, Hydra, Hydra++, an MLP speculator, EAGLE or EAGLE-3.

    The format is told by the file's tensors. Nothing in the file is executed. The head is then as any other:
    `draftheads tune` measures its acceptance, `draftheads train --start-from` trains it further.
    """

    source: tyro.conf.Positional[str]
    """The head. A folder, a file (.safetensors, .bin, .pt) or a Hugging Face id."""
    out: Path
    """Folder to make."""
    model: str = "smollm2-135m"
    """The model that the head was trained for. A name, a folder or a Hugging Face id."""


def run(options: ImportOptions) -> None:
    from draftheads.interop.export import import_head  # noqa: PLC0415 - slow to import

    layout = import_head(options.source, options.out, model=options.model)
    print(f"read {layout.format}; saved in {options.out} as a head of the method {layout.config.method}")
    print(f"measure it: draftheads tune --model {options.model} --head {options.out}")
