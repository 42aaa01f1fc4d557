"""The corpus of ``--corpus``: texts and earlier answers in files, as an index that the user's cache keeps."""

import contextlib
import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from draftheads.data.json_lines import at_line, read_json_lines
from draftheads.data.plain_text import read_texts
from draftheads.data.records import chat_of
from draftheads.drafters.corpus import Corpus, index_texts
from draftheads.errors import CacheWarning, DataError, InvalidSettings, StorageError
from draftheads.models.fingerprint import tokenizer_fingerprint
from draftheads.utils.cache import cache_folder
from draftheads.utils.files import atomic_directory, user_path
from draftheads.utils.messages import half_character
from draftheads.utils.progress import Progress, counted_stage, shown

MOST_KEPT = 4  # indices in the cache; each folder of records that grows makes a new one at each start
MOST_TOKENS = 1 << 24  # of a corpus; they take 128 MiB, and up to 1.8 GiB while they are read and sorted
_FORMAT = 1  # of the index in the cache
_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz")


def load_corpus(
    path: str | PathLike[str], tokenizer: Any, *, vocab_size: int, progress: Progress | bool = True
) -> Corpus:
    """The index of texts, sorted once and then read from the user's cache.

    ``path`` is a ``.txt`` file, which is one text; a ``.jsonl`` (``.gz``) file, each line of which has a ``"text"`` or
    is a chat, of which the answers count; or a folder of such files, also one of ``serve --record``. An incomplete last
    line of a file in a folder is skipped: a server may be writing it. ``vocab_size`` is the model's; a tokenizer may
    have more tokens.

    Raises:
        DataError: a file cannot be read, a line is neither text nor chat, there is no file or no token, or there are
            more than 16,777,216 tokens or one that the model does not have.

    Warns:
        CacheWarning: the index cannot be written to the cache.
    """
    path = user_path(path)
    files = _files(path)
    folder = _folder(files, f"{_FORMAT} {tokenizer_fingerprint(tokenizer)} {vocab_size} {path.is_dir()}")
    if folder is not None and (saved := _saved(folder)) is not None:
        with contextlib.suppress(OSError):
            os.utime(folder)  # used now
        return saved
    progress = shown(progress)
    texts = _token_ids(files, tokenizer, vocab_size, progress, may_be_torn=path.is_dir())
    progress.stage("sorting the corpus")
    corpus = index_texts(texts, progress=progress)
    if folder is not None:
        try:
            with atomic_directory(folder, replace=True) as new:
                np.save(new / "ids.npy", corpus.ids)
                np.save(new / "places.npy", corpus.places)
            _forget_oldest(folder.parent)
        except StorageError as error:
            warnings.warn(f"{error}: the corpus is sorted again at each start", CacheWarning, stacklevel=2)
    return corpus


def _files(path: Path) -> list[Path]:
    """The file, or all files of texts in a folder and its folders, by name."""
    if path.is_dir():
        if files := sorted(file for file in path.rglob("*") if file.name.endswith(_SUFFIXES) and file.is_file()):
            return files
        raise DataError(f"cannot be read: the folder has no {', '.join(_SUFFIXES)} file", path=path)
    if not path.name.endswith(_SUFFIXES):
        raise DataError(f"give a {', '.join(_SUFFIXES)} file or a folder of such files", path=path)
    return [path]


def _folder(files: Sequence[Path], key: str) -> Path | None:
    """Where the index of files with this content is kept, read in this way; None if there is no place for a cache."""
    try:
        folder = cache_folder() / "corpora"
    except InvalidSettings:
        return None
    digest = hashlib.sha256(key.encode())
    for file in files:
        try:
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", path=file) from None
        digest.update(file.suffix.encode())
    return folder / digest.hexdigest()[:24]


def _saved(folder: Path) -> Corpus | None:
    """The index in a folder, mapped into memory; None if it is missing or damaged."""
    try:
        ids, places = (np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ("ids", "places"))
    except (OSError, ValueError, EOFError):
        return None
    is_whole = ids.dtype == places.dtype == np.int32 and ids.ndim == places.ndim == 1 and len(places) == len(ids) - 1
    return Corpus(ids, places) if is_whole else None


def _forget_oldest(cache: Path) -> None:
    """Keeps the :data:`MOST_KEPT` indices that were used last."""
    with contextlib.suppress(OSError):  # another process may delete some, too
        indices = [entry for entry in cache.iterdir() if re.fullmatch("[0-9a-f]{24}", entry.name)]
        for entry in sorted(indices, key=lambda entry: entry.stat().st_mtime)[:-MOST_KEPT]:
            shutil.rmtree(entry, ignore_errors=True)


def _token_ids(
    files: Sequence[Path], tokenizer: Any, vocab_size: int, progress: Progress, *, may_be_torn: bool
) -> list[list[int]]:
    """The texts of all files as token ids. ``may_be_torn`` as for :func:`read_json_lines`."""
    texts: list[list[int]] = []
    total = 0
    own_fingerprint = tokenizer_fingerprint(tokenizer)
    advance = counted_stage(progress, "reading the corpus", len(files))
    for file in files:
        for text in _texts(file, own_fingerprint, may_be_torn=may_be_torn):
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"]) if isinstance(text, str) else text
            if max(ids, default=0) >= vocab_size:
                raise DataError(
                    f"the token {max(ids)} is not in the model's vocabulary of {vocab_size} tokens", path=file
                )
            texts.append(ids)
            total += len(ids)
            if total > MOST_TOKENS:
                raise DataError(f"the corpus has more than {MOST_TOKENS:,} tokens; give fewer texts", path=file)
        advance()
    if not total:
        raise DataError("the corpus has no text", path=files[0])
    return texts


def _texts(file: Path, own_fingerprint: str, *, may_be_torn: bool) -> Iterator[str | list[int]]:
    """Texts of a file, or token ids where these were recorded."""
    if file.suffix == ".txt":
        yield from (text for text, _ in read_texts(file))
        return
    for line_number, value in read_json_lines(file, may_be_torn=may_be_torn):
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            if problem := half_character(value["text"]):
                raise DataError(problem, path=file, line_number=line_number)
            yield value["text"]
            continue
        record = chat_of(value, file, line_number)
        if record.tokens is None:
            yield from (message["content"] for message in record.messages if message["role"] == "assistant")
        else:
            with at_line(file, line_number):
                record.tokens.check_tokenizer(own_fingerprint)
            yield list(record.tokens.answer_ids)
