"""Builds the native library of draftheads when the package is built or installed, if there is a C++ compiler.

Without a compiler, or with ``DRAFTHEADS_NATIVE=0``, the package is pure Python: it does the same, more slowly.
``DRAFTHEADS_NATIVE=here`` compiles for this machine only, in a third of the time.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

SOURCES = Path("src/draftheads/cpu/native")
LIBRARY = SOURCES / "libdraftheads.so"
KEPT = Path("build/native")
OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi")
STATIC = ("-static-libstdc++", "-static-libgcc") if sys.platform == "linux" else ()
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
SETS = {  # of instructions, the fastest first: the name of the kernels, and the compiler's options
    "kAmx": ("amx", (*AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16")),
    "kAvx512Bf16": ("avx512-bf16", (*AVX512, "-mavx512vnni", "-mavx512bf16")),
    "kAvx512Vnni": ("avx512-vnni", (*AVX512, "-mavx512vnni")),
    "kAvx512": ("avx512", AVX512),
    "kAvx2": ("avx2", AVX2),
    "kPortable": ("portable", ()),
}
NEEDED = {  # what the compiler defines where the machine has a set
    "kAmx": "__AMX_BF16__",
    "kAvx512Bf16": "__AVX512BF16__",
    "kAvx512Vnni": "__AVX512VNNI__",
    "kAvx512": "__AVX512DQ__",
    "kAvx2": "__AVX2__",
}


def build(root: Path, target: Path) -> None:
    """Compiles the library with the compiler that ``CXX`` names and further options in ``CXXFLAGS``.

    What was compiled stays in ``build/native``, by the hash of its source, the compiler and the options. Sets of
    instructions that the compiler does not know are left out.

    Raises:
        OSError, subprocess.CalledProcessError: there is no compiler, or it fails.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or "clang++"]
    compiler += [*OPTIONS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    version = _run(compiler[0], "--version")
    kept, sources = root / KEPT, root / SOURCES
    kept.mkdir(parents=True, exist_ok=True)

    def made(name: str, inputs: Sequence[Path], *arguments: str) -> Path:
        """The file that the compiler makes of these inputs, which may be there already."""
        contents = [path.read_bytes() for path in (*inputs, *sources.glob("*.h"))]
        key = hashlib.sha256(repr([version, compiler, arguments, contents]).encode()).hexdigest()[:32]
        output = kept / f"{key}-{name}"
        if not output.exists():
            with tempfile.TemporaryDirectory(dir=kept) as folder:
                fresh = Path(folder) / output.name
                _run(*compiler, *arguments, *map(str, inputs), "-o", str(fresh))
                fresh.replace(output)
        return output

    def compile_set(kernels: str) -> Path | None:
        name, instructions = here[kernels]
        defined = (f"-DKERNELS={kernels}", f'-DKERNELS_NAME="{name}"')
        try:
            return made(f"{kernels}.o", [sources / "kernels.cpp"], *instructions, *defined, "-c")
        except subprocess.CalledProcessError:
            if kernels == "kPortable":
                raise
            return None

    here = SETS if platform.machine().lower() in ("x86_64", "amd64") else {"kPortable": SETS["kPortable"]}
    if os.environ.get("DRAFTHEADS_NATIVE") == "here" and len(here) > 1:
        defined = _run(*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)
        best = next((kernels for kernels, macro in NEEDED.items() if f" {macro} " in defined), "kPortable")
        here = {kernels: SETS[kernels] for kernels in dict.fromkeys((best, "kPortable"))}
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        compiled = {
            kernels: output for kernels, output in zip(here, workers.map(compile_set, here), strict=True) if output
        }
    names = ", ".join(f"&{kernels}" for kernels in compiled)
    step = made("step.o", [sources / "step.cpp"], f"-DKERNEL_SETS={names}", "-pthread", "-c")
    library = made("library.so", [step, *compiled.values()], "-shared", "-pthread", *STATIC)
    if not target.exists() or target.read_bytes() != library.read_bytes():
        new = target.with_suffix(".new")  # a process may have the old one in memory
        shutil.copyfile(library, new)
        new.replace(target)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - the user's compiler


class NativeLibrary(BuildHookInterface[Any]):
    """Adds the library to the wheel, which is then one of this kind of machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles it before the files are collected."""
        if self.target_name != "wheel" or os.environ.get("DRAFTHEADS_NATIVE") == "0":
            return
        root = Path(self.root)
        try:
            build(root, root / LIBRARY)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            message = next((line for line in lines if "error" in line), lines[-1] if lines else "")
            sys.stderr.write(f"draftheads: no native library, decoding is slower: {message}\n")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"
        if version != "editable":
            build_data["artifacts"].append(str(LIBRARY))


def _platform() -> str:
    """As hatchling names it: the library was not checked against the rules of manylinux."""
    platforms = (tag.platform for tag in sys_tags())
    return next(name for name in platforms if "manylinux" not in name and "musllinux" not in name)


if __name__ == "__main__":
    build(Path(__file__).parent, Path(__file__).parent / LIBRARY)
