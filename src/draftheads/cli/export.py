"""``draftheads export``: a head for other engines."""

from draftheads.checkpoints.head_files import read_head_files
from draftheads.checkpoints.registry import find_head
from draftheads.cli.options.export import ExportOptions
from draftheads.interop.export import commands, export_head, format_for
from draftheads.models.model_names import base_of, model_id_of


def run(options: ExportOptions) -> None:
    """Exports, then prints how engines are told to use it."""
    files = read_head_files(find_head(options.head, options.model))
    name, _ = format_for(files.method, options.to)
    folder = export_head(options.head, options.out, model=options.model, to=name)
    print(f"saved in {folder} in the layout {name}")
    for engine, command in commands(
        name, folder, model_id_of(base_of(options.model)), files.options["num_heads"]
    ).items():
        print(f"{engine}: {command}")
