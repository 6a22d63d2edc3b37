"""EAGLE-3 in the loop: draft logits at every depth are those of the reference, whatever the head's files look like."""

from pathlib import Path
from typing import Any

import pytest
import torch

import skipstone
from skipstone import Autoregressive, Eagle3, Sampling
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.eagle3 import feature_depths, read_files
from tests.helpers import families, feature_loop
from tests.helpers.feature_heads import LLAMA3_ROPE, eagle3_folder
from tests.helpers.feature_loop import DraftRecord, Run, finish, of_eagle3, record, requests, start
from tests.helpers.native import NATIVE_ONLY

LAYERS, DRAFTS = 8, 3
DEPTHS = (2, 4, 5)
"""2, N // 2 and N - 3."""


@pytest.fixture(scope="module")
def model() -> Any:
    return families.build("llama", layers=LAYERS)


@pytest.fixture(scope="module")
def plain(model: Any) -> list[list[int]]:
    """Greedy texts of `requests()`, prompts included."""
    return finish(start(Autoregressive(), ModelRunner(model, "eager"), requests()), requests()).texts


EAGLE: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle, bin": {"file": "bin", "prefix": "model."},
    "eagle, own embedding": {"embedding": "own"},
    "eagle, LM head of the target": {"draft_vocab": None, "lm_head": False},
    "eagle, own LM head of all tokens": {"draft_vocab": None},
    "eagle, qwen3": {"kind": "qwen3", "norm_output": True},
    "eagle, qwen2": {"kind": "qwen2", "fc_norm": True},
    "eagle, other size": {"hidden_size": 40, "embedding": "own", "norm_before_fc": True},
    "eagle, scaled frequencies": {"rope_scaling": LLAMA3_ROPE, "norm_before_residual": True},
    "eagle, other frequencies": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "old_rope": False},
    "eagle, all": {
        **{"kind": "qwen3", "fc_norm": True, "norm_output": True, "norm_before_residual": True, "embedding": "own"},
        **{"rope_scaling": LLAMA3_ROPE, "old_rope": False, "file": "bin"},
    },
}
SPECULATORS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "speculators, residual": {"norm_before_residual": True, "fc_norm": True},
    "speculators, output": {"norm_output": True, "norm_before_fc": True, "embedding": "own"},
    "speculators, qwen3": {"kind": "qwen3", "rope_scaling": LLAMA3_ROPE, "norm_output": True},
    "speculators, all tokens": {"draft_vocab": None, "kind": "qwen2"},
    "speculators, other size": {"hidden_size": 40, "embedding": "own", "norm_before_residual": True, "old_rope": False},
}
LAYOUTS = {**EAGLE, **{name: {"layout": "speculators", **options} for name, options in SPECULATORS.items()}}
LISTED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "outputs, as SpecForge lists them": ({"layer_ids": [1, 3, 4]}, (2, 4, 5)),
    "outputs from the first layer on": ({"layer_ids": [0, 3, 6]}, (1, 4, 7)),
    "inputs, because the last is listed": ({"layer_ids": [1, 4, 8]}, (1, 4, 8)),
    "inputs, because the first are not": ({"layer_ids": [2, 4, 6]}, (2, 4, 6)),
    "inputs, as speculators lists them": ({"layout": "speculators", "layer_ids": [1, 3, 4]}, (1, 3, 4)),
    "the last state": ({"layout": "speculators", "layer_ids": [2, 4, 8]}, (2, 4, 8)),
    "four states": ({"layout": "speculators", "layer_ids": [1, 2, 4, 7], "fc_norm": True}, (1, 2, 4, 7)),
}


def checked(model: Any, folder: Path, depths: Any, run: Run) -> list[int]:
    """The number of logits at every depth, all of which equal the reference. Drafts were accepted and rejected."""
    assert 0 < run.accepted < run.drafted
    counts = of_eagle3(model, folder, depths).assert_logits(run.records)
    assert len(counts) == DRAFTS
    assert min(counts) > 10
    return counts


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_at_every_depth_are_those_of_the_reference(name: str, model: Any, plain: Any, tmp_path: Path) -> None:
    """A ragged batch, prompts in chunks, accepted and rejected drafts."""
    folder = eagle3_folder(tmp_path, model.config, **LAYOUTS[name])
    run = record(Eagle3(str(folder), num_speculative_tokens=DRAFTS), ModelRunner(model, "eager"), requests(), plain)
    assert run.texts == plain
    checked(model, folder, DEPTHS, run)


