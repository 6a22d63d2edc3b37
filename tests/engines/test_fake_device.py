"""Steps on a pretended CUDA device: no tensor on the wrong device, one wait for the device a step, and the CPU's text."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import skipstone
from skipstone.decoding.method import Method
from skipstone.methods.drafting.chain import CHECK_EVERY
from tests.helpers import families
from tests.helpers.conformance import COMMON, eagle3_head
from tests.helpers.pairwise import slow_except
from tests.helpers.pretended import DEVICE_ROWS, Pretended, pretended

DRAFTS = 5  # one more than a chain drafts before it looks whether every row has stopped
VARIANTS = ["layerskip, confident", "layerskip, some tokens", "speculative, confident", "adasd, some tokens"]
METHODS = [*COMMON]


def more_waits(method: Method) -> Callable[[skipstone.Step, int], int] | None:
    """How often more than once a step a method's design lets the host wait, by the step and its tests of an exit.

    AdaDecode waits for every test of an exit: what runs next depends on it. If an unsure token ends a draft model's draft, the
    host asks after every CHECK_EVERY tokens whether any row still drafts.
    """
    if method.name == "adadecode":
        return lambda step, tests: tests
    unsure = method.name == "adasd" or getattr(method, "schedule", "") == "confidence"
    return (lambda step, tests: max(step.draft_steps) // CHECK_EVERY) if unsure else None


@dataclass
class Run:
    """A method's texts, and of every step the waits for the device and how many its design allows."""

    texts: list[list[int]]
    waits: list[tuple[list[str], int]]


def run(models: list[PreTrainedModel], method: Method, rows: int, sampled: bool, device: Pretended | None = None) -> Run:
    settings = {"draft_model": models[1], "head": eagle3_head("llama"), "feature_layers": (1, 2, 3)}
    names = {field.name for field in fields(method)} & {*settings}
    method = replace(method, **{name: settings[name] for name in names})
    runner = skipstone.ModelRunner(models[0], "eager")
    method.check(runner)
    session: Any = method.start(runner, rows, 64)
    decoder = skipstone.Decoder(session)
    for row in range(rows):
        sampling = skipstone.Sampling(0.7 + 0.1 * row if sampled else 0.0, top_p=0.9 if sampled else 1.0, seed=row)
        prompt = torch.tensor([5, 9, 5, 9, 7, 5, 9][row:])
        decoder.admit(row, skipstone.Request(prompt, 4 - row // 2, frozenset({3}), sampling))
    found, design = Run([[] for _ in range(rows)], []), more_waits(method)

    def tests() -> int:
        return session.drafter.tallies.tests if method.name == "adadecode" else 0

    while decoder.busy:
        before, waits = tests(), len(device.waits) if device else 0
        step = decoder.step()
        for text, tokens in zip(found.texts, step.tokens, strict=True):
            text += tokens
        if device:
            more = design(step, tests() - before) if design and not step.prefill else 0
            found.waits.append((device.waits[waits:], 1 + more))
    return found


IN_LISTS = {"falcon": 2, "falcon_new": 2}
"""Transformers indexes with lists ([-1], [-2]) in these families. A GPU waits for that: how often in each layer."""
LLAMA = [("llama", *cell) for cell in product([*METHODS, *VARIANTS], (4, 1), (False, True))]
OTHERS = [(family, "early_exit", 4, False) for family in families.NAMES if family != "llama"]
FAST = [("llama", "layerskip", 4, True), ("llama", "eagle3", 4, False)]


@pytest.mark.parametrize(
    ("family", "name", "rows", "sampled"), slow_except(FAST, LLAMA + OTHERS, full=[*LLAMA[::3], *OTHERS[::4]])
)
def test_a_step_stays_on_the_device_and_waits_for_it_once(family: str, name: str, rows: int, sampled: bool) -> None:
    method = DEVICE_ROWS[name].make(DRAFTS, "coupled" if name in VARIANTS else "standard")
    models = [families.build(family, layers=4 if name.startswith(("swift", "self_speculative")) else 3) for _ in range(2)]
    for model in models:
        if hasattr(model.config, "_experts_implementation"):
            model.config._experts_implementation = "batched_mm"  # the other one asks a CUDA build which GPU it is
    expected = run(models, method, rows, sampled)
    with pretended() as device:
        for model in models:
            device.take(model)
        found = run(models, method, rows, sampled, device)
    assert found.texts == expected.texts
    assert found.waits
    for waits, allowed in found.waits:
        assert 1 <= len(waits) <= allowed + 2 * IN_LISTS.get(family, 0), waits


def on_the_device(*values: int) -> torch.Tensor:
    return torch.tensor(values).to("cuda:0", non_blocking=True)


WAITS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.tolist(),
    lambda x: int(x[1]),
    lambda x: bool((x > 2).any()),
    lambda x: x.cpu(),
    lambda x: torch.tensor([1, 2]).to("cuda:0"),
    lambda x: x[[0, 1]],
    lambda x: x.copy_(torch.tensor([1, 2, 3])),
    lambda x: torch.equal(x, x),
]
REFUSED: list[Callable[[torch.Tensor], Any]] = [  # tensors of two devices, and shapes that depend on values
    lambda x: x + torch.ones(3),
    lambda x: torch.where(x > 1, torch.ones(3), 0),
    lambda x: x.nonzero(),
    lambda x: x[x > 1],
    lambda x: x.numpy(),
    lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.float()[None, :, None]] * 2, torch.ones(1, 3, 1)),
]


def test_the_pretended_device_counts_waits_and_refuses_what_a_gpu_refuses() -> None:
    with torch.inference_mode(), pretended() as device:
        x = on_the_device(7)
        copied = x.to("cpu", non_blocking=True)
        assert (copied.tolist(), device.waits) == ([-1], []), "a copy under way"
        assert (x + 1).tolist() == [8]
        assert copied.tolist() == [7]
    for way in WAITS:
        with torch.inference_mode(), pretended() as device:
            x = on_the_device(1, 2, 3)
            assert str(x.device) == "cuda:0"
            assert device.waits == []
            way(x)
            assert len(device.waits) == 1
    for way in REFUSED:
        with torch.inference_mode(), pretended():
            x = on_the_device(1, 2, 3)
            with pytest.raises((RuntimeError, TypeError, AssertionError, ValueError)):
                way(x)
