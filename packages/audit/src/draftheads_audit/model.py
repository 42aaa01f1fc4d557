"""A model in this process: the answers of plain decoding, and what it thinks of the tokens of servers."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftheads.data.records import TextPrompt
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.errors import InvalidSettings
from draftheads.models.chat_template import TokenBytes, special_ids, token_ids_of
from draftheads.runners import runner_for
from draftheads.settings import Grammar, SamplingSettings
from draftheads_audit.compare import Score, common_length, gap_by_logprobs
from draftheads_audit.options import TEMPERATURE
from draftheads_audit.server import Answer, Place

# of a generation configuration: what servers may apply to samples where a request leaves it out
_NEUTRAL: Mapping[str, Any] = {"top_k": 0, "min_p": 0.0}
_NUM_TOPS = 64  # tokens among which one is looked for that agrees with a text
_MOST_STEPS = 8  # tokens that two texts may share beyond their common ids
_BEFORE = 4  # tokens before a difference that may have led beyond it, such as " cats" beside " cat"
_PLAUSIBLE = 2.0  # nats; where both tokens are less likely than the best one by more, the texts did not part


class Surprise(NamedTuple):
    """How surprising sampled tokens were for the model, beyond what it expects of its own samples.

    For each token it is -log p of the token minus the entropy of p. Whatever the text before, the mean is 0 if tokens
    are drawn from p: the sum over all tokens is a martingale, also if texts end by themselves.
    """

    num_tokens: int
    excess: float  # nats, the sum
    variance: float  # of that sum


class ModelReference:
    """Decodes all prompts of an audit plainly, and reads answers.

    Args:
        engine: it must have no drafter.
        prompts: of the audit.
        max_new_tokens: of each answer.
        temperature: at which sampled answers are read.
        is_chat: whether the prompts are chats; else texts are continued.

    Raises:
        InvalidPrompt: a prompt is empty or too long for the model.
        InvalidSettings: messages are to be continued as texts.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[TextPrompt],
        *,
        max_new_tokens: int = 128,
        temperature: float = TEMPERATURE,
        is_chat: bool = True,
    ) -> None:
        self.engine, self._max_new_tokens, self._temperature = engine, max_new_tokens, temperature
        if is_chat:
            self.prompt_ids = [engine.encode(prompt) for prompt in prompts]
        else:
            self.prompt_ids = [engine.encode(token_ids_of(engine.model, text_of(prompt))) for prompt in prompts]
        tokenizer = engine.model.tokenizer
        self._token_bytes, self._special = TokenBytes(tokenizer), special_ids(tokenizer)

    def answers(self, schema: Mapping[str, Any] | None, advance: Callable[[], object]) -> list[Answer]:
        """Greedy answers to all prompts, several at the same time; in JSON if there is a schema."""
        grammar = None if schema is None else Grammar.json_schema(schema)
        requests = self.engine.requests(self.prompt_ids, max_new_tokens=self._max_new_tokens, grammar=grammar)
        for event in self.engine.run(requests):
            if event.finish_reason is not None:
                advance()
        return [self._answer(request.result()) for request in requests]

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

    def defaults_of_servers(self) -> dict[str, Any]:
        """What servers may do by the model's generation configuration, with the values that switch it off."""
        of_model = self.engine.generation.sampling
        return {name: value for name, value in _NEUTRAL.items() if of_model.get(name) not in (None, value)}

    # --- reading answers ---

    @torch.inference_mode()
    def surprise(self, index: int, answer: Answer) -> Surprise | None:
        """Of one sampled answer; None where its tokens are not known."""
        if (read := self._read(index, answer)) is None:
            return None
        logits, ids = read
        scores = (logits / self._temperature).log_softmax(-1)
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
        if (read := self._read(index, answer)) is None:
            return []
        logits, ids = read
        margins: list[float] = (logits.amax(-1) - logits.gather(1, ids[:, None])[:, 0]).tolist()
        return margins

    @torch.inference_mode()
    def next_scores(self, context: Sequence[int]) -> Tensor:
        """(V,) log-probabilities after some tokens, of which the first are those of a prompt."""
        _, logits, _ = runner_for(self.engine.model).prefill([context])
        prompt = max((ids for ids in self.prompt_ids if list(context[: len(ids)]) == ids), key=len)
        return self._ruled(prompt, context, logits[0].float()).log_softmax(-1)

    @torch.inference_mode()
    def _read(self, index: int, answer: Answer) -> tuple[Tensor, Tensor] | None:
        """The logits (t, V) before each token of an answer, and the tokens (t,), with its end if it ended by itself.

        None if the tokens are not known, or if there are none.
        """
        if self._problem(index, answer):
            return None
        ids, prompt = self.token_ids(answer), self.prompt_ids[index]
        if answer.is_cut and not ids:
            return None
        runner = runner_for(self.engine.model)
        row = runner.open(len(prompt) + self._max_new_tokens)
        [(hidden, _)] = runner.read([row], [[*prompt, *(ids[:-1] if answer.is_cut else ids)]])
        logits = self.engine.model.logits(hidden[len(prompt) - 1 :]).float()
        for place in range(len(logits)):
            logits[place] = self._ruled(prompt, [*prompt, *ids[:place]], logits[place])
        if not answer.is_cut:  # the most likely end
            last = logits[-1]
            ids.append(max(self.engine.model.eos_ids, key=lambda token: float(last[token]), default=int(last.argmax())))
        return logits, torch.tensor(ids, device=logits.device)

    def _ruled(self, prompt: Sequence[int], context: Sequence[int], logits: Tensor) -> Tensor:
        """The logits (V,) after a prompt and more tokens as the model's generation configuration changes them."""
        most, rules = self._max_new_tokens, self.engine.generation
        settings = rules.settings(SamplingSettings(max_new_tokens=most), len(prompt))
        processors: Any = rules.processors(prompt, len(prompt) + most, settings, whole=True)
        scores: Tensor = processors(torch.tensor([list(context)], device=logits.device), logits[None].clone())
        return scores[0]

    def _problem(self, index: int, answer: Answer) -> str:
        """Why the tokens of an answer are not known; empty if they are."""
        if answer.is_split:
            return "the server separates reasoning from the answer, so its tokens are not known"
        read, own = answer.num_prompt_tokens, len(self.prompt_ids[index])
        if read is not None and read != own:
            return (
                f"the server read a prompt of {read} tokens, --model reads {own}: another chat template or tokenizer; "
                "give a folder of the model with the server's template"
            )
        return ""

    def token_ids(self, answer: Answer) -> list[int]:
        """The tokens of an answer's text, without the one that ended it: the server's, else those of the tokenizer."""
        if answer.token_ids is None:
            return self.usual_ids(answer.text)
        ids = list(answer.token_ids)
        while ids and ids[-1] in self.engine.model.eos_ids:
            ids.pop()
        return ids

    def usual_ids(self, text: str) -> list[int]:
        """The tokens with which the tokenizer writes a text."""
        return token_ids_of(self.engine.model, text, add_special_tokens=False)

    # --- scoring differences ---

    def score(self, index: int, answer: Answer, reference: Answer, *, by_text: bool = True) -> Score:
        """The gap where two answers to prompt number ``index`` differ first.

        ``by_text``: also where the reference's tokens are not known, but only its text. Under a grammar texts have
        unusual tokens, and scores by their usual ones would be wrong.
        """
        if problem := self._problem(index, answer) or self._problem(index, reference):
            return Score(None, reason=problem)
        if reference.token_ids is not None:
            return gap_by_logprobs(self._places(index, answer, reference), answer.text, reference.text)
        if not by_text:
            return Score(None, reason="under a schema, --model cannot know the tokens of the baseline's text")
        return self._score_texts(index, answer, reference)

    def _places(self, index: int, answer: Answer, reference: Answer) -> list[Place]:
        """The tokens of a reference, its end included, with the most likely ones around the difference."""
        logits, ids = self._read(index, reference) or ((), ())
        common = common_length(answer.text.encode(errors="replace"), reference.text.encode(errors="replace"))
        pieces = [self._bytes_of(int(token)) for token in ids]
        places = [Place(piece, 0.0, {}) for piece in pieces]
        ends = accumulate(map(len, pieces))
        parting = next((place for place, end in enumerate(ends) if end > common), len(pieces))
        for place in range(max(0, parting - _BEFORE), min(parting + 1, len(pieces))):
            scores = logits[place].log_softmax(-1)
            tops = {text: float(scores[token]) for token, text in reversed(self._tops(scores))}  # the first one counts
            end = max((float(scores[token]) for token in self.engine.model.eos_ids), default=None)
            places[place] = Place(pieces[place], float(scores[int(ids[place])]), tops, end)
        return places

    def _score_texts(self, index: int, *answers: Answer) -> Score:
        """The score of two texts whose tokens are not known.

        A text can be written with several sequences of tokens. So the gap is the smallest one over the places at which
        the texts may have parted: where their usual tokens differ, and after further tokens that both agree with.
        """
        usual = [self.usual_ids(answer.text) for answer in answers]
        common = common_length(*usual)
        context, gaps = [*self.prompt_ids[index], *usual[0][:common]], list[float]()
        rests, following = list[bytes](), [ids[common : common + 1] for ids in usual]
        for answer, ids in zip(answers, usual, strict=True):
            pieces, text = [self._bytes_of(token) for token in ids], answer.text.encode(errors="replace")
            if pieces and pieces[0].startswith(b" ") and not text.startswith(b" "):
                text = b" " + text  # the first space of a text is left out by some tokenizers
            rests.append(text[sum(map(len, pieces[:common])) :])
        for _ in range(_MOST_STEPS):
            scores = self.next_scores(context)
            tops, values = self._tops(scores), list[float]()
            for answer, rest, other, usual_next in zip(answers, rests, reversed(rests), following, strict=True):
                agree = [one for one, text in tops if text and rest.startswith(text) and not other.startswith(text)]
                ends = self.engine.model.eos_ids if not rest and not answer.is_cut else ()
                found = [*agree, *usual_next, *ends]
                values += [max(float(scores[token]) for token in found)] if found else []
            if len(values) == 2 and max(values) >= float(scores.max()) - _PLAUSIBLE:
                gaps.append(values[1] - values[0])
            token, piece = tops[0]
            if not piece or not all(rest.startswith(piece) for rest in rests):
                break
            context.append(token)
            rests, following = [rest[len(piece) :] for rest in rests], [[], []]
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


def text_of(prompt: TextPrompt) -> str:
    """A prompt that is continued."""
    if not isinstance(prompt, str):
        raise InvalidSettings("/v1/completions continues texts, and a prompt is a list of messages: use a chat model")
    return prompt
