"""The target at work: the frozen model with the cache of the rows that are being decoded.

Knows nothing of heads or acceptance rules. Rows are dense: 0 … num_rows-1, new ones at the end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftheads.draft import Draft, Verdict
from draftheads.target.kv_cache import SlotCache
from draftheads.target.masks import as_float_mask, tree_visibility, within_window
from draftheads.target.model import TargetModel

PREFILL_CHUNK = 512  # tokens of a long prompt per pass: bounds the mask and the activations


class Target:
    """One cache over a shared frozen model: ``prefill``, ``verify``, ``commit``, ``keep``."""

    def __init__(self, model: TargetModel) -> None:
        self.model = model
        self.cache = SlotCache(len(model.layer_kinds))
        self.lengths: list[int] = []  # tokens of each row in the cache

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.lengths)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Adds a row per prompt and reads it.

        Returns:
            The logits after each prompt's last token (b, V) and the hidden states of all its tokens (b, T, D),
            right-padded.
        """
        device, old, lengths = self.model.device, self.num_rows, [len(prompt) for prompt in prompts]
        longest = max(lengths)
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        tokens = tokens.to(device)
        self.cache.reserve(old + len(prompts), longest)
        hidden = []
        for start in range(0, longest, PREFILL_CHUNK):
            chunk = tokens[:, start : start + PREFILL_CHUNK]
            steps = torch.arange(chunk.shape[1], device=device)
            # a text is a tree too: a chain, in which every token sees those before it
            chain = (steps[:, None] >= steps)[None]
            hidden.append(
                self._forward(slice(old, old + len(prompts)), [start] * len(prompts), chunk, steps[None], chain)
            )
        self.lengths += lengths
        every = torch.cat(hidden, 1)  # (b, T, D)
        last = every[torch.arange(len(prompts), device=device), torch.tensor(lengths, device=device) - 1]
        return self.model.logits(last), every

    @torch.inference_mode()
    def verify(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """One pass over all nodes of all rows: logits (B, N, V) and last hidden states (B, N, D)."""
        hidden = self._forward(slice(0, self.num_rows), self.lengths, draft.token_ids, draft.depths, draft.ancestors)
        return self.model.logits(hidden), hidden

    @torch.inference_mode()
    def commit(self, verdict: Verdict, num_accepted: Sequence[int]) -> None:
        """Keeps the accepted nodes' entries as text and forgets the others.

        Args:
            verdict: paths (B, P) of the nodes that :meth:`verify` just read.
            num_accepted: the verdict's counts, already on the host.
        """
        if max(num_accepted) > 1:  # the root's entry is in place as it is
            starts = torch.tensor(self.lengths, device=verdict.path.device)[:, None]  # (B, 1)
            steps = torch.arange(verdict.path.shape[1], device=verdict.path.device)  # (P,)
            real = steps < verdict.num_accepted[:, None]
            source = starts + torch.where(real, verdict.path, steps)  # what is not accepted stays where it is
            self.cache.move(source, starts + steps)
        self.lengths = [length + count for length, count in zip(self.lengths, num_accepted, strict=True)]

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with the given rows only, in that order."""
        self.lengths = [self.lengths[row] for row in rows]
        self.cache.keep(torch.tensor(rows, dtype=torch.long, device=self.model.device), max(self.lengths, default=0))

    def _forward(self, rows: slice, starts: Sequence[int], tokens: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor:
        """Reads tokens (b, N) that stand ``depths`` after ``starts``; returns (b, N, D)."""
        nodes = tokens.shape[1]
        span = max(starts) + nodes
        self.cache.reserve(self.cache.num_rows, span)
        lengths = torch.tensor(starts, device=tokens.device)
        window = self.cache.window
        window.rows, window.span = rows, span
        window.row_index = torch.arange(rows.start, rows.stop, device=tokens.device)[:, None]
        window.slots = lengths[:, None] + torch.arange(nodes, device=tokens.device)
        output = self.model.decoder(
            input_ids=tokens,
            position_ids=self._positions(lengths, depths),
            attention_mask=self._masks(lengths, depths, ancestors, span),
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _positions(self, lengths: Tensor, depths: Tensor) -> Tensor:
        """(b, N). Nodes beyond the last position guess tokens that the text has no room for: any value will do."""
        positions = lengths[:, None] + depths
        limit = self.model.max_positions
        return positions if limit is None else positions.clamp(max=limit - 1)

    def _masks(self, lengths: Tensor, depths: Tensor, ancestors: Tensor, span: int) -> Tensor | dict[str, Tensor]:
        """One mask, or one per kind of layer where the model has several."""
        visible = tree_visibility(lengths, ancestors, span)
        kinds = sorted(set(self.model.layer_kinds))
        masks = {}
        for kind in kinds:
            window = self.model.sliding_window if kind == "sliding_attention" else None
            seen = visible if window is None else visible & within_window(lengths, depths, span, window)
            masks[kind] = as_float_mask(seen, self.model.dtype)
        return masks if len(masks) > 1 else masks[kinds[0]]
