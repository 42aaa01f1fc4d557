"""Worker: llama-cpp-python on a GGUF file, and its prompt lookup.

Its Python interface answers one prompt at a time; a batch is decoded through its binding of llama.cpp's own functions.
"""

import ctypes
import statistics
import time
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from worker import Answers, Generate, Ids, serve, until_end

_LOOKUP_TOKENS = 2  # llama-cpp-python's advice for machines without a GPU


def load(settings: dict[str, Any]) -> Generate:
    """Settings: ``gguf`` file, ``threads``, ``lookup``, ``max_length``, ``max_batch_size``.

    With ``nodes`` and ``repeats`` a single prompt is answered as by :meth:`Batched.measured`. With ``source`` and
    ``kind`` the file is first made of another one.
    """
    if "source" in settings:
        quantise(Path(settings["source"]), Path(settings["gguf"]), settings["kind"])
    llama = llama_cpp.Llama(
        settings["gguf"],
        n_ctx=settings["max_length"],
        n_threads=settings["threads"],
        n_threads_batch=settings["threads"],
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=_LOOKUP_TOKENS) if settings["lookup"] else None,
        verbose=False,
    )
    batched: list[Batched] = []  # made when it is first needed

    def generate(prompts: list[Ids], max_new_tokens: int) -> Answers:
        if len(prompts) == 1 and "nodes" not in settings:
            llama.reset()  # or a prompt that was answered before is not read again
            answer = islice(llama.generate(prompts[0], temp=0.0), max_new_tokens)
            return Answers([until_end(answer, {llama.token_eos()})])
        if settings["lookup"]:
            raise NotImplementedError("llama-cpp-python has no prompt lookup for batches")
        if not batched:
            batched.append(Batched(llama, settings))
        if "nodes" in settings and len(prompts) == 1:
            nodes = settings["nodes"] if max_new_tokens > 1 else []
            return batched[0].measured(prompts[0], max_new_tokens, nodes, settings["repeats"])
        return Answers(batched[0].generate(prompts, max_new_tokens))

    return generate


class Batched:
    """Several prompts together, each a sequence of one context."""

    def __init__(self, llama: llama_cpp.Llama, settings: dict[str, Any]) -> None:
        self._num_tokens, self._end_id = llama.n_vocab(), llama.token_eos()
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_seq_max = settings["max_batch_size"]
        parameters.n_ctx = parameters.n_batch = settings["max_length"] * settings["max_batch_size"]
        parameters.n_threads = parameters.n_threads_batch = settings["threads"]
        if "nodes" in settings:  # passes of 4 to 16 tokens are a tenth faster so, and those of one as fast (1.1b, AVX2)
            parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(llama.model, parameters)
        self._batch = llama_cpp.llama_batch_init(parameters.n_batch, 0, 1)

    def generate(self, prompts: list[Ids], max_new_tokens: int) -> list[Ids]:
        """Greedy answers to at most ``max_batch_size`` prompts."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)  # noqa: FBT003 - a C function
        answers: list[Ids] = [[] for _ in prompts]
        fed = dict(enumerate(prompts))
        positions = [0] * len(prompts)
        while fed:
            for row, token in self._decoded(fed, positions).items():
                positions[row] += len(fed[row])
                answers[row].append(token)
                fed[row] = [token]
                if token == self._end_id or len(answers[row]) == max_new_tokens:
                    del fed[row]
        return answers

    def measured(self, prompt: Ids, max_new_tokens: int, nodes: list[int], repeats: int) -> Answers:
        """A greedy answer that no token ends; then passes of several tokens behind the prompt, with logits of each."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, True)  # noqa: FBT003 - a C function
        answer = [self._decoded({0: prompt}, [0])[0]]
        start = time.perf_counter()
        for position in range(len(prompt), len(prompt) + max_new_tokens - 1):
            answer.append(self._decoded({0: answer[-1:]}, [position])[0])
        seconds, medians, position = time.perf_counter() - start, [], len(prompt) + max_new_tokens - 1
        for count in nodes:
            times = []
            for _ in range(repeats):
                if llama_cpp.llama_memory_seq_rm(memory, 0, len(prompt), -1):
                    position = len(prompt)  # recurrent states cannot go back: their passes follow one another
                before = time.perf_counter()
                self._decoded({0: prompt[:count]}, [position], all_logits=True)
                times.append(time.perf_counter() - before)
                position += count
            medians.append(statistics.median(times))
        return Answers([answer], decode_seconds=seconds, batch_seconds=tuple(medians))

    def _decoded(self, fed: dict[int, Ids], positions: list[int], *, all_logits: bool = False) -> dict[int, int]:
        """The best next token of each row behind the tokens that are fed."""
        batch, place, last = self._batch, 0, {}
        for row, ids in fed.items():
            for offset, token in enumerate(ids):
                batch.token[place], batch.pos[place] = token, positions[row] + offset
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
                batch.logits[place] = all_logits or offset == len(ids) - 1
                place += 1
            last[row] = place - 1
        batch.n_tokens = place
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        shape, found = (self._num_tokens,), {}
        for row, index in last.items():
            logits = llama_cpp.llama_get_logits_ith(self._context, index)
            found[row] = int(np.ctypeslib.as_array(logits, shape=shape).argmax())
        return found


def quantise(source: Path, path: Path, kind: str) -> None:
    """Another GGUF file in a type such as Q4_0, by the function of ``llama-quantize``."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama_cpp.llama_model_quantize(bytes(source), bytes(path), ctypes.byref(parameters)):
        raise RuntimeError(f"{source.name} cannot be quantised to {kind}")


if __name__ == "__main__":
    serve(load, ("llama_cpp_python",))
