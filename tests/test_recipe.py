"""The recipe: what is written comes back, what is wrong is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snugtune.errors import RecipeError
from snugtune.recipe import How, Lora, Recipe, Section, check, dump, load
from snugtune.units import MIB


def _sections(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[type[Section], tuple[str, ...]]]:
    yield section, path
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _sections(field.annotation, (*path, name))


KEYS = [(section, path, key) for section, path in _sections(Recipe) for key in section.model_fields]


def _tree(path: tuple[str, ...], key: Any, value: Any) -> dict[Any, Any]:
    tree: dict[Any, Any] = {key: value}
    for part in reversed(path):
        tree = {part: tree}
    return tree


def _typos(key: str) -> set[str]:
    dropped = {key[:i] + key[i + 1 :] for i in range(len(key))}
    swapped = {key[:i] + key[i + 1] + key[i] + key[i + 2 :] for i in range(len(key) - 1)}
    return {*dropped, *swapped, f"{key}s", key.replace("_", "-"), key.upper()} - {"", key}


# --- round trip ------------------------------------------------------------------------------------------------------

# Not the rarer line ends (U+0085, U+2028): PyYAML writes them bare, and reads them as the end of a line.
_names = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=20)
_counts = st.integers(1, 10**6)
_positive = st.floats(1e-30, 1e30)
_shares = st.floats(0, 1)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model": _names, "data": _names, "output": _names, "eval_data": st.none() | _names,
    "eval_rows": st.just("auto") | st.integers(0, 500),
    "budget": st.just("auto") | st.integers(1, 2**45) | st.integers(1, 10**5).map(lambda n: f"{n}MiB"),
    "device": st.sampled_from(["auto", "cpu", "cuda", "a100-80gb", "RTX 4090"]),
    "what.method": st.sampled_from(["lora", "full"]),
    "what.base": st.sampled_from(["auto", "fp32", "bf16", "fp16", "int4", "nf4"]),
    "what.precision": st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
    "what.lora.r": st.integers(1, 256), "what.lora.lora_alpha": _positive | _counts,
    "what.lora.target_modules": st.just("all-linear") | st.lists(_names, min_size=1, max_size=4),
    "what.lora.lora_dropout": st.floats(0, 1, exclude_max=True),
    "what.learning_rate": _positive, "what.global_batch_rows": _counts, "what.num_train_epochs": _positive | _counts,
    "what.max_steps": st.none() | _counts, "what.max_length": st.integers(2, 10**6),
    "what.lr_scheduler_type": st.sampled_from(["cosine", "linear", "constant", "constant_with_warmup"]),
    "what.warmup_ratio": _shares, "what.weight_decay": st.floats(0, 10),
    "what.max_grad_norm": _positive | st.just(float("inf")), "what.seed": st.integers(0, 2**63 - 1),
    "how.micro_batch_tokens": st.none() | _counts, "how.recompute": st.sampled_from([None, "none", "selective", "block", "offload"]),
    "how.update": st.sampled_from([None, "after_backward", "in_backward"]),
    "how.loss_chunk_tokens": st.none() | _counts,
    "most_left_out": _shares, "how.batching": st.sampled_from(["packing", "grouping", "padding"]),
    "how.optimizer": st.sampled_from([None, "adamw", "adamw_host", "adamw_8bit"]),
}  # fmt: skip


@st.composite
def _trees(draw: st.DrawFn) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key in draw(st.sets(st.sampled_from(sorted(_VALUES)), max_size=8)):
        *sections, last = key.split(".")
        here = tree
        for section in sections:
            here = here.setdefault(section, {})
        here[last] = draw(_VALUES[key])
    return tree


def test_the_strategy_knows_every_key():
    leaves = {".".join((*path, key)) for section, path, key in KEYS} - {"what", "how", "what.lora"}
    assert leaves == set(_VALUES), "a recipe key is not covered by the round trip"


@settings(deadline=None)
@given(_trees())
@example({"output": "1e5"})
@example({"output": "null", "model": "yes"})
@example({"output": "2024-01-01"})
@example({"what": {"learning_rate": 1e-05}})
def test_a_dumped_recipe_loads_as_itself(tree: dict[str, Any]):
    recipe = check(tree)
    assert check(yaml.safe_load(dump(recipe))) == recipe


def test_a_written_recipe_loads_as_itself(tmp_path):
    recipe = check({"model": "ä/モデル", "budget": 3 * MIB, "what": {"lora": {"target_modules": "all-linear"}}})
    file = tmp_path / "recipe.yaml"
    file.write_text(dump(recipe), encoding="utf-8")
    assert load(file) == recipe


def test_dump_writes_every_key_in_its_order():
    written = yaml.safe_load(dump(Recipe()))
    assert list(written) == list(Recipe.model_fields)
    assert list(written["what"]["lora"]) == list(Lora.model_fields)


def test_dump_writes_whole_mib_as_a_size_and_other_sizes_as_bytes():
    assert "budget: 16384MiB\n" in dump(check({"budget": "16GiB"}))
    assert "budget: 1000000000\n" in dump(check({"budget": "1GB"}))


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("section", "path", "key"), KEYS, ids=[".".join((*p, k)) for _, p, k in KEYS])
def test_a_mistyped_key_is_refused_with_the_right_one(section, path, key):
    for typo in _typos(key) - set(section.model_fields):
        with pytest.raises(RecipeError) as refused:
            check(_tree(path, typo, 1))
        wrong, right = ".".join((*path, typo)), ".".join((*path, key))
        assert str(refused.value) == f"unknown key '{wrong}'; did you mean '{right}'?"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("learning_rate", "what.learning_rate"), ("r", "what.lora.r"), ("lora.r", "what.lora"), ("lora", "what.lora"),
        ("what.micro_batch_tokens", "how.micro_batch_tokens"), ("what.lora.seed", "what.seed"),
        ("lerning_rate", "what.learning_rate"), ("how.lora_alpha", "what.lora.lora_alpha"),
    ],
)  # fmt: skip
def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(wrong, right):
    with pytest.raises(RecipeError, match=f"did you mean '{right}'"):
        load(overrides=[f"{wrong}=1"])


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([path for _, path in _sections(Recipe)]), st.text(max_size=12))
def test_any_other_key_is_refused_by_its_own_name(path, key):
    if any(key in section.model_fields for section, where in _sections(Recipe) if where == path):
        return
    with pytest.raises(RecipeError) as refused:
        check(_tree(path, key, 1))
    assert str(refused.value).startswith(f"unknown key '{'.'.join((*path, key))}'; ")


def test_a_key_like_no_other_gets_the_list_of_its_section():
    with pytest.raises(RecipeError) as refused:
        check({"how": {"zzz": 1}})
    assert all(f"how.{key}" in str(refused.value) for key in How.model_fields)


def test_a_key_that_is_no_text_is_refused():
    with pytest.raises(RecipeError, match="keys should be strings"):
        check({1: 2})  # pyrefly: ignore


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", 3), ("model", None), ("data", 3), ("data", []), ("device", "tpu"), ("eval_rows", -1),
        ("eval_rows", "some"),
        ("what", 3), ("what", None), ("how", "fast"), ("how", [1]), ("how.recompute", "blocks"),
        ("how.micro_batch_tokens", 0), ("how.micro_batch_tokens", "auto"), ("how.loss_chunk_tokens", 2.5),
        ("what.method", "dora"), ("what.precision", "fp8"), ("what.lora", 8), ("what.lora.r", 0),
        ("what.lora.r", "eight"),
        ("what.lora.r", 1.5), ("what.lora.lora_dropout", 1), ("what.lora.target_modules", 3),
        ("what.lora.target_modules", []), ("what.lora.target_modules", [""]), ("what.lora.target_modules", [1]),
        ("what.lora.lora_alpha", 0), ("what.learning_rate", 0), ("what.learning_rate", "fast"),
        ("what.learning_rate", float("inf")), ("what.learning_rate", float("nan")),
        ("what.num_train_epochs", float("inf")),
        ("what.max_length", 1), ("what.max_steps", 0), ("what.seed", -1), ("what.seed", 2**63),
        ("what.warmup_ratio", 1.1), ("what.weight_decay", -0.1), ("what.max_grad_norm", 0),
        ("what.max_grad_norm", float("nan")), ("what.lr_scheduler_type", "cosinus"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_key_and_itself(key, value):
    *path, last = key.split(".")
    with pytest.raises(RecipeError) as refused:
        check(_tree(tuple(path), last, value))
    for line in str(refused.value).splitlines():
        assert line.startswith(f"{key}: "), f"the message does not name {key}"
    assert repr(value if value != [1] or key == "how" else 1) in str(refused.value)


@pytest.mark.parametrize("value", ["16 gibibytes", "", "-1GiB", 0, True, [1], "auto auto"])
def test_a_budget_that_is_no_size_is_refused(value):
    with pytest.raises(RecipeError, match="size"):
        check({"budget": value})


def test_every_wrong_key_is_named_at_once():
    with pytest.raises(RecipeError) as refused:
        check({"modle": "x", "what": {"sed": 1, "max_length": 0}})
    assert [part in str(refused.value) for part in ("'modle'", "'what.sed'", "what.max_length: ")] == [True] * 3


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Recipe().what.seed = 3


@pytest.mark.parametrize("how", ["auto", None, {}])
def test_how_auto_leaves_everything_to_the_planner(how):
    assert check({"how": how}).how == How()


# --- files and overrides ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("what.learning_rate=1e-4", 1e-4), ("what.learning_rate=1E-4", 1e-4), ("what.learning_rate=1.5e-4", 1.5e-4),
        ("what.max_steps=1e2", 100), ("what.max_steps=null", None), ("what.max_steps=", None),
        ("what.lora.target_modules=[q_proj, k_proj]", ("q_proj", "k_proj")),
        ("what.lora.target_modules=q_proj,k_proj", ("q_proj", "k_proj")),
        ("what.lora.target_modules=q_proj", ("q_proj",)), ("what.lora.target_modules=q_proj,q_proj", ("q_proj",)),
        ("what.lora.target_modules=all-linear", "all-linear"), ("what.lora.target_modules=[all-linear]", "all-linear"),
        ("budget=16GiB", 16 << 30), ("budget=1.5GB", 1_500_000_000), ("budget=12345678", 12345678),
        ("budget=auto", "auto"),
        ("output=a=b", "a=b"), ("model=demo2e", "demo2e"), (" what.seed =3", 3), ("how.recompute=none", "none"),
        ("what.max_grad_norm=.inf", float("inf")), ("output='1e5'", "1e5"),
    ],
)  # fmt: skip
def test_an_override_is_a_yaml_value(override, value):
    found: Any = load(overrides=[override])
    for part in override.partition("=")[0].strip().split("."):
        found = getattr(found, part)
    assert found == value and type(found) is not bool


@pytest.mark.parametrize("override", ["what.seed", "=3", " =3", "what.seed=[1", "output=2024-99-99"])
def test_an_override_that_is_none_is_refused(override):
    with pytest.raises(RecipeError, match="--set"):
        load(overrides=[override])


def test_overrides_go_over_keys_and_keys_over_the_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: a\ndata: a\noutput: a\nhow: auto\nwhat:\n  seed: 1\n  max_length: 64\n")
    recipe = load(file, model="b", data="b", eval_data=None, overrides=["data=c", "what.seed=2", "how.recompute=block"])
    assert (recipe.model, recipe.data_names, recipe.output, recipe.eval_data) == ("b", "c", "a", None)
    assert (recipe.what.seed, recipe.what.max_length, recipe.how.recompute) == (2, 64, "block")


def test_the_last_override_of_a_key_wins():
    assert load(overrides=["what.seed=1", "what.seed=2"]).what.seed == 2


def test_load_leaves_the_callers_values_alone():
    what = {"lora": {"r": 4}}
    before = copy.deepcopy(what)
    assert load(what=what, overrides=["what.lora.r=2", "what.seed=1"]).what.lora.r == 2
    assert what == before


def test_an_empty_file_is_the_default_recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("# nothing yet\n")
    assert load(file) == Recipe() == load()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "its top is a list"), (b"demo\n", "its top is a str"), (b"a: [1\n", "is not YAML"),
        (b"output: 2024-99-99\n", "is not YAML"), (b"\xff\xfe", "cannot be read"), (b"a: b: c\n", "is not YAML"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_recipe_is_refused_by_name(tmp_path, content, message):
    file = tmp_path / "broken.yaml"
    file.write_bytes(content)
    with pytest.raises(RecipeError, match=message) as refused:
        load(file)
    assert "broken.yaml" in str(refused.value)


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path):
    with pytest.raises(RecipeError, match=r"there is no recipe at .*absent\.yaml"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load(tmp_path)


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "paths"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ({"path": "a", "task": "t"}, ["a"]), ([{"path": "a"}, "b"], ["a", "b"])],
)
def test_data_is_a_path_a_source_or_a_list(written, paths):
    recipe = check({"data": written})
    assert [source.path for source in recipe.data] == paths
    assert check(yaml.safe_load(dump(recipe))) == recipe


def test_data_is_written_as_a_person_would():
    assert yaml.safe_load(dump(Recipe()))["data"] == "demo"
    assert yaml.safe_load(dump(check({"data": [{"path": "a", "weight": 2}, "b"]})))["data"] == [
        {"path": "a", "weight": 2.0},
        "b",
    ]


def test_a_key_of_the_one_source_is_set_beside_its_path():
    assert load(data="a", overrides=["data.skip_broken_lines=true"]).data[0].model_dump() == {
        "path": "a", "task": None, "weight": 1.0, "columns": {}, "skip_broken_lines": True
    }  # fmt: skip
    assert load(overrides=["data.columns.prompt=q"]).data_names == "demo"


def test_a_key_of_one_of_several_sources_is_not_guessed(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("data: [a, b]\n")
    with pytest.raises(RecipeError, match="data is a list here"):
        load(file, overrides=["data.skip_broken_lines=true"])


@pytest.mark.parametrize(
    ("value", "words"), [([{"task": "x"}], "data.path: field required"), ({"path": "a", "weight": 0}, "data.weight: ")]
)
def test_a_wrong_source_is_refused_with_its_key(value, words):
    with pytest.raises(RecipeError, match=words):
        check({"data": value})
