"""Texts whose hidden states vLLM extracted (its method ``extract_hidden_states``), read from its files on access.

vLLM writes a file for each request: ``token_ids`` (T,) and ``hidden_states`` (T, n, D), the outputs of n chosen layers.
Those of the last layer are not normed; h_t is, so the target's last norm is applied here. A file does not say which
layers it has. They are found by comparing the beginning of a few texts with what the target computes for them. Of
up to a thousand files the first tokens that only its text has are compared, too; of more files the likelihood of the
last tokens decides which are. Without the target's layers nothing can be computed: the files must have the layers that
are read, in their order, and the last one, and the likelihood is looked at in all files.
"""

import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.data.features import Document, LiveStore, Texts, read_alone
from draftheads.data.texts import EncodedChat
from draftheads.errors import DataError, DataWarning, UnsupportedModel
from draftheads.models.model import TargetModel
from draftheads.speculation.draft import as_logits
from draftheads.utils.counts import counted

NUM_COMPARED = 3  # texts
MOST_COMPARED = 256  # tokens of each
_NUM_OWN = 8  # tokens that are compared of a file
_MOST_FILES = 1000  # that are compared; a pass of the target for each of a million files would take hours
_TENSORS = {"token_ids", "hidden_states"}
_AGAIN = "delete it and extract its text again"
MOST_LIKELY, _FEWEST_LIKELY = 64, 16  # last tokens of a text whose likelihood is looked at
LIKELIER = 0.5  # nats; texts of people and models have 5 or more, states of another text about 0
LIMIT = 0.15  # of differences, see _difference; bf16 and fp32 differ by 0.02, neighbouring layers by 0.3 or more


