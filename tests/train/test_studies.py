"""Ablation studies: what makes each variant, that they are trained alike, and what is shown of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro

from draftheads.checkpoint import read_head
from draftheads.cli import ablate
from draftheads.cli.main import main
from draftheads.data.extract import build_features, load_texts
from draftheads.data.features import FeatureStore
from draftheads.errors import DataError, InvalidSettings
from draftheads.heads import head_classes, parse_head_options
from draftheads.models.model import TargetModel
from draftheads.progress import NoProgress
from draftheads.train import run, studies
from draftheads.train.material import arrange
from draftheads.train.options import TrainOptions
from draftheads.train.studies import STUDIES, study, variants_of
from training_world import chat_model, counting_chats, write_chats

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return chat_model()


@pytest.fixture
def data(target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run.TargetModel, "load", lambda *_, **__: target)
    return write_chats(tmp_path / "chats.jsonl", counting_chats(24))


def options(**changes: Any) -> TrainOptions:
    return TrainOptions(method="medusa", out=Path("out"), features=Path("features"), num_heads=4, **changes)


def shape_of(own: TrainOptions) -> dict[str, Any]:
    """The architecture that a variant trains."""
    config_class, _ = head_classes(own.method)
    sizes = {"hidden_size": 32, "vocab_size": 64, "num_heads": own.num_heads, "num_layers": own.num_layers}
    return vars(config_class(**sizes, **parse_head_options(own.method, own.head_options)))


def test_amphista_s_variants_are_those_of_its_table() -> None:
    variants = variants_of(study("amphista"), options())
    full = shape_of(variants["amphista"])
    assert (full["num_adaptation_layers"], full["num_auto_embedding_blocks"]) == (2, 1)
    assert full["head_positions"]
    assert full["sampled_token"]
    assert (variants["hydra++"].num_layers, variants["medusa"].num_layers) == (4, 1)
    changed = {
        "amphista without auto-embedding": {"num_auto_embedding_blocks": 0, "head_positions": False},
        "amphista without positions": {"head_positions": False},
        "amphista without staged adaptation": {"num_adaptation_layers": 0},
        "amphista with one adaptation layer": {"num_adaptation_layers": 1},
        "amphista without sampled token": {"sampled_token": False},
        "amphista-α": {"num_auto_embedding_blocks": 2},
    }
    for name, switched in changed.items():
        assert shape_of(variants[name]) == {**full, **switched}, name
    assert list(variants)[:2] == ["medusa", "hydra++"], "what it is compared with"
    assert len(variants) == 9


def test_hydra_s_variants_are_the_steps_of_its_appendix() -> None:
    variants = variants_of(study("hydra"), options())
    made_of = {name: (own.method, own.num_layers, own.loss, own.noise_alpha) for name, own in variants.items()}
    assert list(made_of.values()) == [
        ("hydra", 1, "hard", 0.0),
        ("hydra", 1, "hard", 75.0),
        ("hydra", 1, "teacher", 0.0),
        ("hydra", 1, "teacher", 75.0),
        ("hydra", 4, "teacher", 0.0),
        ("hydra++", 1, "teacher", 0.0),
        ("hydra++", 4, "teacher", 0.0),
    ]


@pytest.mark.parametrize("name", STUDIES)
def test_variants_share_all_else_and_no_folder(name: str) -> None:
    given = options(epochs=7, learning_rate=0.03, seed=5, draft_vocab_size=99)
    variants = variants_of(study(name), given)
    assert len({own.out for own in variants.values()}) == len(variants)
    makes = {"method", "head_options", "num_layers", "loss", "noise_alpha"}
    for own in variants.values():
        assert own.out.parent == given.out
        same = set(vars(given)) - makes - {"out", "resume"}
        assert {key: getattr(own, key) for key in same} == {key: getattr(given, key) for key in same}
    without = variants_of(study(name), TrainOptions(method="medusa", out=Path("out"), data=(Path("chats.jsonl"),)))
    assert {own.features for own in without.values()} == {Path("out/features")}, "the model reads the text once"


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("hydra", {"noise_alpha": 50.0}, "--noise-alpha is 50.0, but the variants of this study set it: leave it out"),
        ("hydra", {"loss": "tv"}, "--loss is 'tv'"),
        ("hydra", {"num_layers": 2}, "--num-layers is 2"),
        ("amphista", {"num_layers": 2}, "--num-layers is 2"),
        ("amphista", {"num_heads": 3}, "num_heads is 3: each of the two stages"),
    ],
)
def test_what_a_study_sets_is_not_to_be_given(name: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSettings, match=told):
        variants_of(study(name), replace(options(), **changes))
    other = {"hydra": {"head_options": ()}, "amphista": {"loss": "tv", "noise_alpha": 3.0}}[name]
    variants_of(study(name), replace(options(), **other))


@pytest.mark.parametrize(
    ("arguments", "kept", "left_out"),
    [
        (["hydra", "--recipe", "hydra"], {"num_heads": 4, "learning_rate": 1e-3}, {"loss": "teacher"}),
        (["--recipe", "hydra++", "hydra"], {"epochs": 10, "dropout": 0.2}, {"num_layers": 1}),
        (["--recipe", "hydra", "amphista"], {"loss": "hard", "epochs": 1}, {"num_layers": 1}),
        (["amphista", "--recipe=amphista-alpha"], {"lm_head": "own", "loss": "amphista"}, {"head_options": ()}),
        (["--recipe", "amphista", "hydra", "--epochs", "2"], {"epochs": 2, "num_heads": 4}, {"loss": "teacher"}),
    ],
)
def test_of_a_recipe_a_study_takes_what_its_variants_do_not_set(
    arguments: list[str], kept: dict[str, Any], left_out: dict[str, Any]
) -> None:
    files = ["--out", "out", "--data", "chats.jsonl"]
    read = tyro.cli(ablate.AblateOptions, args=ablate.expanded([*arguments, *files]))
    found = {name: getattr(read.training, name) for name in (*kept, *left_out)}
    assert found == kept | left_out, "as the recipe has it, and the defaults"
    variants_of(study(read.study), read.training)


@pytest.mark.parametrize("verb", [["train", "--method", "medusa"], ["ablate", "hydra"]])
def test_files_that_are_missing_are_said_before_a_model_is_sought(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "chats.jsonl"
    assert main([*verb, "--model", "./nowhere", "--out", str(tmp_path / "out"), "--data", str(missing)]) == 1
    assert f"{missing}: cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_study_has_no_method_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--method", "eagle"], ["--method=eagle"]):
        assert main(["ablate", "hydra", *given, "--out", "out", "--data", "chats.jsonl"]) == 1
        assert "the variants of a study have methods of their own: leave it out" in capsys.readouterr().err


def test_an_unknown_study_is_named() -> None:
    with pytest.raises(InvalidSettings, match="no study 'eagle'; choose among amphista, hydra"):
        study("eagle")


@pytest.fixture
def arguments(data: Path, tmp_path: Path) -> list[str]:
    sizes = ["--num-heads", "2", "--draft-vocab-size", "48", "--batch-tokens", "128", "--held-out", "0.2"]
    small = ["--epochs", "1", "--learning-rate", "0.02", "--eval-steps", "0", "--tree-nodes", "6"]
    return ["ablate", "hydra", "--out", str(tmp_path / "out"), "--data", str(data), *sizes, *small]


def test_the_command_trains_what_is_left_and_compares(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = run.fit
    trained: list[str] = []

    def stopped(learner: Any, batches: Any, options: TrainOptions, **more: Any) -> None:
        trained.append(options.out.name)
        if len(trained) == 3:
            raise KeyboardInterrupt
        fit(learner, batches, options, **more)

    monkeypatch.setattr(run, "fit", stopped)
    assert main(arguments) == 130
    assert main(arguments) == 0
    names = [own.out.name for own in variants_of(study("hydra"), options()).values()]
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
    assert main([*arguments, "--epochs", "2"]) == 1
    told = f"{tmp_path / 'out' / names[0]} holds a trained head (epochs was 1 and is 2)"
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out" / "features").exists(), "nobody needs them any more"
    monkeypatch.chdir(tmp_path)
    relative = [argument.replace(str(tmp_path / "out"), "out") for argument in arguments]
    assert main([*relative, "--log-steps", "3"]) == 0
    assert trained[-1] == names[-1], "all is there"
    assert len(trained) == 3 + 5


def test_older_trainings_and_recipes_anywhere_are_understood(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    first = next(iter(variants_of(study("hydra"), options()).values())).out.name
    # what an older version did not know
    metrics = tmp_path / "out" / first / "metrics.json"
    older = json.loads(metrics.read_text())
    del older["options"]["dropout"], older["options"]["head_options"]
    metrics.write_text(json.dumps(older))
    assert main(arguments) == 0
    assert main(["ablate", *arguments[2:4], "--recipe", "small", *arguments[4:], "--dropout", "0.5", "hydra"]) == 1
    told = capsys.readouterr().err
    assert "dropout was 0.0 and is 0.5" in told
    assert "draft_vocab_size" not in told, "options win over the recipe wherever the study stands"
    assert "epochs was" not in told
    monkeypatch.setattr(studies.processes, "is_first", lambda: False)
    (tmp_path / "out" / "ablation.json").unlink()
    assert main(arguments) == 0
    assert not (tmp_path / "out" / "ablation.json").exists(), "of several processes the first one writes"


@pytest.mark.parametrize("most", [1, 300, 10**6])
def test_finished_features_are_used_as_far_as_asked(target: TargetModel, data: Path, tmp_path: Path, most: int) -> None:
    texts = load_texts(target, [data], max_length=64)
    build_features(target, texts, tmp_path / "features", NoProgress())
    store = FeatureStore(tmp_path / "features")
    sizes = {"draft_vocab_size": 48, "batch_tokens": 128, "held_out": 0.2}
    given = TrainOptions(method="medusa", out=tmp_path, features=tmp_path / "features", **sizes)
    limited = TrainOptions(**{**vars(given), "max_tokens": most})
    if most == 1:
        with pytest.raises(DataError, match="only one text"):
            arrange(store, limited)
        return
    used = sorted([*(found := arrange(store, limited)).training, *found.held_out])
    wanted = load_texts(target, [data], max_length=64, max_tokens=most)
    assert used == list(range(len(wanted))), "as many as reading the data with that limit gives"
