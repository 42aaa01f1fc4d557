"""The model that servers are audited against, and the answers of its plain decoding."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import draftheads
from cli_world import PROMPTS
from draftheads.decode.engine import Engine
from fake_openai import Fields, asked, completion
from target_rows import Target

NEW_TOKENS = 24
PLAIN = '{"model": "tiny:plain"}'
Audit = Callable[..., dict[str, Any]]


class World:
    """The model in a folder, and the answers of its plain decoding."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.engine: Engine = draftheads.load(self.model, precision="fp32")
        results = self.engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
        self.plain = {prompt: result.text for prompt, result in zip(PROMPTS, results, strict=True)}
        self.ids = {prompt: result.token_ids for prompt, result in zip(PROMPTS, results, strict=True)}
        (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n", encoding="utf-8")

    def scores(self, prompt: str, place: int) -> torch.Tensor:
        """(V,) log-probabilities after so many tokens of the plain answer."""
        context = [*self.engine.encode(prompt), *self.ids[prompt][:place]]
        logits, _ = Target(self.engine.model).prefill([context])
        return logits[0].log_softmax(-1)

    def answer(self, fields: Fields, changed: Mapping[str, str] | None = None) -> tuple[int, Fields]:
        """The plain answer to a request, or the one to which it was changed."""
        prompt = asked(fields)
        return 200, completion({**self.plain, **(changed or {})}[prompt])

    def changed(self, *, is_tie: bool) -> tuple[str, int, float, str]:
        """The place where another letter is least unlikely, or one where it is very unlikely.

        Returns the prompt, the place, the gap in nats, and the changed answer.
        """
        found = []
        for prompt, ids in self.ids.items():
            for place in range(4, NEW_TOKENS - 4):
                scores = self.scores(prompt, place)
                others = scores.clone()
                others[ids[place]] = others[:4] = -torch.inf  # special tokens are no letters
                best = int(others.argmax())
                gap = float(scores[ids[place]] - scores[best])
                text = self.plain[prompt]
                letter = self.engine.model.tokenizer.decode([best])
                found.append((prompt, place, gap, text[:place] + letter + "mob" * 8))
        found = [(prompt, place, gap, text[:NEW_TOKENS]) for prompt, place, gap, text in found]
        choose = min if is_tie else max
        return choose(found, key=lambda one: one[2])


def of_model(world: World, *checks: str) -> list[str]:
    return ["--model", str(world.model), "--checks", *(checks or ["greedy"])]
