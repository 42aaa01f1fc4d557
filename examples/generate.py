"""Answers prompts with a draft head, and shows how many tokens each step had.

python examples/generate.py --model smollm2-135m --head hydra
"""

import tyro

import draftheads


def main(model: str = "smollm2-135m", head: str = "hydra", max_new_tokens: int = 64) -> None:
    engine = draftheads.load(model, head=head)
    for result in engine.generate(["Why is the sky blue?", "Name three fruits."], max_new_tokens=max_new_tokens):
        print(f"{result.text}\n[{result.tokens_per_step:.2f} tokens per step, {result.finish_reason}]\n")
    for event in engine.stream("Why is the sky blue?", max_new_tokens=max_new_tokens, temperature=0.7, seed=1):
        print(event.text, end="", flush=True)
    print()


if __name__ == "__main__":
    tyro.cli(main)
