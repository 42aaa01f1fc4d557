"""All errors that ``draftheads`` raises on purpose. They form one tree, so one ``except`` catches them all.

A message contains both values and the fix. A broken invariant of our own code is an ``assert``.
"""

import shlex
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.metadata import distributions
from numbers import Integral
from os import PathLike, fspath


class DraftHeadsError(Exception):
    """The base class of all errors of this package."""


class ModelNotFound(DraftHeadsError):
    """The name is neither a folder here nor a repository on the Hugging Face Hub."""


class UnsupportedModel(DraftHeadsError):
    """The model exists, but it is not a causal language model that can read a tree of drafts."""


class InvalidPrompt(DraftHeadsError):
    """The prompt has no token, or has the wrong form."""


class PromptTooLong(InvalidPrompt):
    """The prompt has more tokens than the model allows."""


class InvalidSettings(DraftHeadsError):
    """An option or sampling setting is out of its range, or two of them contradict each other."""


class GrammarFailed(DraftHeadsError):
    """The grammar of a request exceeds a limit in the middle of the answer."""


class UnknownMethod(DraftHeadsError):
    """No draft-head architecture has that name."""


class InvalidTree(DraftHeadsError):
    """The paths do not form a tree, or the tree is deeper than the head has draft positions."""


class CheckpointError(DraftHeadsError):
    """A saved head cannot be used."""


class CheckpointMismatch(CheckpointError):
    """The head was made for another base model or another tokenizer."""


class CheckpointCorrupt(CheckpointError):
    """The saved head has missing or surplus tensors, wrong shapes or unknown keys."""


class DataError(DraftHeadsError):
    """Data does not have the expected form.

    >>> print(DataError("no 'messages' key", path="chat.jsonl", line_number=3))
    chat.jsonl, line 3: no 'messages' key
    """

    path: str | None  # of the file; None if the data is not from a file
    line_number: int | None  # the line with the error, counted from 1

    def __init__(
        self, message: str, *, path: str | PathLike[str] | None = None, line_number: int | None = None
    ) -> None:
        self.path = None if path is None else fspath(path)
        self.line_number = line_number
        line = None if line_number is None else f"line {line_number}"
        place = ", ".join(part for part in (self.path, line) if part)
        super().__init__(f"{place}: {message}" if place else message)


class UnlearnableChat(DataError):
    """Nothing can be learned from this chat; others may do."""


class TrainingError(DraftHeadsError):
    """Training cannot continue."""


class NonFiniteLoss(TrainingError):
    """The training loss became NaN or infinite."""


class EndpointError(DraftHeadsError):
    """A server cannot be reached, refuses the request, or returns an invalid response."""


class QueueFull(DraftHeadsError):
    """Too many requests wait for a place."""

    retry_after: float  # seconds

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class TooLarge(DraftHeadsError):
    """A request does not fit into the memory for keys and values, even alone."""


class ShuttingDown(DraftHeadsError):
    """The server is shutting down and takes no more requests."""


class DeviceLost(DraftHeadsError):
    """The accelerator computes nothing any more: only a new process can use it."""


class DistillationInterrupted(DraftHeadsError):
    """Ctrl-C stopped a distillation; the same command resumes it."""


class StorageError(DraftHeadsError):
    """A file or folder could not be written; the previous content is unchanged."""


class MissingDependency(DraftHeadsError):
    """An optional package is not installed; of an extra of draftheads, the message also names the packages.

    >>> print(MissingDependency("serving needs uvicorn", pip_install="uvicorn"))
    serving needs uvicorn; install it with: pip install uvicorn
    >>> print(MissingDependency("adapters need peft", extra="lora"))
    adapters need peft; install it with: pip install '.[lora]' in a checkout of draftheads, or pip install 'peft>=0.18'
    """

    def __init__(self, message: str, *, pip_install: str | None = None, extra: str | None = None) -> None:
        if extra:  # draftheads is on no index yet, so pip knows its extras in a checkout only
            needed = next((found.requires for found in distributions(name="draftheads")), None) or []
            packages = [text.split(";")[0] for text in needed if f"extra == '{extra}'" in text]
            pip_install = f"'.[{extra}]' in a checkout of draftheads"
            pip_install += f", or pip install {shlex.join(packages)}" if packages else ""
        super().__init__(f"{message}; install it with: pip install {pip_install}" if pip_install else message)


