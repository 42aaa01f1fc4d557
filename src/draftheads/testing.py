"""A check of a draft head, for the tests of the package that it lives in."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from draftheads.decode.engine import Engine
from draftheads.errors import InvalidSettings
from draftheads.heads import head_classes
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import Context
from draftheads.speculation.shapes import BestFirst, Shape
from draftheads.speculation.tree import Tree

_SIZE, _VOCAB, _LENGTH = 32, 24, 30  # of the target's states and vocabulary; tokens of a text
_PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [3]]
_ROUNDED = 0.4  # of log-probabilities, by products of 8 bits
_close = partial(assert_close, rtol=1e-3, atol=1e-4)


def check_head(method: str, *, num_heads: int = 3, **options: Any) -> None:
    """Tests an architecture on a tiny random model, in fp32; takes a second.

    It checks that

    * training gives a gradient to each weight, and reads no later token than drafting knows,
    * each node of a tree is predicted from the path to it as training would predict it from a text,
    * a session that reads a text in steps, whose rows join and leave, drafts as one that reads it at once,
    * the configuration and weights that are saved are all that the head is,
    * its faster modules and products draft tokens of the same probabilities,
    * text of a batch equals that of plain decoding, with a chain, a tree and a growing tree.

    Args:
        method: its name; of another package's head once it is registered.
        num_heads: K.
        options: of its configuration.

    Raises:
        AssertionError: what the head does wrong.
        DraftHeadsError: no such method, or impossible options.
    """
    target = _tiny_target()
    head = _untrained(method, target, num_heads=num_heads, **options)
    _check_training(head)
    head.eval().requires_grad_(requires_grad=False)
    with torch.inference_mode():
        _check_nodes(head)
        _check_steps(head)
        _check_saved(head, target)
    _check_text(head, target)
    with torch.inference_mode():
        _check_fast(head)


def _tiny_target() -> TargetModel:
    """Two layers; far larger random values than usual, so that its text is not one token for ever."""
    sizes: dict[str, Any] = {"vocab_size": _VOCAB, "hidden_size": _SIZE, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": False}
    config = LlamaConfig(**sizes, initializer_range=0.4)
    torch.manual_seed(0)
    return TargetModel(LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False), _Numbers(), "tiny")


class _Numbers:
    """Enough of a tokenizer."""

    eos_token_id = None
    chat_template = None

    def decode(self, token_ids: list[int], **_: object) -> str:
        return " ".join(map(str, token_ids))


def _untrained(method: str, target: TargetModel, **options: Any) -> DraftHead:
    """A head whose weights are not its starting values, in which much is zero."""
    config_class, head_class = head_classes(method)
    try:
        config = config_class(hidden_size=_SIZE, vocab_size=_VOCAB, **options)
    except TypeError as error:
        raise InvalidSettings(f"{config_class.__name__} cannot be made: {error}") from error
    head = head_class(config)
    head.initialise(
        target.weights, torch.arange(_VOCAB)[-config.draft_vocab_size :] if config.draft_vocab_size else None
    )
    torch.manual_seed(1)
    for parameter in head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return head


def _random_text(head: DraftHead, rows: int) -> tuple[Tensor, Tensor]:
    """What the head reads, (B, T, D or n·D), and tokens (B, T)."""
    chance = torch.Generator().manual_seed(2)
    size = max(1, len(head.hidden_layers)) * _SIZE
    hidden = torch.randn(rows, _LENGTH, size, generator=chance)
    return hidden, torch.randint(0, _VOCAB, (rows, _LENGTH), generator=chance)


def _context(hidden: Tensor, tokens: Tensor, starts: Sequence[int], ends: Sequence[int]) -> Context:
    """The tokens from ``starts`` to ``ends`` of each row, as new ones; the next one is the root."""
    spans, last = list(enumerate(map(slice, starts, ends))), torch.tensor(ends)
    # what lies beyond means nothing
    states = pad_sequence([hidden[row, span] for row, span in spans], batch_first=True, padding_value=7.0)
    ids = pad_sequence([tokens[row, span] for row, span in spans], batch_first=True)
    return Context(states, ids, last - torch.tensor(starts), tokens[torch.arange(len(ends)), last])


def _check_training(head: DraftHead) -> None:
    (hidden, tokens), now = _random_text(head, 2), _LENGTH // 2
    taught = head(hidden, tokens)
    heads = head.config.num_heads
    expected = (heads, 2, _LENGTH)
    assert taught.shape[:3] == expected, f"forward returns {tuple(taught.shape)}, not (K, B, T, F) = {(*expected, '…')}"
    loss = sum(head.logits(taught[i], i).float().square().mean() for i in range(heads))
    loss.backward()  # type: ignore[union-attr]
    idle = [name for name, one in head.named_parameters() if one.grad is None or not one.grad.any()]
    assert not idle, f"training does not reach {', '.join(idle)}"
    later = hidden.clone()
    later[:, now + 1 :] += 1
    for i in range(heads):
        other = tokens.clone()
        other[:, now + 2 + i :] += 1
        changed = head(later, other % _VOCAB)[i, :, now]
        _close(
            changed, taught[i, :, now], msg=f"head {i} at t reads a later state than h_t, or token than x_(t+{1 + i})"
        )


def _check_nodes(head: DraftHead) -> None:
    """Two children of each node, at all depths."""
    (hidden, tokens), ends, heads = _random_text(head, 2), [_LENGTH - 8, 1], head.config.num_heads
    state = head.begin(head.start().root(_context(hidden, tokens, [0, 0], ends)), heads)
    rows = torch.arange(2)[:, None]
    paths = tokens.new_zeros(2, 1, 0)  # of the nodes at hand, (B, W, depth)
    for depth in range(heads):
        num_nodes = paths.shape[1]
        logits = head.predict(state, depth)
        expected = (2, num_nodes if head.reads_path else 1, head.config.num_draft_tokens)
        assert tuple(logits.shape) == expected, f"predict({depth}) returns {tuple(logits.shape)}, not {expected}"
        logits = logits.expand(2, num_nodes, -1)
        for row, end in enumerate(ends):
            for node in range(num_nodes):
                text = tokens[row].clone()
                text[end + 1 : end + 1 + depth] = paths[row, node]
                taught = head.logits(head(hidden[[row]], text[None])[depth, 0, end - 1], depth)
                message = f"node {node} at depth {depth}: predict gives other logits than forward does for that text"
                _close(logits[row, node], taught, msg=message)
        children = head.to_target_ids(logits.topk(2).indices).flatten(1).flip(1)
        parents = torch.arange(num_nodes).repeat_interleave(2).flip(0).expand(2, -1)
        if depth + 1 < heads:
            state = head.descend(state, depth, parents, children)
        paths = torch.cat([paths[rows, parents], children[..., None]], -1)


def _check_steps(head: DraftHead) -> None:
    """Rows join, take one to three tokens in each step, sometimes without a draft, and leave."""
    (hidden, tokens), shape, session = _random_text(head, 3), BestFirst(9, top_k=3, beam=2), head.start()
    rows, starts, ends = [0, 1], [0, 0], [9, 1]
    for step in range(8):
        context = _context(hidden[rows], tokens[rows], starts, ends)
        if step in (2, 3):
            session.observe(context)
        else:
            whole = _context(hidden[rows], tokens[rows], [0] * len(rows), ends)
            found, fresh = session.propose(context, shape), head.start().propose(whole, shape)
            message = f"step {step}: a session that has read the text in steps drafts otherwise than one that begins"
            for one, other in ((found.token_ids, fresh.token_ids), (found.path_log_probs, fresh.path_log_probs)):
                _close(one, other, msg=message)
        starts, ends = ends, [end + 1 + (step + row) % 3 for row, end in zip(rows, ends, strict=True)]
        if step == 4:
            rows, starts, ends = [*rows, 2], [*starts, 0], [*ends, 6]
        if step == 5:
            session.keep(torch.tensor([2, 0]))
            rows, starts, ends = ([values[2], values[0]] for values in (rows, starts, ends))


def _check_saved(head: DraftHead, target: TargetModel) -> None:
    options = json.loads(json.dumps(head.config.options()))
    other = type(head)(type(head.config)(**options))
    other.load_state_dict(head.state_dict())
    other.bind(target.weights)
    hidden, tokens = _random_text(head, 1)
    taught, read = (one.logits(one.eval()(hidden, tokens)[0], 0) for one in (head, other))
    _close(read, taught, msg="a head of the saved options and weights gives other logits")


def _check_fast(head: DraftHead) -> None:
    """What ``speed_up`` rounds changes log-probabilities by a few hundredths."""
    every = BestFirst(1 + _VOCAB + _VOCAB**2, top_k=_VOCAB, beam=_VOCAB, max_depth=min(2, head.config.num_heads))
    (hidden, tokens), ends = _random_text(head, 2), [_LENGTH - 8, 5]

    def drafted(shape: BestFirst) -> list[dict[tuple[int, ...], float]]:
        draft = head.start().propose(_context(hidden, tokens, [0, 0], ends), shape)
        assert draft.path_log_probs is not None
        found: list[dict[tuple[int, ...], float]] = []
        for ids, parents, values in zip(draft.token_ids, draft.parents, draft.path_log_probs, strict=True):
            paths: list[tuple[int, ...]] = [()]
            for token, parent in zip(ids[1:].tolist(), parents[1:].tolist(), strict=True):
                paths.append((*paths[parent], token))
            found.append(dict(zip(paths, values.tolist(), strict=True)))
        return found

    slow = drafted(every)
    head.speed_up()
    for before, after in zip(slow, drafted(BestFirst(9, top_k=3, beam=3, max_depth=every.max_depth)), strict=True):
        for path, value in after.items():
            fits = abs(value - before[path]) < _ROUNDED
            assert fits, f"after speed_up() {path} has the log-probability {value:.2f}, and {before[path]:.2f} before"


def _check_text(head: DraftHead, target: TargetModel) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    plain = [result.token_ids for result in Engine(target).generate(_PROMPTS, **settings)]
    heads = head.config.num_heads
    shapes: list[Shape] = [Tree.chain(heads), Tree.cartesian([2] * heads), BestFirst(9, top_k=3, beam=2)]
    for shape in shapes:
        drafted = Engine(target, head, shape=shape).generate(_PROMPTS, **settings)
        assert [result.token_ids for result in drafted] == plain, f"text with {shape} is not that of plain decoding"
