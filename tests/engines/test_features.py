"""The target's states after chosen layers, as every drafter's steps record them, are those of transformers' own forward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from skipstone import (
    AdaDecode,
    Autoregressive,
    Jacobi,
    LayerSkip,
    Lookahead,
    Method,
    PromptLookup,
    Recycle,
    SelfSpeculative,
    Swift,
)
from skipstone.decoding.drafter import Drafter
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Sampling
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from tests.helpers import families
from tests.helpers.feature_loop import finish, prompts, requests, start
from tests.helpers.feature_references import target_states
from tests.helpers.pairwise import round_robin
from tests.helpers.trees import Trees

LAYERS, ROUNDING = 8, 2e-4
ENGINES = [
    "eager",
    pytest.param("native", marks=pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))),
]
pytestmark = pytest.mark.usefixtures("no_gradients")


@dataclass(frozen=True)
class Observed(Method):
    """Another method. Its drafter observes states as well. features: all states of a row, in order."""

    name: ClassVar[str] = "observed"

    method: Any
    depths: tuple[int, ...]
    features: dict[int, list[Tensor]]

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        drafter: Any = self.method.create_drafter(model, rows, capacity)
        assert not drafter.feature_depths
        drafter.feature_depths = self.depths
        drafter.observe_features = self._observe
        return drafter

    def _observe(self, features: dict[int, Tensor]) -> None:
        for row, states in features.items():
            self.features.setdefault(row, []).append(states)


@pytest.fixture(scope="module")
def model() -> Any:
    return families.build("llama", layers=LAYERS)


@pytest.fixture(scope="module")
def texts(model: Any) -> tuple[tuple[int, ...], ...]:
    """What the target says to `requests()`, prompts included."""
    run = finish(start(Autoregressive(), ModelRunner(model, "eager"), requests()), requests())
    return tuple(tuple(text) for text in run.texts)


def assert_states(model: Any, text: list[int], found: list[Tensor], depths: tuple[int, ...]) -> None:
    """There is one state of every token but the last, and it is transformers' own."""
    expected = target_states(model, torch.tensor(text[:-1]), [*depths])
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=0, atol=ROUNDING * float(expected.abs().max()))


METHODS: dict[str, Callable[[Any], Any]] = {
    "autoregressive": lambda _: Autoregressive(),
    "layerskip, exit 2": lambda _: LayerSkip(2, 4),
    "layerskip, exit 4": lambda _: LayerSkip(4, 4),
    "layerskip, exit 6, confident": lambda _: LayerSkip(6, 4, confidence_threshold=0.4),
    "layerskip from the start again": lambda _: LayerSkip(4, 4, reuse_cache=False),
    "adadecode": lambda _: AdaDecode("original", 0.3, 4, exit_layers=(1, 4)),
    "adadecode looks again": lambda _: AdaDecode("original", 0.2, 4, exit_layers=(2, 5), recheck=True),
    "swift": lambda _: Swift(skip_ratio=0.5, context_window=6, num_speculative_tokens=4),
    "skip sets": lambda _: SelfSpeculative((1,), (2,), None, 4),
    "prompt_lookup": lambda _: PromptLookup(num_speculative_tokens=4),
    "jacobi": lambda _: Jacobi(4),
    "lookahead": lambda _: Lookahead(4, 3, 4),
    "recycle": lambda _: Recycle(12, 4),
    "chains": lambda texts: Trees(nodes=4, branching=0.0, references=texts),
    "trees": lambda texts: Trees(nodes=9, branching=0.5, peeking=0.8, references=texts),
}
DEPTHS = [(2, 4, 5), (8,), (5, 2, 8), (2, 2, 1)]


@round_robin(name=METHODS, depths=DEPTHS, engine=ENGINES)
def test_states_of_ragged_rows_are_those_of_transformers(
    name: str, depths: tuple[int, ...], engine: str, model: Any, texts: Any
) -> None:
    """Prompts in chunks, rows that end at different steps, accepted and rejected drafts."""
    method, asked = Observed(METHODS[name](texts), depths, {}), requests()
    run = finish(start(method, ModelRunner(model, engine), asked), asked)
    assert [tuple(text) for text in run.texts] == list(texts)
    if name in ("chains", "trees") or name.startswith(("layerskip", "swift", "adadecode")):
        assert 0 < run.accepted < run.drafted
    for row, text in enumerate(run.texts):
        assert_states(model, text, method.features[row], depths)


@pytest.mark.parametrize("engine", ENGINES)
def test_sampled_rows_that_come_while_others_decode(engine: str, model: Any) -> None:
    """Rows are used again, several prompts run in one pass next to rows that decode."""
    method = Observed(LayerSkip(4, 3, rejection_sample_method="coupled"), (2, 4, 8), {})
    waiting = prompts((5, 40, 3, 33, 1, 9, 21))
    session = method.start(ModelRunner(model, engine), 3, 80)
    loop = DecodingLoop(session, chunk=8, decodes_during_prefill=True)
    texts, mixed, done = dict[int, list[int]](), 0, 0
    while waiting or loop.busy:
        for row in range(3):
            if waiting and row not in texts:
                prompt = waiting.pop()
                loop.admit(row, Request(prompt, 11 + len(prompt) % 5, sampling=Sampling(temperature=1.2, seed=len(prompt))))
                texts[row] = prompt.tolist()
        step = loop.step()
        mixed += step.prefill and bool(step.decoding_rows)
        for row, tokens in enumerate(step.tokens):
            if tokens:
                texts[row] += tokens
        for row in step.finished:
            assert_states(model, texts.pop(row), method.features.pop(row), method.depths)
            done += 1
    assert done == 7
    assert (mixed > 0) == (engine == "native")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_prompts_in_chunks(chunk: int, engine: str, model: Any) -> None:
    method, asked = Observed(Autoregressive(), (2, 4, 5, 8), {}), requests(new=(2, 2, 2))
    run = finish(start(method, ModelRunner(model, engine), asked, chunk), asked)
    for row, text in enumerate(run.texts):
        assert_states(model, text, method.features[row], method.depths)


@pytest.mark.parametrize("engine", ENGINES)
def test_states_do_not_change_the_bits_of_others(engine: str, model: Any, texts: Any) -> None:
    """A pass that stops at some layers gives what one pass gives."""
    found = []
    for depths in ((), (2, 4, 5)):
        method, asked = Observed(Trees(nodes=6, peeking=0.8, references=texts), depths, {}), requests()
        loop = start(method, ModelRunner(model, engine), asked)
        kept: list[Tensor] = []

        def keep(loop: DecodingLoop, kept: list[Tensor] = kept) -> None:
            store = loop.session.store
            kept += [store.keys[-1][row, :, : store.length[row]].clone() for row in range(3)]  # pyright: ignore

        finish(loop, asked, keep)
        found.append(kept)
    assert len(found[0]) > 30
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