def close_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; None if none is near.

    >>> close_name("hydar", ["medusa", "hydra"])
    'hydra'
    """
    return next(iter(get_close_matches(name, list(known), 1)), None)


_OF_OTHERS = {  # names of arguments in transformers and vLLM that are not close to ours
    "do_sample": "temperature",
    "dtype": "precision",
    "load_in_4bit": "four_bit",
    "load_in_8bit": "precision='int8'",
    "max_length": "max_new_tokens",
    "max_num_seqs": "max_batch_size",
    "pretrained_model_name_or_path": "model",
    "stop_strings": "stop",
    "torch_dtype": "precision",
}


def no_such(what: str, name: str, known: Iterable[str]) -> InvalidSettings:
    """The error for an unknown name, with the one that was probably meant; also for a name of another library.

    >>> print(no_such("setting", "top_q", ["top_k", "seed"]))
    no setting 'top_q'; did you mean top_k?
    >>> print(no_such("setting", "stop_strings", ["stop", "stop_token_ids"]))
    no setting 'stop_strings'; did you mean stop?
    """
    known, ours = sorted(known), _OF_OTHERS.get(name, "")
    close = ours if ours.partition("=")[0] in known else close_name(name, known)
    hint = f"did you mean {close}?" if close else f"choose among {', '.join(known)}"
    return InvalidSettings(f"no {what} {name!r}; {hint}")


def require_at_least(least: int, **values: int | None) -> None:
    """Raises :class:`InvalidSettings` if a value is no integer, or below ``least``; None is allowed.

    >>> require_at_least(1, num_heads=0)
    Traceback (most recent call last):
        ...
    draftheads.errors.InvalidSettings: num_heads is 0; it must be at least 1
    """
    for name, value in values.items():
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
            raise InvalidSettings(f"{name} is {value!r}; it must be an integer of at least {least}")
        if value is not None and value < least:
            raise InvalidSettings(f"{name} is {value}; it must be at least {least}")


def require_bool(**values: object) -> None:
    """Raises :class:`InvalidSettings` if a value is neither True nor False.

    >>> require_bool(copy="yes")
    Traceback (most recent call last):
        ...
    draftheads.errors.InvalidSettings: copy is 'yes'; it must be True or False
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise InvalidSettings(f"{name} is {value!r}; it must be True or False")


def first_line(error: BaseException) -> str:
    r"""The first line of another package's error; its class where it has no text.

    >>> first_line(ValueError("bad\nmore")), first_line(KeyError())
    ('bad', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class DraftHeadsWarning(UserWarning):
    """The base class of all warnings of this package."""


class ChatTemplateWarning(DraftHeadsWarning):
    """There is no chat template, so prompts are read as plain text; or its variables do not fit or do nothing."""


class BaseModelWarning(DraftHeadsWarning):
    """A head drafts for a model that differs from the one it was trained for, by its layers or by what is accepted."""


class SpeedWarning(DraftHeadsWarning):
    """Decoding is slower than it could be. The text is the same."""


class RoundingWarning(DraftHeadsWarning):
    """A pass over a tree differs from one over a text by more than the model's own rounding explains."""


class LengthWarning(DraftHeadsWarning):
    """Texts end before the length that the model's configuration allows."""


class TextOnlyWarning(DraftHeadsWarning):
    """A model reads more than text, and is used for text alone."""


class AdapterWarning(DraftHeadsWarning):
    """An adapter has settings that the installed peft does not know; they are switched off."""


class ConfigWarning(DraftHeadsWarning):
    """A model's configuration has keys that nothing reads."""


class GenerationWarning(DraftHeadsWarning):
    """The model's generation configuration changes texts of ``generate`` in ways that are not applied here."""


class DataWarning(DraftHeadsWarning):
    """Files of data have columns that are not read, or lines that were left out."""


class EndpointWarning(DraftHeadsWarning):
    """A server of several fails; the others get its work."""


class CacheWarning(DraftHeadsWarning):
    """The cache of measurements is damaged or cannot be written; decoding works without it."""
