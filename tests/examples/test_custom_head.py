"""The example of docs/extend.md: a head from another package is installed, trained, used and listed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftheads
from draftheads import heads
from draftheads.bench.settings import BenchSettings
from draftheads.cli.main import main
from draftheads.search.settings import ReplaySettings
from families import saved_model
from training_world import chat_model, counting_chats, write_chats

PACKAGE = Path(__file__).parents[2] / "examples" / "custom_head"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed the package, without a network."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, *offline, "--target", str(folder), str(PACKAGE)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def installed(site: Path) -> Iterator[None]:
    """The package can be imported, and its head is registered until the end of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setattr(heads, "HEADS", dict(heads.HEADS))
        heads._load_entry_points.cache_clear()
        yield
    heads._load_entry_points.cache_clear()
    sys.modules.pop("linear_heads", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on the disk."""
    return saved_model(chat_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def head(installed: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of the package, trained on 30 chats by the command line."""
    folder = tmp_path_factory.mktemp("run")
    data = write_chats(folder / "chats.jsonl", counting_chats(30))
    settings = ["--method", "linear", "--head-options", "scale=0.5", "--num-heads", "3", "--epochs", "3"]
    places = ["--model", str(model), "--data", str(data), "--out", str(folder / "head")]
    assert main(["train", *settings, *places]) == 0
    return folder / "head"


def test_a_trained_head_is_loaded_with_its_settings(head: Path, model: Path):
    drafter = draftheads.load_head(head, draftheads.TargetModel.load(str(model)))
    assert type(drafter).__module__ == "linear_heads"
    assert drafter.config.scale == 0.5
    assert any(layer.weight.any() for layer in drafter.layers), "training has changed the layers"


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_drafting_with_the_head_does_not_change_the_text(head: Path, model: Path, settings: dict):
    prompts, tree = ["w1", "w7 w8", "w20"], draftheads.Tree.cartesian([2, 2, 1])
    plain = draftheads.load(model, precision="fp32").generate(prompts, max_new_tokens=24, **settings)
    engine = draftheads.load(model, head=head, precision="fp32", tree=tree)
    drafted = engine.generate(prompts, max_new_tokens=24, **settings)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert sum(result.num_steps for result in drafted) < sum(result.num_steps for result in plain)


def test_tune_measures_a_profile_of_the_head(head: Path, model: Path, tmp_path: Path):
    settings = ReplaySettings(num_prompts=2, max_new_tokens=12, max_nodes=4)
    tuning = draftheads.tune_head(model, head, ["w1", "w2 w3"], out=tmp_path, settings=settings, precision="fp32")
    assert len(tuning.profile.static_tokens) == 4
    assert draftheads.load(model, head=head, tree=tmp_path).generate(["w1"], max_new_tokens=4)


def test_compare_heads_has_a_row_for_the_head(head: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DRAFTHEADS_CACHE", str(tmp_path))
    settings = BenchSettings(trees=("best",), num_nodes=(4,), max_new_tokens=12, num_calibration_prompts=2)
    found = draftheads.compare_heads(model, [head], ["w1", "w2 w3", "w4"], settings=settings, precision="fp32")
    assert 3 * 32 * 32 in [row.num_parameters for row in found.rows], "three layers; the lm_head is the model's"


def test_more_layers_than_the_head_has_are_refused(installed: None):
    with pytest.raises(draftheads.DraftHeadsError, match="num_layers is 2; a linear head has one layer"):
        heads.head_classes("linear")[0](hidden_size=8, vocab_size=16, num_layers=2)


def test_info_lists_the_method_and_describes_the_head(head: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["info"]) == main(["info", str(head)]) == 0
    listed, described = capsys.readouterr().out.split("Methods that can be trained:")[1].split("\n", 1)
    assert "linear" in listed
    words = described.split()
    assert (words[words.index("method") + 1], words[words.index("scale") + 1]) == ("linear", "0.5")
