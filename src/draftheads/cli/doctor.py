"""``draftheads doctor``: prints what :mod:`draftheads.cli.diagnosis` finds on this machine."""

import textwrap
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

from draftheads.cli.diagnosis import Finding, examine
from draftheads.cli.show import check_json_path, write_json
from draftheads.errors import MissingDependency
from draftheads.utils.counts import counted

_MARKS = {  # where there is UTF-8, elsewhere, and the style
    "ok": ("✓", "+", "green"),
    "optional": ("-", "-", "dim"),
    "advice": ("!", "!", "bold yellow"),
    "unusable": ("!", "!", "bold red"),
}
_WIDTH = 100  # where the terminal is wider
_NAMES = 14  # characters of the longest usual name
_INDENT = _NAMES + 4


@dataclass(frozen=True)
class DoctorOptions:
    """Show what draftheads found on this machine, with advice: processor, kernels, packages, GPU, cache."""

    model: str | None = None
    """Also show whether this model gets native passes, and why not. A name, a folder or a Hugging Face id; its weights
    are not read."""
    json: str | None = None
    """Write the findings as JSON to this file. - writes them to standard output."""


def run(options: DoctorOptions) -> None:
    """Prints each group as soon as it is found."""
    check_json_path(options.json)
    console = Console(highlight=False, quiet=options.json == "-")
    groups: dict[str, list[Finding]] = {}
    with console.status("checking"):
        for title, group in examine(options.model):
            groups[title] = group
            _print_group(console, title, group)
    findings = [finding for group in groups.values() for finding in group]
    advised = [finding for finding in findings if finding.level in ("advice", "unusable")]
    console.print()
    console.print(f"{counted(len(advised), 'thing')} to do, marked with !" if advised else "Nothing to do.")
    record = {title: [asdict(finding) for finding in group] for title, group in groups.items()}
    write_json(options.json, {"format_version": 1, "findings": record})
    if unusable := [finding for finding in findings if finding.level == "unusable"]:
        problems = "; ".join(f"{finding.name} {finding.text}" for finding in unusable)
        raise MissingDependency(f"draftheads cannot work here: {problems}. Run: {unusable[0].advice}")


def _print_group(console: Console, title: str, findings: list[Finding]) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    is_plain = not console.encoding.lower().startswith("utf")
    width = min(console.width, _WIDTH) - _INDENT
    for finding in findings:
        mark, plain, style = _MARKS[finding.level]
        lines = textwrap.wrap(finding.text, width, break_on_hyphens=False)
        start = Text.assemble((f" {plain if is_plain else mark} ", style), f"{finding.name:<{_NAMES}} ", lines[0])
        console.print(start, soft_wrap=True)
        advice = f"{'->' if is_plain else '→'} {finding.advice}" if finding.advice else ""
        style = "" if finding.level == "optional" else style
        for line in lines[1:]:
            console.print(Text(" " * _INDENT + line), soft_wrap=True)
        for line in textwrap.wrap(advice, width, break_on_hyphens=False):
            console.print(Text(" " * _INDENT + line, style=style), soft_wrap=True)
