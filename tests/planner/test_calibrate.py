"""Earlier runs on the same device correct the predicted speed; anything else says nothing."""

from __future__ import annotations

import json
import os

import pytest

from snugtune.planner.calibrate import MOST_RUNS, speed_factor

WANTED = {"device": "card", "precision": "bf16", "method": "lora"}


def run_folder(runs, name, *, predicted=100.0, measured=80.0, steps=5, age=0, **changes):
    facts = WANTED | changes
    folder = runs / name
    folder.mkdir(parents=True)
    what = {"precision": facts["precision"], "method": facts["method"], "base": facts.get("base", "bf16")}
    recipe = {"what": what, "how": {"recompute": facts.get("recompute", "none")}}
    plan = {"device": {"name": facts["device"]}, "recipe": recipe, "uncalibrated_tokens_per_second": predicted}
    (folder / "plan.json").write_text(json.dumps(plan))
    report = folder / "report.json"
    report.write_text(json.dumps({"tokens_per_second": measured, "steps": steps}))
    os.utime(report, (1e9 - age, 1e9 - age))
    return folder


def test_no_run_says_nothing(tmp_path):
    assert speed_factor(tmp_path / "nowhere", **WANTED) is None
    assert speed_factor(tmp_path, **WANTED) is None


def test_the_median_of_like_runs_counts(tmp_path):
    for name, measured in (("a", 50.0), ("b", 80.0), ("c", 90.0)):
        run_folder(tmp_path, name, measured=measured)
    assert speed_factor(tmp_path, **WANTED) == pytest.approx(0.8)


@pytest.mark.parametrize("change", [{"device": "other"}, {"precision": "fp32"}, {"method": "full"}, {"steps": 1}])
def test_other_runs_do_not_count(tmp_path, change):
    run_folder(tmp_path, "a", **change)
    assert speed_factor(tmp_path, **WANTED) is None


def test_runs_that_went_the_same_way_count_alone_where_that_is_asked(tmp_path):
    run_folder(tmp_path, "a", measured=50.0)
    run_folder(tmp_path, "b", measured=90.0, recompute="block")
    run_folder(tmp_path, "c", measured=90.0, base="int4")
    assert speed_factor(tmp_path, **WANTED, way=("bf16", "none")) == pytest.approx(0.5)
    assert speed_factor(tmp_path, **WANTED, way=("bf16", "offload")) is None


def test_only_the_newest_count(tmp_path):
    for i in range(MOST_RUNS):
        run_folder(tmp_path, f"new{i}", measured=50.0)
    for i in range(3 * MOST_RUNS):
        run_folder(tmp_path, f"old{i}", measured=200.0, age=1000)
    assert speed_factor(tmp_path, **WANTED) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "broken", ["{", "[]", '{"tokens_per_second": "fast"}', '{"tokens_per_second": 1e9, "steps": 5}']
)
def test_a_damaged_or_absurd_run_is_passed_over(tmp_path, broken):
    (run_folder(tmp_path, "a") / "report.json").write_text(broken)
    assert speed_factor(tmp_path, **WANTED) is None


def test_a_zero_prediction_is_passed_over(tmp_path):
    run_folder(tmp_path, "a", predicted=0.0)
    assert speed_factor(tmp_path, **WANTED) is None
