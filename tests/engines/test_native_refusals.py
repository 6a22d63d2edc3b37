"""What the native engine cannot do it says in a sentence, and a pass that does not fit writes nothing."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.engines.native.engine import why_not
from skipstone.engines.native.structs import declare
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.layer_variants import LAYER_VARIANTS
from skipstone.models.passes import Pass, Tree
from tests.helpers import families
from tests.helpers.native import NATIVE_ONLY, assert_same_bits, chain, native, text

pytestmark = NATIVE_ONLY


GUARD = 512


def guarded(runner: ModelRunner) -> tuple[KVCache, list[Tensor]]:
    """A store for 20 tokens (its buffers inside larger ones), and those larger ones."""
    store, whole = KVCache(2, runner.depth, 20), []
    store.reserve(20)
    shape = (2, 2, store.capacity + 1, 16)
    size = torch.Size(shape).numel()
    for buffers in (store.keys, store.values):
        for index in range(runner.depth):
            whole.append(torch.full((size + 2 * GUARD,), 7.0))
            buffers[index] = whole[-1][GUARD : GUARD + size].view(shape)
    return store, whole


def bad_pass(positions: list[int] | None = None, slots: list[int] | None = None, **more: Any) -> Pass:
    here = torch.arange(3)[None]
    given = [here if one is None else torch.tensor([one]) for one in (positions, slots)]
    return Pass(*given, None, more.pop("rows", slice(0, 1)), more.pop("extent", 3), **more)


def bare_tree(base: int, positions: list[int], sees: bool = True) -> dict[str, Any]:
    seen = torch.eye(3, dtype=torch.bool)[None] & sees
    return {"tree": Tree(torch.tensor([base]), seen, torch.tensor([positions]))}


SLOT, SLOTS = "a slot that the KV store does not have", "a slot .* or one slot for two tokens"
POSITION, TREE = "a position that the model does not have", "a tree in which a token sees nothing"
REFUSED: dict[str, tuple[Callable[[], Pass], str]] = {
    "a slot beyond": (lambda: bad_pass(slots=[0, 1, 4000]), SLOT),
    "the trash": (lambda: bad_pass(slots=[0, 1, 20]), SLOT),
    "a negative slot": (lambda: bad_pass(slots=[0, -1, 2]), SLOT),
    "one slot for two tokens": (lambda: bad_pass(slots=[0, 1, 1]), SLOTS),
    "one slot for two tokens apart": (lambda: bad_pass(slots=[2, 1, 2]), SLOTS),
    "a row beyond": (lambda: bad_pass(rows=slice(2, 3)), SLOT),
    "an extent beyond": (lambda: bad_pass(extent=22), SLOT),
    "a negative position": (lambda: bad_pass(positions=[0, -1, 2]), POSITION),
    "a position not stored": (lambda: bad_pass(positions=[0, 1, 3]), POSITION),
    "a position beyond the rotary table": (lambda: bad_pass(positions=[0, 1, 5000], **bare_tree(0, [0, 1, 5000])), POSITION),
    "a tree without sight": (lambda: bad_pass(**bare_tree(0, [0, 1, 2], False)), TREE),
    "a tree before the store": (lambda: bad_pass(**bare_tree(-4, [0, 1, 2])), TREE),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_pass_is_refused_and_writes_nothing(what: str) -> None:
    make, sentence = REFUSED[what]
    runner = native(families.cached("llama"))
    store, whole = guarded(runner)
    hidden = torch.ones(1, 3, 32)
    with pytest.raises(RuntimeError, match=f"the native engine was asked for {sentence}"):
        runner.run(hidden, make(), store, range(4))
    assert all(bool((one == 7.0).all()) for one in whole), "a refused pass wrote to the store"
    assert bool((hidden == 1).all())
    runner.run(hidden, bad_pass(), store, range(4))  # and the same engine goes on, inside its buffers
    for one in whole:
        assert bool((one[:GUARD] == 7.0).all() & (one[-GUARD:] == 7.0).all())
    assert not bool((whole[0] == 7.0).all())


def test_other_bad_arguments_are_refused() -> None:
    runner = native(families.cached("llama"))
    store, whole = guarded(runner)
    states, ids = torch.ones(1, 3, 32), torch.tensor([[0, 1]])
    trash = bad_pass([0, 1, store.capacity], extent=store.capacity + 1)
    crowded = native(families.build("llama"), threads=65)
    attempts: list[tuple[Any, str]] = [
        (lambda: runner.run(states, trash, store, range(4)), "the native engine was asked for"),
        (lambda: runner.run(states, bad_pass(), store, range(-1, 2)), "a layer that the model does not have"),
        (lambda: runner.run(states, bad_pass(), store, range(3, 5)), "a layer that the model does not have"),
        (lambda: crowded.project(states), "a number of threads that is not from 1 to 64"),
        (lambda: runner.embed(torch.tensor([[3, -1]]), ids), "a token id that the model has no embedding for"),
        (lambda: runner.embed(torch.tensor([[3, 97]]), ids), "a token id that the model has no embedding for"),
        (lambda: runner.embed(torch.tensor([[3, 2**40]]), ids), "a token id that the model has no embedding for"),
    ]
    for attempt, words in attempts:
        with pytest.raises(RuntimeError, match=words):
            attempt()
    assert all(bool((one == 7.0).all()) for one in whole)
    with pytest.raises(ValueError, match=r"wants tokens .* in int64 on the CPU, found .* in int32"):
        runner.embed(ids.int(), ids)


def whole_pass(**changed: Any) -> Pass:
    """Three tokens of a row as a tree. changed: tensors that do not fit."""
    right = {
        **{"positions": torch.arange(3)[None], "slots": torch.arange(3)[None], "valid": None, "seen": None},
        **{"base": torch.tensor([0]), "ancestors": torch.eye(3, dtype=torch.bool)[None]},
        "column_positions": torch.arange(3)[None],
    }
    given = {**right, **changed}
    tree = Tree(given["base"], given["ancestors"], given["column_positions"], given["seen"])
    return Pass(given["positions"], given["slots"], given["valid"], slice(0, 1), 3, None, tree)


MISFITS: dict[str, Tensor] = {
    "slots": torch.arange(2)[None],
    "positions": torch.arange(3, dtype=torch.int32)[None],
    "valid": torch.ones(1, 2, dtype=torch.bool),
    "base": torch.zeros(0, dtype=torch.int64),
    "ancestors": torch.ones(1, 2, 3, dtype=torch.bool),
    "column_positions": torch.arange(2, dtype=torch.int32)[None],
    "seen": torch.tensor(3),
}


def test_tensors_and_states_that_do_not_fit_are_refused() -> None:
    runner = native(families.cached("llama"))
    store, whole = guarded(runner)
    runner.run(torch.ones(1, 3, 32), whole_pass(), store, range(0))
    for name, tensor in MISFITS.items():
        with pytest.raises(ValueError, match=r"the native engine wants \w+ \[[\d, ]*\] in \w+ on the CPU, found \["):
            runner.run(torch.ones(1, 3, 32), whole_pass(**{name: tensor}), store, range(4))
    right = torch.ones(1, 3, 32)
    for hidden in (torch.ones(1, 2, 32), right[..., :31], right.bfloat16(), right.to("meta"), right[0]):
        with pytest.raises(ValueError, match=r"the native engine wants hidden \[1, 3, 32\] in float32 on the CPU, found \["):
            runner.run(hidden, bad_pass(), store, range(4))
    for hidden in (right[..., :31], right.bfloat16(), right.to("meta")):
        for read in (runner.normed, runner.project, runner.engine.greedy_tokens):
            with pytest.raises(ValueError, match=r"the native engine wants (hidden|normed)"):
                read(hidden)
    assert all(bool((one == 7.0).all()) for one in whole), "a refused pass wrote to the store"


def test_a_store_of_another_engine_or_model_is_refused() -> None:
    model = families.build("gemma", head_dim=12)  # the native engine keeps whole vectors
    others = (
        (ModelRunner(model, "eager"), native(model)),
        (native(families.cached("llama")), native(families.build("llama", num_key_value_heads=4))),
    )
    for first, second in others:
        store = KVCache(1, 4, 20)
        store.reserve(20)
        first.run(torch.ones(1, 3, 32), bad_pass(), store, range(4))
        with pytest.raises(ValueError, match=r"wants keys and values .* in float32 on the CPU, found"):
            second.run(torch.ones(1, 3, 32), bad_pass(), store, range(4))


def test_no_memory_is_an_error() -> None:
    """The library takes room for what it normalises before it reads the states, which are not there."""
    engine: Any = native(families.cached("llama")).engine
    states, best = torch.ones(1, 32), torch.ones(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="more memory or threads than there are"):
        engine._library.sk_head(engine._model, None, states.data_ptr(), 2**36, True, states.data_ptr(), best.data_ptr(), 1)


class OtherLinear(nn.Linear):
    pass


def _own_forward(model: Any) -> None:
    module = model.layers[0].self_attn
    module.forward = lambda *given, **more: type(module).forward(module, *given, **more)


HOOKED = "has hooks or a forward of its own, which only transformers' modules run"
SUBCLASS = (
    "model.layers.2.mlp.up_proj is a OtherLinear of tests.engines.test_native_refusals, and the native engine knows only the "
    "modules that transformers builds this family of"
)
ODD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (lambda model: model.layers[1].mlp.register_forward_hook(lambda *_: None), f"model.layers.1.mlp {HOOKED}"),
    "pre-hook": (lambda model: model.norm.register_forward_pre_hook(lambda *_: None), f"model.norm {HOOKED}"),
    "subclass": (lambda model: setattr(model.layers[2].mlp.up_proj, "__class__", OtherLinear), SUBCLASS),
    "own forward": (_own_forward, f"model.layers.0.self_attn {HOOKED}"),
    "activation": (
        lambda model: setattr(model.layers[1].mlp, "act_fn", nn.ReLU()), "the native engine does not know the activation ReLU",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_what_cannot_be_run_is_said_in_a_sentence(what: str) -> None:
    change, sentence = ODD[what]
    model: Any = families.build("llama")
    assert why_not(model, DecoderModel(model)) is None
    change(model.model)
    assert why_not(model, DecoderModel(model)) == sentence
    with pytest.raises(ValueError, match="engine='native' cannot run this model"):
        ModelRunner(model, "native")


def test_an_unknown_family_is_a_reason_and_patches_and_transformers_hooks_are_none() -> None:
    for name in {*families.NAMES} - {*LAYER_VARIANTS}:
        other = families.cached(name)
        assert f"does not know the family {other.config.model_type} (it knows llama" in str(why_not(other, DecoderModel(other)))
    model = families.build("llama")
    expected = chain(native(model), text(9), 1)
    chain(ModelRunner(model, "eager"), text(9), 9)
    model(text(9)[None], output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules()), "transformers listens from now on"
    assert why_not(model, DecoderModel(model)) is None
    assert_same_bits(chain(native(model), text(9), 1), expected)


NAN = float("nan")


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(families.cached("llama"), "native")


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_as_many_of_the_largest_as_there_are_not_are_refused(engine: str) -> None:
    model = ModelRunner(families.cached("llama"), engine)
    for count in (-1, 0, 98, 1000):
        with pytest.raises(ValueError, match=rf"between 1 and the 97 .*{count}"):
            model.top_k_tokens(torch.zeros(2, 97), count)


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_of_logits_with_a_nan_no_token_is_the_largest(engine: str) -> None:
    model, logits = ModelRunner(families.cached("llama"), engine), torch.randn(3, 97)
    expected = logits.topk(4).indices
    logits[1, 50] = NAN
    found = model.top_k_tokens(logits, 4)
    assert found[1].tolist() == [-1] * 4
    assert found[::2].equal(expected[::2])


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # the second has soft caps, which limit what they are given
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_states_with_a_nan_have_no_likeliest_token_and_no_logit_hides_it(name: str, quantize: str) -> None:
    model = ModelRunner(families.cached(name), "native", quantize)
    hidden = torch.randn(1, 5, model.config.hidden_size)
    expected = model.greedy_tokens(hidden)
    hidden[0, 2, 3] = NAN
    found = model.greedy_tokens(hidden)
    assert found[0, 2] == -1
    assert found[0, [0, 1, 3, 4]].equal(expected[0, [0, 1, 3, 4]])
    assert model.logits(hidden)[0, 2].isnan().all()
    best, probability = model.engine.score_exit(hidden, None)
    assert best[0, 2] == -1
    assert probability[0, 2] == 0


def test_a_nan_in_attention_is_not_lost_in_its_soft_cap() -> None:
    ids, model = torch.tensor([[3, 4, 5]]), families.build("gemma2")
    assert ModelRunner(model, "native").read(ids).isfinite().all()  # from now on the shape is known to be good
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.q_proj.weight")[0, 0] = NAN
    assert ModelRunner(model, "native").read(ids).isnan().all()


def test_error_codes_of_every_function_are_raised(runner: ModelRunner) -> None:
    functions: Any = declare(library.load())
    number = torch.zeros(4)
    at = number.data_ptr()
    for name, arguments in {
        "sk_pack": (0, 0, -1, at, 1, -1, 1, at, 1),
        "sk_quantize": (3, 0, -1, at, 1, 1, -1, at, 1),
        "sk_take": (None, at, 1, at),
        "sk_embed": (None, at, 1, at),
        "sk_norm": (None, at, 1, at),
        "sk_head": (None, None, at, 1, 1, None, at, 1),
        "sk_test": (None, None, at, 1, None, at, at, 1),
        "sk_largest": (at, 1, 2, 2, 3, at, 1),
        "sk_draw": (at, -1, 1, 1, at, at, at, at, at, 1, at),
        "sk_run": (None, None, None, 0, 0, None, at, 0, at, 0, 1),
        "sk_chain": (*[None] * 3, 0, 0, *[None] * 5, 0, None, None, 0, 0, None, None, 0, None, None, 0, 0, *[None] * 7, 0, 1),
    }.items():
        with pytest.raises(RuntimeError, match="buffer that is missing, or a size"):
            getattr(functions, name)(*arguments)
    assert functions.sk_packed_bytes(0, 1 << 62, 1 << 62) == -1


LONG = """
import torch
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import families

