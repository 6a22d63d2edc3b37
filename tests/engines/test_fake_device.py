"""Every method's steps on a CUDA device that is only pretended (tests/helpers/pretended.py): no tensor on the wrong device, one
wait for the device a step, and the very text that the CPU writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import skipstone
from skipstone.decoding.method import Method
from skipstone.methods import METHODS, resolve
from skipstone.methods.drafting.chain import CHECK_EVERY
from tests.helpers import families
from tests.helpers.pairwise import round_robin
from tests.helpers.pretended import Pretended, pretended

DRAFTS = 5  # one more than a chain drafts before it looks whether every row has stopped
METHOD_TEXTS = [
    "auto",
    "autoregressive",
    "early_exit exit_layer=1",
    "layerskip exit_layer=1 num_speculative_tokens=3",
    f"layerskip exit_layer=1 num_speculative_tokens={DRAFTS} confidence_threshold=0.05 rejection_sample_method=coupled",
    "layerskip exit_layer=1 num_speculative_tokens=3 draft_vocabulary=50",
    "self_speculative skip_attention=1 skip_mlp=2 num_speculative_tokens=2",
    "swift skip_ratio=0.5 num_speculative_tokens=2 context_window=2",
    "adadecode heads=original confidence_threshold=0.3 num_speculative_tokens=2",
    f"speculative num_speculative_tokens={DRAFTS}",
    f"speculative num_speculative_tokens={DRAFTS} schedule=confidence confidence_threshold=0.05",
    f"adasd num_speculative_tokens={DRAFTS}",
    f"adasd num_speculative_tokens={DRAFTS} draft_vocabulary=50",
    "prompt_lookup",
    "jacobi",
    "lookahead",
    "recycle",
]


def looks(step: skipstone.Step, tests: int) -> int:
    """A draft model's passes are long: where an unsure token ends a draft, the host asks after every CHECK_EVERY tokens whether
    any row still drafts."""
    return max(step.draft_steps) // CHECK_EVERY


def exits(step: skipstone.Step, tests: int) -> int:
    """What AdaDecode runs next depends on whether a head is sure: the host waits for every test of an exit."""
    return tests


def more_waits(method: Method) -> Callable[[skipstone.Step, int], int] | None:
    """How often more than once a step a method's design lets the host wait, and why; None where it never does."""
    if method.name == "adadecode":
        return exits
    return looks if method.name == "adasd" or getattr(method, "schedule", "") == "confidence" else None


@dataclass
class Run:
    """What a method wrote, and of every step the waits for the device and how many its design allows."""

    texts: list[list[int]]
    waits: list[tuple[list[str], int]]


