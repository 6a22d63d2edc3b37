"""The share of the weights that a draft step reads, against counts by hand for a small Llama."""

from typing import Any

import pytest
import torch

from skipstone import (
    AdaDecode,
    AdaSD,
    Auto,
    Autoregressive,
    ExitHeads,
    LayerSkip,
    Lookahead,
    Method,
    PromptLookup,
    SelfSpeculative,
    Speculative,
    Swift,
)
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.bench.draft_weights import share_read
from skipstone.methods.adadecode.heads import new_card
from tests.helpers.machine import llama
from tests.helpers.native import NATIVE_ONLY

# 97 tokens, d = 32, 4 heads and 2 of keys and values, each of 8, MLPs of 64
HEAD, ATTENTION, MLP = 97 * 32, 32 * (32 + 16 + 16 + 32), 3 * 32 * 64
LAYER = ATTENTION + MLP
PLAIN = 4 * LAYER + HEAD
EXITS = {"1": {"predicted": 3}, "2": {"predicted": 0}, "3": {"predicted": 1}}
"""Three tokens read one layer and a head, one reads three of both: 6 of both in 4 tokens."""


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def adadecode(kind: Any) -> AdaDecode:
    return AdaDecode(ExitHeads(new_card(ModelRunner(llama()), (1, 2, 3), kind)))


CASES: list[tuple[Method, dict[str, Any], float | None]] = [
    (LayerSkip(3), {}, 3 * LAYER + HEAD),
    (LayerSkip(1, draft_vocabulary=24), {}, LAYER + 24 * 32),
    (SelfSpeculative((1, 2), (2,)), {}, PLAIN - 2 * ATTENTION - MLP),
    (Swift(), {"known": {"skipped": {"attention": [2], "mlp": [1, 2]}}}, PLAIN - ATTENTION - 2 * MLP),
    (Swift(), {"known": None}, None),
    (Speculative(llama(layers=2)), {}, 2 * LAYER + HEAD),
    (AdaSD(llama(layers=1), draft_vocabulary=50), {}, LAYER + 50 * 32),
    (adadecode("original"), {"grown": {"exits": EXITS}}, (6 * LAYER + 6 * HEAD) / 4),
    (adadecode("square"), {"grown": {"exits": EXITS}}, (6 * LAYER + 6 * (HEAD + 32 * 32)) / 4),
    (adadecode("full"), {"grown": {"exits": EXITS}}, (6 * LAYER + 6 * HEAD) / 4),
    (adadecode("square"), {"grown": {"exits": {"1": {"predicted": 0}}}}, None),
    *((method, {}, 0) for method in (PromptLookup(), Lookahead())),
    *((method, {}, None) for method in (Autoregressive(), Auto((LayerSkip(2),), use_profile=False))),
]


@pytest.mark.parametrize(("method", "row", "read"), CASES)
def test_every_kind_of_drafter_by_hand(model: Any, method: Method, row: dict[str, Any], read: float | None) -> None:
    assert share_read(method, ModelRunner(model), row) == (None if read is None else pytest.approx(read / PLAIN))


class TestFewerBits:
    """For 32 weights int8 has 34 bytes and int4 20; the LM head is int8 in both."""

    pytestmark = NATIVE_ONLY

    @pytest.mark.parametrize(("kind", "bytes_of_32"), [("int8", 34), ("int4", 20)])
    def test_of_the_copy_that_drafts(self, kind: Any, bytes_of_32: int, model: Any) -> None:
        read = (PLAIN - HEAD - MLP) * bytes_of_32 + HEAD * 34
        method = SelfSpeculative((), (1,), draft_quantize=kind)
        assert share_read(method, ModelRunner(model, "native"), {}) == pytest.approx(read / (PLAIN * 32 * 4))
        half: Any = llama()
        assert share_read(method, ModelRunner(half.to(torch.bfloat16), "native"), {}) == pytest.approx(read / (PLAIN * 32 * 2))

    def test_of_the_target(self) -> None:
        read, plain = 2 * LAYER * 20 + HEAD * 34, 4 * LAYER * 20 + HEAD * 34
        assert share_read(LayerSkip(2), ModelRunner(llama(), "native", "int4"), {}) == pytest.approx(read / plain)
