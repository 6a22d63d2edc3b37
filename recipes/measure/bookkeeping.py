"""What a method does beside the models' passes, as a share of its step, at the shapes of real models (random weights).

    python recipes/measure/bookkeeping.py adasd llama-3.2-1b [--draft llama-3.2-1b,layers=1 --dtype bfloat16]
    python recipes/measure/bookkeeping.py lookups llama-3.2-1b [--dtype bfloat16]

adasd: entropies, Jensen-Shannon distances and thresholds, with windows of 20 drafts; a step is 20 passes of the draft model and
one of the target. lookups: drafting and committing of prompt lookup and lookahead behind 4096 tokens, tensors and embedding of
the drafted tokens included, less what plain decoding does there.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch

from skipstone import AdaSD, Autoregressive, Decoder, LayeredModel, Lookahead, Method, PromptLookup, Request
from skipstone.methods.adasd import adasd
from skipstone.synthetic import surrogate

WINDOW, STEPS, WARM, CONTEXT, WORDS = 20, 6, 6, 4096, 300


class Watch:
    """Seconds spent in functions of a module or an object, since the last look."""

    def __init__(self, *places: tuple[Any, str]) -> None:
        self.seconds = 0.0
        for owner, name in places:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Any) -> Any:
        def run(*given: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*given, **more)
            finally:
                self.seconds += time.perf_counter() - began

        return run

    def look(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def started(model: LayeredModel, method: Method, prompt: list[int]) -> Decoder:
    """A decoder behind its prompt."""
    decoder = Decoder(method.start(model, 1, len(prompt) + 1000))
    decoder.admit(0, Request(torch.tensor(prompt), 1000))
    while decoder.session.prefilling:
        decoder.step()
    return decoder


def measured(decoder: Decoder, watch: Watch) -> tuple[float, float, float]:
    """Means over STEPS: (seconds of a step, watched seconds of it, draft tokens scored)."""
    for _ in range(WARM):
        decoder.step()
    watch.look()
    began, nodes = time.perf_counter(), 0
    for _ in range(STEPS):
        nodes += decoder.step().verified_nodes
    return (time.perf_counter() - began) / STEPS, watch.look() / STEPS, nodes / STEPS


def relaxed(target: Any, draft: Any, vocab: int) -> None:
    """The share of AdaSD's own figures."""
    method = AdaSD(draft, adaptive_length=False, fixed_window=WINDOW)
    figures = Watch((adasd, "spread"), (adasd, "js_distances"), (adasd.AdaSDDrafter, "observe_scores"))
    decoder = started(LayeredModel(target), method, [random.randrange(vocab) for _ in range(64)])
    whole, own, nodes = measured(decoder, figures)
    print(
        "| method | drafts a step | ms a step | ms entropies, distances, thresholds | share |\n| --- | --- | --- | --- | --- |"
    )
    print(f"| adasd | {nodes:.0f} | {1000 * whole:.0f} | {1000 * own:.1f} | {own / whole:.1%} |")


def lookups(target: Any) -> None:
    """The share of lookups' own work. The model says nothing but the prompt's words, else nothing would be found."""
    with torch.no_grad():
        target.get_output_embeddings().weight[WORDS:] = 0
    words = [random.randrange(WORDS) for _ in range(CONTEXT // 8)]
    prompt, model = (words * 8)[:CONTEXT], LayeredModel(target)
    print("| method | draft tokens scored | ms a step | ms drafting and committing | share |\n| --- | --- | --- | --- | --- |")
    plain = 0.0
    for method in (Autoregressive(), PromptLookup(), Lookahead()):
        decoder = started(model, method, prompt)
        whole, own, nodes = measured(decoder, Watch((decoder.session.drafter, "propose_draft"), (decoder.session, "commit")))
        plain = own if method.name == "autoregressive" else plain
        print(
            f"| {method.name} | {nodes:.0f} | {1000 * whole:.1f} | {1000 * (own - plain):.2f} | {(own - plain) / whole:.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("adasd", "lookups"))
    parser.add_argument("shape", help="as in `skipstone bench surrogate`")
    parser.add_argument("--draft", default="llama-3.2-1b,layers=1", help="the draft model's shape")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    random.seed(0)
    dtype, shape = getattr(torch, given.dtype), surrogate.parse(given.shape)
    target = surrogate.plain(shape, 0, dtype, "cpu")
    if given.what == "lookups":
        lookups(target)
    else:
        relaxed(target, surrogate.plain(surrogate.parse(given.draft), 1, dtype, "cpu"), shape.config["vocab_size"])


if __name__ == "__main__":
    main()
