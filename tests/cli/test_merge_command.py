"""`snugtune merge`: what a person types, what lies on disk afterwards, and that it is whole or not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import snugtune
import tiny
from snugtune import api, merging
from snugtune.adapters import merge as streamed
from snugtune.adapters import save
from snugtune.data import dataset
from snugtune.models import load


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"prompt": f"w{i} w{i + 2} ", "completion": f"w{i + 1} w{2 * i}"} for i in range(3, 43)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def trained(model_folder, rows_file, tmp_path_factory) -> Path:
    """A run whose adapter has been made large, so that it changes the answers."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    recipe = snugtune.Recipe.model_validate({
        "model": str(model_folder), "data": str(rows_file), "budget": "6GiB", "output": str(folder),
        "what": {"max_steps": 1},
    })  # fmt: skip
    api.train(recipe)
    file = folder / "adapter" / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(0)
    save_file({n: torch.randn(t.shape, generator=generator) * 0.2 for n, t in load_file(file).items()}, file)
    return folder


@pytest.fixture
def place(tmp_path) -> Path:
    """Where a test writes; nothing of a failed merge may stay in it."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def _logits(model: Any, row: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row.ids.tolist()]), use_cache=False).logits[0]
    return logits[torch.tensor(row.is_label).nonzero()[:, 0] - 1].double()


def test_the_merged_folder_and_its_figures(run, trained, rows_file, place):
    code, out, err = run("merge", trained, "--output", place / "merged", "--data", rows_file, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["output"] == str(place / "merged")
    assert [file.name for file in place.iterdir()] == ["merged"]
    assert (
        report["measured_peak_bytes"] > 0
        and report["dtype"] == "bf16"
        and report["base"] == "original"
        and report["merged_tensors"] == 4
    )
    # The same figures from plain transformers and the adapter on it.
    merged = AutoModelForCausalLM.from_pretrained(
        place / "merged", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    base = tiny.model("llama", attn="eager")
    save.load(base, trained / "adapter")
    rows = dataset.load_evaluation(str(rows_file), tiny.tokenizer(), max_length=64, most_rows=32).held_out
    first, second = (torch.cat([_logits(model, row) for row in rows]) for model in (base, merged))
    assert report["positions"] == len(first)
    expected = F.kl_div(second.log_softmax(1), first.log_softmax(1), reduction="batchmean", log_target=True).item()
    assert 0 < report["kl"] == pytest.approx(expected, rel=1e-3)
    assert report["max_logit_drift"] == pytest.approx((first - second).abs().max().item(), rel=1e-3)
    assert report["greedy_agreement"] == pytest.approx((first.argmax(1) == second.argmax(1)).double().mean().item())
    facts = (place / "merged" / "README.md").read_text()
    assert "bf16" in facts and f"{report['kl']:.3g}" in facts and "original weights" in facts
    # What it is worth is what the run is worth.
    losses = [
        json.loads(run("evaluate", name, "--data", rows_file, "--json")[1])["loss"]
        for name in (trained, place / "merged")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_in_float32_nothing_drifts(run, trained, rows_file, place):
    code, out, err = run("merge", trained, "--output", place / "merged", "--data", rows_file, "--dtype", "fp32",
                         "--max-kl", 1e-9, "--json")  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    assert report["kl"] < 1e-9 and report["max_logit_drift"] < 1e-4 and report["greedy_agreement"] == 1.0


def test_a_person_gets_a_table_with_the_next_command(run, trained, rows_file, place):
    code, out, _ = run("merge", trained / "adapter", "--output", place / "merged", "--data", rows_file)
    assert code == 0
    for word in ("KL", "nats", "bf16", "peak", f"snugtune evaluate {place / 'merged'} --data {rows_file}"):
        assert word in out


def test_past_the_limit_of_drift_nothing_is_left_and_the_run_stays(run, trained, rows_file, place):
    before = {file.name: file.read_bytes() for file in (trained / "adapter").iterdir()}
    code, out, err = run("merge", trained, "--output", place / "merged", "--data", rows_file, "--max-kl", 0, "--json")
    assert code == 4 and not out
    assert "KL" in err and "limit of 0" in err and "--dtype fp32" in err and str(trained) in err
    assert not list(place.iterdir())
    assert {file.name: file.read_bytes() for file in (trained / "adapter").iterdir()} == before
    code, _, err = run(
        "merge", trained, "--output", place / "merged", "--data", rows_file, "--max-kl", 0, "--dtype", "fp32"
    )
    assert code == 4 and "--dtype fp32" not in err


def test_a_drift_that_is_no_number_is_past_every_limit(run, trained, rows_file, place, monkeypatch):
    monkeypatch.setattr(merging.drift, "measure", lambda *_: merging.drift.Drift(float("nan"), float("nan"), 0.0, 3))
    code, _, err = run("merge", trained, "--output", place / "merged", "--data", rows_file, "--max-kl", 1e9)
    assert code == 4 and "nan" in err
    assert not list(place.iterdir())


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (OSError("no space left on device"), 2, "no space left"),
        (RuntimeError("unable to mmap: can't allocate memory"), 3, "memory ran out"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_failure_in_the_middle_leaves_nothing_half_written(
    error, code, word, run, trained, rows_file, place, monkeypatch
):
    true_copy, done = streamed._copy, 0

    def copy(*args: Any) -> None:
        nonlocal done
        done += 1
        if done > 7:
            raise error
        true_copy(*args)

    monkeypatch.setattr(streamed, "_copy", copy)
    found, _, err = run("merge", trained, "--output", place / "merged", "--data", rows_file)
    assert found == code and word in err
    assert done == 8 and not list(place.iterdir())


def test_an_empty_folder_is_taken_and_any_other_is_left_alone(run, trained, rows_file, place):
    taken = place / "merged"
    taken.mkdir()
    assert run("merge", trained, "--output", taken, "--data", rows_file)[0] == 0
    before = (taken / "model.safetensors").stat().st_mtime_ns
    code, _, err = run("merge", trained, "--output", taken, "--data", rows_file)
    assert code == 2 and "not empty" in err
    assert (taken / "model.safetensors").stat().st_mtime_ns == before
    code, _, err = run("merge", trained, "--output", taken / "config.json", "--data", rows_file)
    assert code == 2 and "not empty" in err
    code, _, err = run("merge", trained, "--output", taken / "config.json" / "below", "--data", rows_file)
    assert code == 2 and "below" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["no-such-run"], ["no-such-run"]),
        (["RUN", "--data", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["RUN", "--dtype", "bf61"], ["bf61", "bf16"]),
        (["RUN", "--dtype", "int4"], ["int4", "fp32"]),
        (["RUN", "--budget", "lots"], ["lots"]),
        (["MODEL"], ["no adapter"]),
        (["RUN", "--max-kl", "-1"], ["--max-kl"]),
    ],
)
def test_a_mistake_is_named_with_what_to_do(args, words, run, trained, model_folder, rows_file, place):
    args = [{"RUN": trained, "MODEL": model_folder}.get(arg, arg) for arg in args]
    data = [] if "--data" in args else ["--data", rows_file]
    code, out, err = run("merge", *args, "--output", place / "merged", *data)
    assert code == 2
    assert all(word in out + err for word in words), err
    assert not list(place.iterdir())


def test_a_run_that_cannot_be_merged_says_why(run, trained, model_folder, rows_file, place):
    copy = place / "run"
    shutil.copytree(trained, copy)
    command = ["merge", copy, "--output", place / "merged", "--data", rows_file]
    (copy / "adapter" / "adapter_model.safetensors").unlink()
    code, _, err = run(*command)
    assert code == 2 and "adapter_model.safetensors" in err
    shutil.rmtree(copy / "adapter")
    code, _, err = run(*command)
    assert code == 2 and "has no adapter" in err
    shutil.copytree(trained / "adapter", copy / "adapter")
    recipe = copy / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(model_folder), str(place / "gone")))
    code, _, err = run(*command)
    assert code == 2 and "gone" in err
    tiny.model("llama", hidden_size=48).save_pretrained(place / "gone")
    tiny.tokenizer().save_pretrained(place / "gone")
    code, _, err = run(*command)
    assert code == 2 and "[8, 32], not [8, 48]" in err
    assert {file.name for file in place.iterdir()} == {"run", "gone"}


def test_a_tokenizer_with_more_tokens_than_the_base_knows_is_refused(run, trained, rows_file, place):
    copy = place / "run"
    shutil.copytree(trained, copy)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"new{i}" for i in range(4)])
    tokenizer.save_pretrained(copy / "adapter")
    rows = place / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "w4 ", "completion": "new1"}) + "\n")
    code, _, err = run("merge", copy, "--output", place / "merged", "--data", rows)
    assert code == 2 and "132 tokens, its base knows 128" in err
    # Some published models have a token too many that no text has.
    code, _, err = run("merge", copy, "--output", place / "merged", "--data", rows_file)
    assert code == 0 and "132 tokens, its base knows 128" in err


def test_a_run_over_4_bits_is_merged_into_what_it_saw(run, trained, rows_file, place):
    copy = place / "run"
    shutil.copytree(trained, copy)
    ours = copy / "adapter" / "snugtune.json"
    ours.write_text(json.dumps(json.loads(ours.read_text()) | {"packing": "int4"}))
    code, out, err = run("merge", copy, "--output", place / "merged", "--data", rows_file, "--dtype", "fp32", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["base"] == "dequantised" and report["max_logit_drift"] < 1e-4
    assert "dequantised weights" in (place / "merged" / "README.md").read_text()


def test_it_is_there_from_python(trained, rows_file, place):
    told: list[tuple[str, int, int]] = []
    report = merging.merge(
        str(trained), place / "deep" / "merged", data=str(rows_file), progress=lambda what, done, total, _: told.append((what, done, total))
    )  # fmt: skip
    assert Path(report.output) == place / "deep" / "merged"
    assert [fact for fact in told if fact[0] == "merging"][-1] == ("merging", 21, 21)
    assert load.resolve(report.output).adapter is None


def test_the_budget_is_a_wall(run, trained, rows_file, place):
    code, _, err = run("merge", trained, "--output", place / "merged", "--data", rows_file, "--budget", "6GiB")
    assert code == 0, err
