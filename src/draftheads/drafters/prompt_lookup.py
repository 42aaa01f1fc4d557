"""Draft tokens copied from the text so far: what followed the last tokens the last time (prompt lookup decoding)."""

from torch import Tensor

from draftheads.drafters.text_index import RowTexts
from draftheads.errors import require_at_least
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.drafter import Drafter, DraftSession
from draftheads.speculation.shapes import Shape
from draftheads.speculation.tree import Tree
from draftheads.utils.transfer import to_device


class PromptLookup(Drafter):
    """Finds the latest earlier place of the text's last tokens, the longest match first, and copies what follows.

    Where a copy reaches the end of the text, as in a text that repeats itself, it goes on with what it has copied.

    Args:
        num_tokens: the most tokens that are copied.
        max_ngram: the longest n-gram that is looked up.

    Raises:
        InvalidSettings: a number below 1.
    """

    needs_history = True
    default_shape = None

    def __init__(self, *, num_tokens: int = 8, max_ngram: int = 3) -> None:
        require_at_least(1, num_tokens=num_tokens, max_ngram=max_ngram)
        self.num_tokens, self.max_ngram = num_tokens, max_ngram
        self.most_nodes = 1 + num_tokens

    def start(self) -> "PromptLookupSession":
        return PromptLookupSession(self)


class PromptLookupSession(DraftSession):
    """The texts of one batch."""

    def __init__(self, drafter: PromptLookup) -> None:
        self.num_tokens = drafter.num_tokens
        self._texts = RowTexts(max_ngram=drafter.max_ngram)

    def propose(self, context: Context, shape: Shape) -> Draft:
        """A chain for each row that has something to copy."""
        self._texts.read(context)
        roots = [text.ids[-1] for text in self._texts.rows]
        copies = [text.copy(self.num_tokens)[0] for text in self._texts.rows]
        length = max(map(len, copies))
        chains = [[root, *(copy or [root] * length)] for root, copy in zip(roots, copies, strict=True)]
        draft = Draft.on_tree(Tree.chain(length), to_device(chains, context.root_ids.device))
        if all(copies) or not length:
            return draft
        empty = to_device([not copy for copy in copies], context.root_ids.device)[:, None]
        return draft.filled_up(empty & (draft.depths > 0))

    def observe(self, context: Context) -> None:
        self._texts.read(context)

    def keep(self, rows: Tensor) -> None:
        self._texts.keep(rows)
