"""What a decoding step costs on this machine: milliseconds of verifying and of drafting, by rows and by nodes.

A cost profile belongs to a machine, a model and a head's architecture; it does not depend on acceptance. It is measured
once, in one to five seconds, with the operations of the decoding loop, and kept in the user's cache.
"""

import bisect
import hashlib
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from draftheads.cpu.kernels import PackedLinear
from draftheads.cpu.optimise import kernels_of
from draftheads.cpu.threads import thread_choice
from draftheads.decode.step_timer import TEXT_TOKENS, StepTimer
from draftheads.errors import CacheWarning, CheckpointError, InvalidSettings, SpeedWarning, StorageError
from draftheads.heads.base import DraftHead
from draftheads.models.model import TargetModel
from draftheads.utils.cache import cache_folder
from draftheads.utils.files import write_atomic
from draftheads.utils.machine import OtherPrograms
from draftheads.utils.provenance import provenance
from draftheads.utils.strict_json import checked, read_dataclass, read_object

logger = logging.getLogger(__name__)

LEAST_SECONDS, BUDGET_SECONDS = 1.0, 5.0
_BUDGET_STEPS = 40  # plain steps: reading the weights of a file takes as long as reading them so often from memory
_VERSION = 10
_REPEATS, _SWEEPS = 2, 4  # timings of a part in a row, and how often all parts are timed
_REFERENCES = 4  # plain steps that are timed to see whether a stored profile is still right …
_SAME = 1.25  # … which it is where they take up to this many times as long or as short
_LONG_REPEATS = 4  # timings of verifying after a long text
_LONG_TEXT_SHARE = 0.3  # of the budget, for these
Part = Literal["verify", "follow", "static", "dynamic"]  # following is what a drafter does in a step without a draft
Line = list[tuple[int, float]]  # (nodes, milliseconds), ascending
# (part, rows, nodes) in the order of measuring: what decides most comes first
_ORDER: tuple[tuple[Part, int, int], ...] = (
    *(("verify", 1, nodes) for nodes in (1, 8, 16, 4)),
    ("follow", 1, 1),
    ("static", 1, 8),
    ("dynamic", 1, 8),
    *(("verify", 4, nodes) for nodes in (1, 4)),
    *(("verify", 16, nodes) for nodes in (1, 2)),
    *((part, rows, 4) for part in ("static", "dynamic") for rows in (4, 16)),
    *(("follow", rows, 1) for rows in (4, 16)),
    *(("verify", 1, nodes) for nodes in (24, 32, 12)),
    *(("verify", 4, nodes) for nodes in (8, 2)),
    # each of the first levels costs a call of the head
    *((part, 1, nodes) for part in ("static", "dynamic") for nodes in (24, 5, 2)),
    ("verify", 16, 4),
    *(("verify", 1, nodes) for nodes in (64, 48)),
    ("verify", 4, 16),
)
# (rows, nodes) of verifying after a long text; attention takes longer there, the rest as long as before
_LONG_TEXT_ORDER = ((1, 1), (1, 8), (4, 1), (4, 4), (16, 1), (16, 2))
_LONG_TEXT_BYTES = 2**30  # most memory that the keys and values of one of these measurements may take


@dataclass(frozen=True)
class CostPoint:
    """One measurement: a part of a step, with that many rows and nodes."""

    part: Part
    rows: int
    nodes: int
    milliseconds: float
    text_tokens: int = TEXT_TOKENS
    """Tokens of each row's text. Only verifying is also measured after a longer text."""
    depth: int | None = None
    """Levels of the tree that was drafted; None where it is not known, and then all depths cost as much."""


