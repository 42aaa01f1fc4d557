"""Which acceptance profile and chat template a head is loaded with."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import draftheads
from draftheads import loading
from draftheads.bench.contenders import load_contenders
from draftheads.checkpoints.checkpoint import read_head, save_head
from draftheads.checkpoints.registry import cached_profile_folder
from draftheads.decode.engine import Engine
from draftheads.decode.step_costs import StepCosts
from draftheads.drafters.mixed import Mixed
from draftheads.drafters.sources import Corpus, TextSoFar
from draftheads.errors import CheckpointCorrupt, InvalidSettings
from draftheads.loading import load_target, resolve, template_of
from draftheads.serve.load_models import load_served
from draftheads.serve.options import ServeOptions
from draftheads.settings import LoadSettings, Precision
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.drafter import NoDraft
from draftheads.speculation.shapes import BestFirst, Drafting
from draftheads.speculation.tree import Tree
from families import HAS_RECURRENT, by_hand, tiny_head, tiny_model, tiny_profile
from training_world import VOCAB, chat_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")
FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}
OWN = tiny_profile(Tree.chain(3), temperatures=[1.5, 1.25, 1.0])
OTHER = tiny_profile(Tree.from_paths([(0,), (1,)]), temperatures=[0.5, 0.75, 1.0])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model and a head for it."""
    place = tmp_path_factory.mktemp("profiles")
    tiny_model("llama", seed=3, vocab_size=len(VOCAB)).model.save_pretrained(place / "model")
    chat_tokenizer().save_pretrained(str(place / "model"))
    base = load_target(place / "model", **FP32)
    save_head(tiny_head("medusa", base), place / "head", base=base, dtype=torch.float32, profile=OWN)
    return place


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> StepCosts:
    """Nothing is measured."""
    found = by_hand([("verify", 1, 1, 10.0), ("verify", 1, 9, 11.0), ("static", 1, 2, 0.1)])
    monkeypatch.setattr(loading, "costs_of", lambda *_, **__: found)
    return found


def load(world: Path, **options: Any) -> Engine:
    return draftheads.load(world / "model", world / "head", **{**FP32, **options})


def temperatures(engine: Engine) -> tuple[float, ...]:
    """Of growing trees."""
    if engine.profile is not None:
        return engine.profile.growing(2).temperatures
    assert isinstance(engine.shape, BestFirst)
    return engine.shape.temperatures


def test_the_head_s_own_profile_and_the_machine_s_costs_size_the_drafts(world: Path, cost: StepCosts) -> None:
    engine = load(world)
    assert (engine.profile, engine.costs) == (OWN, cost)
    assert temperatures(engine) == (1.5, 1.25, 1.0)
    assert engine.batch().plan is not None


