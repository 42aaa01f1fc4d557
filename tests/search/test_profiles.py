"""From texts to acceptance profiles: what counts as an answer, and the profile when there is little to measure on."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.checkpoints.checkpoint import load_head, save_head
from draftheads.decode.engine import Engine
from draftheads.drafters.sources import DEFAULT_COPY_PROBS, check_copy_probs
from draftheads.errors import CheckpointCorrupt, InvalidTree
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.search import replay
from draftheads.search.replay import Answer
from draftheads.search.settings import ReplaySettings
from draftheads.search.tune import TOKENS_PER_TEXT, copy_probs, measured_profile, recorded, static_profile
from draftheads.speculation.acceptance_profile import AcceptanceProfile, read_profile
from draftheads.speculation.shapes import BestFirst, Shape
from draftheads.speculation.tree import Tree
from draftheads.utils.progress import NoProgress
from families import PROMPTS, tiny_head, tokens_per_step

pytestmark = pytest.mark.usefixtures("one_thread")


def text(mask: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens 100, 101 … of which those with a 1 are learned."""
    return torch.arange(100, 100 + len(mask)), torch.tensor([letter == "1" for letter in mask])


def test_the_first_answer_of_a_text_counts():
    assert recorded([text("001110011")]) == [Answer((100, 101), (102, 103, 104))]
    assert recorded([text("1111")]) == [Answer((100,), (101, 102, 103))], "a plain text's first token is its prompt"
    assert recorded([text("0010"), text("0000"), text("10"), text("")]) == []
    (long,) = recorded([text("0" + "1" * 200)])
    assert len(long.token_ids) == TOKENS_PER_TEXT


@pytest.fixture(scope="module")
def answers(model: TargetModel) -> list[Answer]:
    plain = Engine(model).generate(PROMPTS, max_new_tokens=40)
    return [Answer(tuple(p), r.token_ids) for p, r in zip(PROMPTS, plain, strict=True)]


def decoded(model: TargetModel, head: DraftHead, shape: Shape) -> float:
    """Of decoding the answers."""
    return tokens_per_step(Engine(model, head, shape=shape).generate(PROMPTS, max_new_tokens=40))


def test_a_measured_profile_predicts_the_tokens_per_step_of_decoding(model: TargetModel, answers: list[Answer]):
    head = tiny_head("hydra", model)
    profile, found = measured_profile(model, head, answers, ReplaySettings(top_k=6, beam=3), progress=NoProgress())
    assert (profile.num_texts, profile.num_tokens) == (3, sum(len(answer.token_ids) for answer in answers))
    assert (profile.top_k, profile.beam) == (6, 3)
    assert profile.temperatures == pytest.approx(found["confidence"]["temperatures"], abs=1e-4)
    assert profile.static_tokens == sorted(profile.static_tokens)
    for nodes in (4, 12):
        shape = profile.growing(nodes)
        assert shape == BestFirst(nodes, top_k=6, beam=3, temperatures=tuple(profile.temperatures))
        assert decoded(model, head, shape) == pytest.approx(found["dynamic"]["expected"][nodes - 1])


