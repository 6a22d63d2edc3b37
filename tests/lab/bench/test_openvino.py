"""The OpenVINO peer, over a stand-in for openvino-genai with known next tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skipstone.lab.bench.peers import PEERS
from skipstone.lab.bench.peers.ov import OpenVino
from skipstone.lab.timing.measure import measure
from tests.helpers import families
from tests.helpers.fakes.llama_cpp import following

PROMPT = [5, 9, 3, 5, 9]
Make = Callable[..., OpenVino]


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A peer over a folder of the stand-in."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "helpers" / "fakes"))

    def make(folder: Path = tmp_path, python: str | None = None, **settings: Any) -> OpenVino:
        (tmp_path / "openvino_model.xml").write_text(json.dumps(settings))
        return OpenVino(folder=str(folder), **({} if python is None else {"python": python}))

    return make


def text(count: int, stop: int | None = None) -> list[int]:
    found, model = list(PROMPT), SimpleNamespace(vocabulary=97, wrong=1000)
    while len(found) < len(PROMPT) + count and (stop is None or found[-1] != stop):
        found.append(following(model, found))
    return found[len(PROMPT) :]


def test_it_is_a_method_of_the_benchmark() -> None:
    assert PEERS["openvino"] is OpenVino
    assert not OpenVino.sampled


@pytest.mark.parametrize("count", [40, 1])
def test_it_writes_what_the_model_writes(peer: Make, count: int) -> None:
    model, one = families.cached("llama"), peer(own_eos=text(40)[3])
    one.check(model)
    for _ in range(2):
        found = measure(model, one, torch.tensor(PROMPT), {"max_new_tokens": count}, 0)
        assert found.tokens == text(count)
        assert found.first_seconds is not None
        assert 0 < found.first_seconds <= found.seconds


def test_it_ends_at_the_models_stop_tokens_and_at_no_other(peer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own, stop = families.cached("llama"), text(30)[3], text(30)[20]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [stop, 96])
    found = peer(own_eos=own).generate(model, torch.tensor([PROMPT]), {"max_new_tokens": 60}, 0)
    assert found.tokens == text(60, stop)


@pytest.mark.parametrize(
    ("constants", "lossless"),
    [
        ({"f32": [9, 9], "i64": [5]}, True),
        ({"f16": [9, 9], "i64": [5]}, True),
        ({"u8": [9, 9], "f16": [9, 1]}, False),
        ({"u4": [9, 9], "u8": [8, 8], "f16": [9, 1]}, False),
    ],
)
def test_irs_of_quantised_weights_are_other_models(peer: Make, constants: dict[str, list[int]], lossless: bool) -> None:
    one = peer(constants=constants)
    assert one.lossless is lossless
    assert one.settings["version"] == "0.0.0"


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"vocabulary": 96}, r"has 96 tokens, the model 97$"),
    ({"folder": Path("nothing")}, r"^openvino: nothing has no openvino_model.xml$"),
    ({"python": "/nowhere"}, r"^openvino: python=/nowhere: No such file"),
    ({"python": 3}, r"^openvino: a path is a string, found 3$"),
]


@pytest.mark.parametrize(("settings", "said"), MISTAKES)
def test_what_cannot_be_is_said_in_one_sentence(peer: Make, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        peer(**settings).check(families.cached("llama"))


def test_a_process_that_ends_midway_says_why_and_is_started_again(peer: Make) -> None:
    model, one = families.cached("llama"), peer(ends_at=20)
    for _ in range(2):
        with pytest.raises(ValueError, match="openvino: out of luck"):
            one.generate(model, torch.tensor([PROMPT]), {"max_new_tokens": 30}, 0)
        assert one.generate(model, torch.tensor([PROMPT]), {"max_new_tokens": 9}, 0).tokens == text(9)
