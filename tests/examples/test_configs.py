"""The files of examples/configs: each is read, and one of a recipe has the recipe's settings."""

from dataclasses import replace
from pathlib import Path

import pytest

from draftheads.cli.main import read_options
from draftheads.train.recipes import RECIPES

FOLDER = Path(__file__).parents[2] / "examples" / "configs"
MORE = {  # what a run gives besides the file
    "train": ["--out", "out", "--data", __file__],
    "distill": ["--out", "out.jsonl", "--prompts", "p.jsonl"],
}


def test_there_is_a_file_for_each_recipe_and_for_each_other_command():
    assert {path.stem for path in FOLDER.iterdir()} == {*RECIPES, "distill", "bench", "serve"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_has_the_settings_of_its_recipe(name: str):
    more = [*MORE["train"], *(["--method", "hydra"] if name == "small" else [])]
    found = read_options("train", ["--config", str(FOLDER / f"{name}.yaml"), *more])
    assert replace(found, recipe=name) == read_options("train", ["--recipe", name, *more])


@pytest.mark.parametrize("command", ["distill", "bench", "serve"])
def test_a_file_of_another_command_is_read(command: str):
    options = read_options(command, ["--config", str(FOLDER / f"{command}.yaml"), *MORE.get(command, [])])
    assert options != read_options(command, MORE.get(command, []))
