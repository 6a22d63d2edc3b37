"""Linear layers over few rows: the same products, only where they were measured to pay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from skipstone.engines.eager import linear
from tests.helpers.pairwise import pairwise

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="nothing is replaced without MKL")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pairwise(
    rows=[1, 2, 3, 8, 9, 17],
    bias=[False, True],
    count=[1, 2, 3],
    sizes=[pytest.param((24, 40), id="small"), pytest.param((30, 37), id="prime"), pytest.param((768, 800), id="large")],
)
def test_the_product_is_that_of_nn_linear(
    rows: int, bias: bool, count: int, sizes: tuple[int, int], threads: Callable[[int], None]
) -> None:
    torch.manual_seed(rows)
    threads(count)
    module = nn.Linear(*sizes, bias=bias)
    with torch.no_grad():
        for x in (torch.randn(1, rows, sizes[0]), torch.randn(rows, 1, sizes[0]), torch.randn(sizes[0], rows).t()):
            expected = nn.functional.linear(x.double(), module.weight.double(), module.bias.double() if bias else None)
            found = linear.few_rows(module, x)
            assert found.shape == expected.shape
            assert found.is_contiguous()
            assert torch.allclose(found.double(), expected, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_one_row_is_a_product_of_as_many_blocks_as_there_are_threads(
    bias: bool, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(2)
    blocks: list[int] = []
    name = "baddbmm" if bias else "bmm"
    real = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *tensors: blocks.append(len(tensors[-2])) or real(*tensors))
    with torch.no_grad():
        for size in (40, 37):  # the prime one stays whole
            linear.few_rows(nn.Linear(24, size, bias=bias), torch.randn(1, 1, 24))
        transposed = nn.Linear(24, 40, bias=bias)
        transposed.weight = nn.Parameter(torch.randn(24, 40).t())
        linear.few_rows(transposed, torch.randn(1, 1, 24))
    assert blocks == [2]


def test_it_pays_for_plain_float32_linears_only() -> None:
    class Own(nn.Linear):
        pass

    assert not any(map(linear.pays, [nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).double(), Own(3, 3), nn.ReLU()]))


@pytest.mark.parametrize("bias", [False, True])
def test_a_turned_layer_has_the_products_of_nn_linear(bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(24, 40, bias=bias)
    expected_of = copy.deepcopy(module).double()
    module.__class__ = linear.TransposedLinear
    calls: list[int] = []

    def counted(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        calls.append(len(x[0]))
        return transposed(x, *given)

    transposed = linear.transposed
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "transposed", counted)
        for rows in (1, 2, 7, 8, 16, 31, 32, 64):
            x = torch.randn(1, rows, 24)
            assert torch.allclose(module(x).double(), expected_of(x.double()), atol=1e-6)
    assert calls == [8, 16, 31], "few rows and many are F.linear's"
