"""What is told of requests, many events at once."""

from __future__ import annotations

from dataclasses import replace

import torch

import skipstone
from skipstone.decoding.request import Request
from skipstone.serving.pending_request import LENGTH, PendingRequest, RequestEnd, StepOutput, TokenLogprobs, merge_outputs


def pending() -> PendingRequest:
    return PendingRequest(Request(torch.tensor([1, 2]), 8), skipstone.Autoregressive())


def piece(step: int, *tokens: int) -> StepOutput:
    logprobs = [TokenLogprobs(-float(token), [(token, -float(token))]) for token in tokens]
    return StepOutput(step, list(tokens), ["bonus"] * len(tokens), logprobs, 3, "layerskip", f"step {step}", (1.0, 2.0))


def test_what_came_of_a_job_is_one_piece_with_the_tokens_of_all_and_its_end_stays_behind_it() -> None:
    one, other = pending(), pending()
    end = RequestEnd(LENGTH)
    events = [(one, piece(0, 7)), (other, piece(4, 1)), (one, piece(1, 8, 9)), (one, end), (other, piece(5, 2))]
    found = merge_outputs(events)
    assert [owner for owner, _ in found] == [one, other, one]
    assert found[0][1] == replace(piece(1, 7, 8, 9), reason="step 1")
    assert found[1][1] == piece(5, 1, 2)
    assert found[2][1] is end
    assert events[0][1] == piece(0, 7), "what was told is as it was"


def test_nothing_is_told_of_probabilities_that_nobody_asked_for() -> None:
    one = pending()
    silent = [(one, replace(piece(step, step), logprobs=None)) for step in range(3)]
    ((_, found),) = merge_outputs(silent)
    assert isinstance(found, StepOutput)
    assert (found.tokens, found.logprobs) == ([0, 1, 2], None)
