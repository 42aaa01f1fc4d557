"""``draftheads export``: a head for other engines."""

from draftheads.checkpoints.head_files import read_head_files
from draftheads.checkpoints.registry import find_head
from draftheads.cli.options.export import ExportOptions
from draftheads.interop.export import commands, export_head, format_for
from draftheads.models.model_names import base_of, model_id_of
from draftheads.utils.counts import counted


def run(options: ExportOptions) -> None:
    """Exports, then prints how engines are told to use it."""
    files = read_head_files(find_head(options.head, options.model))
    name, form = format_for(files.method, options.to, files.options)
    folder = export_head(options.head, options.out, model=options.model, to=name, with_embedding=options.with_embedding)
    print(f"saved in {folder} in the layout {name}")
    drafted, whole = files.options.get("draft_vocab_size"), files.options["vocab_size"]
    if drafted is not None and not form.keeps_vocab:
        print(f"it predicts all {counted(whole, 'token')} of the model, not only its {counted(drafted, 'draft token')}")
    for engine, command in commands(
        name, folder, model_id_of(base_of(options.model)), files.options["num_heads"]
    ).items():
        print(f"{engine}: {command}")