def megabytes(): return int(open('/proc/self/statm').read().split()[1]) * 4096 / 2**20

model = ModelRunner(families.build('llama'), 'native')
few, many = (torch.zeros(1, n, model.config.hidden_size) for n in (1, 200_000))
model.greedy_tokens(few); before = megabytes()
model.greedy_tokens(many); grown = megabytes()
for _ in range(600): model.greedy_tokens(few)
print(before, grown, megabytes())
"""


@pytest.mark.slow
def test_the_memory_of_a_long_prompt_is_given_back() -> None:
    said = subprocess.check_output([sys.executable, "-c", LONG], text=True, timeout=300)
    before, grown, after = map(float, said.split())
    logits = 200_000 * 97 * 4 / 2**20
    assert grown - before > 0.9 * logits
    assert after - before < 0.3 * logits


def test_what_a_caller_has_set_of_its_floating_point_unit_changes_nothing_and_stays(runner: ModelRunner) -> None:
    tiny = torch.full((1, 3, runner.config.hidden_size), 1e-39)
    before = runner.normed(tiny)
    assert torch.set_flush_denormal(True)
    try:
        flushed = runner.normed(tiny)
        assert float(torch.tensor([1e-39]) * 1) == 0.0, "the caller's own setting is still there"
    finally:
        torch.set_flush_denormal(False)
    assert flushed.equal(before)
    assert before.abs().max() > 0
