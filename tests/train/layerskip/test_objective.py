"""LayerSkip's loss on a model: value and gradients equal a naive reference that holds every logit and runs every row alone."""

import inspect
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F

from skipstone.models.decoder_model import DecoderModel
from skipstone.train.data.rows import IGNORED
from skipstone.train.layerskip.dropout import kept_rows
from skipstone.train.layerskip.objective import LayerSkipObjective
from skipstone.train.layerskip.schedules import EarlyExitLoss, LayerSkipRecipe
from tests.helpers import families
from tests.helpers.objectives import (
    CE,
    HEADS,
    KL,
    LAYERS,
    PLAIN,
    RATE,
    RATES,
    SEED,
    STEPS,
    TOWARDS_LAST,
    WEIGHTS,
    alone,
    assert_same,
    build,
    combined,
    gradients,
    inputs,
    naive,
    objective,
)
from tests.helpers.pairwise import slow_except

MODELS = [(name, tied) for name in HEADS for tied in (False, True) if not tied or name in ("llama", "gemma2", "gpt2")]


@pytest.mark.parametrize(("name", "tied"), slow_except(MODELS[::4], MODELS))
def test_loss_and_all_gradients_equal_a_naive_reference(name: str, tied: bool) -> None:
    model, batch = build(name, tied), inputs()
    count = int((batch["labels"][:, 1:] != IGNORED).sum())
    for exits, kl in ((CE, False), (TOWARDS_LAST, True)):
        for step, chunk in ((0, 7), (1, 1000), (5, 1)):
            recipe = objective(model, exits, chunk=chunk)
            recipe.step = step
            with recipe.installed():
                loss = model(**batch).loss
            assert_same(model, loss, naive(name, model, batch, step, kl) / count)


@pytest.mark.parametrize(("name", "other"), [("llama", "gemma2"), ("gemma2", "opt_projected")])
@pytest.mark.parametrize(
    "exits", [EarlyExitLoss(0.0, "none", None), CE, TOWARDS_LAST], ids=["last alone", "exits", "towards the last"]
)
def test_a_teachers_distribution_takes_the_place_of_the_labels(name: str, other: str, exits: EarlyExitLoss) -> None:
    """KL(teacher || student) at every place that predicts something; a teacher of another family and size, left as it is."""
    model, teacher, batch = families.build(name).train(), families.build(other).eval().requires_grad_(False), inputs()
    own = LayerSkipObjective(model, LayerSkipRecipe(PLAIN, exits), STEPS, SEED, 7, teacher)
    own.step = 1
    with own.installed():
        loss = model(**batch).loss
    given = {key: value for key, value in batch.items() if key != "labels"}
    out = model(**given, output_hidden_states=True, use_cache=False)
    logits = {layer: HEADS[name](model, out.hidden_states[layer + 1]) for layer in range(LAYERS - 1)} | {LAYERS - 1: out.logits}
    kept = batch["labels"][:, 1:] != IGNORED
    said = teacher(**given, use_cache=False).logits[:, :-1].log_softmax(-1)[kept]
    p = {layer: each[:, :-1].log_softmax(-1)[kept] for layer, each in logits.items()}
    wrong = {layer: (said.exp() * (said - each)).sum() for layer, each in p.items()}
    if exits.kl_weight is None:
        weights = exits.weights(1, LAYERS, STEPS)
        expected = torch.stack([weight * wrong[layer] for layer, weight in enumerate(weights)]).sum()
    else:
        last, among = p[LAYERS - 1].detach(), [layer for layer in (1,) if layer in p]
        apart = [(last.exp() * (last - p[layer])).sum() for layer in among]
        expected = wrong[LAYERS - 1] + KL * sum(apart, torch.zeros(())) / len(apart)
    assert_same(model, loss, expected / int(kept.sum()))
    assert all(weight.grad is None for weight in teacher.parameters())


class Head(torch.nn.Linear):
    """An LM head that is no plain one, as with an adapter."""


