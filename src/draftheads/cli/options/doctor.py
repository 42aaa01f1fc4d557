"""Options of ``draftheads doctor``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DoctorOptions:
    """Show what draftheads found on this machine, with advice: processor, kernels, packages, GPU, cache."""

    json: str | None = None
    """Write the findings as JSON to this file. - writes them to standard output."""