@dataclass(frozen=True)
class CostProfile:
    """Milliseconds of a step: straight lines between the measured points.

    Verifying costs by the number of tokens, rows x nodes, and something for the rows. Beyond the last points the last
    line goes on. Verifying never gets cheaper with more rows or tokens, and no token is cheaper than those before it:
    few tokens wait for weights, many compute. Disturbances only add time, so points that break these rules are lowered.

    Raises:
        ValueError: on construction, where a point is not positive or no plain step was measured.

    >>> cost = CostProfile((CostPoint("verify", 1, 1, 10.0), CostPoint("verify", 1, 11, 20.0)))
    >>> cost.verify(1, 6), cost.verify(1, 21), cost.draft("static", 1, 6)
    (15.0, 30.0, 0.0)
    """

    points: tuple[CostPoint, ...]

    def __post_init__(self) -> None:
        for point in self.points:
            if not (point.rows >= 1 and point.nodes >= 1 and 0 <= point.milliseconds < math.inf):
                raise ValueError(f"{point} must have at least 1 row, 1 node and 0 milliseconds")
        plain = [point for point in self.points if (point.part, point.rows, point.nodes) == ("verify", 1, 1)]
        if not plain or plain[0].milliseconds <= 0:
            raise ValueError("a cost profile needs the milliseconds of verifying 1 row of 1 node")

    def verify(self, rows: int, nodes: int, text_tokens: int = 0) -> float:
        """Milliseconds of verifying, accepting and committing.

        Args:
            rows: B.
            nodes: N, root included.
            text_tokens: of the longest row. All rows attend to as many slots as the longest one needs. Attention takes
                time in proportion to them, beyond the length at which the other points were measured.
        """
        short = self._verify_short(rows, nodes)
        if not self._long_lines or text_tokens <= TEXT_TOKENS:
            return short
        return short + self._by_rows(self._long_lines, rows, nodes) * (text_tokens - TEXT_TOKENS)

    @cached_property
    def _long_lines(self) -> dict[int, Line]:
        """By rows: (nodes, milliseconds that each further token of text adds)."""
        lines: dict[int, Line] = {}
        for point in sorted(self.points, key=lambda point: point.nodes):
            if point.part == "verify" and point.text_tokens > TEXT_TOKENS:
                line = lines.setdefault(point.rows, [])
                added = max(0.0, point.milliseconds - self._verify_short(point.rows, point.nodes))
                line.append((point.nodes, added / (point.text_tokens - TEXT_TOKENS)))
        return lines

    def _verify_short(self, rows: int, nodes: int) -> float:
        by_tokens, by_rows = self._verifying
        return _on_line(by_tokens, rows * nodes) + _on_line(by_rows, rows)

    @cached_property
    def _verifying(self) -> tuple[Line, Line]:
        """Milliseconds by tokens, rows x nodes, and what each number of rows adds.

        The layers compute tokens, whatever the rows, and their kernels change with the number of tokens. Attention is
        computed by rows. So 8 rows of 2 nodes are as 4 rows of 4 or 1 row of 16, but for what 8 rows add. The least
        that was measured counts, as disturbances only add.
        """
        lines = {rows: [(rows * nodes, value) for nodes, value in line] for rows, line in self._lines["verify"].items()}
        one_row = _from_below(lines[1])
        by_rows: Line = []
        for rows, line in sorted(lines.items(), reverse=True):
            known = [point for point in line if point[0] <= one_row[-1][0]] or line[:1]
            added = max(0.0, min(value - _on_line(one_row, tokens) for tokens, value in known))
            by_rows.append((rows, min([added, *(more for _, more in by_rows)]) if rows > 1 else 0.0))
        by_rows.reverse()
        least: dict[int, float] = {}
        for rows, added in by_rows:
            for tokens, value in lines[rows]:
                least[tokens] = min(least.get(tokens, math.inf), value - added)
        return _from_below(sorted(least.items())), by_rows

    @staticmethod
    def _by_rows(lines: Mapping[int, Line], rows: int, nodes: int) -> float:
        """Between numbers of rows; never less for more rows, and in proportion beyond the last number."""
        highest: list[tuple[int, float]] = []
        for number, line in sorted(lines.items()):
            added = _on_line(_from_below(line), nodes)
            highest.append((number, max([added, *(value for _, value in highest)])))
        most = highest[-1][0]
        return _on_line(highest, min(rows, most)) * max(1.0, rows / most)

    def draft(self, kind: Literal["static", "dynamic"], rows: int, nodes: int, depth: int | None = None) -> float:
        """Milliseconds of drafting; a root alone (``depth`` 0) is not drafted.

        Args:
            kind: of tree.
            rows: B.
            nodes: N, root included.
            depth: levels below the root; as in the trees that were measured when left out. The first level has its own
                cost, where it was measured alone, and all further ones cost as much as each other.
        """
        if depth == 0:
            return 0.0
        part = kind if kind in self._lines else "static"
        if depth is None or part not in self._levels:
            return self._bilinear(self._lines.get(part), rows, nodes)
        by_rows = [
            (number, first + (depth - 1) * _on_line(line, nodes))
            for number, (first, line) in sorted(self._levels[part].items())
        ]
        return max(0.0, _on_line(by_rows, rows))

    @cached_property
    def _levels(self) -> dict[str, dict[int, tuple[float, Line]]]:
        """By part and rows: milliseconds of the first level, and of each further one by nodes."""
        places: dict[tuple[str, int], list[CostPoint]] = {}
        for point in sorted(self.points, key=lambda point: point.nodes):
            if point.depth:
                places.setdefault((point.part, point.rows), []).append(point)
        levels: dict[str, dict[int, tuple[float, Line]]] = {}
        for (part, rows), points in places.items():
            first = [point.milliseconds for point in points if point.depth == 1]
            lowest = min(first, default=0.0)
            known = len(first[:1])  # levels whose cost is known; where none is, all cost as much
            line = [
                (point.nodes, max(0.0, point.milliseconds - lowest) / (point.depth - known))
                for point in points
                if point.depth and point.depth > 1
            ] or [(1, lowest)]
            levels.setdefault(part, {})[rows] = (lowest if known else line[0][1], line)
        return levels

    def follow(self, rows: int) -> float:
        """Milliseconds that a drafter takes in a step without a draft."""
        return self._bilinear(self._lines.get("follow"), rows, 1)

    @staticmethod
    def _bilinear(lines: dict[int, Line] | None, rows: int, nodes: int) -> float:
        if not lines:
            return 0.0
        return _on_line([(number, _on_line(line, nodes)) for number, line in sorted(lines.items())], rows)

    @cached_property
    def _lines(self) -> dict[str, dict[int, Line]]:
        lines: dict[str, dict[int, Line]] = {}
        for point in sorted(self.points, key=lambda point: point.nodes):
            if point.text_tokens > TEXT_TOKENS:
                continue
            lines.setdefault(point.part, {}).setdefault(point.rows, []).append((point.nodes, point.milliseconds))
        return lines

    def to_json(self) -> str:
        return json.dumps({"format_version": _VERSION, "points": [asdict(point) for point in self.points]}) + "\n"


