"""A model in this process: the answers of plain decoding, and what it thinks of the tokens of servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftheads.data.records import TextPrompt
from draftheads.decode.engine import Engine
from draftheads.decode.request import GenerationResult
from draftheads.errors import InvalidSettings
from draftheads.interop.audit.answer import Answer
from draftheads.interop.audit.settings import AuditSettings, CheckName, is_json
from draftheads.models.prompt_text import token_ids_of
from draftheads.runners import runner_for
from draftheads.settings import Grammar, SamplingSettings
from draftheads.utils.progress import Progress

# of a generation configuration: what servers may apply to samples where a request leaves it out
_NEUTRAL: Mapping[str, Any] = {"top_k": 0, "min_p": 0.0}


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
    """Decodes plainly, and reads answers. Its engine must have no drafter.

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
        """Greedy answers to all prompts, several at the same time."""
        grammar = Grammar.json_schema(schema) if is_json(check) else None
        requests = self.engine.requests(self.prompt_ids, max_new_tokens=self.settings.max_new_tokens, grammar=grammar)
        done = 0
        for event in self.engine.run(requests):
            done += event.finish_reason is not None
            progress.progress(done, len(requests))
        return [self._answer(request.result()) for request in requests]

    def unknown(self, index: int, answer: Answer) -> str:
        """Why the model cannot score an answer; empty if it can."""
        if answer.is_split:
            return "the server separates reasoning from the answer, so its tokens are not known"
        read, own = answer.num_prompt_tokens, len(self.prompt_ids[index])
        if read is not None and read != own:
            return (
                f"the server read a prompt of {read} tokens, --model reads {own}: another chat template or tokenizer; "
                "give the server's template by --chat-template, or use --set route=completions"
            )
        return ""

    @torch.inference_mode()
    def read(self, index: int, answer: Answer) -> tuple[Tensor, Tensor] | None:
        """The logits (t, V) before each token of an answer, and the tokens (t,), with its end if it ended by itself.

        None if the tokens are not known, or if there are none.
        """
        if self.unknown(index, answer):
            return None
        ids, prompt = self.token_ids(answer), self.prompt_ids[index]
        if answer.is_cut and not ids:
            return None
        runner = runner_for(self.engine.model)
        row = runner.open(len(prompt) + self.settings.max_new_tokens)
        [(hidden, _)] = runner.read([row], [[*prompt, *(ids[:-1] if answer.is_cut else ids)]])
        logits = self.engine.model.logits(hidden[len(prompt) - 1 :]).float()
        for place in range(len(logits)):
            logits[place] = self._ruled(prompt, [*prompt, *ids[:place]], logits[place])
        if not answer.is_cut:
            ids.append(self._likeliest_end(logits[-1]))
        return logits, torch.tensor(ids, device=logits.device)

    @torch.inference_mode()
    def next_scores(self, context: Sequence[int]) -> Tensor:
        """(V,) log-probabilities after some tokens, of which the first are those of a prompt."""
        _, logits, _ = runner_for(self.engine.model).prefill([context])
        prompt = max((ids for ids in self.prompt_ids if list(context[: len(ids)]) == ids), key=len)
        return self._ruled(prompt, context, logits[0].float()).log_softmax(-1)

    @torch.inference_mode()
    def surprise(self, index: int, answer: Answer) -> Surprise | None:
        """Of one sampled answer; None where its tokens are not known."""
        read = self.read(index, answer)
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
        read = self.read(index, answer)
        if read is None:
            return []
        logits, ids = read
        margins: list[float] = (logits.amax(-1) - logits.gather(1, ids[:, None])[:, 0]).tolist()
        return margins

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

    def defaults_of_servers(self) -> dict[str, Any]:
        """What servers may do by the model's generation configuration, with the values that switch it off."""
        of_model = self.engine.generation.sampling
        return {name: value for name, value in _NEUTRAL.items() if of_model.get(name) not in (None, value)}

    def _ruled(self, prompt: Sequence[int], context: Sequence[int], logits: Tensor) -> Tensor:
        """The logits (V,) after a prompt and more tokens as the model's generation configuration changes them."""
        most, rules = self.settings.max_new_tokens, self.engine.generation
        settings = rules.settings(SamplingSettings(max_new_tokens=most), len(prompt))
        processors: Any = rules.processors(prompt, len(prompt) + most, settings, whole=True)
        scores: Tensor = processors(torch.tensor([list(context)], device=logits.device), logits[None].clone())
        return scores[0]

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

    def _likeliest_end(self, scores: Tensor) -> int:
        return max(self.engine.model.eos_ids, key=lambda token: float(scores[token]), default=int(scores.argmax()))


def text_of(prompt: TextPrompt) -> str:
    """A prompt that is continued."""
    if not isinstance(prompt, str):
        raise InvalidSettings("/v1/completions continues texts, and a prompt is a list of messages: use a chat model")
    return prompt