@pytest.mark.parametrize(
    ("name", "other", "plain"), [("llama", "gemma2", False), ("gemma2", "opt_projected", True), ("phi", "gemma2", False)]
)
def test_a_teachers_distribution_may_be_learnt_over_a_part_of_the_vocabulary(name: str, other: str, plain: bool) -> None:
    """Both distributions are those of the part alone. gemma2 caps its logits, phi's head has a bias."""
    model, teacher, batch = families.build(name).train(), families.build(other).eval().requires_grad_(False), inputs()
    if not plain:
        model.get_output_embeddings().__class__ = Head
    ids = torch.tensor([0, 3, 4, 17, 60, 96])
    own = LayerSkipObjective(model, LayerSkipRecipe(PLAIN, EarlyExitLoss(0.0, "none", None)), STEPS, SEED, 7, teacher, ids)
    with own.installed():
        loss = model(**batch).loss
    given = {key: value for key, value in batch.items() if key != "labels"}
    kept = batch["labels"][:, 1:] != IGNORED
    said, found = (one(**given, use_cache=False).logits[:, :-1, ids].log_softmax(-1)[kept] for one in (teacher, model))
    assert_same(model, loss, (said.exp() * (said - found)).sum() / int(kept.sum()))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_exits_may_learn_what_the_last_layer_says_over_a_part_of_the_vocabulary(name: str) -> None:
    """The last layer's cross-entropy stays one over all tokens; the exits' divergence is over the part alone."""
    model, batch = families.build(name).train(), inputs()
    ids = torch.tensor([0, 3, 4, 17, 60, 96])
    exits = EarlyExitLoss(kl_weight=KL, curriculum="none", exit_layers=(1, 2))
    own = LayerSkipObjective(model, LayerSkipRecipe(PLAIN, exits), STEPS, SEED, 7, shortlist=ids)
    with own.installed():
        loss = model(**batch).loss
    given = {key: value for key, value in batch.items() if key != "labels"}
    out = model(**given, output_hidden_states=True, use_cache=False)
    labels = batch["labels"][:, 1:]
    kept = labels != IGNORED
    wrong = torch.nn.functional.cross_entropy(out.logits[:, :-1][kept], labels[kept], reduction="sum")
    last = out.logits.detach()[:, :-1, ids].log_softmax(-1)[kept]
    read = [HEADS[name](model, out.hidden_states[layer + 1])[:, :-1, ids].log_softmax(-1)[kept] for layer in (0, 1)]
    apart = torch.stack([(last.exp() * (last - one)).sum() for one in read]).mean()
    assert_same(model, loss, (wrong + KL * apart) / int(kept.sum()))


@pytest.mark.parametrize("name", ["llama", "falcon", "qwen3_moe"])
def test_with_dropped_rows_loss_and_gradients_are_those_of_each_row_alone(name: str) -> None:
    model, batch = build(name), inputs(4)
    count = int((batch["labels"][:, 1:] != IGNORED).sum())
    given = {key: value for key, value in batch.items() if key != "labels"}
    recipe, micro = objective(model, CE, RATE), 9
    plan = kept_rows(4, RATES, SEED, micro)
    assert 0 < min(map(len, plan[1:3])) < 4
    assert plan[3] == []
    recipe.step, recipe.micro = 0, micro
    with recipe.installed():
        loss = model(**batch).loss
    rows = []
    for row in range(4):
        states, _ = alone(DecoderModel(model), given, row, [row in kept for kept in plan])
        logits = {layer: HEADS[name](model, state[None]) for layer, state in states.items()}
        rows.append(combined(logits, batch["labels"][row : row + 1], WEIGHTS[0], kl=False))
    assert_same(model, loss, torch.stack(rows).sum() / count)


def test_positions_are_passed_on_and_no_cache_is_made() -> None:
    model, caches = build("llama"), []
    recipe = objective(model, CE)
    layer = recipe.modules.layers[0]
    layer.register_forward_pre_hook(lambda _module, _args, given: caches.append(given["past_key_values"]), with_kwargs=True)
    batch = {key: value[:1] for key, value in inputs().items()} | {"position_ids": 3 * torch.arange(11)[None]}
    with recipe.installed():
        loss = model(**batch, use_cache=True).loss
        bare = {key: batch[key] for key in ("input_ids", "labels")}
        torch.testing.assert_close(model(**bare).loss, model(**bare, attention_mask=torch.ones(1, 11)).loss)
    assert caches == [None] * 3
    count = int((batch["labels"][:, 1:] != IGNORED).sum())
    reference = naive("llama", model, batch, 0, False) / count
    torch.testing.assert_close(loss, reference, check_dtype=False, rtol=1e-6, atol=0)