def test_a_measured_profile_of_a_head_without_a_limit_of_depth(
    model: TargetModel, answers: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its trees are deeper than the head was trained, in the file, when it is loaded, and when it drafts."""
    monkeypatch.setattr(replay, "_SMALLEST_STEP", 0.0)
    head = tiny_head("eagle", model)
    profile, found = measured_profile(model, head, answers, ReplaySettings(top_k=6, beam=3), progress=NoProgress())
    assert (profile.depth, profile.depths("dynamic")) == (8, range(1, 9))
    assert profile.tokens("dynamic", 1)[-1] < profile.tokens("dynamic", 8)[-1]
    save_head(head, tmp_path / "head", base=model, profile=profile, dtype=torch.float32)
    loaded = load_head(tmp_path / "head", model)
    assert loaded.default_shape == read_profile(tmp_path / "head" / "acceptance.json").tree(10)
    assert decoded(model, loaded, profile.growing(12, 2)) == pytest.approx(found["dynamic"]["shallower"][1][11])
    with pytest.raises(CheckpointCorrupt, match="temperatures"):
        save_head(head, tmp_path / "other", base=model, profile=AcceptanceProfile.assumed(2))
    with pytest.raises(InvalidTree, match="4 deep"):
        save_head(tiny_head("hydra", model), tmp_path / "other", base=model, profile=AcceptanceProfile.assumed(4))


def test_static_profiles_from_ranks_alone():
    ranks = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 9]])
    profile = static_profile(ranks, top_k=9)
    assert profile.paths == [[0], [0, 1], [1], [1, 0]]
    assert profile.static_tokens == [1.0, 1.75, 2.25, 2.5, 2.75]
    assert (profile.dynamic_tokens, profile.num_tokens) == ([], 4)
    chain = static_profile(ranks, top_k=9, only_chain=True)
    assert chain.tree(64) == Tree.chain(2)
    assert chain.static_tokens == [1.0, 1.75, 1.75]


def test_a_measured_profile_has_the_probabilities_of_copies(model: TargetModel):
    """Answers that repeat themselves raise the probs of copies above the usual ones; others lower them."""
    vocabulary = list(range(5, 20))
    repeating = [Answer((3, 4), (5, 6, 7, 8) * 15)] * 4
    pairs = zip(vocabulary * 4, [21] * 60, strict=True)
    others = [Answer((3, 4), tuple(token for pair in pairs for token in pair))] * 4

    def copies(answers: list[Answer]) -> list[list[float]]:
        settings = ReplaySettings(top_k=4, beam=2)
        profile, _ = measured_profile(model, tiny_head("medusa", model), answers, settings, progress=NoProgress())
        check_copy_probs(profile.copies)
        return profile.copies

    assert copies(repeating)[-1][5] > DEFAULT_COPY_PROBS[-1][5]
    assert copies(others)[0][0] < DEFAULT_COPY_PROBS[0][0], "21 is followed by another token each time"


# --- the probabilities of copies ---


def falls(probs: list[list[float]]) -> bool:
    along = all(a > b > 0 for row in probs for a, b in pairwise(row))
    down = all(a <= b for one, other in pairwise(probs) for a, b in zip(one, other, strict=True))
    return along and down


def test_probabilities_of_a_text_that_repeats_itself_and_without_a_match() -> None:
    """Where nothing was observed, one half for each next token."""
    probs = copy_probs([([1, 2, 3, 4], [1, 2, 3, 4] * 200)], num_tokens=3, max_match=6)
    assert probs[-1] == [0.99, 0.98, 0.97]
    assert copy_probs([([1, 2, 3], [4, 5, 6])], num_tokens=3, max_match=2) == [[0.5, 0.25, 0.125]] * 2


def test_probabilities_of_single_tokens_that_are_followed_by_the_same_every_other_time() -> None:
    answer = [token for i in range(400) for token in (100 + i, 1, 2 + (i // 2) % 2)]
    probs = copy_probs([([1], answer)], num_tokens=2, max_match=3)
    assert probs[0][0] == pytest.approx(0.5, abs=0.03)  # 1 is followed by 2, 2, 3, 3, 2, 2, …
    assert probs[0][1] < 0.01, "then comes a new token"


def test_probabilities_of_few_texts_stay_near_earlier_ones() -> None:
    assert falls([list(row) for row in DEFAULT_COPY_PROBS])
    assert copy_probs([], prior=DEFAULT_COPY_PROBS) == [pytest.approx(row, abs=1e-3) for row in DEFAULT_COPY_PROBS]
    once = copy_probs([([1, 2, 3], [1, 2, 3])], prior=DEFAULT_COPY_PROBS)
    assert DEFAULT_COPY_PROBS[0][0] < once[0][0] < DEFAULT_COPY_PROBS[0][0] + 0.1


def test_what_follows_the_end_of_an_answer_is_not_counted() -> None:
    """One token of each answer is known: the second copied one stays as uncertain as without texts."""
    probs = copy_probs([([1, 2, 1, 2, 1, 2], [1])] * 400, num_tokens=2, max_match=4)
    assert probs[3][0] == 0.99
    assert probs[3][1] == pytest.approx(0.99 / 2, abs=0.001)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=30), max_size=5), st.integers(1, 5), st.integers(1, 6))
def test_probabilities_fall_along_a_copy_and_rise_with_the_match(
    texts: list[list[int]], num_tokens: int, max_match: int
) -> None:
    probs = copy_probs([(text[:1], text[1:]) for text in texts], num_tokens=num_tokens, max_match=max_match)
    assert [len(row) for row in probs] == [num_tokens] * max_match
    assert falls(probs)
    assert all(row[0] < 1 for row in probs)
    check_copy_probs(probs)
