"""The wheels: two heads in draftheads, eight in draftheads-zoo, and no head in both."""

import ctypes
import importlib.util
import re
import shlex
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from draftheads.checkpoints.registry import DATA_PACKAGE_HEADS
from draftheads.errors import MissingDependency

ROOT = Path(__file__).parents[1]
HEAD_FILES = {"README.md", "acceptance.json", "config.json", "model.safetensors"}
BASE = "smollm2-135m"


def project(folder: Path) -> Any:
    """The table [project] of a pyproject.toml."""
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def built(project_folder: Path, out: Path) -> Path:
    """The wheel of a project, built without a network."""
    return Path(next(WheelBuilder(str(project_folder)).build(directory=str(out), versions=["standard"])))


def load_hook() -> Any:
    """The module hatch_build."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


def heads_in(wheel: Path, package: str) -> set[str]:
    """The methods whose four files are in the wheel, in the package's folder of weights."""
    prefix = f"{package}/weights/{BASE}/"
    files: dict[str, set[str]] = {}
    for name in zipfile.ZipFile(wheel).namelist():
        if name.startswith(prefix):
            method, file = name.removeprefix(prefix).split("/")
            files.setdefault(method, set()).add(file)
    assert all(found == HEAD_FILES for found in files.values())
    return set(files)


LIBRARY = "draftheads/cpu/native/libdraftheads.so"


@pytest.mark.parametrize(
    ("macros", "kept"),
    [("__AVX2__", ["kAvx2", "kPortable"]), ("", ["kPortable"]), ("__AMX_BF16__ __AVX2__", ["kAmx", "kPortable"])],
)
def test_a_library_for_this_machine_has_its_fastest_kernels_alone(
    macros: str, kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = load_hook()
    commands: list[tuple[str, ...]] = []

    def run(*command: str) -> str:
        """A compiler that knows the machine, and writes empty files."""
        commands.append(command)
        if "-o" in command:
            Path(command[-1]).touch()
        return "".join(f"#define {name} 1\n" for name in macros.split())

    monkeypatch.setattr(hook, "_run", run)
    monkeypatch.setattr(hook, "KEPT", tmp_path)
    monkeypatch.setattr(hook.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("DRAFTHEADS_NATIVE", "here")
    monkeypatch.setenv("CXX", "ccache g++")
    hook.build(ROOT, tmp_path / "library.so")
    assert {command[:2] for command in commands[1:]} == {("ccache", "g++")}
    compiled = {part.removeprefix("-DKERNELS=") for command in commands for part in command if "-DKERNELS=" in part}
    assert compiled == set(kept)
    assert any(f"-DKERNEL_SETS={', '.join('&' + name for name in kept)}" in command for command in commands)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_only_sources_that_changed_are_compiled_again(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = load_hook()
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(hook, "_run", lambda *command: commands.append(command) or run(*command))
    run, library = load_hook()._run, tmp_path / "library.so"
    monkeypatch.setattr(hook, "KEPT", kept := tmp_path / "kept")
    shutil.copytree(ROOT / load_hook().KEPT, kept)
    hook.build(ROOT, library)
    assert [command[-1] for command in commands] == ["--version"], "the wheel's was compiled from these sources"
    assert library.read_bytes() == (ROOT / "src" / LIBRARY).read_bytes()
    sources = tmp_path / hook.SOURCES
    shutil.copytree(ROOT / hook.SOURCES, sources)
    with (sources / "step.cpp").open("a", encoding="utf-8") as file:
        file.write('extern "C" int draftheads_answer() { return 42; }\n')
    hook.build(tmp_path, library)
    assert [Path(command[-1]).name[33:] for command in commands[2:]] == ["step.o", "library.so"]
    assert ctypes.CDLL(str(library)).draftheads_answer() == 42


def test_without_a_compiler_the_wheel_is_pure_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    pure = built(ROOT, tmp_path)
    assert pure.name.endswith("-py3-none-any.whl")
    assert LIBRARY not in zipfile.ZipFile(pure).namelist()
    assert "no native library, decoding is slower: " in capsys.readouterr().err


@pytest.mark.thorough
def test_the_data_package_has_the_other_heads(tmp_path: Path) -> None:
    data = built(ROOT / "zoo", tmp_path)
    assert heads_in(data, "draftheads_zoo") == set(DATA_PACKAGE_HEADS)
    assert data.stat().st_size <= 100 * 2**20, "package indexes refuse larger files"


def test_the_wheel_has_two_heads_all_files_of_the_package_and_the_native_library(wheel: Path) -> None:
    assert heads_in(wheel, "draftheads/zoo") == {"hydra", "medusa"}
    assert wheel.stat().st_size < 30e6
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = {name.removeprefix("src/") for name in tracked.splitlines() if "/zoo/weights/" not in name}
    assets = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/draftheads/assets").glob("*/*.j*")}
    assert len(assets) >= 7, "prompts and chat templates, also where there is no git"
    found = set(zipfile.ZipFile(wheel).namelist())
    assert files | assets <= found
    [commands] = (name for name in found if name.endswith(".dist-info/entry_points.txt"))
    assert b"draftheads = draftheads.cli.main:main" in zipfile.ZipFile(wheel).read(commands)
    assert (LIBRARY in found) == (not wheel.name.endswith("-any.whl")) == (shutil.which("c++") is not None)


def test_every_bundled_head_is_in_one_of_the_wheels() -> None:
    folders = {path.parent.name for path in (ROOT / "src/draftheads/zoo/weights" / BASE).glob("*/config.json")}
    assert folders == {"hydra", "medusa", *DATA_PACKAGE_HEADS}


def test_both_packages_have_the_same_version() -> None:
    assert project(ROOT)["version"] == project(ROOT / "zoo")["version"]


def test_extras_that_errors_name_are_ours_and_their_packages_are_found() -> None:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = {name for text in sources for name in re.findall(r'MissingDependency\([^)]*extra="(\w+)"', text)}
    extras = project(ROOT)["optional-dependencies"]
    assert {"demo", "lora", "serve"} <= named <= set(extras)
    for name in named:
        assert str(MissingDependency("x", extra=name)).endswith(f"or pip install {shlex.join(extras[name])}")


def test_every_extra_is_in_the_environment_of_the_tests() -> None:
    extras = project(ROOT)["optional-dependencies"]
    [included] = [line for line in extras["dev"] if line.startswith("draftheads[")]
    # vLLM pins the packages of its environment, so it has one of its own
    assert set(included.removeprefix("draftheads[").rstrip("]").split(",")) == set(extras) - {"dev", "vllm"}
