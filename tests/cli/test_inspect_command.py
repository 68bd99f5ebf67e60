"""`snugtune inspect`: what a person and a script see of data before anything is trained."""

from __future__ import annotations

import json

import pyte

from snugtune.cli import console

ROWS = [{"prompt": f"w{i} ", "completion": f"w{i + 1}"} for i in range(5, 25)]


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_keys_of_the_contract(run, model_folder, tmp_path):
    bad = {"prompt": "w1", "completion": None}
    code, out, err = run(
        "inspect", _write(tmp_path / "r.jsonl", [*ROWS, bad, ROWS[0]]), "--model", model_folder, "--json"
    )
    found = json.loads(out)
    assert code == 0, err
    assert (found["rows"], found["left_out"], found["formats"]) == (
        21,
        {"completion is null": 1},
        {"prompt + completion": 21},
    )
    assert (
        found["token_lengths"] == {"p50": 3, "p95": 3, "max": 3}
        and found["label_tokens"] == 42
        and found["tokens"] == 63
    )
    assert found["padding"]["packing"] == 0 and found["padding"]["max_length"] > 0.9
    said = "\n".join(found["warnings"])
    assert "r.jsonl:21" in said and "r.jsonl:21" in err and "same" in said


def test_a_person_sees_lengths_warnings_and_masks_in_colour(run, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        console, "stdout", console.Console(force_terminal=True, color_system="standard", width=100, highlight=False)
    )
    code, out, _ = run("inspect", _write(tmp_path / "r.jsonl", ROWS), "--model", model_folder)
    assert code == 0
    screen = pyte.Screen(100, 60)
    pyte.Stream(screen).feed(out.replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display]
    assert any("tokens a row" in line and "median 3" in line for line in lines)
    place = next(y for y, line in enumerate(lines) if line.startswith("row 1")) + 1
    green = "".join(screen.buffer[place][x].data for x in range(100) if screen.buffer[place][x].bg == "green")
    plain = "".join(screen.buffer[place][x].data for x in range(100) if screen.buffer[place][x].bg != "green").strip()
    assert green.split()[0].startswith("w") and "</s>" in green, "the answer and its end are what is learnt"
    assert plain.startswith("w") and "</s>" not in plain


def test_a_recipe_is_inspected_with_its_sources(run, model_folder, tmp_path):
    _write(tmp_path / "a.jsonl", ROWS)
    _write(tmp_path / "b.jsonl", [{"q": "w5", "a": "w6"}] * 3)
    recipe = tmp_path / "r.yaml"
    sources = (
        f"[{{path: {tmp_path / 'a.jsonl'}}}, {{path: {tmp_path / 'b.jsonl'}, columns: {{question: q, answer: a}}}}]"
    )
    recipe.write_text(f"model: {model_folder}\ndata: {sources}\neval_rows: 0\n")
    code, out, err = run("inspect", recipe, "--json")
    assert code == 0, err
    assert json.loads(out)["formats"] == {"prompt + completion": 20, "question + answer": 3}


def test_what_cannot_be_used_at_all_exits_with_2(run, model_folder, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a", "completion": "b"}\n{oops\n')
    code, _, err = run("inspect", broken, "--model", model_folder)
    assert code == 2 and "broken.jsonl:2" in err
    code, out, err = run("inspect", broken, "--model", model_folder, "--set", "data.skip_broken_lines=true", "--json")
    assert code == 0 and json.loads(out)["left_out"] == {"the line is no JSON": 1}, err
    unknown = _write(tmp_path / "u.jsonl", [{"a": 1}])
    code, _, err = run("inspect", unknown, "--model", model_folder)
    assert code == 2 and "prompt + completion" in err and "data.columns" in err


def test_losses_are_looked_at_where_that_is_asked_for(run, model_folder, tmp_path):
    code, out, err = run(
        "inspect", _write(tmp_path / "r.jsonl", ROWS), "--model", model_folder, "--loss-rows", "5", "--json"
    )
    assert code == 0 and json.loads(out)["rows"] == 20, err
