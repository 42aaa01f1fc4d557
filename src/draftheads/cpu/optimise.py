"""Makes a model faster on a CPU, in place, by native products and by an attention with fewer operators.

``int8`` and ``int4`` quantise the linear layers. This is another model; lossless then means: equal to its own plain
decoding.

Stock attention copies each key and value head once per query head of its group. Here the query heads of a group become
rows of one product instead. b texts, H query heads, G key and value heads, N tokens, S slots, d head size.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from draftheads.cpu.kernels import (
    HalfEmbedding,
    Native,
    NativeInt8,
    PackedLinear,
    Plain,
    Product,
    RoundedEmbedding,
    in_16_bits,
    is_linear,
    native_bf16,
    pack,
    replace_linears,
    smoothing,
)
from draftheads.cpu.layer_parts import are_experts, replace_experts
from draftheads.cpu.native_library import how_to_get, load_library
from draftheads.errors import InvalidSettings

# varied text, on which int8 and int4 find the layers' large inputs
TYPICAL_TEXT = """
The committee met on 14 March 2019 to discuss the harbour. "Nobody asked us," said Mrs. Alvarez, who has
fished here since 1987. def mean(values): return sum(values) / len(values)  # raises ZeroDivisionError when
empty. Prices rose by 3.5% in the first quarter, and then fell again. Dear Sir, thank you for your letter; I
am sorry that the parcel never arrived. Photosynthesis turns carbon dioxide and water into glucose and oxygen.
Why did the old lighthouse keeper leave? He loved his daughter more than the sea. SELECT name, age FROM people
WHERE city = 'Oslo' ORDER BY age DESC; Der Zug nach Bern fährt um 7 Uhr. La maison est près de la rivière. 1.
Wash the rice. 2. Boil 400 ml of water."""
_SMALLEST_SHARE = 0.5  # rounded layers must be this share of the weights, embeddings excluded
_TYPES = (torch.float32, torch.bfloat16)
GROUPED_ATTENTION = "draftheads_grouped"
MAX_TREE_ROWS = 128  # a pass with more tokens of a text is no tree
_REPEATED: Any = WeakTensorKeyDictionary()  # masks of several query heads by the mask of a pass
# from this number of scores (all texts and heads), batched bf16 products beat PyTorch's fused attention
_MANY_SCORES = 32_000
_MOST_SCORES = 256_000  # per product; the memory of larger results returns to the system after each use


def speed_up(model: Any, *, bits: int | None = None, typical_ids: Tensor | None = None) -> None:
    """Gives a stock model faster products. Its results stay the same, up to rounding (or ``bits``).

    Each weight is stored once, in the format of its kernel. ``layer.weight`` unpacks it.

    Args:
        model: a transformers causal LM in fp32 or bf16 on a CPU; other models are not changed.
        bits: of quantised linear layers, 8 or 4; None: they stay exact. The lm_head has at least 8.
        typical_ids: (1, T) a text whose inputs of the layers are typical; without it rounding loses more.
    """
    embedding = model.get_input_embeddings().weight
    if embedding.device.type != "cpu" or embedding.dtype not in _TYPES:
        return
    if bits is not None:
        _check_quantisable(model, f"int{bits}")
    with torch.inference_mode(mode=False), torch.no_grad():  # so that training can use these tensors later
        layers = _replace_modules(model)
        if typical_ids is not None and bits:
            _observe_inputs(model, layers, typical_ids)
        lm_head = model.get_output_embeddings()
        is_tied = isinstance(lm_head, PackedLinear) and bool(getattr(model.config, "tie_word_embeddings", False))
        if bits == 4 and isinstance(lm_head, PackedLinear):
            pack([lm_head], bits=8, portable=True)
        pack(layers, bits=bits, portable=bits is not None)
        is_rounded = _store_embedding(model, lm_head.product if is_tied else None, in_8_bits=bits == 4)
        _let_go_of_file(model)
        if is_tied and not is_rounded:
            lm_head.tied = model.get_input_embeddings().weight  # it need not unpack its own


def restore(model: Any, products: Sequence[Native], embedding: Tensor | NativeInt8) -> None:
    """Gives a stock model the fast modules that :func:`speed_up` made of it before; its own large weights are not read.

    Args:
        model: in fp32 on a CPU.
        products: of its linear layers, in their order.
        embedding: the one in 8 bits, or the weights.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        layers = _replace_modules(model)
        for layer, product in zip(layers, products[: len(layers)], strict=True):
            layer.product = product
        original, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        scale = float(getattr(original, "embed_scale", 1.0))
        if isinstance(embedding, NativeInt8):
            model.set_input_embeddings(RoundedEmbedding(embedding, scale))
        elif embedding.dtype != torch.float32:
            model.set_input_embeddings(HalfEmbedding(embedding, torch.float32, scale))
        _let_go_of_file(model, but=None if isinstance(embedding, NativeInt8) else embedding)
        if not isinstance(embedding, NativeInt8) and getattr(model.config, "tie_word_embeddings", False):
            lm_head.tied = model.get_input_embeddings().weight


