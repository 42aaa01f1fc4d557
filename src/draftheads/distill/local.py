"""Answers by our own engine: many conversations together, each new turn as soon as the last one has ended."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from draftheads.data.forms import tool_call
from draftheads.decode.answer_forms import form_of
from draftheads.decode.answer_forms.form import schemas_of
from draftheads.decode.engine import Engine
from draftheads.decode.prompts import Prompt, prompt_ids
from draftheads.decode.request import Request
from draftheads.decode.text import read_answer
from draftheads.distill.conversation import Dialogue, OnProgress
from draftheads.distill.options import NO_CHATS, DistillOptions
from draftheads.errors import DataError, InvalidPrompt, PromptTooLong, UnsupportedModel
from draftheads.models.chat_template import ChatReader, continuing_ids, render, special_ids, template_of
from draftheads.settings import SamplingSettings
from draftheads.utils.provenance import identity_digest

DOCUMENT_TOKENS = 64  # of each text that the model reads
QUESTION_TOKENS = 256  # a self-talk question that is longer is dropped
_TOKEN_CHARACTERS = 64  # hardly any token is longer
_BATCHES_AT_ONCE = 8  # that are in memory; at their end the batch is not full, which costs a tenth of the speed
_WORDS = "seventeen purple elephants"  # stands for the user's words; templates strip white space around them


class EngineSource:
    """Continues conversations with an engine's model.

    Raises:
        UnsupportedModel: on construction, if the model writes questions and has no chat template, or none for that.
    """

    def __init__(self, engine: Engine, options: DistillOptions) -> None:
        self.engine = engine
        self.options = options
        self._has_chats = template_of(engine.model) is not None
        if not self._has_chats and options.num_self_talk:
            raise UnsupportedModel(f"{engine.model.model_id} {NO_CHATS}")
        self.opening, self.question_end = user_turn(engine.model) if options.num_self_talk else ([], {})

    @property
    def identity(self) -> dict[str, str]:
        """What the answers depend on: the model and its chat template. A head changes no answer."""
        model = self.engine.model
        return {
            "model": model.model_id,
            "model_fingerprint": identity_digest([asdict(model.fingerprints), template_of(model)]),
            "dtype": str(model.dtype).removeprefix("torch."),
        }

    def converse(self, dialogues: Iterator[Dialogue], on_progress: OnProgress) -> None:
        """Continues all to their end, some batches together."""
        while together := list(islice(dialogues, _BATCHES_AT_ONCE * self.options.batch_size)):
            self._converse(together, on_progress)

    def _converse(self, dialogues: Sequence[Dialogue], on_progress: OnProgress) -> None:
        """Long conversations start first, so that the batch is full for longer."""
        core, running = self.engine.core(), dict[int, Request]()

        def go_on(place: int, *, first: bool = False) -> None:
            """Adds the dialogue's next request, if it has one."""
            dialogue = dialogues[place]
            try:
                if not dialogue.is_over:
                    running[place] = self.engine.request(*self._request(dialogue), index=place)
                    core.add(running[place], first=first)
            except PromptTooLong:
                dialogue.stop("too_long")
            except InvalidPrompt as error:
                raise DataError(f"{dialogue.prompt.source}: {error}") from error
            if dialogue.is_over:
                on_progress(0, dialogue)

        for place in sorted(range(len(dialogues)), key=lambda place: -dialogues[place].num_turns):
            go_on(place)
        for event in self.engine.events(core):
            on_progress(len(event.token_ids))
            if event.finish_reason is not None:
                add_result(dialogues[event.index], running.pop(event.index), self.engine.model)
                go_on(event.index, first=True)

    def _request(self, dialogue: Dialogue) -> tuple[Prompt, SamplingSettings]:
        if not self._has_chats:
            if dialogue.num_turns > 1 or dialogue.prompt.system is not None:
                raise DataError(f"{dialogue.prompt.source}: a chat, and {self.engine.model.model_id} {NO_CHATS}")
            dialogue.is_text = True
        if dialogue.ask_next():
            prompt: Prompt = self._beginning(dialogue) if dialogue.prompt.is_document else dialogue.messages
            if dialogue.prompt.tools:
                prompt = prompt_ids(self.engine.model, dialogue.messages, tools=dialogue.prompt.tools)
            return prompt, SamplingSettings(
                max_new_tokens=self.options.max_new_tokens, temperature=dialogue.temperature, seed=dialogue.next_seed
            )
        return self.opening, SamplingSettings(
            max_new_tokens=QUESTION_TOKENS, temperature=1.0, seed=dialogue.next_seed, **self.question_end
        )

    def _beginning(self, dialogue: Dialogue) -> list[int]:
        """Token ids of the beginning of a document, after cutting the dialogue's text to whole characters of it."""
        tokenizer, count = self.engine.model.tokenizer, DOCUMENT_TOKENS
        text = dialogue.prompt.turns[0][: _TOKEN_CHARACTERS * count]  # a whole book takes long
        ids = tokenizer(text)["input_ids"][:count]
        beginning = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        dialogue.messages[0]["content"] = beginning.rstrip("\ufffd")
        return list(tokenizer(dialogue.messages[0]["content"])["input_ids"])


def add_result(dialogue: Dialogue, request: Request, model: ChatReader) -> None:
    """Adds the generated question or answer to the dialogue.

    An answer stays as the model wrote it. Only one in channels, which templates refuse, is separated into its parts.
    """
    result = request.result()
    dialogue.count(len(result.token_ids), num_steps=result.num_steps)
    is_finished = result.finish_reason == "stop"
    if dialogue.awaits_answer:
        text, ids = result.text, result.token_ids[: -1 if is_finished else None]
        if not special_ids(model.tokenizer).isdisjoint(ids):  # which the text lacks
            text = model.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        schemas, form = schemas_of(dialogue.prompt.tools), form_of(model).calls
        parts = read_answer(model, request.prompt_ids, text, schemas or None)
        words: dict[str, Any] = {"content": text}
        calls = [tool_call({"name": call.name, "arguments": call.arguments}) for call in parts.calls]
        if form is not None and form.thinking is not None:
            words = {"content": "", **parts.texts(), **({"tool_calls": calls} if calls else {})}
        dialogue.answer(**words, is_finished=is_finished, is_called=bool(calls))
    elif is_finished and result.text.strip():
        dialogue.ask(result.text.strip())
    else:
        dialogue.stop("no_question")


def user_turn(reader: ChatReader) -> tuple[list[int], dict[str, Any]]:
    """Token ids of a chat up to where the user's first words begin, and settings by which a request stops after them.

    It stops at the special token right after the words in the chat template, or else at the text there.
    """
    try:
        text = render(reader, [{"role": "user", "content": _WORDS}], add_generation_prompt=True)
    except Exception as error:  # a template is a program of the model's author: it may raise anything
        raise UnsupportedModel(f"the chat template refuses a chat of self-talk: {error}") from error
    before, words, after = text.rpartition(_WORDS)
    if not words:
        raise UnsupportedModel("the chat template does not show the user's words, so the model cannot write them")
    first_line = next(iter(after.strip().splitlines()), "").strip()
    if not first_line:
        raise UnsupportedModel("the chat template writes nothing after a user's words, so their end cannot be found")
    # a space before the user's words belongs to their first token
    opening = list(reader.tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"])
    token = continuing_ids(reader.tokenizer, after.strip())[0]
    return opening, {"stop_token_ids": (token,)} if token in special_ids(reader.tokenizer) else {"stop": (first_line,)}