def read_cost(path: Path) -> CostProfile:
    """The profile in a file.

    Raises:
        CheckpointError, ValueError: it is damaged, or of a newer version.
    """
    raw = checked(read_object(path, newest=_VERSION), {"format_version": int, "points": list}, path)
    return CostProfile(
        tuple(read_dataclass(CostPoint, item, path, f"points[{i}]") for i, item in enumerate(raw["points"]))
    )


def _from_below(line: Sequence[tuple[int, float]]) -> Line:
    """The corners of the highest convex line that rises and lies above no point.

    >>> _from_below([(1, 10.0), (4, 14.0), (8, 14.0), (16, 22.0)])
    [(1, 10.0), (8, 14.0), (16, 22.0)]
    >>> _from_below([(1, 12.0), (4, 10.0), (8, 14.0)])
    [(1, 10.0), (4, 10.0), (8, 14.0)]
    """
    corners: Line = []
    lowest = math.inf
    for nodes, value in reversed(line):
        lowest = min(lowest, value)  # a smaller tree costs no more than a larger one
        while len(corners) >= 2 and _slope((nodes, lowest), corners[-1]) > _slope(corners[-1], corners[-2]):
            corners.pop()
        corners.append((nodes, lowest))
    return corners[::-1]


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _on_line(line: Sequence[tuple[int, float]], at: int) -> float:
    """The value at a place of the straight lines through (place, value) points; beyond the last by its slope.

    >>> _on_line([(1, 10.0), (3, 30.0)], 2), _on_line([(1, 10.0), (3, 30.0)], 4), _on_line([(2, 10.0)], 4)
    (20.0, 40.0, 10.0)
    """
    right = bisect.bisect_left(line, at, key=lambda point: point[0])
    if right == 0 or len(line) == 1:
        return line[0][1]
    right = min(right, len(line) - 1)
    (x0, y0), (x1, y1) = line[right - 1], line[right]
    value = y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return max(y1, value) if at > x1 else value


