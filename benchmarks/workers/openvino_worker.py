"""Worker: OpenVINO GenAI on an exported model, its prompt lookup, and its drafts with an exported EAGLE-3 head."""

from typing import Any

import numpy as np
import openvino_genai
from openvino import Tensor
from worker import Answers, Generate, Ids, serve

_LOOKUP_TOKENS, _LONGEST_NGRAM = 5, 3  # as in OpenVINO GenAI's example


def load(settings: dict[str, Any]) -> Generate:
    """Settings: ``model`` folder, ``threads``, ``lookup``, ``max_batch_size``; or ``draft`` folder and ``config``."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # or a prompt that was answered before is not read again
    scheduler.max_num_seqs = settings["max_batch_size"]
    scheduler.cache_size = 1  # GB
    if settings.get("draft"):
        return _with_draft(settings, scheduler)
    options = {"prompt_lookup": True} if settings["lookup"] else {}
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        settings["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": settings["threads"], **options}
    )

    def generate(prompts: list[Ids], max_new_tokens: int) -> Answers:
        config = pipeline.get_config()
        config.max_new_tokens, config.do_sample = max_new_tokens, False
        if settings["lookup"]:
            config.num_assistant_tokens, config.max_ngram_size = _LOOKUP_TOKENS, _LONGEST_NGRAM
        rows = [Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = pipeline.generate(rows, [config] * len(prompts))
        return Answers([list(result.m_generation_ids[0]) for result in results])

    return generate


def _with_draft(settings: dict[str, Any], scheduler: Any) -> Generate:
    draft = openvino_genai.draft_model(settings["draft"], "CPU")
    pipeline = openvino_genai.LLMPipeline(settings["model"], "CPU", scheduler_config=scheduler, draft_model=draft)

    def generate(prompts: list[Ids], max_new_tokens: int) -> Answers:
        answers, steps = [], 0
        for ids in prompts:
            config = pipeline.get_generation_config()
            config.max_new_tokens, config.do_sample = max_new_tokens, False
            for name, value in settings["config"].items():
                setattr(config, name, value)
            result = pipeline.generate(Tensor(np.array([ids], dtype=np.int64)), config)
            answers.append(list(result.tokens[0]))
            # the first token is the prompt's
            steps += len(answers[-1]) - 1 - result.extended_perf_metrics.get_num_accepted_tokens()
        return Answers(answers, steps)

    return generate


if __name__ == "__main__":
    serve(load, ("openvino_genai", "openvino"))
