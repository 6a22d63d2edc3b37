"""What of a client's time is not the model's. Printed, and held to nothing: it depends on what else the machine does.

SKIPSTONE_SOAK_MODEL: a folder or hub id in the place of the bundled model, which is then asked for plain decoding alone.
"""

import asyncio
import os

import pytest

from tests.helpers.served import Heard, Process, caller, hear, serving

pytestmark = pytest.mark.soak

ANSWERS, NEW = 8, 400
"""Answers of one client, one after the other, and tokens of each."""
MODEL_SECONDS = ("spec_decode_draft_seconds_total", "spec_decode_verify_seconds_total")


async def one_client(url: str, method: str) -> list[Heard]:
    body = {"prompt": "class Stack:\n", "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "speculative": method}
    async with caller(url) as http:
        return [await hear(http, body) for _ in range(ANSWERS)]


def model_seconds(served: Process) -> float:
    return sum(served.counted(name) for name in MODEL_SECONDS)


def report(served: Process, method: str) -> float:
    """Prints and returns the share of a client's time, behind the first tokens or not, that is not the model's."""
    asyncio.run(one_client(served.url, method))
    before = model_seconds(served)
    heard = asyncio.run(one_client(served.url, method))
    model = model_seconds(served) - before
    wall, first = sum(one.seconds for one in heard), sum(one.arrived[0] - one.began for one in heard)
    share, later = (wall - model) / wall, (wall - first - model) / (wall - first)
    pieces = sum(len(one.arrived) for one in heard)
    print(f"\n{method}: {wall:.3f} s for {ANSWERS * NEW} tokens in {pieces} pieces, of which the model {model:.3f} s: ", end="")
    print(f"{share:.1%} are not the model's; {later:.1%} behind the first tokens, ", end="")
    print(f"{1000 * (wall - first - model) / pieces:.2f} ms a piece beside {1000 * model / pieces:.2f} ms of the model", end="")
    return share


def test_the_share_of_time_that_is_not_the_model_s_is_told() -> None:
    model = os.environ.get("SKIPSTONE_SOAK_MODEL")
    methods = ("off", "layerskip exit_layer=6 num_speculative_tokens=8") if model is None else ("off",)
    with serving(*([] if model is None else [model]), "--max-num-seqs", "1") as served:
        shares = {method: report(served, method) for method in methods}
    missed = {method: f"{share:.1%}" for method, share in shares.items() if share >= 0.05}
    print(f"\nunder 5 % are the aim; missed by {missed or 'none'}")
    assert all(0 < share < 1 for share in shares.values()), "the counters and the clock do not belong together"
