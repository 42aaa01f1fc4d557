"""Makes a model faster on a CPU, in place, by native products.

``int8`` quantises the linear layers. This is another model; lossless then means: equal to its own plain decoding.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.cpu.attention import GROUPED_ATTENTION
from draftheads.cpu.experts import PackedExperts, are_experts
from draftheads.cpu.kernels import PackedLinear, Plain, is_linear, pack, replace_linears, smoothing
from draftheads.cpu.native_library import how_to_get, load_library
from draftheads.errors import InvalidSettings

# varied text, on which int8 finds the layers' large inputs
TYPICAL_TEXT = """
The committee met on 14 March 2019 to discuss the harbour. "Nobody asked us," said Mrs. Alvarez, who has
fished here since 1987. def mean(values): return sum(values) / len(values)  # raises ZeroDivisionError when
empty. Prices rose by 3.5% in the first quarter, and then fell again. Dear Sir, thank you for your letter; I
am sorry that the parcel never arrived. Photosynthesis turns carbon dioxide and water into glucose and oxygen.
Why did the old lighthouse keeper leave? He loved his daughter more than the sea. SELECT name, age FROM people
WHERE city = 'Oslo' ORDER BY age DESC; Der Zug nach Bern fährt um 7 Uhr. La maison est près de la rivière. 1.
Wash the rice. 2. Boil 400 ml of water."""
_SMALLEST_SHARE = 0.5  # int8 must cover this share of the weights, embeddings excluded
_TYPES = (torch.float32, torch.bfloat16)


def speed_up(model: Any, *, int8: bool = False, typical_ids: Tensor | None = None) -> None:
    """Gives a stock model faster products. Its results stay the same, up to rounding (or int8).

    Each weight is stored once, in the format of its kernel. ``layer.weight`` unpacks it.

    Args:
        model: a transformers causal LM in fp32 or bf16 on a CPU; other models are not changed.
        int8: quantise the linear layers.
        typical_ids: (1, T) a text on which int8 finds outliers in the layers' inputs; without it the loss is larger.
    """
    embedding = model.get_input_embeddings().weight
    if embedding.device.type != "cpu" or embedding.dtype not in _TYPES:
        return
    if int8:
        _check_quantisable(model)
    if model.config.get_text_config()._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED_ATTENTION)
    with torch.inference_mode(mode=False), torch.no_grad():  # so that training can use these tensors later
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if are_experts(child):
                    setattr(parent, name, PackedExperts(child))
        layers = replace_linears(model)
        if typical_ids is not None and int8:
            _observe_inputs(model, layers, typical_ids)
        pack(layers, int8=int8, portable=int8)
        _halve_embedding(model)
        _let_go_of_file(model)
        lm_head = model.get_output_embeddings()
        if isinstance(lm_head, PackedLinear) and bool(getattr(model.config, "tie_word_embeddings", False)):
            lm_head.tied = model.get_input_embeddings().weight  # it need not unpack its own


class HalfEmbedding(nn.Module):
    """An embedding in 16 bits, for a model that computes in fp32 and whose embedding is exact in 16 bits."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.dtype, self.embed_scale = dtype, scale  # Gemma scales its embeddings

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight).to(self.dtype) * self.embed_scale


def _halve_embedding(model: Any) -> None:
    original = model.get_input_embeddings()
    scale = float(getattr(original, "embed_scale", 1.0))
    is_known = type(original) is nn.Embedding or type(original).__name__.endswith("ScaledWordEmbedding")
    if not is_known or original.weight.dtype != torch.float32:
        return
    weight = original.weight.detach()
    for dtype in (torch.bfloat16, torch.float16):
        held = weight.to(dtype)
        if torch.equal(held.float(), weight):
            model.set_input_embeddings(HalfEmbedding(held, weight.dtype, scale))
            return


def return_freed_memory() -> None:
    """Returns freed memory to the system. After loading, glibc keeps more of it than the weights take."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def kernels_of(model: Any) -> str:
    """``fast``, or ``stock`` if :func:`speed_up` changed nothing."""
    return "fast" if model.config.get_text_config()._attn_implementation == GROUPED_ATTENTION else "stock"


def _check_quantisable(model: Any) -> None:
    if load_library() is None:
        raise InvalidSettings(f"precision int8 needs the native library: {how_to_get()}")
    embeddings = {id(model.get_input_embeddings().weight)}
    everything = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in embeddings)
    linears = sum(m.weight.numel() for m in model.modules() if is_linear(m) and id(m.weight) not in embeddings)
    linears += sum(p.numel() for m in model.modules() if are_experts(m) for p in m.parameters() if p.dim() == 3)
    if linears < _SMALLEST_SHARE * everything:
        raise InvalidSettings(
            f"precision int8 needs nn.Linear layers; only {linears / max(1, everything):.0%} of the weights of this "
            f"{model.config.model_type} are in such layers: use fp32 or bf16"
        )


@torch.inference_mode()
def _observe_inputs(model: Any, layers: Sequence[PackedLinear], token_ids: Tensor) -> None:
    """Reads a text and gives each layer factors of its inputs, the same to layers that read the same rows.

    What counts are the largest inputs of rows that are divided by their maximum, as int8 does.
    """
    groups: list[tuple[Tensor, list[PackedLinear]]] = []
    held: list[Tensor] = []  # the last rows, so that their place in memory is not used again

    class Observing(Plain):
        def __call__(self, rows: Tensor) -> Tensor:
            if not held or held[0].data_ptr() != rows.data_ptr():
                size = rows.abs().float()
                groups.append(((size / size.amax(1, keepdim=True).clamp_min(1e-12)).amax(0), []))
                held[:] = [rows]
            groups[-1][1].append(observed[id(self)])
            return super().__call__(rows)

    plain = [layer.product for layer in layers]
    for layer in layers:
        layer.product = Observing(layer.product.weight, layer.bias)
    observed = {id(layer.product): layer for layer in layers}
    model(input_ids=token_ids, use_cache=False)
    for layer, product in zip(layers, plain, strict=True):
        layer.product = product
    for inputs, readers in groups:
        smooth = smoothing(inputs, [layer.weight for layer in readers])
        for layer in readers:
            layer.smooth = smooth


def _let_go_of_file(model: Any) -> None:
    """Copies the tensors that are not packed, such as norms. Otherwise they keep the whole mapped file in memory."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}  # a tensor that two modules share stays shared

    def copied(old: Tensor) -> Tensor:
        place = (old.data_ptr(), old.shape)
        if place not in copies:
            copies[place] = old.detach().clone()
        return copies[place]

    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(copied(old), requires_grad=old.requires_grad))
        if isinstance(module, PackedLinear) and type(module.product) is Plain:
            module.product = Plain(copied(module.product.weight), module.product.bias)
