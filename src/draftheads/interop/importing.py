"""Heads of other projects by name: from a file, a folder or the Hugging Face Hub."""

from os import PathLike

from draftheads.checkpoints.registry import find_published
from draftheads.formats.layout import Layout
from draftheads.formats.reading import convert
from draftheads.loading import Loadable, load_target, name_of


def import_head(source: str | PathLike[str], out: str | PathLike[str], *, model: Loadable = "smollm2-135m") -> Layout:
    """Writes a head of another project as one of this package.

    Args:
        source: a folder, a file or a Hub id.
        out: the folder to make.
        model: the model that it was trained for: a name, a folder, a Hub id, or a loaded model.

    Returns:
        What it was read as.

    Raises:
        ModelNotFound, CheckpointError, UnsupportedModel, InvalidSettings, StorageError: as for
            :func:`draftheads.formats.reading.convert`.
    """
    path = find_published(source, name_of(model))
    return convert(path, out, base=load_target(model, device="cpu", fast=False))
