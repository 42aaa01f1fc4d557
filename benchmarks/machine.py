"""The kind of machine that a benchmark ran on, for the head of its table."""

from pathlib import Path

from draftheads.utils.provenance import provenance

CPU_FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16")  # of interest for products


def cpu_model_and_flags(cpuinfo: str) -> tuple[str, tuple[str, ...]]:
    r"""Name and interesting flags of the first CPU in the text of ``/proc/cpuinfo``.

    >>> cpu_model_and_flags("model name\t: Some CPU\nflags\t\t: fpu avx2 avx512f\n")
    ('Some CPU', ('avx2', 'avx512f'))
    """
    lines = dict(reversed([line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line]))
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    present = fields.get("flags", "").split()
    return fields.get("model name", "unknown CPU"), tuple(flag for flag in CPU_FLAGS if flag in present)


def machine(num_threads: int) -> dict[str, object]:
    """Kind of CPU, threads, commit and versions; plain JSON values."""
    path = Path("/proc/cpuinfo")
    model, flags = cpu_model_and_flags(path.read_text(encoding="utf-8") if path.is_file() else "")
    facts: dict[str, object] = {**provenance(), "cpu": model, "cpu_flags": list(flags), "threads": num_threads}
    del facts["command"]  # its arguments are the machine's folders
    return facts