# --- measuring ---


def measure_cost(
    target: TargetModel,
    drafter: DraftHead,
    *,
    extra_nodes: int = 0,
    budget_seconds: float | None = None,
    timer_class: type[StepTimer] = StepTimer,
) -> CostProfile:
    """Times the parts of a step, the most informative first, in several sweeps until the time is up; the least counts.

    Args:
        target: the model.
        drafter: bound to it.
        extra_nodes: tokens that a step may have beyond the head's.
        budget_seconds: no measurement begins that would not be over by then. Two always are made. None: about as long
            as loading the weights takes.
        timer_class: what times a part.
    """
    timer = timer_class(target, drafter)
    start = timer.now
    if budget_seconds is None:
        step_seconds = timer.milliseconds("verify", 1, 1) / 1e3
        budget_seconds = min(BUDGET_SECONDS, max(LEAST_SECONDS, _BUDGET_STEPS * step_seconds))
    end = start + budget_seconds
    deadline = end - (_LONG_TEXT_SHARE * budget_seconds if timer.long_text_tokens > TEXT_TOKENS else 0.0)
    samples: dict[tuple[Part, int, int], float] = {}
    most = 1.0 + timer.depth + extra_nodes  # tokens of a step
    for sweep in range(_SWEEPS):
        for part, rows, nodes in _ORDER:
            place = (part, rows, nodes)
            if sweep and place not in samples:
                continue
            expected = samples.get(place, _estimate(samples, part, rows, nodes))
            if len(samples) >= 2 and timer.now + _REPEATS * expected / 1e3 > deadline:
                continue
            if not sweep and _never_faster(samples, part, rows, nodes, most):
                continue
            times = [samples.get(place, math.inf)]
            for _ in range(_REPEATS):
                times.append(timer.milliseconds(part, rows, nodes))
                if timer.now + times[-1] / 1e3 > deadline:
                    break
            samples[place] = min(times)  # what disturbs a machine only adds
    points = [
        CostPoint(*place, round(value, 4), depth=timer.depth_of(place[0], place[2]))
        for place, value in sorted(samples.items())
    ]
    return CostProfile((*points, *_after_long_text(timer, samples, end)))


def _after_long_text(
    timer: StepTimer, samples: Mapping[tuple[Part, int, int], float], deadline: float
) -> Iterator[CostPoint]:
    """What verifying takes after a long text; nothing for models that take none, and once the time is up."""
    length = timer.long_text_tokens
    for rows, nodes in _LONG_TEXT_ORDER:
        expected = samples.get(("verify", rows, nodes), math.inf)
        fits = rows * length * timer.bytes_per_token <= _LONG_TEXT_BYTES
        if length <= TEXT_TOKENS or not fits or timer.now + _LONG_REPEATS * 2 * expected / 1e3 > deadline:
            continue
        least = min(timer.milliseconds("verify", rows, nodes, text_tokens=length) for _ in range(_LONG_REPEATS))
        yield CostPoint("verify", rows, nodes, round(least, 4), length)


def _estimate(samples: dict[tuple[Part, int, int], float], part: Part, rows: int, nodes: int) -> float:
    """About how many milliseconds a part will take: as the nearest one so far, in proportion to its tokens at most."""
    known = {place: value for place, value in samples.items() if (place[0] == "verify") == (part == "verify")}
    if not known:
        return 0.0
    near = min(known, key=lambda place: abs(math.log(place[1] * place[2] / (rows * nodes))))
    return known[near] * max(1.0, rows * nodes / (near[1] * near[2]))


def _never_faster(samples: dict[tuple[Part, int, int], float], part: Part, rows: int, nodes: int, most: float) -> bool:
    """Does verifying fewer nodes already cost more plain steps than a step can have tokens?"""
    plain = samples.get(("verify", rows, 1))
    if part != "verify" or plain is None:
        return False
    below = [v for (p, r, n), v in samples.items() if p == "verify" and r == rows and n < nodes]
    return bool(below) and max(below) > most * plain


# --- the cache ---


