"""Linear layers over few rows: the same products, and only where they are faster."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from skipstone import Output
from skipstone.engines.compiled import BACKEND_VARIABLE
from skipstone.engines.eager import attention, linear
from tests.helpers import families
from tests.helpers.pairwise import pairwise
from tests.helpers.support import assert_same_texts, decode

MKL = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="nothing is replaced without MKL")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@MKL
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


@MKL
def test_it_pays_for_plain_float32_linears_with_mkl_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    class Odd(torch.Tensor):
        """Like a weight of torchao: the module stays nn.Linear, and the dtype says float32."""

    plain, others = nn.Linear(3, 3), [nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).double(), Own(3, 3), nn.ReLU()]
    packed = nn.Linear(3, 3)
    packed.weight = nn.Parameter(packed.weight.data.as_subclass(Odd))
    assert linear.pays(plain)
    assert not any(map(linear.pays, [*others, packed]))
    assert not any(map(linear.is_faster_transposed, [plain, *others])), "on the CPU"
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not linear.pays(plain)


@pytest.mark.parametrize("bias", [False, True])
def test_a_turned_layer_has_the_products_of_nn_linear(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, calls, transposed = nn.Linear(24, 40, bias=bias), [], linear.transposed
    expected_of = copy.deepcopy(module).double()
    module.__class__ = linear.TransposedLinear
    monkeypatch.setattr(linear, "transposed", lambda x, *given: calls.append(len(x[0])) or transposed(x, *given))
    with torch.no_grad():
        for rows in (1, 2, 7, 8, 16, 31, 32, 64):
            x = torch.randn(1, rows, 24)
            assert torch.allclose(module(x).double(), expected_of(x.double()), atol=1e-6)
    assert calls == [8, 16, 31], "few rows and many are F.linear's"


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("seen", [True, False], ids=["bool", "added"])
def test_it_is_torch_s_attention(scaling: float | None, seen: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 11, 8), torch.randn(2, 3, 11, 8)
    mask = torch.rand(2, 1, 5, 11) < 0.5  # [b, 1, n, extent]
    mask[..., 0] = True  # no row is empty
    given = mask if seen else torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=mask, scale=scaling)
    assert torch.allclose(attention.unfused(query, key, value, given, scaling).double(), expected, atol=1e-6)


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Graphs for the CPU compute what those for a GPU do; nothing is compiled but traced."""
    patch.setenv(BACKEND_VARIABLE, "eager")
    patch.setattr(linear, "is_faster_transposed", lambda module: type(module) is nn.Linear)
    patch.setattr(attention, "is_faster_unfused", lambda query: torch.compiler.is_compiling())


def texts(name: str, engine: str) -> Output:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    return decode(families.build(name), families.prompts(3), "layerskip exit_layer=2", engine=engine, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_graphs_computed_so_write_the_same_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    expected = texts(name, "eager").new_tokens
    assert expected is not None
    assert_same_texts(families.build(name), families.prompts(3), expected, texts(name, "compiled"), {"do_sample": False})
    for module, part in ((attention, "unfused"), (linear, "transposed")) if name == "llama" else ():
        with monkeypatch.context() as patch:
            right = getattr(module, part)
            patch.setattr(module, part, lambda *given, right=right: -right(*given))
            assert texts(name, "compiled").new_tokens != expected