def _replace_modules(model: Any) -> list[PackedLinear]:
    if model.config.get_text_config()._attn_implementation == "sdpa":
        model.get_decoder().set_attn_implementation(GROUPED_ATTENTION)
    replace_experts(model)
    return replace_linears(model)


def _store_embedding(model: Any, tied: Product | None, *, in_8_bits: bool) -> bool:
    """Stores it in 8 bits, or in 16 if it is exact in them, where its class is known. Whether it is in 8 bits."""
    original = model.get_input_embeddings()
    if type(original) is not nn.Embedding and not type(original).__name__.endswith("ScaledWordEmbedding"):
        return False
    weight, scale = original.weight.detach(), float(getattr(original, "embed_scale", 1.0))
    if in_8_bits and NativeInt8.fits(weight):
        product = tied if isinstance(tied, NativeInt8) else NativeInt8(weight, None)
        model.set_input_embeddings(RoundedEmbedding(product, scale))
        return True
    if weight.dtype == torch.float32 and (held := in_16_bits(weight)) is not weight:
        model.set_input_embeddings(HalfEmbedding(held, weight.dtype, scale))
    return False


def return_freed_memory() -> None:
    """Returns freed memory to the system. After loading, glibc keeps more of it than the weights take."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def kernels_of(model: Any) -> str:
    """``fast``, or ``stock`` if :func:`speed_up` changed nothing."""
    return "fast" if model.config.get_text_config()._attn_implementation == GROUPED_ATTENTION else "stock"


def _check_quantisable(model: Any, precision: str) -> None:
    if load_library() is None:
        raise InvalidSettings(f"precision {precision} needs the native library: {how_to_get()}")
    embeddings = {id(model.get_input_embeddings().weight)}
    everything = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in embeddings)
    linears = sum(m.weight.numel() for m in model.modules() if is_linear(m) and id(m.weight) not in embeddings)
    linears += sum(p.numel() for m in model.modules() if are_experts(m) for p in m.parameters() if p.dim() == 3)
    if linears < _SMALLEST_SHARE * everything:
        raise InvalidSettings(
            f"precision {precision} needs nn.Linear layers; only {linears / max(1, everything):.0%} of the weights of "
            f"this {model.config.model_type} are in such layers: use fp32 or bf16"
        )


@torch.inference_mode()
def _observe_inputs(model: Any, layers: Sequence[PackedLinear], token_ids: Tensor) -> None:
    """Reads a text and gives each layer factors and sizes of its inputs, the same to layers that read the same rows.

    For factors the largest inputs of rows that are divided by their maximum count, as int8 does.
    """
    groups: list[tuple[list[Tensor], list[PackedLinear]]] = []
    held: list[Tensor] = []  # the last rows, so that their place in memory is not used again

    class Observing(Plain):
        def __call__(self, rows: Tensor) -> Tensor:
            if not held or held[0].data_ptr() != rows.data_ptr():
                size = rows.abs().float()
                share = size / size.amax(1, keepdim=True).clamp_min(1e-12)
                groups.append(([share.amax(0), size.square().mean(0)], []))
                held[:] = [rows]
            groups[-1][1].append(observed[id(self)])
            # nothing reads the logits: they take a third of the time in a model with a large vocabulary
            return rows.new_zeros(1).expand(len(rows), self.out_features) if self is last else super().__call__(rows)

    plain = [layer.product for layer in layers]
    for layer in layers:
        layer.product = Observing(layer.product.weight, layer.bias)
    observed = {id(layer.product): layer for layer in layers}
    last = getattr(model.get_output_embeddings(), "product", None)
    model(input_ids=token_ids, use_cache=False)
    for layer, product in zip(layers, plain, strict=True):
        layer.product = product
    for (largest, squares), readers in groups:
        smooth = smoothing(largest, [layer.weight for layer in readers])
        for layer in readers:
            layer.smooth, layer.sizes = smooth, squares


def _let_go_of_file(model: Any, *, but: Tensor | None = None) -> None:
    """Copies the tensors that are not packed, such as norms. Otherwise they keep the whole mapped file in memory."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}  # a tensor that two modules share stays shared
    if but is not None:
        copies[but.data_ptr(), but.shape] = but

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


