"""torch's default dtype and default device change no text, and loads change no default while a model decodes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import skipstone
from skipstone import AdaDecode, ExitHeads, LayerSkip
from skipstone.engines.host_transfer import dense, on_device, pointer
from skipstone.engines.loading import load_model
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.methods.adadecode.heads import new_card
from skipstone.models import recognition
from skipstone.models.torch_defaults import loading, stable_defaults
from tests.helpers import families
from tests.helpers.conformance import COMMON, ROWS
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import QUIET
from tests.helpers.support import tokenizer

pytestmark = QUIET
ENGINES = ["eager", *([] if library.missing() else ["native"])]
PROMPT = families.prompts(1)[0]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.1}
FAST = ("layerskip", "speculative")
METHODS = [*COMMON]


@contextmanager
def changed(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


CHANGES: dict[str, Callable[[], Any]] = {
    **{
        str(dtype).removeprefix("torch."): lambda dtype=dtype: changed(torch.set_default_dtype, dtype, torch.float32)
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
    },
    "meta context": lambda: torch.device("meta"),
    "meta device": lambda: changed(torch.set_default_device, "meta", None),
}
"""What a caller may have changed."""


def assert_unchanged(call: Callable[[], Any]) -> None:
    expected = call()
    for change, context in CHANGES.items():
        with context():
            assert call() == expected, change


def texts(model: Any, method: Any, engine: str, **options: Any) -> list[list[int]]:
    common = {"max_new_tokens": 12, "seed": 3, "engine": engine, **options}
    found = [skipstone.generate(model, PROMPT, method, **common, **more) for more in ({"do_sample": False}, SAMPLED)]
    return [one.new_tokens[0] for one in found if one.new_tokens]


@cache
def usual(family: str, name: str, engine: str) -> list[list[int]]:
    return texts(families.build(family), ROWS[name].method(family, 4, "standard"), engine)


OTHERS = {"xglm": "prompt_lookup", **dict.fromkeys(("phimoe", "gemma3n_text", "ministral3", "qwen3_next"), "layerskip")}
"""Types with modules that create tensors without a device or a dtype."""
CELLS = [*(("llama", *pair) for pair in product(METHODS, ENGINES)), *((*pair, "eager") for pair in OTHERS.items())]


@pytest.mark.parametrize(("family", "name", "engine"), slow_except([cell for cell in CELLS if cell[1] in FAST][:4:3], CELLS))
def test_defaults_change_no_text(family: str, name: str, engine: str) -> None:
    """By one of the dtypes and one of the devices, which take turns."""
    expected, method = usual(family, name, engine), ROWS[name].method(family, 4, "standard")
    place = CELLS.index((family, name, engine)) // 2
    for change in ([*CHANGES][place % 3], [*CHANGES][3 + place % 2]):
        model = families.build(family)
        recognition._KNOWN.clear()
        with CHANGES[change]():
            assert texts(model, method, engine) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_a_changed_default_between_two_calls_changes_no_text(engine: str) -> None:
    model, options = families.build("llama"), {"max_new_tokens": 4, "engine": engine, "do_sample": False}
    assert_unchanged(lambda: skipstone.generate(model, PROMPT.repeat(20), "autoregressive", **options).new_tokens)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options", [{"bad_words_ids": [[5], [6, 7]], "typical_p": 0.9}, {"min_new_tokens": 4, "eos_token_id": [5, 6]}]
)
@pytest.mark.slow
def test_processors_of_transformers_see_no_changed_default(engine: str, options: dict[str, Any]) -> None:
    model = families.build("llama")
    assert_unchanged(lambda: texts(model, LayerSkip(2, 4), engine, **options))


def test_text_prompts_and_enabled_models_see_no_changed_default() -> None:
    model: Any = families.build("llama", vocab=256)
    words, ids = tokenizer(), PROMPT[None].clone()

    def written() -> list[Any]:
        one = skipstone.generate(model, ["a b", "b"], LayerSkip(2, 3), tokenizer=words, max_new_tokens=5, do_sample=False)
        steps = skipstone.stream(model, "a b", LayerSkip(2, 3), tokenizer=words, max_new_tokens=5, do_sample=False)
        skipstone.enable(model, LayerSkip(2, 3))
        try:
            enabled = model.generate(ids, max_new_tokens=5, do_sample=False).tolist()
        finally:
            skipstone.disable(model)
        return [one.text, [step.tokens for step in steps], enabled]

    assert_unchanged(written)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["square", "low_rank"])
@pytest.mark.slow
def test_trained_heads_see_no_changed_default(tmp_path: Path, kind: Any, engine: str) -> None:
    heads = ExitHeads(new_card(ModelRunner(families.build("llama")), (2,), kind, 4 if kind == "low_rank" else None))
    with torch.no_grad():
        for number, weight in enumerate(heads.parameters()):
            weight += 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    heads.save(tmp_path)
    models = iter([families.build("llama") for _ in range(len(CHANGES) + 1)])
    assert_unchanged(lambda: texts(next(models), AdaDecode(str(tmp_path), 0.1, 3), engine))


def test_loading_looks_at_no_default_and_leaves_it(tmp_path: Path) -> None:
    families.build("llama").to(torch.bfloat16).save_pretrained(tmp_path)

    def loaded() -> Any:
        before, state = torch.get_default_dtype(), load_model(tmp_path).state_dict()
        assert torch.get_default_dtype() is before
        return {name: (one.device.type, one.dtype, one.tolist()) for name, one in state.items()}

    assert_unchanged(loaded)


def test_a_load_waits_for_a_pass_and_changes_no_default_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for context in (loading, stable_defaults):  # an error ends both
        with pytest.raises(KeyError), context():
            raise KeyError
    families.build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model: Any = families.build("llama")
    begins, changes, seen = threading.Event(), threading.Event(), []
    load = threading.Thread(target=load_model, args=(tmp_path,))
    contexts, change = PreTrainedModel.get_init_context, torch.set_default_dtype

    def init_context(cls: Any, *given: Any, **named: Any) -> Any:
        begins.set()
        return contexts.__func__(cls, *given, **named)

    def set_default_dtype(dtype: torch.dtype) -> None:
        change(dtype)
        changes.set()

    def in_a_layer(*_: Any) -> None:
        if load.ident is None:
            load.start()
            assert begins.wait(60)
            assert not changes.wait(0.3), "the load did not wait"
        seen.append(torch.get_default_dtype())

    monkeypatch.setattr(PreTrainedModel, "get_init_context", classmethod(init_context))
    monkeypatch.setattr(torch, "set_default_dtype", set_default_dtype)
    model.model.layers[1].register_forward_pre_hook(in_a_layer)
    skipstone.generate(model, PROMPT, "autoregressive", engine="eager", max_new_tokens=3, do_sample=False)
    load.join(timeout=60)
    assert not load.is_alive(), "the load waits for ever"
    assert changes.is_set()
    assert set(seen) == {torch.float32}


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
@pytest.mark.slow
def test_the_native_engine_decodes_while_another_thread_changes_the_default_dtype() -> None:
    model, stop = families.build("llama"), threading.Event()
    expected = texts(model, LayerSkip(2, 4), "native")

    def change() -> None:
        while not stop.is_set():
            for dtype in (torch.bfloat16, torch.float64, torch.float32):
                torch.set_default_dtype(dtype)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(10):
            assert texts(model, LayerSkip(2, 4), "native") == expected
    finally:
        stop.set()
        changing.join()
        torch.set_default_dtype(torch.float32)


WRONG: list[tuple[Tensor, int, str]] = [
    (torch.zeros(2, 3, dtype=torch.float64), 0, "float64"),
    (torch.zeros(2, 3, device="meta"), 0, "meta"),
    (torch.zeros(2, 4), 0, r"\[2, 4\]"),
    (torch.zeros(6), 0, r"\[6\]"),
    (torch.zeros(3, 2).t(), 0, "strides"),
    (torch.zeros(3, 2).t(), 1, "strides"),
    (torch.zeros(2, 5)[:, :3], 0, "strides"),
]


def test_c_is_handed_no_other_buffer_than_it_expects() -> None:
    for tensor, free, found in WRONG:
        with pytest.raises(ValueError, match=rf"wants states \[2, 3\] in float32 on the CPU, found .*{found}"):
            pointer("states", tensor, (2, 3), torch.float32, free)
    whole = torch.zeros(2, 5)
    rows, columns = whole[:, :3], torch.zeros(3, 2).t()
    assert pointer("states", rows, (2, 3), torch.float32, free=1) == whole.data_ptr(), "no copy of what fits"
    assert dense(rows, free=1) is rows
    assert dense(whole) is whole
    assert dense(columns).is_contiguous()
    assert torch.equal(dense(columns), columns)
    assert dense(torch.zeros(4, 3, 6)[:, :2, :5], free=2).shape == (4, 2, 5)


def test_values_of_the_host_keep_their_kind() -> None:
    """A drafter of a user's makes its mask of valid drafts by `on_device`, as docs/add-a-method.md shows."""
    values = [[True], [False]], [[1, 2]], [0.5, 1], [1, 0.5], [True, 2], [[]], [2**62 + 1], []
    kinds = [torch.bool, torch.int64, torch.float32, torch.float32, *[torch.int64] * 4]
    for dtype, one in zip(kinds, values, strict=True):
        made: Any = on_device(one, torch.device("cpu"))
        assert made.dtype is dtype
        assert made.tolist() == one
