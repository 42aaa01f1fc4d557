"""One conversation on its way: what was said, whose turn it is, and how it ended. Knows no models."""

import hashlib
from typing import Any, Literal

from draftheads.distill.options import DistillOptions
from draftheads.distill.prompts import SELF_TALK, Prompt

GivenUp = Literal["too_long", "no_question"]  # more tokens than the model takes; the model made up no question


def mixed_seed(*numbers: int) -> int:
    """A number of 32 bits (PyTorch's generators read no more of a seed) that depends on all the given ones.

    >>> mixed_seed(0, 1) == mixed_seed(0, 1), mixed_seed(0, 1) == mixed_seed(1, 0)
    (True, False)
    """
    digest = hashlib.blake2b("/".join(map(str, numbers)).encode(), digest_size=4).digest()
    return int.from_bytes(digest)


class Dialogue:
    """A conversation that is led turn by turn; what is random in it depends on the run's seed and its place."""

    def __init__(self, prompt: Prompt, *, index: int, options: DistillOptions) -> None:
        self.prompt = prompt
        self.index = index  # its place in the run
        self.seed = mixed_seed(options.seed, index)
        self.temperature = options.temperature[self.seed % len(options.temperature)]
        self.messages: list[dict[str, str]] = []
        if prompt.system is not None:
            self.messages.append({"role": "system", "content": prompt.system})
        self.is_made_up = prompt.source == SELF_TALK
        self.num_turns = options.self_talk_turns if self.is_made_up else len(prompt.turns)
        self.num_answers = 0
        self.num_generations = 0  # answers and made-up questions, those of no use included
        self.num_tokens = 0  # of all generations
        self.num_steps = 0  # passes of the target after the prompts were read
        self.is_finished = True  # whether the last answer ended by itself
        self.given_up: GivenUp | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be said."""
        return self.given_up is not None or not self.is_finished or self.num_answers == self.num_turns

    @property
    def awaits_answer(self) -> bool:
        """Whether the user spoke last."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    @property
    def next_seed(self) -> int:
        """Of the next turn, whoever speaks."""
        return mixed_seed(self.seed, len(self.messages))

    def ask_next(self) -> bool:
        """Lets the user speak from the prompt; False where the question has to be made up."""
        if not self.awaits_answer and not self.is_made_up:
            self.ask(self.prompt.turns[self.num_answers])
        return self.awaits_answer

    def ask(self, question: str) -> None:
        """The user speaks."""
        self.messages.append({"role": "user", "content": question})

    def answer(self, text: str, *, is_finished: bool) -> None:
        """The assistant speaks."""
        self.messages.append({"role": "assistant", "content": text})
        self.num_answers += 1
        self.is_finished = is_finished

    def spend(self, num_tokens: int, *, num_steps: int = 0) -> None:
        """Counts a generation."""
        self.num_generations += 1
        self.num_tokens += num_tokens
        self.num_steps += num_steps

    def give_up(self, why: GivenUp) -> None:
        """Ends it where it is; a question without an answer is taken back."""
        if self.awaits_answer:
            self.messages.pop()
        self.given_up = why

    def record(self) -> dict[str, Any] | None:
        """The line to write; None where nothing was answered."""
        if not self.num_answers:
            return None
        return {
            "messages": self.messages,
            "finished": self.is_finished,
            "temperature": self.temperature,
            "seed": self.seed,
            "index": self.index,
            "source": self.prompt.source,
        }
