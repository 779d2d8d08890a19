"""Weights of int8 and products with them, for every instruction set of this machine that has them."""

from __future__ import annotations

import pytest
import torch

from engine_core.model_executor.kernels.cpu_build import INSTRUCTION_SETS
from engine_core.model_executor.kernels.cpu_library import available_sets, load_operators
from engine_core.model_executor.kernels.int8_weights import (
    Int8Products,
    int8_panels,
    panel_weight,
    quantized,
    values_of,
)
from engine_core.model_executor.models.linear import FusedLinear, LinearOptions
from skips import require_program

pytestmark = pytest.mark.instructions

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def operators():
    require_program("c++", "g++", "clang++", how="apt-get install g++")
    return load_operators(lambda _: None)


@pytest.fixture(scope="module")
def product_sets(operators) -> list[Int8Products]:
    sets = [name for name in available_sets(operators) if operators.has_int8(INSTRUCTION_SETS.index(name))]
    if not sets:
        pytest.skip("needs a CPU with AVX-512 VNNI")
    return [Int8Products(operators, name) for name in sets]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rows_are_rounded_to_the_nearest_of_their_own_scale():
    weight = torch.tensor([[127.0, -1.4, 0.6], [0.0, 0.0, 0.0], [-0.5, 0.25, 0.0]])
    found = quantized(weight)
    assert found.values.tolist() == [[127, -1, 1], [0, 0, 0], [-127, 64, 0]]
    assert (found.dense(torch.float32) - weight).abs().max() <= 0.5


@pytest.mark.parametrize("shape", [(1, 1), (32, 64), (33, 65), (100, 70)], ids=str)
def test_panels_hold_the_values(shape):
    values = quantized(random(*shape)).values
    assert torch.equal(values_of(int8_panels(values), *shape), values)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What is multiplied: float64, each row to the nearest of 255 * 254 numbers."""
    scales = x.double().abs().amax(1, keepdim=True) / (127 * 254)
    return (x.double() / scales.clamp(min=1e-30)).round() * scales


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (100, 70), (17, 33), (1, 1), (64, 192)], ids=str)
def test_products_are_those_of_rounded_numbers(product_sets, shape, dtype, has_bias):
    columns, depth = shape
    weight = quantized(random(*shape))
    bias = random(columns, dtype=dtype, seed=1) if has_bias else None
    for products in product_sets:
        product = products.product(panel_weight(weight.values, weight.scales, bias))
        assert product(random(0, depth, dtype=dtype)).shape == (0, columns)
        for rows in (1, 2, 4, 5, 16, 17, 32, 33, 70):
            x = random(rows, depth, dtype=dtype, seed=2)
            x[0] = 0
            expected = rounded(x) @ weight.dense(torch.float64).T
            expected = expected if bias is None else expected + bias.double()
            # A number between two may be rounded to either, by the last bit of its scale.
            atol = 1e-3 * float(weight.dense(torch.float32).abs().max() * x.abs().max())
            rtol = 1e-4 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(product(x).double(), expected, rtol=rtol, atol=atol)


def test_extreme_numbers_do_not_overflow(product_sets):
    weight = quantized(torch.full((64, 4096), -3.0))
    for products in product_sets:
        found = products.product(panel_weight(weight.values, weight.scales, None))(torch.full((2, 4096), 5.0))
        torch.testing.assert_close(found, torch.full((2, 64), -15.0 * 4096))


def test_several_threads_share_the_panels(product_sets):
    weight, x = quantized(random(1000, 96)), random(70, 96, seed=1)
    before = torch.get_num_threads()
    for products in product_sets:
        product = products.product(panel_weight(weight.values, weight.scales, None))
        torch.set_num_threads(1)
        try:
            alone = product(x)
            torch.set_num_threads(4)
            assert torch.equal(product(x), alone)
        finally:
            torch.set_num_threads(before)


def linear(dtype: torch.dtype) -> list[torch.nn.Linear]:
    torch.manual_seed(5)
    return [torch.nn.Linear(48, 40, dtype=dtype), torch.nn.Linear(48, 24, dtype=dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_parts_are_taken_over_and_come_back_rounded(product_sets, dtype):
    parts = linear(dtype)
    originals = [part.weight.data.clone() for part in parts]
    x = random(3, 48, dtype=dtype)
    with torch.inference_mode():
        expected = torch.cat([part(x) for part in parts], dim=1)
        fused = FusedLinear(parts, options=LinearOptions(int8=product_sets[0]))
        assert all(part.weight.numel() == 0 for part in parts)
        found = fused(x)
    assert (found - expected).norm() < 0.03 * expected.norm()
    fused.unpack()
    for part, original in zip(parts, originals, strict=True):
        assert part.weight.dtype == dtype
        assert 0 < (part.weight - original).norm() < 0.02 * original.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_not_changed_meanwhile_keeps_its_numbers(product_sets, dtype):
    """In bfloat16 quantizing what came back would not give the same numbers again."""
    parts, options = linear(dtype), LinearOptions(int8=product_sets[0])
    x = random(3, 48, dtype=dtype)
    with torch.inference_mode():
        fused = FusedLinear(parts, options=options)
        before = fused(x)
        fused.unpack()
        changed = random(24, 48, dtype=dtype, seed=9)
        parts[1].weight.data.copy_(changed)
        again = FusedLinear(parts, options=options)(x)
    assert torch.equal(again[:, :40], before[:, :40])
    expected = x.float() @ changed.float().T + parts[1].bias.float()
    assert (again[:, 40:].float() - expected).norm() < 0.03 * expected.norm()


def test_a_shared_weight_stays_where_it_is(product_sets):
    part = linear(torch.float32)[0]
    original = part.weight.data.clone()
    fused = FusedLinear([part], is_shared=True, options=LinearOptions(int8=product_sets[0]))
    assert torch.equal(part.weight.data, original)
    fused.unpack()
    assert torch.equal(part.weight.data, original)


def test_what_does_not_fit_is_refused(operators, product_sets):
    weight = quantized(random(40, 32))
    panels, number = int8_panels(weight.values), INSTRUCTION_SETS.index(available_sets(operators)[0])
    sums = panels.sum(dim=(1, 3), dtype=torch.int32).flatten()
    x = torch.ones(1, 32)
    good = (x, panels, weight.scales, sums, None, 40, number)
    torch.library.opcheck(operators.multiply_int8.default, good)
    for place, bad in [
        (0, torch.ones(1, 65)),
        (0, x.half()),
        (1, panels[:1]),
        (1, panels.float()),
        (2, weight.scales[:-1]),
        (3, sums[:-1]),
        (4, torch.ones(39)),
        (5, 65),
        (6, INSTRUCTION_SETS.index("portable")),
    ]:
        with pytest.raises(RuntimeError):
            operators.multiply_int8(*good[:place], bad, *good[place + 1 :])
