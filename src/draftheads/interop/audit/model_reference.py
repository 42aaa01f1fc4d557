"""A model in this process: the answers of plain decoding, and scores of what servers answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftheads.data.records import TextPrompt
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.errors import InvalidSettings
from draftheads.interop.audit.answer import Answer
from draftheads.interop.audit.compare import Score
from draftheads.interop.audit.settings import AuditSettings, CheckName, is_json
from draftheads.models.kv_target import Target
from draftheads.models.prompt_text import token_ids_of
from draftheads.settings import Grammar
from draftheads.utils.progress import Progress

_NUM_TOPS = 64  # tokens among which one is looked for that agrees with a text
_MOST_STEPS = 8  # tokens that two texts may share beyond their common ids
_TAIL = 4  # tokens before a token whose text is asked for
_PLAUSIBLE = 2.0  # nats; where both tokens are less likely than the best one by more, the texts did not part
# of a generation configuration: what servers may apply where a request leaves it out
_FROM_CONFIG = ("repetition_penalty", "top_k", "min_p")
_NEUTRAL: Mapping[str, Any] = {"repetition_penalty": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True)
class Surprise:
    """How surprising sampled tokens were for the model, beyond what it expects of its own samples.

    For each token it is -log p of the token minus the entropy of p. Whatever the text before, the mean is 0 if tokens
    are drawn from p: the sum over all tokens is a martingale, also if texts end by themselves.
    """

    num_tokens: int
    excess: float  # nats, the sum
    variance: float  # of that sum

    def __add__(self, other: "Surprise") -> "Surprise":
        return Surprise(self.num_tokens + other.num_tokens, self.excess + other.excess, self.variance + other.variance)


class ModelReference:
    """Decodes plainly and scores. Its engine must have no drafter.

    Args:
        engine: the model.
        prompts: all prompts of the audit.
        settings: of the audit.

    Raises:
        InvalidPrompt: a prompt is empty or too long for the model.
        InvalidSettings: messages are to be continued as texts.
    """

    def __init__(self, engine: Engine, prompts: Sequence[TextPrompt], settings: AuditSettings) -> None:
        self.engine = engine
        self.settings = settings
        if settings.route == "chat":
            self.prompt_ids = [engine.encode(prompt) for prompt in prompts]
        else:
            self.prompt_ids = [engine.encode(token_ids_of(engine.model, text_of(prompt))) for prompt in prompts]

    def answers(self, check: CheckName, schema: Mapping[str, Any], progress: Progress) -> list[Answer]:
        """Greedy answers to all prompts, several at the same time.

        Raises:
            MissingDependency: llguidance is not installed, in a JSON check.
        """
        grammar = Grammar.json_schema(schema) if is_json(check) else None
        requests = self.engine.requests(self.prompt_ids, max_new_tokens=self.settings.max_new_tokens, grammar=grammar)
        done = 0
        for event in self.engine.run(requests):
            done += event.finish_reason is not None
            progress.progress(done, len(requests))
        return [self._answer(request.result()) for request in requests]

    def score(self, index: int, answer: Answer, reference: Answer) -> Score:
        """The gap where two answers to prompt number ``index`` differ first, by the model's log-probabilities.

        A text can be written with several sequences of tokens. So the gap is the smallest one over the places at which
        the texts may have parted: where their usual tokens differ, and after further tokens that both agree with.
        """
        for one in (answer, reference):
            if problem := self._unknown(index, one):
                return Score(None, reason=problem)
        exact = answer.token_ids is not None and reference.token_ids is not None
        if not exact:  # usual tokens of both, or none
            answer, reference = replace(answer, token_ids=None), replace(reference, token_ids=None)
        ours, theirs = _End(self, answer), _End(self, reference)
        common = next(
            (place for place, (a, b) in enumerate(zip(ours.ids, theirs.ids, strict=False)) if a != b),
            min(len(ours.ids), len(theirs.ids)),
        )
        context, gaps = [*self.prompt_ids[index], *ours.ids[:common]], list[float]()
        ours.start_at(common)
        theirs.start_at(common)
        for _ in range(1 if exact else _MOST_STEPS):
            scores = self._next_scores(context)
            tops = [] if exact else self._tops(context, scores)
            values = [one.best(scores, tops, other.rest) for one, other in ((ours, theirs), (theirs, ours))]
            known = [value for value in values if value is not None]
            if len(known) == 2 and max(known) >= float(scores.max()) - _PLAUSIBLE:
                gaps.append(known[1] - known[0])
            token, piece = tops[0] if tops else (0, "")
            if not piece or not (ours.rest.startswith(piece) and theirs.rest.startswith(piece)):
                break
            context.append(token)
            ours.skip(piece)
            theirs.skip(piece)
        if not gaps:
            return Score(None, reason="--model would say neither: does the server have other weights or prompts?")
        return Score(min(gaps, key=abs))

    @torch.inference_mode()
    def surprise(self, index: int, answer: Answer) -> Surprise | None:
        """Of one sampled answer; None where its tokens are not known."""
        read = self._read(index, answer)
        if read is None:
            return None
        logits, ids = read
        scores = (logits / self.settings.temperature).log_softmax(-1)
        probs = scores.exp()
        # a probability of 0 adds nothing, though its logarithm is infinite
        terms = torch.where(probs > 0, probs * scores, 0.0)
        entropy = -terms.sum(-1)  # (t,)
        squares = torch.where(probs > 0, terms * scores, 0.0).sum(-1)
        excess = (-scores.gather(1, ids[:, None])[:, 0] - entropy).double().sum()
        return Surprise(len(ids), float(excess), float((squares - entropy**2).double().sum()))

    @torch.inference_mode()
    def margins(self, index: int, answer: Answer) -> list[float]:
        """For each token of an answer, how much less likely it is than the most likely one there, in nats.

        Greedy tokens have 0, up to rounding. Empty where the tokens are not known.
        """
        read = self._read(index, answer)
        if read is None:
            return []
        logits, ids = read
        margins: list[float] = (logits.amax(-1) - logits.gather(1, ids[:, None])[:, 0]).tolist()
        return margins

    def token_ids(self, answer: Answer) -> list[int]:
        """The tokens of an answer's text, without the one that ended it: the server's, else those of the tokenizer."""
        if answer.token_ids is None:
            return token_ids_of(self.engine.model, answer.text, add_special_tokens=False)
        ids = list(answer.token_ids)
        while ids and ids[-1] in self.engine.model.eos_ids:
            ids.pop()
        return ids

    def defaults_of_servers(self) -> dict[str, Any]:
        """What servers may do by the model's generation configuration, with the values that switch it off."""
        config = getattr(self.engine.model.model, "generation_config", None)
        of_model = {} if config is None else config.to_diff_dict()
        return {name: _NEUTRAL[name] for name in _FROM_CONFIG if of_model.get(name) not in (None, _NEUTRAL[name])}

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, those with a special meaning included."""
        text: str = self.engine.model.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _answer(self, result: GenerationResult) -> Answer:
        ids = result.token_ids
        ended = result.finish_reason == "stop" and bool(ids) and ids[-1] in self.engine.model.eos_ids
        return Answer(
            result.text,
            is_cut=result.finish_reason == "length",
            num_tokens=len(ids),
            num_prompt_tokens=result.num_prompt_tokens,
            token_ids=ids[:-1] if ended else ids,
        )

    def _unknown(self, index: int, answer: Answer) -> str:
        """Why the model cannot score an answer; empty if it can."""
        if answer.is_split:
            return "the server separates reasoning from the answer, so its tokens are not known"
        read, own = answer.num_prompt_tokens, len(self.prompt_ids[index])
        if read is not None and read != own:
            return (
                f"the server read a prompt of {read} tokens, --model reads {own}: another chat template or tokenizer; "
                "give the server's template by --chat-template, or use --route completions"
            )
        return ""

    @torch.inference_mode()
    def _next_scores(self, context: Sequence[int]) -> Tensor:
        """(V,) log-probabilities after some tokens."""
        logits, _ = Target(self.engine.model).prefill([context])
        return logits[0].float().log_softmax(-1)

    def _tops(self, context: Sequence[int], scores: Tensor) -> list[tuple[int, str]]:
        """The most likely tokens with their texts in this context, the likeliest first; half characters have none."""
        tail = list(context[-_TAIL:])
        before = self.decode(tail)
        pieces = []
        for token in scores.topk(min(_NUM_TOPS, len(scores))).indices.tolist():
            text = self.decode([*tail, token])
            is_whole = text.startswith(before) and not text.endswith("\ufffd")
            is_end = token in self.engine.model.eos_ids
            pieces.append((token, text[len(before) :] if is_whole and not is_end else ""))
        return pieces

    def _read(self, index: int, answer: Answer) -> tuple[Tensor, Tensor] | None:
        """The logits (t, V) before each token of an answer, and the tokens (t,), with its end if it ended by itself.

        None if the tokens are not known, or if there are none.
        """
        if self._unknown(index, answer):
            return None
        ids, prompt = self.token_ids(answer), self.prompt_ids[index]
        if answer.is_cut and not ids:
            return None
        target = Target(self.engine.model)
        target.lengths = [0]
        [(hidden, _)] = target.read([[*prompt, *(ids[:-1] if answer.is_cut else ids)]])
        logits = self.engine.model.logits(hidden[len(prompt) - 1 :]).float()
        if not answer.is_cut:
            ids.append(self._likeliest_end(logits[-1]))
        return logits, torch.tensor(ids, device=logits.device)

    def _likeliest_end(self, scores: Tensor) -> int:
        return max(self.engine.model.eos_ids, key=lambda token: float(scores[token]), default=int(scores.argmax()))


class _End:
    """The end of an answer, from some place on."""

    def __init__(self, model: ModelReference, answer: Answer) -> None:
        self.ids = model.token_ids(answer)
        self.rest = answer.text
        self._model = model
        self._is_cut = answer.is_cut
        self._next: int | None = None  # the next of its usual tokens, if that is known

    def start_at(self, place: int) -> None:
        """Skips its first tokens."""
        if place < len(self.ids):
            self._next = self.ids[place]
        before = self._model.decode(self.ids[:place])
        self.rest = self.rest[len(before) :]

    def skip(self, piece: str) -> None:
        """Skips a text with which it begins; its usual tokens are no longer those of the rest."""
        self.rest, self._next = self.rest[len(piece) :], None

    def best(self, scores: Tensor, tops: Sequence[tuple[int, str]], other: str) -> float | None:
        """The log-probability of the most likely token that agrees with this text and not with the other."""
        values = [float(scores[token]) for token, piece in tops if piece and self._parts(piece, other)]
        if self._next is not None:
            values.append(float(scores[self._next]))
        if not self.rest and not self._is_cut:
            values += [float(scores[token]) for token in self._model.engine.model.eos_ids]
        return max(values, default=None)

    def _parts(self, piece: str, other: str) -> bool:
        return self.rest.startswith(piece) and not other.startswith(piece)


def text_of(prompt: TextPrompt) -> str:
    """A prompt that is continued.

    Raises:
        InvalidSettings: it is a list of messages.
    """
    if not isinstance(prompt, str):
        raise InvalidSettings("--route completions continues texts, and a prompt is a list of messages: use chat")
    return prompt
