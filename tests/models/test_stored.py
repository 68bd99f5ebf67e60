"""Files that the safetensors library writes are read here, and the other way round, byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from snugtune.errors import ModelError
from snugtune.models import stored

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
]  # fmt: skip


def _tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {f"weight.{dtype}": (torch.randn(7, 5) * 3).to(dtype) for dtype in DTYPES}
    return made | {
        "scalar": torch.tensor(1.5),
        "empty": torch.ones(0, 4),
        "deep": torch.randn(3, 2, 5),
        "row": torch.randn(9),
    }


def _same(got: Tensor, expected: Tensor) -> bool:
    return got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(got, expected)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(_tensors(), tmp_path / "model.safetensors", metadata={"format": "pt", "more": "text"})
    return tmp_path / "model.safetensors"


def test_rows_are_those_that_the_library_reads(file: Path):
    found = stored.contents(file)
    assert found.keys() == _tensors().keys()
    for name, expected in _tensors().items():
        tensor = found[name]
        assert (tensor.shape, tensor.dtype, tensor.numel) == (tuple(expected.shape), expected.dtype, expected.numel())
        assert _same(tensor[:], expected.reshape(1) if name == "scalar" else expected)
        if expected.ndim:
            for part in (slice(0, 1), slice(2, 5), slice(5, 100), slice(3, 3), slice(-2, None)):
                assert _same(tensor[part], expected[part]), f"{name}[{part}]"


def test_rows_have_memory_of_their_own_and_no_more(file: Path):
    part = stored.contents(file)["weight.torch.float32"][2:4]
    assert part.untyped_storage().nbytes() == 2 * 5 * 4
    part.zero_()
    assert _same(stored.contents(file)["weight.torch.float32"][:], _tensors()["weight.torch.float32"])


def test_tensors_come_in_the_order_of_their_bytes(file: Path):
    begins = [tensor.begin for tensor in stored.contents(file).values()]
    assert begins == sorted(begins)


def test_what_is_written_is_read_by_the_library(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    tensors = _tensors() | {"turned": torch.randn(4, 6).t()}
    with file.open("wb") as out:
        out.write(stored.header((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()))
        for tensor in tensors.values():
            out.write(stored.as_bytes(tensor))
    read = load_file(file)
    assert read.keys() == tensors.keys()
    assert all(_same(read[name], tensor) for name, tensor in tensors.items())


def test_the_bytes_of_a_contiguous_tensor_are_its_own():
    tensor = torch.zeros(3, dtype=torch.int32)
    view = stored.as_bytes(tensor)
    tensor[1] = 5
    assert view[4] == 5


def test_a_dtype_that_is_not_known_is_named(tmp_path: Path):
    save_file({"weight": torch.zeros(3).to(torch.float8_e4m3fn)}, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match="weight is stored as F8_E4M3"):
        stored.contents(tmp_path / "x.safetensors")


def test_a_file_that_shrank_is_told(file: Path):
    found = stored.contents(file)
    last = list(found)[-1]
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)
    with pytest.raises(ModelError, match="ended early"):
        found[last][:]
