"""Products of a few rows with weights that oneDNN has packed, for every instruction set that this machine has."""

from __future__ import annotations

import pytest
import torch

from engine_core.model_executor.kernels import few_rows
from engine_core.model_executor.kernels.cpu_build import INSTRUCTION_SETS
from engine_core.model_executor.kernels.cpu_kernels import CpuKernels
from engine_core.model_executor.kernels.cpu_library import available_sets, load_operators
from engine_core.model_executor.kernels.few_rows import in_panels, panels_of
from engine_core.model_executor.models.linear import FusedLinear, LinearOptions
from skips import require_program

pytestmark = pytest.mark.instructions

DTYPES = (torch.float32, torch.bfloat16)
# Columns and depths that fill panels and tiles, and some that do not.
SHAPES = [(96, 64), (100, 70), (17, 33), (1, 1), (64, 31), (200, 160), (33, 32)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def operators():
    require_program("c++", "g++", "clang++", how="apt-get install g++")
    return load_operators(lambda _: None)


@pytest.fixture(scope="module")
def sets(operators) -> list[int]:
    """Numbers of those that have the kernel."""
    names = available_sets(operators)
    numbers = [number for number, name in enumerate(INSTRUCTION_SETS) if name in names]
    found = [number for number in numbers if operators.packed_rows(True, number)]
    if not found:
        pytest.skip("needs a CPU with AVX-512 and its products of bfloat16")
    return found


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).to(x.dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_weight(operators, sets, shape, dtype, has_bias):
    """In panels of every width, whatever oneDNN takes on this machine; more rows than it is meant for too."""
    columns, depth = shape
    weight = random(columns, depth, dtype=dtype)
    bias = random(columns, dtype=dtype, seed=1) if has_bias else None
    for width in (16, 32, 48, 64):
        panels = in_panels(weight, width, -(-depth // 32) * 32)
        assert panels is not None
        for rows in (0, 1, 2, 3, 4, 7, 16, 17, 32, 33, 70):
            x = random(rows, depth, dtype=dtype, seed=2)
            expected = expected_of(x, weight, bias)
            for number in sets:
                found = operators.multiply_packed(x, panels, bias, columns, number)
                tolerance = TOLERANCES[dtype] * depth**0.5
                torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_whatever_rows_are_beside_it(operators, sets, dtype):
    """To the last bit: how rows are taken together changes no sum."""
    weight, x = random(100, 70, dtype=dtype), random(70, 70, dtype=dtype, seed=1)
    panels = in_panels(weight, 64, 96)
    number = INSTRUCTION_SETS.index("avx512")
    together = operators.multiply_packed(x, panels, None, 100, number)
    for rows in (1, 4, 5, 6, 7, 13, 32):
        assert torch.equal(operators.multiply_packed(x[:rows], panels, None, 100, number), together[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_packed_memory_itself_is_read(operators, sets, dtype):
    few = CpuKernels(operators, available_sets(operators)[0]).few_rows
    weight, bias = random(96, 64, dtype=dtype), random(96, dtype=dtype, seed=1)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    panels = panels_of(packed, weight.shape, dtype)
    if panels is None:
        pytest.skip("oneDNN packs in a way of its own on this machine")
    assert panels.data_ptr() == torch.ops.mkldnn.data_ptr(packed)
    read = few.read(packed, weight, bias)
    assert read is not None
    product = few.product(read)
    x = random(3, 64, dtype=dtype, seed=2)
    torch.testing.assert_close(product(x), expected_of(x, weight, bias), rtol=2e-2, atol=2e-2)


def test_where_the_layout_is_another_one_onednn_multiplies(operators, sets, monkeypatch):
    monkeypatch.setattr(few_rows, "_PANEL_WIDTHS", (80,))
    few_rows._panel_width.cache_clear()
    try:
        few = CpuKernels(operators, available_sets(operators)[0]).few_rows
        part = torch.nn.Linear(48, 160)
        x, expected = torch.ones(2, 48), part(torch.ones(2, 48)).detach()
        packed = torch.ops.mkldnn._reorder_linear_weight(part.weight.data, None)
        assert few.read(packed, part.weight.data, None) is None
        with torch.inference_mode():
            torch.testing.assert_close(FusedLinear([part], options=LinearOptions(few_rows=few))(x), expected)
    finally:
        few_rows._panel_width.cache_clear()


class CountingRows(few_rows.FewRows):
    """Notes of how many rows the products are."""

    def __init__(self, operators, instruction_set):
        super().__init__(operators, instruction_set)
        self.rows: list[int] = []

    def product(self, weight):
        inner = super().product(weight)

        def noting(x: torch.Tensor) -> torch.Tensor:
            self.rows.append(len(x))
            return inner(x)

        return noting


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_serves_few_rows_and_onednn_many(operators, sets, dtype):
    few = CountingRows(operators, available_sets(operators)[0])
    parts = [torch.nn.Linear(64, 40, dtype=dtype), torch.nn.Linear(64, 24, dtype=dtype)]
    most = few.max_rows(dtype)
    x = random(most + 1, 64, dtype=dtype)
    with torch.inference_mode():
        expected = torch.cat([part(x) for part in parts], dim=1)
        linear = FusedLinear(parts, options=LinearOptions(few_rows=few))
        for rows in (1, most, most + 1):
            torch.testing.assert_close(linear(x[:rows]), expected[:rows], rtol=2e-2, atol=2e-2)
    assert few.rows == [1, most]


def test_several_threads_share_the_panels(operators, sets):
    weight = random(1000, 96, dtype=torch.float32)
    panels = in_panels(weight, 64, 96)
    x = random(4, 96, dtype=torch.float32, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = operators.multiply_packed(x, panels, None, 1000, sets[0])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected_of(x, weight, None), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused(operators, sets):
    panels = in_panels(random(64, 32, dtype=torch.float32), 16, 32)
    x = torch.ones(1, 32)
    for bad_x, columns, bias in [
        (torch.ones(1, 33), 64, None),
        (x, 65, None),
        (x, 48, None),
        (x.bfloat16(), 64, None),
        (torch.ones(32), 64, None),
        (x, 64, torch.ones(63)),
    ]:
        with pytest.raises(RuntimeError):
            operators.multiply_packed(bad_x, panels, bias, columns, sets[0])
    with pytest.raises(RuntimeError, match="has no products with packed weights"):
        operators.multiply_packed(x, panels, None, 64, INSTRUCTION_SETS.index("portable"))


def test_the_operator_is_known_to_torch(operators, sets):
    panels = in_panels(random(40, 32, dtype=torch.float32), 16, 32)
    torch.library.opcheck(operators.multiply_packed.default, (torch.ones(2, 32), panels, None, 40, sets[0]))


def test_a_set_without_the_kernel_leaves_it_to_onednn(operators):
    part = torch.nn.Linear(32, 32)
    packed = torch.ops.mkldnn._reorder_linear_weight(part.weight.data, None)
    assert CpuKernels(operators, "portable").few_rows.read(packed, part.weight.data, None) is None
