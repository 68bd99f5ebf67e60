"""The table of cards, and the names that it is asked by."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from snugtune.cards import CARDS, DeviceSpec, find
from snugtune.errors import RecipeError
from snugtune.units import GIB

# The size on the box, read as GiB.
NOMINAL_BYTES = {
    key: size * GIB
    for key, size in {
        "a100-40gb": 40, "a100-40gb-pcie": 40, "a100-80gb": 80, "a100-80gb-pcie": 80, "h100-80gb": 80, "h100-pcie": 80,
        "h200": 141, "l4": 24, "l40s": 48, "t4": 16, "a10": 24, "a10g": 24, "rtx-3090": 24, "rtx-4090": 24,
        "rtx-5090": 32, "mi300x": 192,
    }.items()
}  # fmt: skip

every_card = pytest.mark.parametrize(("key", "card"), CARDS.items(), ids=list(CARDS))


@every_card
def test_a_card_says_all_that_a_plan_asks(key, card):
    assert isinstance(card, DeviceSpec) and card.kind == "cuda"
    assert isinstance(card.memory_bytes, int)
    assert set(card.flops) == {"fp32", "bf16", "fp16"}
    assert all(figure > 0 for figure in (*card.flops.values(), card.memory_bandwidth, card.link_bandwidth))
    assert "memory:" in card.source, "where the reading of the memory is from"


@every_card
def test_the_memory_is_what_a_driver_leaves_of_what_is_sold(key, card):
    assert 0.9 * NOMINAL_BYTES[key] <= card.memory_bytes < NOMINAL_BYTES[key]


@every_card
def test_bf16_is_the_faster_choice_where_the_card_says_so(key, card):
    fp32, bf16, fp16 = (card.flops[precision] for precision in ("fp32", "bf16", "fp16"))
    assert fp16 > fp32
    assert card.has_bf16 == (bf16 > fp32)
    assert bf16 == (fp16 if card.has_bf16 else fp32)


@every_card
def test_the_figures_are_of_one_scale(key, card):
    """A rate with sparsity, a bandwidth both ways or a slipped unit falls out of these bounds."""
    assert 8e12 <= card.flops["fp32"] <= 170e12
    assert 2 * card.flops["fp32"] <= 1.01 * card.flops["fp16"] <= 16.2 * card.flops["fp32"]
    assert 300e9 <= card.memory_bandwidth <= 5.4e12
    assert card.link_bandwidth == pytest.approx({"t4": 15.75e9}.get(key, 31.5e9), rel=0.01) or (
        key in {"h100-80gb", "h100-pcie", "h200", "rtx-5090", "mi300x"}
        and card.link_bandwidth == pytest.approx(63e9, rel=0.01)
    )


def test_the_table_is_canonical():
    assert set(CARDS) == set(NOMINAL_BYTES)
    for key in CARDS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key)
    assert len({card.name for card in CARDS.values()}) == len(CARDS)
    with pytest.raises(TypeError):
        CARDS["mine"] = CARDS["t4"]


@every_card
@pytest.mark.parametrize(
    "written",
    [str, str.upper, str.title, lambda name: name.replace("-", "_"), lambda name: name.replace("-", " "), "  {}\n".format],
    ids=["as it is", "upper", "title", "underscores", "spaces", "padded"],
)  # fmt: skip
def test_a_card_is_found_by_its_key_and_by_torchs_name(key, card, written):
    assert find(written(key)) is card
    assert find(written(card.name)) is card


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("A100 80GB", "a100-80gb"), ("a100_80gb", "a100-80gb"), ("a100 80 GB", "a100-80gb"), ("A100-80G", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-SXM-80GB", "a100-80gb"), ("A100 40GiB", "a100-40gb"),
        ("A100-SXM4-40GB", "a100-40gb"), ("A100-PCIE-40GB", "a100-40gb-pcie"), ("a100 pcie 80gb", "a100-80gb-pcie"),
        ("h100", "h100-80gb"), ("NVIDIA H100", "h100-80gb"), ("H100 SXM5", "h100-80gb"), ("h100-80gb-pcie", "h100-pcie"),
        ("NVIDIA H200", "h200"), ("h200 sxm", "h200"), ("H200 141GB", "h200"), ("nvidia l4", "l4"), ("L40S 48GB", "l40s"),
        ("Tesla T4", "t4"), ("NVIDIA A10", "a10"), ("NVIDIA A10G", "a10g"), ("A10G 24G", "a10g"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("GeForce RTX 3090", "rtx-3090"), ("RTX4090", "rtx-4090"),
        ("4090", "rtx-4090"), ("rtx 5090 32gb", "rtx-5090"), ("AMD Instinct MI300X VF", "mi300x"), ("MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_a_card_is_found_by_what_people_and_drivers_call_it(name, key):
    assert find(name) is CARDS[key]


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("a100", ["a100-40gb", "a100-40gb-pcie", "a100-80gb", "a100-80gb-pcie"]),
        ("NVIDIA A100 SXM", ["a100-40gb", "a100-80gb"]),
        ("a100-pcie", ["a100-40gb-pcie", "a100-80gb-pcie"]),
    ],
)
def test_a_name_that_leaves_the_memory_open_is_an_error_that_lists_the_candidates(name, candidates):
    with pytest.raises(RecipeError, match="may be any of") as refused:
        find(name)
    assert repr(name) in str(refused.value)
    assert f" {', '.join(candidates)};" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rtx-4080", "rtx-4090"), ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090"), ("a100-80", "a100-80gb"),
        ("mi300", "mi300x"), ("l40", "l40s"), ("a10gg", "a10g"), ("H100 PCI", "h100-pcie"),
    ],
)  # fmt: skip
def test_an_unknown_card_is_an_error_that_names_the_nearest_and_the_list(name, near):
    with pytest.raises(RecipeError) as refused:
        find(name)
    assert f"'{name}' is known; did you mean '{near}'?" in str(refused.value)
    assert f"There are: {', '.join(sorted(CARDS))}" in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "", " ", "nvidia", "rtx", "80gb", "sxm", "gpu", "-", "Iris Xe", "TPU v4", "NVIDIA GH200 480GB",
        # Other cards, or parts of a card, whose name begins like one of ours.
        "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA L40", "NVIDIA GeForce RTX 4090 D", "A100 20GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "GRID T4-16Q", "AMD Instinct MI300A",
    ],
)  # fmt: skip
def test_no_other_card_passes_for_one_of_ours(name):
    with pytest.raises(RecipeError, match="is known"):
        find(name)


def test_where_nothing_is_near_the_list_is_given_once():
    with pytest.raises(RecipeError) as refused:
        find("Iris Xe")
    assert str(refused.value) == f"no card 'Iris Xe' is known; there are: {', '.join(sorted(CARDS))}"


def test_the_table_needs_no_torch():
    script = "import sys, snugtune.cards; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "snugtune" in done.stdout.split()
    assert not {"torch", "transformers", "numpy"}.intersection(done.stdout.split())
