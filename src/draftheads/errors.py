"""Everything that ``draftheads`` raises on purpose: one tree, so that one ``except`` catches it all.

::

    DraftHeadsError
    ├── ModelNotFound           no such folder, and the Hub does not give it
    ├── UnsupportedModel        there, but not a model that trees can be verified on
    ├── InvalidPrompt           empty, or not what a prompt is
    │   └── PromptTooLong       longer than the model allows
    ├── InvalidSettings         an option or sampling setting out of its range
    ├── UnknownMethod           no draft-head architecture of that name
    ├── InvalidTree             not a tree, or deeper than the heads guess
    ├── CheckpointError         a saved head cannot be used
    │   ├── CheckpointMismatch  made for another model or tokenizer
    │   └── CheckpointCorrupt   missing or surplus tensors, wrong shapes, unknown keys
    ├── DataError               malformed training or prompt data, with its line
    ├── TrainingError           training cannot go on
    │   └── NonFiniteLoss       the loss became NaN or infinite
    ├── EndpointError           a server that was asked for answers gives none
    ├── DistillationInterrupted Ctrl-C stopped a distillation that can go on
    ├── StorageError            a file could not be written; nothing is left half-written
    └── MissingDependency       an optional package is not installed; the text has its pip line

Messages carry both values and the mend. A broken invariant of our own is an ``assert``, never one of these.
"""

from os import PathLike, fspath


class DraftHeadsError(Exception):
    """Whatever this package raises on purpose."""


class ModelNotFound(DraftHeadsError):
    """The named model is neither a folder here nor to be had from the Hugging Face Hub."""


class UnsupportedModel(DraftHeadsError):
    """The model exists, but is no causal language model whose cache can be rewound."""


class InvalidPrompt(DraftHeadsError):
    """The prompt has no token, or is not of a prompt's form."""


class PromptTooLong(InvalidPrompt):
    """The prompt has more tokens than the model allows."""


class InvalidSettings(DraftHeadsError):
    """An option or sampling setting is out of its range, or two of them contradict each other."""


class UnknownMethod(DraftHeadsError):
    """No draft-head architecture has that name."""


class InvalidTree(DraftHeadsError):
    """The paths form no tree, or the tree is deeper than the heads can guess."""


class CheckpointError(DraftHeadsError):
    """A saved head cannot be used."""


class CheckpointMismatch(CheckpointError):
    """The head was made for another base model or another tokenizer."""


class CheckpointCorrupt(CheckpointError):
    """The saved head has missing or surplus tensors, wrong shapes or unknown keys."""


class DataError(DraftHeadsError):
    """Data that cannot be read as what it should be.

    >>> print(DataError("no 'messages' key", path="chat.jsonl", line_number=3))
    chat.jsonl, line 3: no 'messages' key
    """

    path: str | None  # of the file, where there is one
    line_number: int | None  # of the offending line, counted from 1

    def __init__(
        self, message: str, *, path: str | PathLike[str] | None = None, line_number: int | None = None
    ) -> None:
        self.path = None if path is None else fspath(path)
        self.line_number = line_number
        line = None if line_number is None else f"line {line_number}"
        place = ", ".join(part for part in (self.path, line) if part)
        super().__init__(f"{place}: {message}" if place else message)


class TrainingError(DraftHeadsError):
    """Training cannot go on."""


class NonFiniteLoss(TrainingError):
    """The training loss became NaN or infinite."""


class EndpointError(DraftHeadsError):
    """A server that was asked for answers cannot be reached, refuses, or says what cannot be understood."""


class DistillationInterrupted(DraftHeadsError):
    """Ctrl-C stopped a distillation; the same command goes on with it."""


class StorageError(DraftHeadsError):
    """A file or folder could not be written; whatever stood at its place before still does."""


class MissingDependency(DraftHeadsError):
    """An optional package is not installed.

    >>> print(MissingDependency("serving needs uvicorn", pip_install="uvicorn"))
    serving needs uvicorn; install it with: pip install uvicorn
    """

    def __init__(self, message: str, *, pip_install: str | None = None) -> None:
        super().__init__(f"{message}; install it with: pip install {pip_install}" if pip_install else message)


class ChatTemplateWarning(UserWarning):
    """A chat prompt is read as plain text, because the model has no chat template."""


class CacheWarning(UserWarning):
    """The cache of measurements is damaged or cannot be written; decoding works without it."""
