"""``draftheads export``: a head for other engines."""

from draftheads.cli.options import ExportOptions
from draftheads.interop.export import export_head
from draftheads.utils.counts import counted


def run(options: ExportOptions) -> None:
    """Exports, then prints how engines are told to use it."""
    done = export_head(**vars(options))
    print(f"saved in {done.folder} in the layout {done.layout}")
    if done.left_out is not None:
        print(f"it predicts all tokens of the model, not only its {counted(done.left_out, 'draft token')}")
    for engine, command in done.commands.items():
        print(f"{engine}: {command}")
