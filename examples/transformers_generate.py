"""Decodes a batch with ``generate`` of transformers, with and without a draft head, and compares texts and times.

python examples/transformers_generate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --head hydra
"""

import time
from typing import Any

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

import draftheads

QUESTIONS = ["Why is the sky blue?", "Name three fruits.", "What is 12 times 7?", "Write a haiku about rain."]


def main(model: str = "HuggingFaceTB/SmolLM2-135M-Instruct", head: str = "hydra", max_new_tokens: int = 64) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    language_model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    options = {"add_generation_prompt": True, "padding": True, "return_dict": True, "return_tensors": "pt"}
    inputs = tokenizer.apply_chat_template(chats, **options)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "repetition_penalty": 1.1}
    drafting = draftheads.custom_generate(head)
    drafting.engine(language_model)  # else the first call prepares the model
    texts: list[Any] = []
    for custom in (None, drafting):
        begin = time.perf_counter()
        texts.append(language_model.generate(**inputs, **settings, custom_generate=custom))
        print(f"{texts[-1].shape[1] - inputs['input_ids'].shape[1]} places in {time.perf_counter() - begin:.1f} s")
    print(tokenizer.batch_decode(texts[1], skip_special_tokens=True)[0])
    print("the same text as generate:", torch.equal(*texts))


if __name__ == "__main__":
    tyro.cli(main)