# --- attention ---


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of (b, H, N, d) queries over (b, G, S, d) keys and values, mask (b, 1, N, S); G divides H."""
    batch, heads, nodes, size = query.shape
    groups = key.shape[1]
    if attention_mask is None and nodes > 1:  # a whole text: the causal mask is for N rows, not H/G · N
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups < heads
        )
        return out.transpose(1, 2).contiguous(), None
    rows = query.reshape(batch, groups, heads // groups * nodes, size)
    mask = None if attention_mask is None else _repeated(attention_mask, heads // groups)
    has_no_gaps = batch == 1 or (key.is_contiguous() and value.is_contiguous())  # else the products would copy them
    is_added = mask is not None and mask.dtype != torch.bool
    if is_added and has_no_gaps and by_products(query.shape, key.shape[2], query.dtype, query.device):
        assert mask is not None
        out = _by_products(rows, key, value, mask, size**-0.5 if scaling is None else scaling)
    else:
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous(), None


def by_products(query: Sequence[int], slots: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether batched products are faster than fused attention, for queries of shape (b, H, N, d)."""
    batch, heads, nodes, _ = query
    if nodes > MAX_TREE_ROWS or batch * heads * nodes * slots < _MANY_SCORES:
        return False
    return dtype == torch.bfloat16 and device.type == "cpu" and native_bf16()


def _by_products(rows: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Softmax in fp32 between two batched products: (b, G, n, d) over (b, G, S, d), mask (b, 1, n, S)."""
    batch, groups, num, _ = rows.shape
    texts = max(1, _MOST_SCORES // (groups * num * key.shape[2]))
    if texts < batch:
        parts = zip(rows.split(texts), key.split(texts), value.split(texts), mask.split(texts), strict=True)
        return torch.cat([_by_products(q, k, v, m, scaling) for q, k, v, m in parts])
    scores = torch.bmm(rows.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).view(batch, groups, num, -1)
    weights = torch.add(mask.float(), scores, alpha=scaling).softmax(-1).to(value.dtype)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).view(batch, groups, num, -1)


def _repeated(mask: Tensor, times: int) -> Tensor:
    """(b, 1, N, S) -> (b, 1, times · N, S), computed once per pass, whose layers share the mask."""
    repeated: Tensor | None = _REPEATED.get(mask)
    if repeated is None or repeated.shape[2] != times * mask.shape[2]:
        repeated = _REPEATED[mask] = mask.repeat(1, 1, times, 1)
    return repeated


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
# otherwise a whole text would be read without its sliding window
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
