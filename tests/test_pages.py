"""Every block of README.md and the manual runs on a tiny model, as do the commands in the docstrings of examples.

A block that needs a program or machine that tests do not have says so in the page, where readers do not see it:
``<!-- needs: vllm -->`` before the block. Then our own commands and names in it are checked.
"""

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from draftheads import heads
from draftheads.checkpoints import registry
from draftheads.cli.main import read_options
from page_world import HEADS, ROOT, Block, Reader, blocks_of, write_world
from serve_process import ServerProcess

PAGES = {
    str(path.relative_to(ROOT)): blocks_of(path)
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/*.py")))
}
BLOCKS = [block for page in PAGES.values() for block in page]
MARKED = 7  # blocks that are not run

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("cheap_nodes", "one_thread")]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: the package's default model with heads, own models and files."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTHEADS_CACHE", str(folder / "cache"))
        return write_world(folder)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ServerProcess]]:
    """Those that run, by their options."""
    found: dict[str, ServerProcess] = {}
    yield found
    for server in found.values():
        server.stop()
        assert server.process.returncode == 0, server.errors


@pytest.fixture(scope="module")
def reader(
    request: pytest.FixtureRequest,
    world: Path,
    servers: dict[str, ServerProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Reader]:
    """Of one page, in its own folder."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        named = (ROOT / request.param).read_text(encoding="utf-8")
        few = {name: place for name, place in heads.HEADS.items() if name in HEADS or name in named}
        patch.setattr(heads, "HEADS", few)  # a table of all methods is one of few
        patch.chdir(folder)
        patch.setattr(sys, "stdin", StringIO("Hello!\n"))  # to chat
        patch.setenv("DRAFTHEADS_CACHE", str(world / "cache"))
        patch.setattr(registry, "weights_folder", lambda: world / "weights")
        patch.setattr(registry, "data_package_folder", lambda: None)
        yield Reader(folder, world, PAGES[request.param], patch, servers)
    heads._load_entry_points.cache_clear()


@pytest.mark.parametrize(
    ("reader", "block"),
    [(block.page, block) for block in BLOCKS],
    ids=map(str, BLOCKS),
    indirect=["reader"],
    scope="module",
)
def test_a_block_runs(reader: Reader, block: Block):
    reader.read_up_to(block)
    if block.needs is None:
        return
    for place, command in block.commands if block.language == "console" else ():
        words = shlex.split(reader.given(command), comments=True)
        if "draftheads" in words:
            name, *options = words[words.index("draftheads") + 1 :]
            try:
                read_options(name, options)
            except SystemExit:
                pytest.fail(f"{place}: {command}")
    for node in ast.walk(ast.parse(block.text)) if block.language == "python" else ():
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("draftheads"):
            assert all(hasattr(importlib.import_module(str(node.module)), name.name) for name in node.names)


def test_the_metrics_that_the_manual_names_are_there():
    source = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("src/draftheads/serve/*.py"))
    pages = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/serve/*.md"))
    named = re.findall(r"`draftheads_(\w+?)(?:_total)?`", pages)
    assert len(named) >= 5
    assert [name for name in named if not re.search(rf'"(draftheads_)?{name}"', source)] == []


def test_few_blocks_are_not_run_and_each_example_is():
    assert len([block for block in BLOCKS if block.needs]) == MARKED
    assert [page for page, blocks in PAGES.items() if page.startswith("examples/") and not blocks] == []
