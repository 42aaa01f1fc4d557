"""A conversation: the messages so far, and the record of them. Knows nothing of models and terminals."""

from dataclasses import dataclass, field, replace
from typing import Any

from draftheads.utils.messages import Message


@dataclass
class Conversation:
    """What the user and the model wrote, in turns.

    >>> chat = Conversation(system="Be brief.")
    >>> chat.ask("Why is the sky blue?")
    >>> chat.answer("Because of", finished=False)
    >>> [message["role"] for message in chat.messages]
    ['system', 'user', 'assistant']
    >>> chat.take_back()
    'Why is the sky blue?'
    >>> chat.turns
    []
    """

    system: str = ""  # the system prompt; empty: none
    turns: list[Message] = field(default_factory=list)  # of the user and the assistant
    finished: bool = True  # False if the last answer was cut off

    @property
    def messages(self) -> list[Message]:
        """The system prompt, if there is one, and all turns."""
        return [{"role": "system", "content": self.system}] * bool(self.system) + self.turns

    def copy(self) -> "Conversation":
        """The same, to go on with."""
        return replace(self, turns=list(self.turns))

    def ask(self, text: str) -> None:
        """Adds what the user wrote."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str, *, finished: bool) -> None:
        """Adds what the model wrote; ``finished`` is False if it was cut off."""
        self.turns.append({"role": "assistant", "content": text})
        self.finished = finished

    def take_back(self) -> str | None:
        """Removes the last question and its answer, if there is one; returns the question, None if there is none."""
        while self.turns:
            message = self.turns.pop()
            if message["role"] == "user":
                self.finished = True
                return message["content"]
        return None

    def record(self) -> dict[str, Any]:
        """The chat as one line of a chat file; see :mod:`draftheads.data.records`."""
        return {"messages": self.messages} | ({} if self.finished else {"finished": False})
