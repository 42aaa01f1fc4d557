"""On the real model: plain text is transformers', speculative text is plain's, to the bit where promised."""

import shlex
from functools import cache
from pathlib import Path

import pytest
import torch

from draftheads import Engine, GenerationResult, TargetModel, Tree
from draftheads.checkpoints.checkpoint import resolve_head
from draftheads.checkpoints.registry import find_head, zoo_heads
from draftheads.cli.main import main
from draftheads.cpu.native_library import load_library
from draftheads.loading import engine_on, load_target
from draftheads.settings import ROUNDED_BITS, Precision
from draftheads.speculation.acceptance_profile import read_profile
from draftheads.speculation.shapes import Drafting
from families import PlantedDrafter, ids
from thorough import some

pytestmark = pytest.mark.real

MODEL = "smollm2-135m"
NEW_TOKENS = 20
BUNDLED = [head.method for head in zoo_heads() if head.base_name == MODEL]
PROMPTS = [
    "Why is the sky blue?",
    "Write a haiku about rain on a tin roof.",
    "List the first five prime numbers and say what a prime number is.",
]
TREE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)])


class Oracle(PlantedDrafter):
    """Plants what plain decoding said along a random path; where the text left it (a near-tie), it guesses noise."""

    def _coming(self, text: list[int]) -> tuple[int, ...]:
        prompt, answer = next((p, a) for p, a in self.answers.items() if tuple(text[: len(p)]) == p)
        return super()._coming(text) if tuple(text[len(prompt) :]) == answer[: len(text) - len(prompt)] else ()


def answers(engine: Engine, num_tokens: int) -> list[GenerationResult]:
    return engine.generate(PROMPTS, max_new_tokens=num_tokens)


def with_oracle(engine: Engine, plain: list[GenerationResult]) -> Engine:
    prompts = [tuple(engine.encode(prompt)) for prompt in PROMPTS]
    known = {prompt: result.token_ids for prompt, result in zip(prompts, plain, strict=True)}
    engine.drafter = Oracle(TREE, known)
    return engine


@pytest.fixture(scope="module")
def stock() -> TargetModel:
    return load_target(MODEL, precision="fp32", fast=False)


@cache
def fp32() -> TargetModel:
    """In bf16 near-ties may fall either way."""
    return load_target(MODEL, precision="fp32")


@cache
def plain_answers() -> list[GenerationResult]:
    return answers(Engine(fp32(), max_batch_size=1), NEW_TOKENS)


def test_plain_text_is_transformers_text(stock: TargetModel):
    for prompt, result in zip(PROMPTS, plain_answers(), strict=True):
        encoded = stock.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        length = encoded["input_ids"].shape[1]
        output = stock.model.generate(**encoded, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        assert result.token_ids == tuple(output[0, length:].tolist())
        assert result.num_prompt_tokens == length
        assert result.text == stock.tokenizer.decode(output[0, length:], skip_special_tokens=True)


@pytest.mark.parametrize("precision", some(["fp32", "bf16", *ROUNDED_BITS], *ROUNDED_BITS))
def test_speculative_text_is_plains(precision: Precision):
    if precision in ROUNDED_BITS and load_library() is None:
        pytest.skip("int8 and int4 need the native library")
    target, num_tokens = load_target(MODEL, precision=precision), 8 if precision in ROUNDED_BITS else 24
    if target.native is None and precision != "fp32":
        pytest.skip("without native passes it is plain decoding's up to near ties")
    plain = answers(Engine(target), num_tokens)
    found = answers(with_oracle(Engine(target), plain), num_tokens)
    assert ids(found) == ids(plain)
    assert num_tokens == 8 or 1.5 < sum(result.tokens_per_step for result in found) / len(found) < 4.0


@pytest.mark.thorough
def test_the_worst_margin_is_no_larger_with_drafts(stock: TargetModel):
    target = load_target(MODEL)
    plain = answers(Engine(target, max_batch_size=1), 24)
    engine = with_oracle(Engine(target), plain)
    prompts = [engine.encode(prompt) for prompt in PROMPTS]

    @torch.inference_mode()
    def worst(results: list[GenerationResult]) -> float:
        """The largest gap in fp32 between the best logit and the emitted token's."""
        margins = []
        for prompt, result in zip(prompts, results, strict=True):
            text = torch.tensor([[*prompt, *result.token_ids]])
            logits = stock.model(input_ids=text[:, :-1]).logits[0, len(prompt) - 1 :]  # (T, V)
            chosen = logits.gather(1, text[0, len(prompt) :, None])[:, 0]
            margins.append(float((logits.amax(-1) - chosen).max()))
        return max(margins)

    drafted = worst(answers(engine, 24))
    assert drafted <= max(1.5 * worst(plain), 1e-4)


@cache
def tokens_per_step(head: str) -> float:
    """Of a bundled head on trees of ten nodes, in fp32, where its text must be plain's."""
    resolved = resolve_head(head, MODEL)
    results = answers(engine_on(fp32(), resolved, Drafting(resolved.name, tree="10")), NEW_TOKENS)
    assert ids(results) == ids(plain_answers())
    return sum(len(result.token_ids) - 1 for result in results) / sum(r.num_steps for r in results)


@pytest.mark.parametrize("head", some(BUNDLED, "medusa", "hydra"))
def test_a_bundled_head_saves_steps(head: str):
    """Limits well under what it reaches on these prompts, and far above what a damaged head does (1.0 to 1.2)."""
    assert tokens_per_step(head) > 1.4
    if head in ("hydra", "hydra++", "eagle"):  # they read the draft tokens above
        assert tokens_per_step(head) > max(1.6, tokens_per_step("medusa"))


@pytest.mark.parametrize("head", BUNDLED)
def test_bundled_heads_are_small(head: str):
    folder = find_head(head, MODEL)
    assert (folder / "model.safetensors").stat().st_size <= 30e6
    assert sum((bundled.folder / "model.safetensors").stat().st_size for bundled in zoo_heads()) <= 165e6
    profile = read_profile(folder / "acceptance.json")
    assert profile.num_texts >= 60
    assert (len(profile.static_tokens), len(profile.dynamic_tokens)) == (64, 64)


@pytest.mark.parametrize("verb", ["generate", "info"])
def test_the_session_in_the_readme(verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    session = readme.split("```console\n")[1].split("```")[0]
    command, said = next(part for part in session.split("$ draftheads ") if part.startswith(verb)).split("\n", 1)
    assert main(shlex.split(command)) == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    assert shown == said.strip().splitlines()
