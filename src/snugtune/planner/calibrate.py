"""What earlier runs on this device say about the prediction of its speed.

Each run writes its plan and, at its end, its report; a run folder that lies beside the one that is planned for, made on the
same device, in the same precision and with the same method, tells by what factor the speed was predicted wrongly.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

MOST_RUNS = 8
"""The newest ones count: drivers and machines change."""
_BOUNDS = (0.1, 10.0)
"""A factor outside of these tells of something else than the model (a machine that slept)."""


Way = tuple[str, str]
"""The base's storage and the recompute policy."""


def speed_factor(runs: Path, *, device: str, precision: str, method: str, way: Way | None = None) -> float | None:
    """Median of measured over predicted tokens/s of the newest finished runs in `runs`, of those that went this way where
    one is given; None where there is none."""
    wanted = (device, precision, method)
    factors = [f for folder in _newest_first(runs) if (f := _factor(folder, wanted, way)) is not None]
    return median(factors[:MOST_RUNS]) if factors else None


def _newest_first(runs: Path) -> list[Path]:
    try:
        reports = [(path.stat().st_mtime, path.parent) for path in runs.glob("*/report.json")]
    except OSError:
        return []
    return [folder for _, folder in sorted(reports, reverse=True)]


def _factor(folder: Path, wanted: tuple[str, str, str], way: Way | None) -> float | None:
    try:
        plan, report = (
            json.loads((folder / name).read_text(encoding="utf-8")) for name in ("plan.json", "report.json")
        )
        return _compare(plan, report, wanted, way)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        ZeroDivisionError,
    ):  # a run of another version, or one that somebody edited
        return None


def _compare(
    plan: dict[str, Any], report: dict[str, Any], wanted: tuple[str, str, str], way: Way | None
) -> float | None:
    what, how = plan["recipe"]["what"], plan["recipe"].get("how", {})
    if way and (what.get("base"), how.get("recompute")) != way:
        return None
    if (plan["device"]["name"], what["precision"], what["method"]) != wanted or report["steps"] < 2:
        return None
    factor = report["tokens_per_second"] / plan["uncalibrated_tokens_per_second"]
    return factor if _BOUNDS[0] < factor < _BOUNDS[1] else None
