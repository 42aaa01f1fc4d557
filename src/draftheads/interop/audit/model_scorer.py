"""Scores the first difference of two texts by a model's log-probabilities."""

from collections.abc import Callable, Sequence

from torch import Tensor

from draftheads.interop.audit.answer import Answer, Place
from draftheads.interop.audit.compare import Score, common_length, gap_by_logprobs
from draftheads.interop.audit.model_reference import ModelReference
from draftheads.models.chat_template import special_ids
from draftheads.models.prompt_text import TokenBytes

_NUM_TOPS = 64  # tokens among which one is looked for that agrees with a text
_MOST_STEPS = 8  # tokens that two texts may share beyond their common ids
_BEFORE = 4  # tokens before a difference that may have led beyond it, such as " cats" beside " cat"
_PLAUSIBLE = 2.0  # nats; where both tokens are less likely than the best one by more, the texts did not part


class ModelScorer:
    """Scores by a model.

    Args:
        model: the model, with the prompts.
        by_text: also where the reference's tokens are not known, but only its text. Under a grammar texts have unusual
            tokens, and scores by their usual ones would be wrong.
    """

    def __init__(self, model: ModelReference, *, by_text: bool = True) -> None:
        self._model, self._by_text = model, by_text
        tokenizer = model.engine.model.tokenizer
        self._token_bytes, self._special = TokenBytes(tokenizer), special_ids(tokenizer)

    def score(self, index: int, answer: Answer, reference: Answer) -> Score:
        """The gap where two answers to prompt number ``index`` differ first."""
        for one in (answer, reference):
            if problem := self._model.unknown(index, one):
                return Score(None, reason=problem)
        if reference.token_ids is not None:
            return gap_by_logprobs(self._places(index, answer, reference), answer.text, reference.text)
        if not self._by_text:
            return Score(None, reason="under a schema, --model cannot know the tokens of the baseline's text")
        return self._score_texts(index, answer, reference)

    def _places(self, index: int, answer: Answer, reference: Answer) -> list[Place]:
        """The tokens of a reference, its end included, with the most likely ones around the difference."""
        logits, ids = self._model.read(index, reference) or ((), ())
        common = common_length(answer.text.encode(), reference.text.encode())
        places = list[Place]()
        pieces = [self._bytes_of(int(token)) for token in ids]
        starts = [sum(map(len, pieces[:place])) for place in range(len(pieces) + 1)]
        parting = next((place for place, end in enumerate(starts[1:]) if end > common), len(pieces))
        for place, (piece, token) in enumerate(zip(pieces, ids, strict=True)):
            if not parting - _BEFORE <= place <= parting:
                places.append(Place(piece, 0.0, {}))
                continue
            scores = logits[place].log_softmax(-1)
            tops: dict[bytes, float] = {}
            for other, text in self._tops(scores):
                tops.setdefault(text, float(scores[other]))
            places.append(Place(piece, float(scores[int(token)]), tops, end=self._end(scores)))
        return places

    def _score_texts(self, index: int, answer: Answer, reference: Answer) -> Score:
        """The score of two texts whose tokens are not known.

        A text can be written with several sequences of tokens. So the gap is the smallest one over the places at which
        the texts may have parted: where their usual tokens differ, and after further tokens that both agree with.
        """
        ours, theirs = self._unread(answer), self._unread(reference)
        common = common_length(ours.ids, theirs.ids)
        context, gaps = [*self._model.prompt_ids[index], *ours.ids[:common]], list[float]()
        ours.start_at(common)
        theirs.start_at(common)
        for _ in range(_MOST_STEPS):
            scores = self._model.next_scores(context)
            tops = self._tops(scores)
            values = [one.best(scores, tops, other.rest) for one, other in ((ours, theirs), (theirs, ours))]
            known = [value for value in values if value is not None]
            if len(known) == 2 and max(known) >= float(scores.max()) - _PLAUSIBLE:
                gaps.append(known[1] - known[0])
            token, piece = tops[0]
            if not piece or not (ours.rest.startswith(piece) and theirs.rest.startswith(piece)):
                break
            context.append(token)
            ours.skip(piece)
            theirs.skip(piece)
        if not gaps:
            return Score(None, reason="--model would say neither: does the server have other weights or prompts?")
        return Score(min(gaps, key=abs))

    def _tops(self, scores: Tensor) -> list[tuple[int, bytes]]:
        """The most likely tokens with their bytes, the most likely one first."""
        ids = scores.topk(min(_NUM_TOPS, len(scores))).indices.tolist()
        return [(token, self._bytes_of(token)) for token in ids]

    def _bytes_of(self, token: int) -> bytes:
        """Empty for tokens with a special meaning, which are not in texts."""
        return b"" if token in self._special else self._token_bytes.of(token)

    def _end(self, scores: Tensor) -> float | None:
        """The log-probability of the most likely end."""
        return max((float(scores[token]) for token in self._model.engine.model.eos_ids), default=None)

    def _unread(self, answer: Answer) -> "_Unread":
        ids = self._model.usual_ids(answer.text)
        return _Unread(answer, ids, [self._bytes_of(token) for token in ids], self._end)


class _Unread:
    """The end of a text, from some place on."""

    def __init__(
        self, answer: Answer, ids: Sequence[int], pieces: Sequence[bytes], end: Callable[[Tensor], float | None]
    ) -> None:
        self.ids = ids  # its usual tokens
        self.rest = answer.text.encode(errors="replace")
        self._pieces, self._is_cut, self._end = pieces, answer.is_cut, end
        self._next: int | None = None  # the next one of the usual tokens, if that is known
        if pieces and pieces[0].startswith(b" ") and not self.rest.startswith(b" "):
            self.rest = b" " + self.rest  # the first space of a text is left out by some tokenizers

    def start_at(self, place: int) -> None:
        if place < len(self.ids):
            self._next = self.ids[place]
        self.rest = self.rest[sum(map(len, self._pieces[:place])) :]

    def skip(self, piece: bytes) -> None:
        """Skips a text with which it begins; its usual tokens are no longer those of the rest."""
        self.rest, self._next = self.rest[len(piece) :], None

    def best(self, scores: Tensor, tops: Sequence[tuple[int, bytes]], other: bytes) -> float | None:
        """The log-probability of the most likely token that agrees with this text and not with the other."""
        agree = [
            token for token, piece in tops if piece and self.rest.startswith(piece) and not other.startswith(piece)
        ]
        values = [float(scores[token]) for token in agree]
        if self._next is not None:
            values.append(float(scores[self._next]))
        if not self.rest and not self._is_cut and (end := self._end(scores)) is not None:
            values.append(end)
        return max(values, default=None)
