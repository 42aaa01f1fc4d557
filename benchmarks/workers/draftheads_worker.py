"""Worker: draftheads, plain or with a draft head."""

from itertools import zip_longest
from typing import Any

from worker import Answers, Generate, Ids, serve

import draftheads


def load(settings: dict[str, Any]) -> Generate:
    """Settings: ``name`` of the model, ``head`` or None, ``precision``, ``max_batch_size``; ``chain``, its length."""
    chain = settings.get("chain", 0)
    engine = draftheads.load(
        settings["name"],
        head=settings["head"],
        precision=settings["precision"],
        max_batch_size=settings["max_batch_size"],
        tree=draftheads.Tree.chain(chain) if chain else "auto",
        copy=not chain,
    )

    def generate(prompts: list[Ids], max_new_tokens: int) -> Answers:
        results = engine.generate(prompts, max_new_tokens=max_new_tokens)
        return Answers(
            [list(result.token_ids) for result in results],
            sum(result.num_steps for result in results),
            tuple(map(sum, zip_longest(*(result.accepted_by_depth for result in results), fillvalue=0))),
        )

    return generate


if __name__ == "__main__":
    serve(load, ("draftheads", "torch", "transformers"))