class ExtractedStore(LiveStore):
    """The same texts as of a :class:`LiveStore`, with the hidden states of vLLM's files in place of the target's."""

    def __init__(
        self, target: TargetModel, texts: Sequence[EncodedChat], folder: Path, layers: Sequence[int] = ()
    ) -> None:
        """Finds the file of each text, and the layers in the files of a folder.

        A file may have further tokens after those of its text. A head reads the inputs of n ``layers``: index i is the
        output of layer i - 1, vLLM's layer id i.
        """
        super().__init__(target, texts, layers)
        self._files, num_shared = _files_of(self, folder)
        if (norm := target.final_norm) is None:
            raise UnsupportedModel(f"{target.model_id} has no known last norm, which outputs of the last layer need")
        self._norm: nn.Module = norm
        self._places = self._find_places() if target.has_layers else self._places_in_order()
        compared = range(0, len(self), -(-len(self) // _MOST_FILES)) if target.has_layers else ()
        for index, ids in enumerate(self.token_ids):
            problem = ""
            if index not in compared:
                last = self._normed(self._states(index, max(0, len(ids) - MOST_LIKELY), place=self._places[-1]))
                problem = likelihood_problem(target, last, ids)
            if index in compared or (problem and target.has_layers):  # a text of random characters is not likely
                self._compare(index, num_shared[index])
            elif problem:
                fix = f"{_AGAIN}, or leave a text of random characters out"
                raise DataError(f"{self._files[index]} ({self.sources[index]}): {problem}; {fix}")

    def __getitem__(self, index: int) -> Document:
        token_ids = self.token_ids[index]
        states = self._states(index)
        *inputs, last = (states[:, place] for place in self._places)
        hidden = torch.cat([*inputs, self._normed(last)], -1)
        if not hidden.isfinite().all():
            raise DataError(f"{self._files[index]}: hidden_states have NaN or infinite values; {_AGAIN}")
        return Document(hidden.to("cpu", torch.bfloat16), token_ids, self.loss_masks[index])

    def _states(self, index: int, start: int = 0, most: int | None = None, place: Any = slice(None)) -> Tensor:
        """(T, n, D) of a text or a part of its tokens, in the target's type; (T, D) of one place."""
        with _opened(self._files[index]) as file:
            states: Tensor = file.get_slice("hidden_states")[start : len(self.token_ids[index][:most]), place]
        return states.to(self.target.device, self.target.dtype)

    def _compare(self, index: int, num_shared: int) -> None:
        """Compares the first tokens that a text does not share with the others: its file may be of another text."""
        most = min(num_shared + _NUM_OWN, MOST_COMPARED)
        expected = read_alone(self.target, self.token_ids[index][:most])[-_NUM_OWN:].to(self.target.device)
        found = self._normed(self._states(index, most=most)[-_NUM_OWN:, self._places[-1]])
        difference = _difference(self._logits(found), self._logits(expected))
        if not difference <= LIMIT:
            raise DataError(
                f"{self._files[index]}: the hidden states are not those of the tokens: the logits differ by "
                f"{difference:.1%} from {self.target.model_id}'s, and at most {LIMIT:.0%} is allowed; {_AGAIN}"
            )

    @torch.inference_mode()
    def _normed(self, states: Tensor) -> Tensor:
        """h_t of the outputs of the last layer: (T, D) -> (T, D)."""
        normed: Tensor = self._norm(states[None])[0]
        return normed

    def _find_places(self) -> list[int]:
        """Where the files have the inputs of each of the ``layers``, and then the last layer's outputs."""
        texts = range(min(NUM_COMPARED, len(self)))
        computed = [read_alone(self.target, self.token_ids[i][:MOST_COMPARED], self.layers).float() for i in texts]
        stored = [self._states(i)[:MOST_COMPARED] for i in texts]
        *inputs, last = torch.cat(computed).to(self.target.device).split(self.target.hidden_size, -1)
        candidates = torch.cat(stored).unbind(1)
        places = []
        for layer, expected in zip(self.layers, inputs, strict=True):
            differences = [_difference(states.float(), expected) for states in candidates]
            places.append(self._least(differences, f"inputs of layer {layer}", layer))
        logits = self._logits(last)
        differences = [_difference(self._logits(self._normed(states)), logits) for states in candidates]
        return [*places, self._least(differences, "logits", len(self.target.layer_kinds))]

    def _places_in_order(self) -> list[int]:
        """The same where the files have exactly these layers: vLLM writes them in ascending order."""
        wanted = sorted({*self.layers, len(self.target.layer_kinds)})
        with _opened(self._files[0]) as file:
            count = file.get_slice("hidden_states").get_shape()[1]
        if count != len(wanted):
            have = f"{self._files[0].parent}: the files have {counted(count, 'layer')}, and {len(wanted)} are read"
            fix = f"extract with eagle_aux_hidden_state_layer_ids {wanted}, or give this machine more memory"
            raise DataError(f"{have}, which cannot be found without the model's layers: {fix}")
        return [*map(wanted.index, self.layers), len(wanted) - 1]

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden.to(self.target.dtype)).float()

    def _least(self, differences: list[float], what: str, vllm_id: int) -> int:
        """The place of the smallest difference to what layer ``vllm_id`` of the files should give."""
        least = min(differences)
        if not least <= LIMIT:
            raise DataError(
                f"{self._files[0].parent}: the {what} of {self.target.model_id} are in none of "
                f"{counted(len(differences), 'layer')} of the files: the nearest differs by {least:.1%}, and at most "
                f"{LIMIT:.0%} is allowed. Give the model that vLLM served, and add {vllm_id} to "
                "eagle_aux_hidden_state_layer_ids when you extract"
            )
        return differences.index(least)


@torch.inference_mode()
def likelihood_problem(target: TargetModel, hidden: Tensor, token_ids: Tensor) -> str:
    """Why these cannot be the hidden states of the tokens, or "". Needs only a few rows of the lm_head.

    After each state the next token must be likelier than the text's other tokens are. The last tokens are looked at,
    as many texts begin in the same way; texts of few tokens, or of a single one, are not. A text of random characters
    and a model that was never trained look like wrong states.

    Args:
        target: whose states they are.
        hidden: h_t (T, D) of the last tokens.
        token_ids: of the whole text.
    """
    hidden = hidden[-MOST_LIKELY:-1].to(target.device, target.dtype)  # (n, D)
    following = token_ids[-len(hidden) :].to(target.device)
    others = following[:, None] != following
    told = others.any(1)
    if int(told.sum()) < _FEWEST_LIKELY:
        return ""
    weights = target.weights
    bias = None if weights.lm_head_bias is None else weights.lm_head_bias[following]
    logits = F.linear(hidden, weights.lm_head[following], bias)  # (n, n): of each token of the text
    logits = as_logits(logits, weights.logit_scale, weights.logit_softcap).float()
    usual = logits.masked_fill(~others, 0.0).sum(1) / others.sum(1)
    gain = float((logits.diagonal() - usual)[told].mean())
    if gain >= LIKELIER:
        return ""
    problem = f"the hidden states are not those of the text, or not of {target.model_id}"
    return (
        f"{problem}: the next tokens are {gain:.2f} nats likelier than others of the text, expected {LIKELIER} or more"
    )


def _difference(states: Tensor, expected: Tensor) -> float:
    """The median over tokens of |a - b| / |b|, b without its mean, which no softmax and no layer norm sees.

    Few tokens, such as the first one, have states that are far larger than the others'; a median does not count them.
    """
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((states - expected).norm(dim=-1) / spread).median())


