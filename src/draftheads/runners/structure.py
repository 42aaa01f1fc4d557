"""Checks of a loaded model: trees of drafts have the logits of plain texts, and fast modules those of the stock ones.

Errors of structure (a mask, a position, a cap or a norm) are looked for in a *probe*: a few layers of the same classes
and configuration with random weights in fp32, where such an error is far above rounding. The model itself is only
compared with its own rounding, which may be large in 16 bits.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from draftheads.errors import RoundingWarning, SpeedWarning, UnsupportedModel, first_line
from draftheads.models.gguf_models import without_logs
from draftheads.models.model import TargetModel
from draftheads.models.model_config import num_heads
from draftheads.runners import runner_for
from draftheads.speculation.draft import Draft
from draftheads.speculation.tree import Tree

_TREE = Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1)])
_PROBE_TOKENS = 64  # in a probe's vocabulary, and in its longer text
_PROBE_WINDOW = 6  # tokens that a sliding layer of a probe sees: fewer than its text has
_PROBE_LAYERS = 8  # most kinds of layers, by all that their configuration says
_PROBE_INNER = 64  # most numbers inside a feed-forward part of a probe
_PROBE_HEADS = 2  # groups of heads, where the model is wider than _NARROW
_NARROW = 1024
_EXACT, _ROUNDED = 1e-4, 0.25  # how much logits may differ in fp32 and in 16 bits, as a share of the largest
_TEXT = (3, 11, 7, 5, 2, 13, 8)
_MORE_THAN_NOISE = 8.0  # rounding differs from token to token
_ROUNDINGS = 4  # of some models one of them changes all, and others little
_SHORT_TEXT = 5  # tokens; a whole model reads a dozen of them
_MISFITS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_UNFIT = (UnsupportedModel, *_MISFITS[1:])  # errors of modules that do not fit this version of transformers


def checked(
    target: TargetModel, read: Callable[[], TargetModel], *, fast: bool, bits: int | None = None
) -> TargetModel:
    """The target if its trees are lossless; ``fast``: with faster products and, on a CPU, the native pass.

    ``target`` is changed, and ``read`` reads it again, without what the cache has.
    """
    probe = probe_of(target)
    if probe is None and target.packed is not None:  # it is checked itself, with all its weights
        target = read()
    stock = check_trees(probe) if probe else check_trees(target, num_tokens=_SHORT_TEXT)
    own = None if bits else own_numbers(target)
    if fast:
        try:
            target = target.sped_up(bits=bits)
            if probe is None:  # modules were changed, and the native pass would not notice
                target = replace(target, native=None)
                check_trees(target, stock=None if bits else stock, num_tokens=_SHORT_TEXT)
            else:
                target = _as_proved(target, probe, stock)
            if own is not None:
                check_numbers(target, own)
        except _UNFIT as error:
            if bits:
                raise
            target = read()
            warnings.warn(
                f"faster products do not fit transformers {transformers.__version__} with PyTorch {torch.__version__}, "
                f"so PyTorch's own are used, which are slower ({first_line(error)})",
                SpeedWarning,
                stacklevel=5,
            )
    elif own is not None:
        check_numbers(target, own)
    return target


def _as_proved(target: TargetModel, probe: TargetModel, stock: Tensor) -> TargetModel:
    """The target with those of its fast ways that have the stock logits in its probe."""
    quick = probe.twin().sped_up()
    try:
        if target.native is None or quick.native is None:
            raise UnsupportedModel
        check_trees(quick, stock=stock)
    except _UNFIT:  # a part of its layers, or of its embedding, is not known to the native library
        target, quick = replace(target, native=None), replace(quick, native=None)
        check_trees(quick, stock=stock)
    return target


def probe_of(target: TargetModel) -> TargetModel | None:
    """A few layers like the model's own; None if they cannot be made, or if modules of the model were changed.

    Each kind of layer is there, and two layers at least. Windows are shorter than the text of :func:`check_trees`, and
    the weights make scores and logits large, so that a cap, a scale or a norm that is left out changes them much.
    """
    if any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in target.model.modules()):  # noqa: SLF001
        return None
    for few, narrow in ((True, True), (True, False), (False, True)):
        try:
            # what transformers says of the configuration, it said when the model was loaded
            with torch.random.fork_rng(devices=[]), without_logs(), warnings.catch_warnings(action="ignore"):
                config = _probe_config(target, few=few, narrow=narrow)
                if narrow:
                    _few_heads_of_mixers(config)
                model = _built(target, config)
            known = {type(module) for module in model.modules()}
            if not target.is_quantised and any(type(module) not in known for module in target.model.modules()):
                return None
            probe = TargetModel(model, target.tokenizer, target.model_id)
            runner_for(probe).prefill([[1, 2]])
        except _MISFITS:
            continue
        return probe
    return None


def _probe_config(target: TargetModel, *, few: bool, narrow: bool) -> Any:
    config = copy.deepcopy(target.config)
    kinds = target.layer_kinds
    by_layer = {  # lists in the configuration with one value for each layer
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == len(kinds)
    }
    told = [str(values) for values in zip(kinds, *by_layer.values(), strict=True)]
    if len(set(told)) > _PROBE_LAYERS:
        told = list(kinds)
    chosen = sorted({*map(told.index, told), *range(min(2, len(kinds)))}) if few else range(len(kinds))
    config.num_hidden_layers = len(chosen)
    for name, value in by_layer.items():
        setattr(config, name, [value[layer] for layer in chosen])
    for name, value in list(vars(config).items()):
        if name.endswith("intermediate_size") or name in ("ffn_dim", "n_inner"):
            small = [min(size, _PROBE_INNER) for size in value] if isinstance(value, list) else value
            setattr(config, name, min(small, _PROBE_INNER) if isinstance(small, int) else small)
        elif name.startswith("vocab_size"):
            setattr(config, name, min(value, _PROBE_TOKENS))
    config.pad_token_id = None
    if target.sliding_window is not None:
        config.sliding_window = min(target.sliding_window, _PROBE_WINDOW)
    heads = num_heads(config)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if narrow and config.hidden_size > _NARROW and heads % groups == 0 and groups > _PROBE_HEADS:
        has_own_size = getattr(config, "head_dim", None) is not None
        config.hidden_size = _NARROW // 2 if has_own_size else config.hidden_size // groups * _PROBE_HEADS
        config.num_attention_heads = heads // groups * _PROBE_HEADS
        if groups != heads or hasattr(config, "num_key_value_heads"):
            config.num_key_value_heads = _PROBE_HEADS
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    return config


def _few_heads_of_mixers(config: Any) -> None:
    """Of recurrent layers, with as many values for each key."""
    names = [name for name in ("linear_num_key_heads", "linear_num_value_heads") if hasattr(config, name)]
    factor, rest = divmod(min((getattr(config, name) for name in names), default=_PROBE_HEADS), _PROBE_HEADS)
    for name in () if rest else names:
        setattr(config, name, getattr(config, name) // factor)


def _built(target: TargetModel, config: Any) -> Any:
    stock = target.model
    if target.config is stock.config:
        text = model = type(stock)(config)
    else:  # a text model in a larger one: all but its own modules is shared, such as what reads images
        decoder, lm_head = type(target.decoder)(config), target.lm_head
        lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=lm_head.bias is not None)
        text = nn.ModuleList([decoder, lm_head])
        if target.lm_head.weight is stock.get_input_embeddings().weight:
            lm_head.weight = decoder.get_input_embeddings().weight
        shared = {id(weight): weight for weight in (*stock.parameters(), *stock.buffers())}
        new = {id(target.decoder): decoder, id(target.lm_head): lm_head, id(target.config): config}
        model = copy.deepcopy(stock, memo=shared | new)
    model.get_decoder().set_attn_implementation(target.config._attn_implementation)  # noqa: SLF001 - no public name
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in text.parameters():  # a tied one once
            numbers = torch.randn(weight.shape, generator=generator)
            weight.add_(0.3 * numbers) if weight.dim() == 1 else weight.copy_(2.0 / weight.shape[-1] ** 0.5 * numbers)
        model.get_output_embeddings().weight.mul_(4.0)
    return model.float().eval().requires_grad_(requires_grad=False)


@torch.inference_mode()
def check_trees(model: TargetModel, *, stock: Tensor | None = None, num_tokens: int = _PROBE_TOKENS) -> Tensor:
    """Checks that logits in a tree equal those of its paths as plain text, after texts of ``num_tokens`` and of one.

    Returns the logits of all nodes (2·N, V). Given those of the model with its ``stock`` modules, they must equal them.
    """
    limit = model.max_positions if model.long_rope is None else model.long_rope.original
    longest = max(1, min(num_tokens, (limit or num_tokens) - _TREE.max_depth - 1))
    texts = [[(3 + 7 * place) % model.vocab_size for place in range(longest)], [13 % model.vocab_size]]
    tokens = torch.arange(2 * _TREE.num_nodes, device=model.device).view(2, -1) * 5 % model.vocab_size  # (2, N)
    paths = [
        text + [int(nodes[_TREE.paths.index(path[:depth])]) for depth in range(len(path) + 1)]
        for text, nodes in zip(texts, tokens, strict=True)
        for path in _TREE.paths
    ]
    runner = runner_for(model)
    try:
        rows, _, _ = runner.prefill(texts)
        draft = Draft.on_tree(_TREE, tokens)
        in_tree = runner.verify(rows, draft)[0].flatten(0, 1)  # (2·N, V)
        if model.native is not None:
            in_text = runner_for(model).prefill(paths)[1]
        else:  # fast products in the same passes are compared with the stock ones alone
            in_text = in_tree if stock is not None else _logits_after(paths, model)
    except _MISFITS as error:
        raise UnsupportedModel(f"{model.model_id} cannot read a tree of drafts: {error}") from error
    is_exact = model.precision == "fp32"
    most = _EXACT if is_exact or model.native is not None else _ROUNDED
    if (gap := _gap(in_tree, in_text)) > most:
        raise UnsupportedModel(
            f"{model.model_id}: logits in a tree of drafts differ from those of a plain text by {gap:.1%}; "
            "its attention depends on more than positions and masks"
        )
    if stock is not None and (gap := _gap(in_tree, stock)) > (_EXACT if is_exact else _ROUNDED):
        raise UnsupportedModel(f"{model.model_id}: its logits differ from those of the stock modules by {gap:.1%}")
    return in_tree


def _logits_after(paths: Sequence[Sequence[int]], model: TargetModel) -> Tensor:
    """(n, V) after the last token of n texts, without a cache. What another text begins with is not read again."""
    whole = [path for path in paths if not any(other[: len(path)] == path != other for other in paths)]
    read = [(path, model.hidden_states(torch.tensor([path], device=model.device))[0]) for path in whole]
    last = [next(states[len(path) - 1] for text, states in read if text[: len(path)] == path) for path in paths]
    return model.logits(torch.stack(last))


def _gap(logits: Tensor, expected: Tensor) -> float:
    """How much logits (n, V) differ, as a share of the largest; infinite if a number is not finite."""
    gap = float((logits.float() - expected.float()).abs().max()) / max(1.0, float(expected.abs().max()))
    return gap if math.isfinite(gap) else math.inf


class OwnNumbers(NamedTuple):
    """What the stock modules compute of a short text."""

    hidden: Tensor  # (2, D) h_t of its last two tokens, in fp32
    noise: float  # how much rounding changes them, as a share of their norm


@torch.inference_mode()
def own_numbers(target: TargetModel) -> OwnNumbers:
    """Computes them with stock modules, without our cache and masks.

    The noise is the larger one of two: the last token after a text in a cache, against the whole text in one pass; and
    embeddings that are rounded to the next number, in either direction, in several ways.
    """
    text = torch.tensor([[token % target.vocab_size for token in _TEXT]], device=target.device)
    hidden = target.hidden_states(text)[0, -2:].float()
    before = target.decoder(input_ids=text[:, :-1], use_cache=True)
    cache = {target.cache_name: before[target.cache_name]}
    again = target.decoder(input_ids=text[:, -1:], use_cache=True, **cache).last_hidden_state[0].float()
    generator = torch.Generator().manual_seed(0)

    def rounded(_: Any, __: Any, out: Tensor) -> Tensor:
        signs = torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1
        return out + out * torch.finfo(out.dtype).eps * signs

    handle = target.model.get_input_embeddings().register_forward_hook(rounded)
    try:
        others = target.hidden_states(text.expand(_ROUNDINGS, -1))[:, -2:].float()
    finally:
        handle.remove()
    return OwnNumbers(hidden, max(_share(again, hidden[-1:]), *(_share(other, hidden) for other in others)))


@torch.inference_mode()
def check_numbers(target: TargetModel, own: OwnNumbers) -> None:
    """Compares hidden states in a tree with those of the stock modules.

    Warns:
        RoundingWarning: the same in another precision, or a hidden state is not finite.
    """
    text = [token % target.vocab_size for token in _TEXT]
    runner = runner_for(target)
    rows, _, _ = runner.prefill([text[:-2]])
    tokens = torch.tensor([[text[-2], *text[: _TREE.num_nodes - 1]]], device=target.device)
    tokens[0, _TREE.paths.index((1,))] = text[-1]
    hidden = runner.verify(rows, Draft.on_tree(_TREE, tokens))[1][0, [0, _TREE.paths.index((1,))]].float()
    is_exact = target.precision == "fp32"
    gap, limit = _share(hidden, own.hidden), _MORE_THAN_NOISE * own.noise + (10 * _EXACT if is_exact else 0.1)
    is_finite = bool(hidden.isfinite().all() and own.hidden.isfinite().all())
    if is_finite and gap <= limit:
        return
    if not is_finite:
        problem = f"hidden states are not finite in {target.precision}: use bf16 or fp32"
    else:
        problem = (
            f"hidden states in a tree of drafts differ by {gap:.1%} from those of the stock modules, and rounding "
            f"explains {own.noise:.1%}"
        )
        if is_exact:
            raise UnsupportedModel(f"{target.model_id}: {problem}")
    warnings.warn(f"{target.model_id}: {problem}", RoundingWarning, stacklevel=2)


def _share(hidden: Tensor, expected: Tensor) -> float:
    """The largest difference of states (n, D), as a share of their norm; infinite if a number is not finite."""
    share = float(((hidden - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)).max())
    return share if math.isfinite(share) else math.inf