def machine_of(target: TargetModel) -> dict[str, str | int]:
    """What speeds depend on besides the sizes of model and head."""
    here = provenance()
    is_gpu = target.device.type == "cuda"
    return {
        "processor": str(here["processor"]),
        "device": torch.cuda.get_device_name(target.device) if is_gpu else str(target.device),
        "threads": torch.get_num_threads(),
        "precision": target.precision,
        "kernels": kernels_of(target.model),
        "torch": str(here["torch"]),
        "transformers": str(here["transformers"]),
        "draftheads": str(here["draftheads"]),
    }


def _products(module: nn.Module) -> list[str]:
    """Kernels by shape of layer: they depend on the weights, too."""
    layers = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    return sorted({f"{layer.out_features}x{layer.in_features} {layer.product.name}" for layer in layers})


def cost_key(target: TargetModel, drafter: DraftHead, extra_nodes: int = 0) -> str:
    """A digest of what a cost profile depends on; not of weights."""
    sizes = {
        "model": target.config.model_type,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "layers": target.layer_kinds,
        "layer_sizes": target.layer_sizes,
        "experts": getattr(target.config, "num_local_experts", None),
    }
    head = {"method": drafter.config.method, **drafter.config.options()}
    products = [_products(target.model), _products(drafter), extra_nodes]
    whole = {"version": _VERSION, "machine": machine_of(target), "sizes": sizes, "head": head, "products": products}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:24]


def cost_of(target: TargetModel, drafter: DraftHead, *, extra_nodes: int = 0, keep: bool = True) -> CostProfile:
    """The cost profile in the user's cache; measured now, and kept, where there is none or where it is wrong by now.

    With ``extra_nodes`` a step may have as many tokens beyond the head's: copies. Without ``keep`` nothing is written,
    as other work of this process may slow the measurement down. What other programs slowed down is not written either.

    Warns:
        CacheWarning: the cache is damaged or cannot be written. Then it is measured anew.
        SpeedWarning: other programs use the cores.
    """
    problems = []
    path = None
    with thread_choice().unchanged():
        others, on_cpu = OtherPrograms(), target.device.type == "cpu"
        try:
            path = cache_folder() / "costs" / f"{cost_key(target, drafter, extra_nodes)}.json"
            if path.exists():
                stored = read_cost(path)
                factor = slowdown(stored, target, drafter)
                is_busy = on_cpu and others.disturb(torch.get_num_threads())
                if 1.0 / _SAME <= factor <= _SAME or (factor > 1.0 and is_busy):
                    if factor > _SAME:
                        _warn_of_others(f"a step takes {factor:.1f} times as long as on the idle machine")
                    return stored
        except (CheckpointError, ValueError, OSError) as error:
            problems.append(f"the cost profile cannot be read: {error}")
        except InvalidSettings as error:
            problems.append(f"the cost profile is not kept: {error}")
        logger.info(
            "measuring the costs of steps (at most %.0f seconds, once per machine, model and head)", BUDGET_SECONDS
        )
        others.busy_cores()
        measured = measure_cost(target, drafter, extra_nodes=extra_nodes)
        if on_cpu and others.disturb(torch.get_num_threads()):
            _warn_of_others("the measured costs of steps are rough, and not kept")
        elif keep and path is not None:
            try:
                write_atomic(path, measured.to_json().encode())
            except StorageError as error:
                problems.append(f"the cost profile is not kept: {error}")
    if problems:
        warnings.warn("; ".join(problems), CacheWarning, stacklevel=3)
    return measured


def slowdown(stored: CostProfile, target: TargetModel, drafter: DraftHead) -> float:
    """How many times as long as in a profile a plain step takes now."""
    timer = StepTimer(target, drafter)
    now = math.inf
    for count in (_REFERENCES, 3 * _REFERENCES):  # what disturbs a machine for a moment is no change
        now = min(now, *(timer.milliseconds("verify", 1, 1) for _ in range(count)))
        if now <= _SAME * stored.verify(1, 1):
            break
    return now / stored.verify(1, 1)


def _warn_of_others(effect: str) -> None:
    load = f"the load average is {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "the machine is busy"
    warnings.warn(f"other programs use the processor ({load}): {effect}", SpeedWarning, stacklevel=4)