def _in_order(texts: Texts) -> tuple[list[tuple[bytes, int]], list[int], list[int]]:
    """Texts by their tokens, the places of those that begin them (-1: none), how many tokens it shares with others."""
    keys = sorted((_key(texts.part(index)[0]), index) for index in range(len(texts)))
    before, begun, shared = [-1], [0], [0] * len(keys)
    for place, ((last, other), (key, index)) in enumerate(pairwise(keys), 1):
        while begun and not key.startswith(keys[begun[-1]][0]):
            begun.pop()
        before.append(begun[-1] if begun else -1)
        begun.append(place)
        shared[index] = _num_shared(last, key)
        shared[other] = max(shared[other], shared[index])
    return keys, before, shared


def _files_of(store: LiveStore, folder: Path) -> tuple[list[Path], list[int]]:
    """The file of each text, and how many tokens it shares with another one. Tokens of files are not kept."""
    keys, before, shared = _in_order(store.texts)
    files: list[Path | None] = [None] * len(keys)
    unread, width, size, path = set[str](), None, store.target.hidden_size, None
    for path in sorted(folder.rglob("*.safetensors")):
        with _opened(path) as file:
            unread |= {*file.keys()} - _TENSORS
            token_ids, stored = file.get_tensor("token_ids").flatten(), file.get_slice("hidden_states")
            shape, is_float = stored.get_shape(), "F" in stored.get_dtype()
            if token_ids.is_floating_point() or not is_float or shape[::2] != [len(token_ids), size] or len(shape) != 3:
                what = f"{stored.get_dtype()} {shape}, expected floats [{len(token_ids)}, layers, {size}]"
                raise DataError(f"{path}: hidden_states are {what}, and token_ids whole numbers; {_AGAIN}")
            if shape[1] != (width := width or shape[1]):
                raise DataError(f"{path} has {shape[1]} layers, and files before it have {width}; give one kind")
        own = _key(token_ids.numpy())
        place = bisect_right(keys, (own, len(keys))) - 1  # each text that begins the file is this one or begins it
        while place >= 0 and files[keys[place][1]] is None:
            if own.startswith(keys[place][0]):
                files[keys[place][1]] = path
            place = before[place]
    if path is None:
        raise DataError(f"{folder} has no .safetensors file")
    if unread:
        warnings.warn(f"{folder}: tensors {', '.join(sorted(unread))} are not read", DataWarning, stacklevel=3)
    if missing := [index for index, found in enumerate(files) if found is None]:
        texts = f"{counted(len(missing), 'text')} of {len(store)}, the first is {store.sources[missing[0]]}"
        fix = "a file must begin with the tokens that training reads; give vLLM these tokens as prompts"
        raise DataError(f"{folder} has no hidden states of {texts}: {fix}")
    return [found for found in files if found is not None], shared


def _key(token_ids: np.ndarray) -> bytes:
    """Bytes in the order of the tokens: a text that begins another one is a prefix of it, and comes before it."""
    return token_ids.astype(">i4").tobytes()


def _num_shared(one: bytes, other: bytes) -> int:
    """How many tokens two keys begin with together."""
    size = min(len(one), len(other)) // 4
    differ = np.flatnonzero(np.frombuffer(one, ">i4", size) != np.frombuffer(other, ">i4", size))
    return int(differ[0]) if len(differ) else size


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            if missing := _TENSORS - set(file.keys()):
                raise DataError(f"{path} has no {' and no '.join(sorted(missing))}, so it is not one of vLLM's files")
            yield file
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: {error}; {_AGAIN}") from None