def run(models: list[PreTrainedModel], method: Method, rows: int, sampled: bool, device: Pretended | None = None) -> Run:
    """Ragged rows, decoded for a few steps."""
    if any(field.name == "draft_model" for field in fields(method)):
        method = replace(method, draft_model=models[1])  # type: ignore[call-arg]
    runner = skipstone.ModelRunner(models[0], "eager")
    method.check(runner)
    session: Any = method.start(runner, rows, 64)
    decoder = skipstone.Decoder(session)
    for row in range(rows):
        temperature = 0.7 + 0.1 * row if sampled else 0.0
        sampling = skipstone.Sampling(temperature, top_p=0.9 if sampled else 1.0, seed=row)
        prompt = torch.tensor([5, 9, 5, 9, 7, 5, 9][row:])
        decoder.admit(row, skipstone.Request(prompt, 4 - row // 2, frozenset({3}), sampling))
    found = Run([[] for _ in range(rows)], [])
    while decoder.busy:
        tests = session.drafter.tallies.tests if method.name == "adadecode" else 0
        waits = len(device.waits) if device else 0
        step = decoder.step()
        for text, tokens in zip(found.texts, step.tokens, strict=True):
            text += tokens
        if device:
            tests = session.drafter.tallies.tests - tests if method.name == "adadecode" else 0
            design = more_waits(method)
            more = design(step, tests) if design and not step.prefill else 0
            found.waits.append((device.waits[waits:], 1 + more))
    return found


def variant(text: str) -> list[pytest.MarkDecorator]:
    """All but the first text of a method are slow."""
    first = next(other for other in METHOD_TEXTS if other.split()[0] == text.split()[0])
    return [] if text == first else [pytest.mark.slow]


def test_every_method_is_looked_at() -> None:
    assert {text.split()[0] for text in METHOD_TEXTS} == set(METHODS)


@round_robin(
    text=[pytest.param(text, id=text.replace("=", " "), marks=variant(text)) for text in METHOD_TEXTS],
    rows=(4, 1),
    sampled=(False, True),
)
def test_a_step_stays_on_the_device_and_waits_for_it_once(text: str, rows: int, sampled: bool) -> None:
    skips = text.startswith(("swift", "self_speculative"))  # sublayers, of a model that has at least 4 layers
    models = [families.build("llama", layers=4 if skips else 2) for _ in range(2)]
    expected = run(models, resolve(text), rows, sampled)
    with pretended() as device:
        for model in models:
            device.take(model)
        found = run(models, resolve(text), rows, sampled, device)
    assert found.texts == expected.texts
    assert found.waits
    for waits, allowed in found.waits:
        assert 1 <= len(waits) <= allowed, waits


IN_LISTS = {"falcon": 2, "falcon_new": 2}
"""Families whose modelling code in transformers indexes with lists, [-1] and [-2], which a GPU waits for: how often a layer."""


@pytest.mark.slow
@pytest.mark.parametrize("name", families.NAMES)
def test_every_family_stays_on_the_device(name: str) -> None:
    models, method = [families.build(name)], resolve("early_exit exit_layer=3")
    if hasattr(models[0].config, "_experts_implementation"):
        models[0].config._experts_implementation = "batched_mm"  # the other one asks a CUDA build which GPU it is
    expected = run(models, method, 4, False)
    with pretended() as device:
        device.take(models[0])
        found = run(models, method, 4, False, device)
    assert found.texts == expected.texts
    assert found.waits
    for waits, _ in found.waits:
        assert len(waits) == 1 + 3 * IN_LISTS.get(name, 0), waits


def on_the_device(*values: int) -> torch.Tensor:
    return torch.tensor(values).to("cuda:0", non_blocking=True)


@pytest.mark.parametrize(
    "way",
    [
        lambda x: x.tolist(),
        lambda x: int(x[1]),
        lambda x: bool((x > 2).any()),
        lambda x: x.cpu(),
        lambda x: x.max().item(),
        lambda x: torch.tensor([1, 2]).to("cuda:0"),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x[[0, 1]],
        lambda x: x.copy_(torch.tensor([1, 2, 3])),
        lambda x: torch.equal(x, x),
    ],
)
def test_what_waits_for_the_device_is_counted_once(way: Any) -> None:
    with torch.inference_mode(), pretended() as device:
        x = on_the_device(1, 2, 3)
        assert str(x.device) == "cuda:0"
        assert device.waits == []
        way(x)
        assert len(device.waits) == 1


@pytest.mark.parametrize(
    "way",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.where(x > 1, torch.ones(3), 0),
        lambda x: torch.cat([x, torch.tensor([1])]),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.numpy(),
        lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.float()[None, :, None]] * 2, torch.ones(1, 3, 1)),
    ],
)
def test_what_a_gpu_refuses_is_refused(way: Any) -> None:
    """Tensors of two devices, and shapes that depend on values."""
    with torch.inference_mode(), pretended():
        x = on_the_device(1, 2, 3)
        with pytest.raises((RuntimeError, TypeError, AssertionError, ValueError)):
            way(x)


def test_a_copy_under_way_must_not_be_looked_at_before_the_device_was_waited_for() -> None:
    with torch.inference_mode(), pretended() as device:
        x = on_the_device(7)
        told = x.to("cpu", non_blocking=True)
        assert (told.tolist(), device.waits) == ([-1], [])
        assert (x + 1).tolist() == [8]
        assert told.tolist() == [7]