@pytest.mark.parametrize("name", LISTED)
def test_states_after_the_listed_layers_are_read(name: str, model: Any, plain: Any, tmp_path: Path) -> None:
    options, depths = LISTED[name]
    folder = eagle3_folder(tmp_path, model.config, **options)
    assert feature_depths(read_files(folder), LAYERS) == depths
    run = record(Eagle3(str(folder), num_speculative_tokens=DRAFTS), ModelRunner(model, "eager"), requests(), plain)
    checked(model, folder, depths, run)


@pytest.mark.parametrize("setting", ["feature_layers", "norm_before_residual", "feedback"])
def test_settings_replace_those_of_the_files(setting: str, model: Any, plain: Any, tmp_path: Path) -> None:
    options: Any = {
        "feature_layers": ({}, {"layer_ids": [1, 2, 6], "layout": "speculators"}),
        "norm_before_residual": ({"layout": "speculators"}, {"layout": "speculators", "norm_before_residual": True}),
        "feedback": ({"norm_output": True}, {}),
    }[setting]
    value: Any = {"feature_layers": (1, 2, 6), "norm_before_residual": True, "feedback": "raw"}[setting]
    given, expected = (eagle3_folder(tmp_path / str(number), model.config, **one) for number, one in enumerate(options))
    method = Eagle3(str(given), num_speculative_tokens=DRAFTS, **{setting: value})
    run = record(method, ModelRunner(model, "eager"), requests(), plain)
    depths = value if setting == "feature_layers" else DEPTHS
    checked(model, expected, depths, run)
    with pytest.raises(AssertionError, match="off by"):
        of_eagle3(model, given, DEPTHS).assert_logits(run.records)


SAMPLED = Sampling(temperature=1.3, seed=5)


class TestNative:
    """The native engine computes the logits of sampled drafts one by one, and greedy chains in one call."""

    pytestmark = NATIVE_ONLY

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_logits_at_every_depth_are_those_of_the_reference(
        self, name: str, model: Any, plain: Any, tmp_path: Path
    ) -> None:
        folder = eagle3_folder(tmp_path, model.config, **LAYOUTS[name])
        method = Eagle3(str(folder), num_speculative_tokens=DRAFTS)
        runner = ModelRunner(model, "native")
        assert method.head_for(runner).engine.name == "native"
        checked(model, folder, DEPTHS, record(method, runner, requests(), plain))

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_one_call_drafts_what_the_reference_drafts(self, name: str, model: Any, tmp_path: Path) -> None:
        """Confidences are softmax probabilities of the drafts."""
        folder = eagle3_folder(tmp_path, model.config, **LAYOUTS[name])
        method = Eagle3(str(folder), num_speculative_tokens=DRAFTS, confidence_threshold=0.02)
        loop = start(method, ModelRunner(model, "native"), requests())
        drafter: Any = loop.session.drafter
        own, drafts, records = drafter.propose_draft, [], []

        def propose(*given: Any) -> Any:
            texts = [[*text] for text in drafter.text]
            draft = own(*given)
            for row, text in enumerate(texts):
                if draft.width and loop.session.alive[row] and bool(draft.valid[row, 0]):
                    count = int(draft.valid[row].sum())
                    tokens = draft.tokens[row, :count].tolist()
                    records.append(DraftRecord(row, text, tokens, [torch.zeros(97)] * count))
                    drafts.append(draft.confidence[row, :count])
            return draft

        drafter.propose_draft = propose
        drafter.next_logits = None
        finish(loop, requests())
        expected, deep = of_eagle3(model, folder, DEPTHS), 0
        for one, confidence in zip(records, drafts, strict=True):
            chances = expected.logits(one).softmax(-1)
            assert one.tokens == chances.argmax(-1).tolist()
            torch.testing.assert_close(confidence.double(), chances.amax(-1), rtol=1e-3, atol=1e-5)
            deep += len(one.tokens) == DRAFTS
        assert len(records) > 40
        assert deep > 10
