"""``tools/ablate.py``: the variants of each study, that they are trained with the same settings, and the results."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftheads.checkpoints.checkpoint import read_head
from draftheads.errors import InvalidSettings
from draftheads.heads import head_classes
from draftheads.heads.head_options import parse_head_options
from draftheads.models.model import TargetModel
from draftheads.train import processes, run
from draftheads.train.options import TrainOptions
from draftheads.train.run_folder import RunFolder
from training_world import chat_model, counting_chats, tool_module, write_chats

pytestmark = pytest.mark.usefixtures("one_thread")


tool = tool_module("ablate")
variants_of = tool.variants_of


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture
def data(target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run.TargetModel, "load", lambda *_, **__: target)
    return write_chats(tmp_path / "chats.jsonl", counting_chats(24))


def options(study: str, **changes: Any) -> TrainOptions:
    method = {"amphista": "medusa", "hydra": "hydra"}[study]
    values = {"method": method, "out": Path("out"), "features": Path("features"), "num_heads": 4}
    return TrainOptions.of(**{**values, **changes})


def config_of(variant: TrainOptions) -> dict[str, Any]:
    """The architecture that a variant trains."""
    own = variant.heads
    config_class, _ = head_classes(own.method)
    sizes = {"hidden_size": 32, "vocab_size": 64, "num_heads": own.num_heads, "num_layers": own.num_layers}
    return vars(config_class(**sizes, **parse_head_options(own.method, own.head_options)))


def test_the_amphista_study_has_the_variants_of_the_papers_table():
    variants = variants_of("amphista", options("amphista"))
    full = config_of(variants["amphista"])
    assert (full["num_adaptation_layers"], full["num_auto_embedding_blocks"]) == (2, 1)
    assert full["head_positions"]
    assert full["sampled_token"]
    assert (variants["hydra++"].heads.num_layers, variants["medusa"].heads.num_layers) == (4, 1)
    changed = {
        "amphista without auto-embedding": {"num_auto_embedding_blocks": 0, "head_positions": False},
        "amphista without positions": {"head_positions": False},
        "amphista without staged adaptation": {"num_adaptation_layers": 0},
        "amphista with one adaptation layer": {"num_adaptation_layers": 1},
        "amphista without sampled token": {"sampled_token": False},
        "amphista-α": {"num_auto_embedding_blocks": 2},
    }
    for name, switched in changed.items():
        assert config_of(variants[name]) == {**full, **switched}, name
    assert list(variants)[:2] == ["medusa", "hydra++"], "what it is compared with"
    assert len(variants) == 9


def test_the_hydra_study_has_the_steps_of_the_papers_appendix():
    variants = variants_of("hydra", options("hydra"))
    made_of = {
        name: (own.heads.method, own.heads.num_layers, own.objective.loss, own.objective.noise_alpha)
        for name, own in variants.items()
    }
    assert list(made_of.values()) == [
        ("hydra", 1, "hard", 0.0),
        ("hydra", 1, "hard", 75.0),
        ("hydra", 1, "teacher", 0.0),
        ("hydra", 1, "teacher", 75.0),
        ("hydra", 4, "teacher", 0.0),
        ("hydra++", 1, "teacher", 0.0),
        ("hydra++", 4, "teacher", 0.0),
    ]


@pytest.mark.parametrize("study", tool.STUDIES)
def test_variants_differ_only_in_what_the_study_sets_and_in_their_folders(study: str):
    shared = options(study, epochs=7, learning_rate=0.03, seed=5, draft_vocab_size=99)
    variants = variants_of(study, shared)
    assert len({own.out for own in variants.values()}) == len(variants)
    for own in variants.values():
        assert own.out.parent == shared.out
        differing = {name for name, value in own.flat().items() if value != shared.flat()[name]}
        assert differing <= tool.set_by(study) | {"out", "resume"}


@pytest.mark.parametrize("study", tool.STUDIES)
def test_all_variants_share_the_hidden_states(study: str):
    variants = variants_of(study, options(study, features=None, data=(Path("chats.jsonl"),)))
    assert {own.hidden_states.features for own in variants.values()} == {Path("out/features")}


@pytest.mark.parametrize(
    ("study", "changes", "message"),
    [
        ("hydra", {"noise_alpha": 50.0}, "--noise-alpha is 50.0, but the variants of this study set it: leave it out"),
        ("hydra", {"loss": "tv"}, "--loss is 'tv'"),
        ("hydra", {"num_layers": 2}, "--num-layers is 2"),
        ("hydra", {"method": "eagle"}, "--method is 'eagle'"),
        ("hydra", {"start_from": "hydra"}, "all variants of a study start untrained"),
        ("amphista", {"num_layers": 2}, "--num-layers is 2"),
    ],
)
def test_settings_that_a_study_sets_are_refused(study: str, changes: dict[str, Any], message: str):
    with pytest.raises(InvalidSettings, match=message):
        variants_of(study, options(study, **changes))


@pytest.mark.parametrize("changes", [{"loss": "tv"}, {"noise_alpha": 3.0}])
def test_settings_that_a_study_does_not_set_are_accepted(changes: dict[str, Any]):
    assert variants_of("amphista", options("amphista", method="medusa", **changes))


@pytest.mark.parametrize(
    ("study", "arguments", "kept", "left_out"),
    [
        ("hydra", ["--recipe", "hydra"], {"num_heads": 4, "learning_rate": 1e-3}, {"loss": "teacher"}),
        ("hydra", ["--recipe", "hydra++"], {"epochs": 10, "dropout": 0.2}, {"num_layers": 1}),
        ("amphista", ["--recipe", "hydra"], {"loss": "hard", "epochs": 1}, {"num_layers": 1}),
        ("amphista", ["--recipe=amphista-alpha"], {"lm_head": "own", "loss": "amphista"}, {"head_options": ()}),
    ],
)
def test_a_study_uses_the_recipe_settings_that_its_variants_do_not_set(
    study: str, arguments: list[str], kept: dict[str, Any], left_out: dict[str, Any]
):
    found = tool.study_defaults(study, arguments).flat()
    assert {name: found[name] for name in (*kept, *left_out)} == kept | left_out


def test_help_lists_the_studies(capsys: pytest.CaptureFixture[str]):
    assert tool.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"``{study}``" in shown for study in tool.STUDIES)


def test_an_unknown_study_is_named(capsys: pytest.CaptureFixture[str]):
    assert tool.main(["eagle"]) == 2
    assert "no study 'eagle'; choose among amphista, hydra" in capsys.readouterr().err


@pytest.fixture
def arguments(data: Path, tmp_path: Path) -> list[str]:
    sizes = ["--num-heads", "2", "--draft-vocab-size", "48", "--batch-tokens", "128", "--held-out", "0.2"]
    small = ["--epochs", "1", "--learning-rate", "0.02", "--eval-steps", "0", "--tree-nodes", "6"]
    return ["hydra", "--out", str(tmp_path / "out"), "--data", str(data), *sizes, *small]


@pytest.mark.thorough
def test_a_stopped_study_resumes_and_compares_all_variants(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fit = run.fit
    trained: list[str] = []

    def stopped(learner: Any, batches: Any, folder: RunFolder, **more: Any) -> int:
        trained.append(folder.path.name)
        if len(trained) == 3:
            raise KeyboardInterrupt
        return fit(learner, batches, folder, **more)

    monkeypatch.setattr(run, "fit", stopped)
    assert tool.main(arguments) == 130
    assert tool.main(arguments) == 0
    names = [own.out.name for own in variants_of("hydra", options("hydra")).values()]
    assert trained == [*names[:3], *names[2:]], "a variant is trained once, in order"
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "ablation.json").read_text())
    table = (tmp_path / "out" / "ablation.md").read_text().splitlines()
    assert len(table) == 2 + len(names)
    first = None
    for name, finding, line in zip(names, found["findings"], table[2:], strict=True):
        metrics = json.loads((tmp_path / "out" / name / "metrics.json").read_text())
        assert finding["tokens_per_step_tree"] == metrics["tokens_per_step_tree"]
        first = first or finding["tokens_per_step_tree"]
        assert finding["over_first"] == finding["tokens_per_step_tree"] / first
        assert finding["num_parameters"] == read_head(tmp_path / "out" / name).num_parameters
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:5] == [
            finding["variant"],
            f"{finding['num_parameters'] / 1e6:.1f} M",
            f"{finding['tokens_per_step_chain']:.3f}",
            f"{finding['tokens_per_step_tree']:.3f}",
            f"{finding['over_first']:.3f}",
        ]
        assert cells[5:] == [f"{share:.1%}" for share in metrics["top1"]]
        assert finding["variant"].split(",")[0] in shown
        assert f"wrote {tmp_path / 'out' / name / 'report.html'}\n" in shown
    assert tool.main([*arguments, "--epochs", "2"]) == 1
    told = f"{tmp_path / 'out' / names[0]} holds a trained head (epochs was 1 and is 2)"
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out" / "features").exists(), "they are not needed any more"
    monkeypatch.chdir(tmp_path)
    relative = [argument.replace(str(tmp_path / "out"), "out") for argument in arguments]
    assert tool.main([*relative, "--log-steps", "3"]) == 0
    assert trained[-1] == names[-1], "all variants are complete"
    assert len(trained) == 3 + 5


@pytest.mark.thorough
def test_only_the_first_of_several_processes_writes_the_results(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert tool.main(arguments) == 0
    monkeypatch.setattr(processes, "is_first", lambda: False)
    (tmp_path / "out" / "ablation.json").unlink()
    assert tool.main(arguments) == 0
    assert not (tmp_path / "out" / "ablation.json").exists()
