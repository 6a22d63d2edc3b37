"""The presets of LayerSkip against traces by hand. Its texts are tested with those of all methods."""

from typing import Any

import pytest
import torch

from skipstone import LayerSkip, Request, Sampling
from skipstone.decoding.loop import DecodingLoop
from skipstone.engines.model_runner import ModelRunner
from tests.helpers.machine import llama, prompt

DRAFTS = {"paper": 12, "paper-humaneval": 6, "paper-topv2": 8, "paper-cpu": 7}
"""d of Table 3 (Llama2 7B; CNN/DM and XSum, HumanEval), section 6.2 (TOPv2) and Table 11 (the CPU)."""


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("preset", LayerSkip.presets)
def test_a_step_of_every_preset_by_hand(preset: str, temperature: float) -> None:
    """Section 4.3: E layers run for the last token and for each of d drafts, however unlikely they are. The other layers run
    once, for all of them. A sampled draft is verified with the distribution that it was drawn from."""
    method = LayerSkip(2, preset=preset)  # type: ignore[call-arg]
    decoder = DecodingLoop(method.start(ModelRunner(llama(layers=4, head=0.1), "eager"), 1, 40))
    decoder.admit(0, Request(prompt(7), 30, sampling=Sampling(temperature)))
    decoder.step()
    session: Any = decoder.session
    with torch.inference_mode():
        draft = session.drafter.propose_draft([29])
        session.score(draft)
    assert draft.forward.passes == [*[(0, 2, 1)] * (DRAFTS[preset] + 1), (2, 4, DRAFTS[preset] + 1)]
    assert (draft.q is not None) == (temperature > 0)