def test_only_active_exits_with_a_weight_reach_the_head_a_chunk_at_a_time() -> None:
    model, batch = build("llama"), inputs()
    given: list[int] = []
    head: Any = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _module, args: given.append(args[0].numel() // args[0].shape[-1]))
    try:
        # {0, 2, 3}: e(0) = 0, and a KL needs the teacher's logits beside each exit's; {1, 3}
        for exits, step, times in ((CE, 0, 2), (CE, 1, 2), (TOWARDS_LAST, 0, 5), (TOWARDS_LAST, 1, 3)):
            recipe = objective(model, exits, chunk=10)
            recipe.step = step
            given.clear()
            recipe.loss(batch["input_ids"], batch["attention_mask"], labels=batch["labels"])
            assert sorted(given) == sorted(times * [10, 10, 3]), "23 tokens are predicted, the others only read"
    finally:
        handle.remove()


# the model's own forward


def test_in_eval_mode_or_without_labels_the_models_own_forward_answers() -> None:
    model, batch = build("llama"), inputs()
    ids, mask, embedded = batch["input_ids"], batch["attention_mask"], model.get_input_embeddings()(batch["input_ids"])
    expected, items = model(**batch), model(**batch, num_items_in_batch=50).loss
    recipe = objective(model, CE, RATE)
    own = inspect.signature(model.forward)
    with recipe.installed():
        assert inspect.signature(model.forward) == own
        for answer in (
            model(ids, mask),
            model(input_ids=ids, attention_mask=mask, labels=None),
            model(ids, mask, mask.cumsum(-1).sub(1).clamp(min=0) * 0 + torch.arange(11)),
            model(inputs_embeds=embedded, attention_mask=mask),
        ):
            torch.testing.assert_close(answer.logits, expected.logits)
        assert getattr(model(**batch), "logits", None) is None, "in training mode the loss is LayerSkip's"
        model.eval()
        assert model(**batch).loss.item() == expected.loss.item()
        assert model(**batch, num_items_in_batch=50).loss.item() == items.item() != expected.loss.item()
        text = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
    assert text.equal(model.generate(ids[:1], max_new_tokens=3, do_sample=False))


# refusals


def test_a_shortlist_without_a_distribution_to_learn_is_refused() -> None:
    ids = torch.tensor([0, 3])
    with pytest.raises(ValueError, match="a shortlist has no effect on a loss against labels"):
        LayerSkipObjective(families.cached("llama"), LayerSkipRecipe(PLAIN, CE), STEPS, SEED, 7, shortlist=ids)


def test_what_the_recipe_does_not_cover_is_refused_before_training() -> None:
    for model, exits, options, words in (
        (families.build("qwen3_moe", output_router_logits=True), CE, {}, "no router loss: set output_router_logits=False"),
        (families.build("opt", layerdrop=0.1), CE, {}, r"layerdrop=0\.1.* set layerdrop=0"),
        (families.cached("llama"), EarlyExitLoss(0.5, "rotational", 8), {}, "at most the 4 layers, found 8"),
    ):
        with pytest.raises(ValueError, match=words):
            objective(model, exits, **options)
    for name in ("gemma3n_text", "gemma4_text"):
        with pytest.raises(ValueError, match=rf"this {name} model read keys and values of other layers.*\(p_max=0\)"):
            objective(families.cached(name), CE, RATE)


def test_under_bfloat16_autocast_the_loss_is_close_and_its_gradients_are_finite() -> None:
    model, batch = build("llama").float(), inputs(4)
    recipe = objective(model, CE, RATE)
    recipe.micro = 9
    with recipe.installed():
        exact = model(**batch).loss
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
    assert loss.dtype == torch.float32
    assert loss.item() != exact.item()
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    found, expected = gradients(model, loss), gradients(model, exact)
    for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        assert F.cosine_similarity(found[name].flatten(), expected[name].flatten(), 0) > 0.95
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("name", ["llama", "falcon"])
@pytest.mark.parametrize("exits", [CE, TOWARDS_LAST])
def test_activation_checkpointing_changes_nothing(name: str, exits: EarlyExitLoss) -> None:
    model, batch = build(name), inputs(4)
    recipe = objective(model, exits, RATE)
    recipe.micro = 9
    runs: list[int] = []
    mlp: Any = recipe.modules.layers[2].mlp
    mlp.register_forward_pre_hook(lambda _module, args: runs.append(len(args[0])))
    results = []
    for enable in (None, getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)):
        if enable is not None:
            enable()
        with recipe.installed():
            loss = model(**batch).loss
            results.append((loss.detach(), gradients(model, loss)))
    assert runs == 3 * [len(kept_rows(4, RATES, SEED, 9)[2])], "once plainly, then for the loss and again for its gradient"
    assert 0 < runs[0] < 4
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-9, atol=0)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "down_proj", "lm_head"]])
def test_a_lora_model_is_trained_through_its_wrapper(targets: list[str]) -> None:
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=4)
    wrapper: Any = peft.get_peft_model(build("llama"), settings).double().train()
    generator = torch.Generator().manual_seed(0)
    trained = {name: p for name, p in wrapper.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    batch = inputs()
    count = int((batch["labels"][:, 1:] != IGNORED).sum())
    for exits, kl in ((CE, False), (TOWARDS_LAST, True)):
        recipe = objective(wrapper, exits)
        recipe.step = 1
        with recipe.installed():
            loss = wrapper(**batch).loss
        assert_same(wrapper, loss, naive("llama", wrapper.get_base_model(), batch, 1, kl) / count)
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained.values())
        assert all(p.grad is None for name, p in wrapper.named_parameters() if name not in trained)
    assert "forward" not in wrapper.get_base_model().__dict__
