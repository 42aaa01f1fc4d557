"""Worker: ``generate`` of transformers, and its prompt lookup."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from worker import Answers, Generate, Ids, serve, until_end

_LOOKUP_TOKENS = 10  # as in transformers' documentation


def load(settings: dict[str, Any]) -> Generate:
    """Settings: ``model`` folder, ``dtype``, ``lookup``."""
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()
    pad_id, end_id = model.config.pad_token_id, model.config.eos_token_id
    options = {"do_sample": False, "pad_token_id": pad_id}
    if settings["lookup"]:
        options["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS

    def generate(prompts: list[Ids], max_new_tokens: int) -> Answers:
        length = max(map(len, prompts))
        rows = torch.tensor([[pad_id] * (length - len(ids)) + ids for ids in prompts])  # (B, T)
        mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts])
        with torch.inference_mode():
            out = model.generate(rows, attention_mask=mask, max_new_tokens=max_new_tokens, **options)
        return Answers([until_end(row, {end_id}) for row in out[:, length:].tolist()])

    return generate


if __name__ == "__main__":
    serve(load, ("transformers", "torch"))
