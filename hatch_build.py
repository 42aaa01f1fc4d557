"""Builds the native library of draftheads when the package is built or installed, if there is a C++ compiler.

Without a compiler, or with ``DRAFTHEADS_NATIVE=0``, the package is pure Python: it does the same, more slowly.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

SOURCES = Path("src/draftheads/cpu/native")
LIBRARY = SOURCES / "libdraftheads.so"
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


def build(root: Path, target: Path) -> None:
    """Compiles the library unless it is there, from the same sources with the same compiler and options.

    Raises:
        OSError, subprocess.CalledProcessError: as of :func:`compile_library`.
    """
    compiler, options = _compiler()
    parts = [Path(__file__), *sorted((root / SOURCES).glob("*.[ch]*"))]
    found = hashlib.sha256(repr([compiler, options, *(part.read_bytes() for part in parts)]).encode()).hexdigest()
    key = target.with_suffix(".key")
    if not (target.exists() and key.exists() and key.read_text() == found and shutil.which(compiler[0])):
        fresh = target.with_suffix(".fresh.so")
        compile_library(root, fresh)
        key.unlink(missing_ok=True)
        fresh.replace(target)
        key.write_text(found)


def _compiler() -> tuple[list[str], list[str]]:
    """The command and its options."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or "clang++"]
    return compiler, [*OPTIONS, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def compile_library(root: Path, target: Path) -> None:
    """Compiles the library with the compiler that ``CXX`` names and further options in ``CXXFLAGS``.

    Sets of instructions that the compiler does not know are left out.

    Raises:
        OSError, subprocess.CalledProcessError: there is no compiler, or it fails.
    """
    compiler, options = _compiler()
    here = SETS if platform.machine().lower() in ("x86_64", "amd64") else {"kPortable": SETS["kPortable"]}

    def run(*arguments: str) -> None:
        command = [*compiler, *options, *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - the user's compiler

    with tempfile.TemporaryDirectory() as folder:

        def compile_set(kernels: str) -> str | None:
            name, instructions = here[kernels]
            output = str(Path(folder) / f"{kernels}.o")
            defined = (f"-DKERNELS={kernels}", f'-DKERNELS_NAME="{name}"')
            try:
                run(*instructions, *defined, "-c", str(root / SOURCES / "kernels.cpp"), "-o", output)
            except subprocess.CalledProcessError:
                if kernels == "kPortable":
                    raise
                return None
            return output

        with ThreadPoolExecutor(os.cpu_count()) as workers:
            objects = dict(zip(here, workers.map(compile_set, here), strict=True))
        names = ", ".join(f"&{kernels}" for kernels, output in objects.items() if output)
        linked = Path(folder) / target.name
        sources = [str(root / SOURCES / "step.cpp"), *filter(None, objects.values())]
        run(f"-DKERNEL_SETS={names}", "-shared", "-pthread", *STATIC, *sources, "-o", str(linked))
        new = target.with_suffix(".new")  # a process may have the old one in memory
        shutil.copyfile(linked, new)
        new.replace(target)


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
    (Path(__file__).parent / LIBRARY).with_suffix(".key").unlink(missing_ok=True)
    build(Path(__file__).parent, Path(__file__).parent / LIBRARY)
