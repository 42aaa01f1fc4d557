"""The decoding loop: rows that join, step together and leave. Plain and speculative decoding are the same loop."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.decode.prefix_cache import ReadText
from draftheads.decode.request import Request, StreamEvent, TopLogprobs
from draftheads.decode.token_rules import BatchRules, has_rules
from draftheads.models.model import TargetModel
from draftheads.runners import runner_for
from draftheads.runners.runner import Row
from draftheads.speculation.accept import accept, accept_greedy, num_rejection_uniforms
from draftheads.speculation.draft import AcceptResult, Context, Draft, Places
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.sampling import RowSettings, SeenTokens, has_penalty, most_likely, token_logprobs
from draftheads.speculation.shapes import ROOT_ONLY, Shape
from draftheads.utils.transfer import to_device

if TYPE_CHECKING:
    from draftheads.decode.planner import AcceptanceCheck, Planner

BatchEvent = tuple[Request, StreamEvent | Exception]  # a request ends with a finish reason or an exception


class TokenChoice(NamedTuple):
    """How the next tokens of some rows are chosen."""

    settings: RowSettings | None = None  # None for rows without requests
    seen: SeenTokens | None = None  # (B, V) the tokens of their texts; only where a row has a penalty
    rules: BatchRules | None = None  # only where a row has some


class Verified(NamedTuple):
    """A draft, and what the model says of it."""

    draft: Draft
    places: Places  # of its nodes, where rows have rules
    logits: Tensor | None  # (B, N, V)
    best: Tensor | None  # (B, N) the most likely tokens, where nobody needs more of the logits
    hidden: Tensor  # (B, N, D or n·D)
    asked: Tensor | None  # what the session wants to read on the host
    begun: float  # when, in seconds
    drafted: float


class Batch:
    """The rows that are being decoded. Row b of every tensor belongs to ``requests[b]``.

    :meth:`join` and :meth:`step` choose tokens by the settings of requests. Another caller that chooses them itself,
    such as transformers' ``generate``, has rows without requests: :meth:`begin`, :meth:`verify`, :meth:`advance` and
    :meth:`keep` are what both do.

    Args:
        model, drafter: the target, and what drafts for it.
        shape: what it fills at each step; its default where left out.
        planner: chooses the shape at each step, in place of that.
        check: gets the accepted draft tokens of each step.
        on_phase: called with "prompt" after prompts are read, and after each part of a step with its name: "draft",
            "verify", "on_verify" (what the drafter takes from the target's logits) and "rest".

    Attributes:
        on_leave: if set, called before a row leaves with its request and with what was read of it. The batch then
            keeps the hidden states of all tokens.
    """

    on_leave: Callable[[Request, ReadText], None] | None = None
    _context: Context  # of the rows, once there are some

    def __init__(
        self,
        model: TargetModel,
        drafter: Drafter,
        *,
        shape: Shape | None = None,
        planner: "Planner | None" = None,
        check: "AcceptanceCheck | None" = None,
        on_phase: Callable[[str], object] = str,
    ) -> None:
        self.runner = runner_for(model, drafter.hidden_layers)
        self.drafter = drafter
        self.session = drafter.start()
        self.shape = shape or drafter.default_shape
        self.plan = None if planner is None else planner.start()
        self.check = check
        self.on_phase = on_phase
        self.requests: list[Request] = []
        self.rows: list[Row] = []  # of the requests
        self._choice = TokenChoice()  # of the requests
        self._are_free: list[bool] = []  # rows that take the most likely token whatever it is
        self._stepped_rows = 0  # rows that the session has seen; they come first
        # with on_leave, for each row: parts (t, D or n·D) of the tokens in the cache
        self._hidden: list[list[Tensor]] = []

    @torch.inference_mode()
    def read(self, counts: Mapping[Request, int]) -> dict[Request, Tensor]:
        """Reads so many next tokens of some prompts. Of those that are read whole, h_t (D,) of the last token."""
        rows = [request.begun_row for request in counts]
        chunks = [request.read_ids[row.length :][:n] for row, (request, n) in zip(rows, counts.items(), strict=True)]
        ended = {}
        for request, (states, hidden) in zip(counts, self.runner.read(rows, chunks), strict=True):
            request.hidden.append(hidden)
            if request.begun_row.length == len(request.read_ids):
                ended[request] = states[-1]
        return ended

    def read_part(self, request: Request) -> ReadText:
        """What was read of a prompt."""
        row = request.begun_row
        request.hidden = [torch.cat(request.hidden)]
        parts = self.runner.entries(row, row.length), request.hidden[0], self.runner.states(row)
        return ReadText(request.read_ids[: row.length], *parts)

    @torch.inference_mode()
    def join(self, ended: Mapping[Request, Tensor]) -> list[BatchEvent]:
        """Prompts that :meth:`read` has read whole become rows, and each gets its first token.

        A request that has tokens was interrupted: it goes on with the last of them, without an event.
        """
        requests, logits = list(ended), self.runner.model.logits(torch.stack(list(ended.values())))
        parts = ((request.read_ids, request.begun_row, torch.cat(request.hidden)) for request in requests)
        texts, rows, hidden = zip(*parts, strict=True)
        for request in requests:
            request.end_reading()
        last = Draft.on_tree(ROOT_ONLY, torch.zeros_like(logits[:, :1], dtype=torch.long))
        found = self._accepted(last, logits[:, None], [[0]] * len(requests), requests, self._choice_of(requests))
        roots: list[int] = found.next_ids.tolist()
        new_ids = [request.token_ids[-1:] or [root] for request, root in zip(requests, roots, strict=True)]
        logprobs = _logprobs_of(requests, logits[:, None], found.path, new_ids)
        events = [
            self._append(request, ids, num_drafted=0, **scores)
            for request, ids, scores in zip(requests, new_ids, logprobs, strict=True)
            if not request.token_ids
        ]
        self.begin(rows, texts, hidden, [ids[0] for ids in new_ids])
        self.requests += requests
        self._hidden += [[states] if self.on_leave is not None else [] for states in hidden]
        if not self._drop_ended():
            self._read_settings()
        self.on_phase("prompt")
        return events

    @torch.inference_mode()
    def step(self) -> list[BatchEvent]:
        """Draft, verify, accept, commit: at least one new token for every row."""
        found = self.verify(takes_best=self._takes_best())
        draft = found.draft
        if found.best is not None:
            result = accept_greedy(draft, found.best)
        else:
            assert found.logits is not None
            result = self._accepted(draft, found.logits, found.places, self.requests, self._choice)
        new_ids, copied, by_depth, watched = _tokens_of(draft, result, found.asked)  # the step's one read
        self.advance(found, result, new_ids, watched)
        logprobs = _logprobs_of(self.requests, found.logits, result.path, new_ids)
        if self.on_leave is not None:
            for parts, states, ids in zip(self._hidden, self._context.hidden, new_ids, strict=True):
                parts.append(states[: len(ids)].clone())
        events = []
        rows = zip(self.requests, new_ids, copied, by_depth, logprobs, strict=True)
        for request, ids, num_copied, drafted, scores in rows:
            request.num_steps += 1
            counts = {"num_drafted": len(ids) - 1, "num_copied": num_copied}
            events.append(self._append(request, ids, **counts, drafted_by_depth=drafted, **scores))
        self._note_seen()
        self.note(found, list(map(len, new_ids)), copied, self._are_free)
        self._drop_ended()
        self.on_phase("rest")
        return events

    def _takes_best(self) -> bool:
        """Whether the model finds the most likely tokens, and all rows take them whatever their probability."""
        rows, _, rules = self._choice
        assert rows is not None, "a step needs rows"
        others = rows.any_sampled or rows.any_penalty or rows.any_typical or rules is not None
        asked = (request.settings.logprobs for request in self.requests)
        return self.runner.model.finds_most_likely and not others and all(number is None for number in asked)

    def _accepted(
        self, draft: Draft, scores: Tensor, places: Places, requests: Sequence[Request], choice: TokenChoice
    ) -> AcceptResult:
        """The verdict on a draft by the logits (B, N, V) of the model."""
        settings, seen, rules = choice
        assert settings is not None
        uniforms = self._uniforms(requests, draft.max_depth + 1)
        more = processed = None
        if draft.sampled and settings.any_rejection:
            more = self._numbers(num_rejection_uniforms(draft), "rejection")
        if rules is not None:
            scores, processed = rules.verified(scores, places, draft.depths), rules.processed(draft)
        return accept(draft, scores, settings, uniforms, seen, rejection_uniforms=more, processed=processed)

    def begin(
        self, rows: Sequence[Row], texts: Sequence[list[int]], hidden: Sequence[Tensor], roots: Sequence[int]
    ) -> None:
        """New rows, whose texts the runner has read, with their hidden states (T, D or n·D) and first new tokens."""
        start = 0 if self.drafter.needs_history else -1  # what a drafter sees: all that was read, or the last token
        prompts = [ids[start:] for ids in texts]
        states = pad_sequence([part[start:] for part in hidden], batch_first=True)
        tokens = pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True)
        new = Context(
            states,
            to_device(tokens, states.device),
            to_device([len(ids) for ids in prompts], states.device),
            to_device(list(roots), states.device),
            known_ids=[[*ids, root] for ids, root in zip(prompts, roots, strict=True)],
        )
        self._context = self._context.beside(new) if self.rows else new
        self.rows += rows

    @torch.inference_mode()
    def verify(self, *, takes_best: bool = False, settings: RowSettings | None = None) -> Verified:
        """A draft for all rows, and one pass over it: with the logits, or where the model can the best tokens alone.

        ``settings`` are those of rows without requests.
        """
        assert self.rows, "a step needs rows"
        settings, rules = self._choice.settings or settings, self._choice.rules
        of_drafts = rules if rules and rules.concern_drafts else None
        draws = partial(self._numbers, stream="drafts")
        context = replace(self._context, rows=settings, draws=draws, rules=of_drafts)
        begun = time.perf_counter()
        draft = self._drafted(context)
        drafted = time.perf_counter()
        places: Places = []
        if rules is not None:
            draft, places = rules.pruned(draft)
        self._stepped_rows = len(self.rows)
        self.on_phase("draft")
        found, hidden = (self.runner.most_likely if takes_best else self.runner.verify)(self.rows, draft)
        logits, best = (None, found) if takes_best else (found, None)
        self.on_phase("verify")
        asked = self.session.on_verify(draft, (lambda: found) if takes_best else partial(most_likely, found))
        self.on_phase("on_verify")
        return Verified(draft, places, logits, best, hidden, asked, begun, drafted)

    @torch.inference_mode()
    def advance(
        self, found: Verified, result: AcceptResult, new_ids: Sequence[list[int]], asked: Sequence[Sequence[int]]
    ) -> None:
        """The accepted nodes become text: new tokens of each row, the last of them the next root.

        ``asked`` is what the session wanted to read of each row.
        """
        if found.asked is not None:
            self.session.on_read(asked)
        self.runner.commit(self.rows, result, list(map(len, new_ids)))
        # the first accepted token is the root of before
        known = [[old[-1], *ids] for old, ids in zip(self._context.ids, new_ids, strict=True)]
        self._context = _advanced(found.draft, result, found.hidden, known)

    def note(self, found: Verified, counts: Sequence[int], copied: Sequence[int], are_free: Sequence[bool]) -> None:
        """Tells the planner how many new tokens each row got, how many of them a copy brought, and how long it took."""
        accepted = [count - 1 for count in counts]
        if self.check is not None:
            are_drafted = found.draft.num_nodes > 1 and (self.plan is None or self.plan.is_drafting)
            self.check.note([of_all - n for of_all, n in zip(accepted, copied, strict=True)], are_drafted=are_drafted)
        if self.plan is not None:
            milliseconds = 1e3 * (found.drafted - found.begun), 1e3 * (time.perf_counter() - found.drafted)
            self.plan.note(found.draft, accepted, copied, are_free, milliseconds)

    @torch.inference_mode()
    def keep(self, going: Sequence[int]) -> None:
        """The other rows leave."""
        kept = set(going)
        self.runner.drop([each for row, each in enumerate(self.rows) if row not in kept])
        self.rows = [self.rows[row] for row in going]
        self._context = self._context.keep(going)
        known = [row for row in going if row < self._stepped_rows]
        if len(known) < self._stepped_rows:
            self.session.keep(torch.tensor(known, dtype=torch.long))
            if self.plan is not None:
                self.plan.keep(known)
            self._stepped_rows = len(known)

    def _drafted(self, context: Context) -> Draft:
        if self.plan is None:
            return self.session.propose(context, self.shape)
        rows, cuts = context.rows, context.root_ids.device.type == "cpu"
        depends = rows is not None and (rows.any_typical or rows.any_rejection)
        shape, num_nodes = self.plan.shape(len(context.root_ids), may_follow=not depends, cuts=cuts)
        if num_nodes == 1:
            self.session.observe(context)
            return self.plan.cut(Draft.on_tree(ROOT_ONLY, context.root_ids[:, None]))
        return self.plan.cut(self.session.propose(replace(context, num_nodes=num_nodes), shape))

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values, also of texts that are being read, and of hidden states that are kept."""
        return self.runner.num_bytes + sum(part.nbytes for parts in self._hidden for part in parts)

    @torch.inference_mode()
    def drop(self, requests: Collection[Request]) -> None:
        """These requests leave unfinished, between two steps; others than the rows' are ignored."""
        self._keep([row for row, request in enumerate(self.requests) if request not in requests])

    def _append(self, request: Request, token_ids: Sequence[int], **what: Any) -> BatchEvent:
        """:meth:`Request.append` gives an event; an error in the text, grammar or stop rules ends this row alone."""
        try:
            return request, request.append(token_ids, **what)
        except Exception as error:  # noqa: BLE001 - the core hands it on
            request.failure = error
            return request, error

    def _drop_ended(self) -> bool:
        """Finished and failed rows leave; whether there were any."""
        ended = (request.finish_reason is not None or request.failure is not None for request in self.requests)
        return self._keep([row for row, is_ended in enumerate(ended) if not is_ended])

    def _keep(self, going: Sequence[int]) -> bool:
        """The other rows leave; whether any did."""
        if len(going) == len(self.requests):
            return False
        if self.on_leave is not None:
            for row in sorted(set(range(len(self.requests))) - set(going)):
                if (text := self._read_text(row)) is not None:
                    self.on_leave(self.requests[row], text)
        self.keep(going)
        self.requests = [self.requests[row] for row in going]
        self._hidden = [self._hidden[row] for row in going]
        self._read_settings()
        return True

    def _read_text(self, row: int) -> ReadText | None:
        """What was read of a row: the cache may go on beyond the end of an answer. None where states have done so."""
        request, memory = self.requests[row], self.rows[row]
        token_ids = [*request.prompt_ids, *request.token_ids][: memory.length]
        if self.runner.model.is_recurrent and len(token_ids) < memory.length:
            return None
        hidden = torch.cat(self._hidden[row])[: len(token_ids)]
        return ReadText(token_ids, self.runner.entries(memory, len(token_ids)), hidden, self.runner.states(memory))

    def _read_settings(self) -> None:
        self._choice = self._choice_of(self.requests)
        self._are_free = [
            request.settings.temperature == 0 and not has_penalty(request.settings) and not has_rules(request)
            for request in self.requests
        ]

    def _choice_of(self, requests: Sequence[Request]) -> TokenChoice:
        vocab_size, device = self.runner.model.vocab_size, self.runner.model.device
        rows = RowSettings.of([request.row_settings for request in requests], vocab_size=vocab_size, device=device)
        seen = None
        if rows.any_penalty:
            texts = [(request.prompt_ids, request.token_ids) for request in requests]
            seen = SeenTokens.of(texts, vocab_size=vocab_size, device=device)
        is_ruled = any(map(has_rules, requests))
        rules = BatchRules(requests, vocab_size=vocab_size, device=device) if is_ruled else None
        return TokenChoice(rows, seen, rules)

    def _uniforms(self, requests: Sequence[Request], count: int) -> Tensor:
        """(B, count) float64."""
        if not any(request.settings.temperature > 0 for request in requests):
            return torch.zeros(len(requests), count, dtype=torch.float64, device=self.runner.model.device)
        numbers = [request.uniforms(count) for request in requests]
        return to_device(numbers, self.runner.model.device, torch.float64)

    def _numbers(self, count: int, stream: Literal["rejection", "drafts"]) -> Tensor:
        """(B, count) float64, which choose no token of an answer."""
        numbers = [request.draws(count, stream) for request in self.requests]
        return to_device(numbers, self.runner.model.device, torch.float64)

    def _note_seen(self) -> None:
        """The tokens that the step accepted, and the new roots."""
        if self._choice.seen is not None:
            context = self._context
            tokens = torch.cat([context.token_ids, context.root_ids[:, None]], 1)
            places = torch.arange(tokens.shape[1], device=tokens.device)
            is_new = (places > 0) & (places < context.num_accepted[:, None])  # the first one is the root of before
            is_new[:, -1] = True
            self._choice.seen.in_answer.scatter_add_(1, tokens, is_new.int())


def _advanced(draft: Draft, result: AcceptResult, hidden: Tensor, known_ids: Sequence[Sequence[int]]) -> Context:
    """What the drafter sees next: the accepted tokens with the target's hidden states, and the new root."""
    batch = torch.arange(len(hidden), device=hidden.device)[:, None]
    return Context(
        hidden[batch, result.path],
        draft.token_ids.gather(1, result.path),
        result.num_accepted,
        result.next_ids,
        known_ids=known_ids,
    )


def _tokens_of(
    draft: Draft, result: AcceptResult, asked: Tensor | None
) -> tuple[list[list[int]], list[int], list[list[int]], list[list[int]]]:
    """What a step did, for each row, read from the device.

    Returns:
        The accepted draft tokens and then the next token, the number of copied ones, the number of draft tokens at each
        depth, and what the session asked for.
    """
    ids = draft.token_ids.gather(1, result.path).roll(-1, 1)  # (B, P): without the root
    ids.scatter_(1, result.num_accepted[:, None] - 1, result.next_ids[:, None])
    depths = torch.arange(1, draft.max_depth + 1, device=ids.device)
    by_depth = (draft.depths[:, :, None] == depths).sum(1).expand(len(ids), -1)  # (B, depths)
    parts = [result.num_accepted[:, None], result.num_copied(draft)[:, None], by_depth, ids]
    packed = torch.cat(parts if asked is None else [*parts, asked], 1).tolist()
    first = 2 + draft.max_depth
    end = first + ids.shape[1]
    return (
        [row[first : first + row[0]] for row in packed],
        [row[1] for row in packed],
        [_without_zeros(row[2:first]) for row in packed],
        [row[end:] for row in packed],
    )


def _without_zeros(counts: list[int]) -> list[int]:
    """The counts up to the last one above 0: a tree may be less deep than its shape allows."""
    while counts and not counts[-1]:
        counts.pop()
    return counts


def _logprobs_of(
    requests: Sequence[Request], logits: Tensor | None, path: Tensor, new_ids: list[list[int]]
) -> list[dict[str, Any]]:
    """For each row the log-probabilities of its new tokens, as arguments of :meth:`Request.append`; empty unless asked.

    Args:
        requests: of the B rows.
        logits: (B, N, V) the target's, at each node; None where nobody asked.
        path: (B, P) the nodes at which the new tokens were chosen.
        new_ids: of each row, at most P.
    """
    arguments: list[dict[str, Any]] = [{} for _ in requests]
    asked = {row: k for row, request in enumerate(requests) if (k := request.settings.logprobs) is not None}
    if not asked or logits is None:
        return arguments
    rows = to_device(list(asked), logits.device)
    width = max(len(new_ids[row]) for row in asked)
    tokens = to_device([[*new_ids[row], *[0] * width][:width] for row in asked], logits.device)
    at = logits[rows[:, None], path[rows, :width]]  # (b, width, V)
    of_tokens, top, top_ids = token_logprobs(at, tokens, max(asked.values()))
    packed = torch.cat([of_tokens[..., None].double(), top.double(), top_ids.double()], -1).tolist()  # one transfer
    num_top = top.shape[-1]
    for (row, k), places in zip(asked.items(), packed, strict=True):
        pairs: list[TopLogprobs] = [
            tuple(zip(map(int, place[1 + num_top :]), place[1 : 1 + num_top], strict=True))[:k] for place in places
        ]
        arguments[row] = {"logprobs": [place[0] for place in places], "top_logprobs": pairs}
    return arguments
