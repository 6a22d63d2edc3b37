"""Linear layers over few rows: the same products, put back afterwards, only where they were measured to pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from skipstone.models import linear
from tests.helpers import families
from tests.helpers.pairwise import crossed

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="nothing is replaced without MKL")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@crossed(
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
            with linear.in_use([(module, linear._few_rows(module))]):
                found = module(x)
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
            linear._few_rows(nn.Linear(24, size, bias=bias))(torch.randn(1, 1, 24))
        transposed = nn.Linear(24, 40, bias=bias)
        transposed.weight = nn.Parameter(torch.randn(24, 40).t())
        linear._few_rows(transposed)(torch.randn(1, 1, 24))
    assert blocks == [2]


def test_without_mkl_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert linear.replacements(nn.Linear(3, 3)) == []


def test_replacements_are_in_use_inside_the_block_only_and_after_an_error_not() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    pairs = linear.replacements(module)
    assert [part for part, _ in pairs] == [module[0], module[2]]

    def fails() -> None:
        with linear.in_use(pairs):
            assert all("forward" in part.__dict__ for part, _ in pairs)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not any("forward" in part.__dict__ for part, _ in pairs)


def test_only_plain_float32_linears_without_a_forward_of_their_own_are_replaced() -> None:
    class Own(nn.Linear):
        pass

    patched = nn.Linear(3, 3)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert linear.replacements(nn.ModuleList([nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).double(), Own(3, 3), patched])) == []
    assert len(linear.replacements(nn.ModuleList([nn.Linear(3, 3), Own(3, 3)]))) == 1


def test_weights_changed_in_place_or_replaced_are_seen() -> None:
    module, x = nn.Linear(4, 3, bias=False), torch.randn(2, 4)
    pairs = linear.replacements(module)
    module.weight = nn.Parameter(torch.ones(3, 4))
    with torch.no_grad(), linear.in_use(pairs):
        assert torch.allclose(module(x), x.sum(1, keepdim=True).expand(2, 3))
        assert torch.allclose(module(x[:1]), x[:1].sum(1, keepdim=True).expand(1, 3))


def test_a_decoded_model_keeps_no_replacement() -> None:
    import skipstone

    model = families.build("llama")
    skipstone.generate(model, torch.arange(1, 9)[None], skipstone.LayerSkip(exit_layer=2), max_new_tokens=6)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert len(linear.replacements(model)) == 7 * 4 + 1