def test_a_corpus_is_a_source_of_drafts_wherever_it_is_given(world: Path, cost: StepCosts, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("w1 w2 w3 w4")
    model, head, corpus = str(world / "model"), str(world / "head"), str(tmp_path / "corpus.txt")
    options = ServeOptions(model, head=(head,), name="tiny", max_rows=3, corpus=corpus, load=LoadSettings(**FP32))
    [served], engines = load_served(options)
    assert (served.name, served.base, served.head, *engines) == ("tiny", "tiny", "head", "tiny")
    assert engines["tiny"].max_batch_size == 3
    drafting = Drafting(corpus=corpus)
    contender = next(load_contenders({"head": resolve(head, model)}, engines["tiny"].model, drafting=drafting))
    for engine in (load(world, corpus=corpus), engines["tiny"], contender.as_loaded(True)):
        assert isinstance(engine.drafter, Mixed)
        assert [type(source) for source in engine.drafter.sources] == [TextSoFar, Corpus]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rounded_weights_are_refused_before_a_model_is_loaded_on_a_gpu(
    world: Path, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "device_named", lambda _: torch.device("cuda:1"))
    monkeypatch.setattr(loading.TargetModel, "load", lambda *_, **__: pytest.fail("the model is loaded"))
    with pytest.raises(InvalidSettings, match=f"precision {precision} is for CPUs; the model is on cuda:1: give "):
        load_target(world / "model", precision=precision)


def test_steps_are_captured_only_if_it_is_asked_for(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU: the device of the model is looked at before it is loaded."""
    with pytest.raises(InvalidSettings, match="cuda_graphs is for CUDA; the model is on cpu"):
        load_target(world / "model", device="cpu", cuda_graphs=True)
    monkeypatch.setattr(loading, "device_named", lambda _: torch.device("cuda"))
    assert not load_target(world / "model", fast=False).has_static_steps
    assert load_target(world / "model", fast=False, cuda_graphs=True).has_static_steps


@pytest.mark.skipif(not HAS_RECURRENT, reason="trees need a newer transformers")
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_steps_of_recurrent_models_are_not_captured(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU; also where such a model drafts."""
    monkeypatch.setattr(loading, "device_named", lambda _: torch.device("cuda"))
    model = tiny_model(family)
    expected = "cuda_graphs is not for .*its recurrent layers walk each tree level by level.*leave cuda_graphs out"
    with pytest.raises(InvalidSettings, match=expected):
        load_target(model.model, tokenizer=model.tokenizer, cuda_graphs=True)
    assert load_target(model.model, tokenizer=model.tokenizer).is_recurrent
    options = {"tokenizer": model.tokenizer, "draft_model": model.model, "cuda_graphs": True, "tree": 4}
    with pytest.raises(InvalidSettings, match=expected):
        draftheads.load(tiny_model("llama").model, **options)


@pytest.mark.usefixtures("cost")
def test_the_user_s_profile_comes_before_the_head_s_and_a_given_one_before_both(world: Path, own_cache: Path) -> None:
    folder = cached_profile_folder(read_head(world / "head"))
    assert folder.is_relative_to(own_cache)
    other = folder.with_name("medusa-0123456789abcdef")  # of another head
    other.mkdir(parents=True)
    OTHER.save(other / "acceptance.json")
    assert load(world).profile == OWN
    for place in (other, other / "acceptance.json", str(other)):
        assert load(world, tree=place).profile == OTHER
    other.rename(folder)
    engine = load(world)
    assert engine.profile == OTHER
    assert temperatures(engine) == (0.5, 0.75, 1.0)
    assert load(world, tree=world / "head").profile == OWN
    assert temperatures(load(world, tree=BestFirst(8))) == (0.5, 0.75, 1.0)


def test_a_fixed_tree_needs_no_costs(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "costs_of", lambda *_, **__: pytest.fail("costs were measured"))
    for options, shape in (
        ({"tree": "static:10"}, Tree.chain(3)),
        ({"tree": Tree.chain(1)}, Tree.chain(1)),
        ({"tree": BestFirst(5)}, BestFirst(5, temperatures=(1.5, 1.25, 1.0))),
        ({"tree": "5"}, BestFirst(5, temperatures=(1.5, 1.25, 1.0))),
        ({"tree": [[0], [0, 0]]}, Tree.chain(2)),
        ({"tree": BestFirst(5, temperatures=(2.0, 2.0, 2.0))}, BestFirst(5, temperatures=(2.0, 2.0, 2.0))),
    ):
        engine = load(world, **options)
        assert (engine.profile, engine.costs) == (None, None)
        assert engine.batch().shape == shape
        assert engine.batch().plan is None
    engine = load(world, tree="plain")
    assert (type(engine.drafter), engine.profile, engine.costs) == (NoDraft, None, None)


@pytest.mark.usefixtures("cost")
def test_a_profile_that_does_not_fit_is_named(world: Path, tmp_path: Path) -> None:
    AcceptanceProfile.assumed(2).save(tmp_path / "acceptance.json")
    with pytest.raises(CheckpointCorrupt, match="temperatures has 2 numbers but the head has 3 heads") as caught:
        load(world, tree=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_head_that_nobody_measured_is_used_all_the_same(world: Path, tmp_path: Path) -> None:
    base = load_target(world / "model", **FP32)
    save_head(tiny_head("hydra", base), tmp_path / "new", base=base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = draftheads.load(world / "model", tmp_path / "new", **FP32)
    assert engine.profile == AcceptanceProfile.assumed(3)
    plain = draftheads.load(world / "model", **FP32).generate(["why", "how"], max_new_tokens=20)
    assert [r.token_ids for r in engine.generate(["why", "how"], max_new_tokens=20)] == [r.token_ids for r in plain]


# --- chat templates ---

TEMPLATE = "{{ messages[0]['content'] }} <e>"


def save_with_template(world: Path, folder: Path, template: str | None) -> Path:
    base = load_target(world / "model", chat_template=template, **FP32)
    save_head(tiny_head("medusa", base), folder, base=base, dtype=torch.float32, profile=OWN)
    return folder


def words(engine: Engine) -> str:
    return " ".join(VOCAB[token] for token in engine.encode("w1"))


@pytest.mark.usefixtures("cost")
def test_a_head_is_used_with_the_template_of_its_training_unless_another_is_given(world: Path, tmp_path: Path) -> None:
    head = save_with_template(world, tmp_path / "trained", TEMPLATE)
    (tmp_path / "other.jinja").write_text("<s> {{ messages[0]['content'] }}", encoding="utf-8")
    given = {"chat_template": tmp_path / "other.jinja"}
    for chosen, options, expected in ((head, {}, "w1 <e>"), (head, given, "<s> w1"), (None, given, "<s> w1")):
        assert words(draftheads.load(world / "model", chosen, **options, **FP32)) == expected
    assert words(load(world)).startswith("<s> user")


def test_heads_of_different_templates_need_one_to_be_given(world: Path, tmp_path: Path) -> None:
    one, other = (save_with_template(world, tmp_path / name, text) for name, text in (("a", TEMPLATE), ("b", None)))
    with pytest.raises(InvalidSettings, match=r"a, .*b were trained with different chat templates: give --chat-temp"):
        template_of(None, *(resolve(head, world / "model") for head in (one, other)))
    assert template_of(None, *(resolve(head, world / "model") for head in (one, one, "lookahead"))) == TEMPLATE
    assert template_of(None, "lookahead", None) is None
