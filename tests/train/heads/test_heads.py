"""Training of exit heads: the model's own answers, its states, the divergence; all of it resumable, none of it touching the
model."""

import errno
import hashlib
import json
import os
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch import Tensor

import skipstone
from skipstone import AdaDecode, ExitHeads
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.adadecode import heads as exit_heads
from skipstone.methods.adadecode.heads import new_card
from skipstone.train.heads import answers as answering
from skipstone.train.heads import training
from skipstone.train.heads.answers import ModelAnswer
from skipstone.train.heads.recipe import PAPER, AnswerSettings, HeadPrompt, HeadSchedule, made, of_prompts, read_prompts
from skipstone.utils.files import LineFile, read_lines
from tests.helpers.machine import llama, prompt
from tests.helpers.pairwise import slow_except
from tests.helpers.training import heads_base, quiet
from tests.helpers.training import heads_recipe as recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads_base(tmp_path_factory.mktemp("base"))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_training_brings_heads_nearer_and_never_touches_the_model(base: Path, tmp_path: Path) -> None:
    before = digests(base / "model")
    with pytest.raises(ValueError, match=r"the features of 24 answers take 0.00 GiB, more than --max-disk"):
        training.run(recipe(base, tmp_path / "run"), base, max_disk=1000, say=quiet)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["answers.jsonl"]
    folder = training.run(recipe(base, tmp_path / "run"), base, say=quiet)
    with pytest.raises(ValueError, match=r"belongs to another run, training.learning_rate differ"):
        training.run(recipe(base, tmp_path / "run", training={"learning_rate": 0.1}), base, say=quiet)
    with pytest.raises(ValueError, match="is not empty"):
        training.run(recipe(base, tmp_path / "run"), base, fresh=True, say=quiet)
    assert digests(base / "model") == before
    card = json.loads((folder / "exit_heads.json").read_text())
    for figures in card["metrics"].values():
        assert figures["divergence"] < 0.9 * figures["before"]["divergence"]
    assert card["training"]["answers"] + card["training"]["held_out_answers"] == 24
    assert card["training"]["lm_head"]["rank"] == 32
    _, *answers = read_lines(tmp_path / "run" / "answers.jsonl")
    assert card["training"]["tokens"] == sum(len(answer["tokens"]) for answer in answers)
    model, _ = skipstone.load(base / "model")
    own = exit_heads.load_heads(folder, ModelRunner(model))
    assert not all(torch.equal(head.weight, torch.eye(32)) for head in own.heads)  # type: ignore[arg-type]
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    out = skipstone.generate(model, prompt(9), AdaDecode(str(folder), 0.2), **options)
    assert out.new_tokens == skipstone.generate(model, prompt(9), "autoregressive", **options).new_tokens


@pytest.mark.parametrize("vocabulary", slow_except([12], [None, 12]))
def test_the_divergence_is_that_of_the_formula(base: Path, tmp_path: Path, vocabulary: int | None) -> None:
    """KL(p* || p_theta) in float64, from the model's own logits, over all tokens or those that the answers hold most often."""
    folder = training.run(recipe(base, tmp_path / "run", heads={"vocabulary": vocabulary}), base, say=quiet)
    model, _ = skipstone.load(base / "model")
    runner = ModelRunner(model)
    heads = exit_heads.load_heads(folder, runner)
    ids = list(range(97)) if heads.shortlist is None else heads.shortlist.tolist()
    with torch.no_grad():
        states = model(prompt(12)[None], output_hidden_states=True).hidden_states
        stored = torch.stack([model.model.norm(states[layer][0]) for layer in heads.card.layers] + [states[6][0]], 1)
        divergences = training.HeadDivergence(heads, runner)(stored)
        rows = model.lm_head.weight.double()[ids]
        target = (stored[:, -1].double() @ rows.T).log_softmax(-1)
        for index, divergence in enumerate(divergences):
            own = (stored[:, index].double() @ heads.heads[index].weight.double().T @ rows.T).log_softmax(-1)  # type: ignore[operator, union-attr]
            assert divergence.item() == pytest.approx((target.exp() * (target - own)).sum().item(), rel=1e-4)
    if vocabulary is None:
        return
    _, *answers = read_lines(tmp_path / "run" / "answers.jsonl")
    found = [token for answer in answers for token in answer["tokens"]]
    assert ids == sorted(set(ids))
    assert min(map(found.count, ids)) >= max(found.count(other) for other in set(range(97)) - {*ids})
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    plain = skipstone.generate(model, prompt(9), "autoregressive", **options).new_tokens
    for method in (AdaDecode(str(folder), 0.1), AdaDecode(str(folder), 0.1, draft_vocabulary=97)):
        assert skipstone.generate(model, prompt(9), method, **options).new_tokens == plain
    assert AdaDecode(str(folder)).shortlist(runner).tolist() == ids  # type: ignore[union-attr]
    assert AdaDecode(str(folder), draft_vocabulary=97).shortlist(runner) is None, "what is asked for counts"


def test_features_in_bfloat16_or_of_another_model_are_made_anew(base: Path, tmp_path: Path) -> None:
    answers = [ModelAnswer([3, 4], [5, 6, 7]), ModelAnswer([4], [6, 8])]
    wide, mixed, other = (
        answering.extract(ModelRunner(llama(layers=6, seed=seed)), answers, (2, 4), tmp_path, 1e9, quiet, mixed)
        .states.float()
        .clone()
        for seed, mixed in ((0, False), (0, True), (1, False))
    )
    assert not torch.equal(wide, mixed)
    assert float((wide - mixed).abs().max()) < 0.05 * float(wide.abs().max())
    assert not torch.equal(wide, other)


def test_a_recipe_in_mixed_precision_makes_states_so_and_goes_on_from_no_others(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AcceleratorState._reset_state()  # a process has one precision
    wish = recipe(base, tmp_path / "bf16", training={"epochs": 1, "mixed_precision": "bf16"})
    training.run(wish, base, say=quiet)
    assert json.loads((tmp_path / "bf16" / "features.json").read_text())["mixed"] is True
    monkeypatch.setattr(training, "_mixed", lambda _: False)  # as before there was a choice
    with pytest.raises(ValueError, match="states"):
        training.run(wish, base, say=quiet)
    AcceleratorState._reset_state()


def test_features_are_the_states_behind_the_models_own_answers(base: Path, tmp_path: Path) -> None:
    """Of every position whose next token is an answer's, in ragged batches, against transformers one by one."""
    model, _ = skipstone.load(base / "model")
    runner = ModelRunner(model)
    dice = torch.Generator().manual_seed(0)
    answers = [
        ModelAnswer(prompt(int(length), seed).tolist(), prompt(int(new), 50 + seed).tolist())
        for seed, (length, new) in enumerate(torch.randint(1, 9, (21, 2), generator=dice).tolist())
    ]
    features = answering.extract(runner, answers, (2, 4), tmp_path, 1e9, quiet)
    assert (tmp_path / answering.DATA).stat().st_size == 2 * 3 * 32 * sum(len(one.tokens) for one in answers)
    for index, one in enumerate(answers):
        ids = torch.tensor([one.prompt + one.tokens])
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        span = slice(len(one.prompt) - 1, ids.shape[1] - 1)
        wanted = [model.model.norm(out.hidden_states[2][0, span]), model.model.norm(out.hidden_states[4][0, span])]
        found = features.states_of([index])
        assert torch.allclose(found.float(), torch.stack([*wanted, out.hidden_states[6][0, span]], 1), atol=2e-2)
        own = runner.project(found[None, :, -1].float())[0]
        assert torch.allclose(own, out.logits[0, span], atol=5e-2)


def test_answers_are_the_models_greedy_ones_and_are_not_asked_twice(base: Path, tmp_path: Path) -> None:
    model, tokenizer = skipstone.load(base / "model")
    asked = [*map(HeadPrompt, ["a b c", "d", "b c d e f"])]
    path, wish = tmp_path / "answers.jsonl", AnswerSettings(max_new_tokens=8, batch_size=2)
    found, seconds = answering.write(model, asked, tokenizer, wish, path, {1}, quiet)
    assert [len(one.prompt) for one in found] == [1, 5, 9]
    for one in found:
        alone = model.generate(torch.tensor([one.prompt]), max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=0)
        assert one.tokens == alone[0, len(one.prompt) :].tolist()
    with path.open("r+b") as file:  # killed while it wrote the last line
        file.truncate(path.stat().st_size - 5)
    again, more = answering.write(model, asked, tokenizer, wish, path, {1}, quiet)
    assert again == found
    assert more > 0
    with pytest.raises(ValueError, match=r"holds other answers \(prompts differ\)"):
        answering.write(model, asked[:2], tokenizer, wish, path, {1}, quiet)
    assert seconds > 0


def test_the_rank_of_the_lm_head_is_that_of_its_singular_values() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 7) @ torch.diag(torch.tensor([3.0, 2, 1, 1, 0.5, 0.1, 0]))
    wanted = torch.linalg.svdvals(weight.double())
    found = training.singular_values(weight)
    assert (found["tokens"], found["size"], found["rank"]) == (50, 7, 6)
    long = torch.randn(200_000, 4) @ torch.diag(torch.tensor([1.0, 1, 1, 0.01]))
    assert training.singular_values(long)["rank"] == 4, "many tokens make no small singular value a zero"
    assert found["largest"] == pytest.approx(wanted[0].item())
    assert found["least"] == pytest.approx(wanted[-1].item(), abs=1e-4)


def test_a_damaged_shortlist_is_refused(base: Path, tmp_path: Path) -> None:
    folder = training.run(recipe(base, tmp_path / "run", heads={"vocabulary": 12}, dtype="bfloat16"), base, say=quiet)
    weights = load_file(folder / "exit_heads.safetensors")
    assert weights["shortlist"].dtype is torch.int64, "half precision would round ids"
    assert weights["heads.0.weight"].dtype is torch.bfloat16
    model = ModelRunner(skipstone.load(base / "model")[0])
    save_file(weights | {"shortlist": weights["shortlist"].float()}, folder / "exit_heads.safetensors")
    with pytest.raises(ValueError, match=r"the shortlist in exit_heads\.safetensors must be int64, found torch\.float32"):
        exit_heads.load_heads(folder, model)
    save_file(weights | {"shortlist": weights["shortlist"].flip(0)}, folder / "exit_heads.safetensors")
    with pytest.raises(
        ValueError, match=r"the shortlist in exit_heads\.safetensors must hold ids from 0 to 96 in ascending order"
    ):
        exit_heads.load_heads(folder, model)


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def asked_by(folder: Path, *records: Any, chat: bool = False) -> list[HeadPrompt]:
    """What a file of prompts asks, as `--prompts` reads it."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_prompts(of_prompts([file], folder).prompts, folder, chat)


def test_prompts_are_texts_chats_or_turns(base: Path, tmp_path: Path) -> None:
    _, tokenizer = skipstone.load(base / "model")
    tokenizer.chat_template = CHAT
    user, said = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}
    system, more = {"role": "system", "content": "d"}, {"role": "user", "content": "e"}
    asked = asked_by(
        tmp_path,
        {"prompt": "a b c"},
        {"messages": [system, user, said]},  # what follows the user's last message is the model's to write
        {"messages": [user, said, more], "prompt": None},
        {"prompt": [user], "messages": None},
        {"prompt": ["a b", "e"]},
        {"turns": ["a b", "e"]},  # the same once more
    )
    wanted = ["a b c", "<system>d<user>a b<assistant>", "<user>a b<assistant>c<user>e<assistant>", "<user>a b<assistant>"]
    assert [one.ids([], tokenizer) for one in asked[:4]] == [tokenizer(text)["input_ids"] for text in wanted]
    assert [len(one) for one in asked] == [1, 1, 1, 1, 2]
    assert asked[4].ids(["f"], tokenizer) == tokenizer("<user>a b<assistant>f<user>e<assistant>")["input_ids"]
    (turned,) = asked_by(tmp_path, {"prompt": "a b c"}, chat=True)
    assert turned.ids([], tokenizer) == tokenizer("<user>a b c<assistant>")["input_ids"]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"question": "a"}, "line 1: expected one of the keys messages, prompt, turns, found question"),
        ({"messages": ["a"]}, 'expected a list of {"role": text, "content": text} under \'messages\', found'),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "expected a message of the role 'user' under 'messages'"),
        ("a", "expected an object with one of the keys messages, prompt, turns, found 'a'"),
    ],
)
def test_a_record_that_asks_nothing_is_refused_with_its_line(tmp_path: Path, record: Any, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        asked_by(tmp_path, record)


def test_a_chat_that_the_template_refuses_is_named_by_its_line(base: Path, tmp_path: Path) -> None:
    _, tokenizer = skipstone.load(base / "model")
    tokenizer.chat_template = "{{ raise_exception('no system here') if messages[0].role == 'system' }}" + CHAT
    system, user = ({"role": role, "content": "a"} for role in ("system", "user"))
    fine, refused = asked_by(tmp_path, {"messages": [user]}, {"messages": [system, user]})
    assert fine.ids([], tokenizer)
    with pytest.raises(
        ValueError, match=r"prompts\.jsonl, line 2 cannot be asked as a chat: .* refuses the messages: no system here"
    ):
        refused.ids([], tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="line 1 cannot be asked as a chat: this tokenizer has no chat template"):
        fine.ids([], tokenizer)


def test_a_file_of_answers_is_of_one_template_and_read_without_its_lock_when_it_is_whole(base: Path, tmp_path: Path) -> None:
    model, tokenizer = skipstone.load(base / "model")
    tokenizer.chat_template = CHAT
    path, wish = tmp_path / "answers.jsonl", AnswerSettings(max_new_tokens=4)
    asked = [HeadPrompt(turns=("a", "b")), HeadPrompt("c")]
    first, _ = answering.write(model, asked, tokenizer, wish, path, {1}, quiet)
    with LineFile(path):  # another process has it
        assert answering.write(model, asked, tokenizer, wish, path, {1}, quiet)[0] == first
    tokenizer.chat_template = CHAT.replace("<assistant>", "<a>")
    with pytest.raises(ValueError, match=r"holds other answers \(prompts differ\)"):
        answering.write(model, asked, tokenizer, wish, path, {1}, quiet)
    with pytest.raises(ValueError, match="there are no prompts"):
        answering.write(model, [], tokenizer, wish, tmp_path / "none.jsonl", {1}, quiet)


def test_a_second_turn_follows_the_models_own_answer_to_the_first(base: Path, tmp_path: Path) -> None:
    model, tokenizer = skipstone.load(base / "model")
    tokenizer.chat_template = CHAT
    asked = [HeadPrompt("a b"), HeadPrompt(turns=("c d", "e")), HeadPrompt(turns=("f",)), HeadPrompt(turns=("b", "a", "d"))]
    path, wish = tmp_path / "answers.jsonl", AnswerSettings(max_new_tokens=6, batch_size=3)
    found, _ = answering.write(model, asked, tokenizer, wish, path, {1}, quiet)
    assert len(found) == 7
    by_prompt = {tuple(one.prompt): tokenizer.decode(one.tokens, skip_special_tokens=True) for one in found}
    for one in asked:
        answers: list[str] = []
        for _ in range(len(one)):
            answers.append(by_prompt[tuple(one.ids(answers, tokenizer))])
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:6]))  # killed in the middle of the second turns
    assert answering.write(model, asked, tokenizer, wish, path, {1}, quiet)[0] == found


class Killed(BaseException):
    """Nothing catches it."""


@pytest.mark.slow
def test_a_run_that_is_killed_anywhere_ends_with_the_same_heads(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = digests(training.run(recipe(base, tmp_path / "whole"), base, say=quiet))[exit_heads.WEIGHTS]
    kills = [
        (answering, "left_padded", 2),
        (answering, "_states", 1),
        (training, "quality", 3),
        (training._HeadTrainingRun, "save", 1),
        (training._HeadTrainingRun, "_step", 7),
    ]
    for owner, name, after in kills:
        with monkeypatch.context() as patch:
            plain, count = getattr(owner, name), [0]

            def dies(*given: Any, plain: Any = plain, count: list[int] = count, after: int = after) -> Any:
                count[0] += 1
                if count[0] > after:
                    raise Killed
                return plain(*given)

            patch.setattr(owner, name, dies)
            with pytest.raises(Killed):
                training.run(recipe(base, tmp_path / "killed"), base, say=quiet)
    folder = training.run(recipe(base, tmp_path / "killed"), base, say=quiet)
    assert digests(folder)[exit_heads.WEIGHTS] == wanted


def test_heads_that_grow_no_better_end_the_run_and_the_best_are_kept(base: Path, tmp_path: Path) -> None:
    said: list[str] = []
    wild = recipe(base, tmp_path / "run", training={"epochs": 50, "learning_rate": 0.3, "patience": 2, "warmup": 0.0})
    folder = training.run(wild, base, say=said.append)
    card = json.loads((folder / "exit_heads.json").read_text())
    assert card["training"]["epochs_trained"] < 50
    epochs = [line for line in said if line.startswith("epoch")]
    assert len(epochs) == card["training"]["epochs_trained"]
    for layer, figures in card["metrics"].items():
        seen = [float(line.split(f"E={layer} ")[1].split(",")[0]) for line in epochs]
        assert figures["divergence"] == pytest.approx(min(*seen, figures["before"]["divergence"]), abs=6e-4)
    assert exit_heads.load_heads(folder, ModelRunner(skipstone.load(base / "model")[0])) is not None


def test_a_full_disk_leaves_nothing_half_written(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(skipstone.load(base / "model")[0])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    usage = namedtuple("usage", "free")
    for module, name, failing in (
        (os, "fsync", full),
        (answering.shutil, "disk_usage", lambda _: usage(10)),
        (answering, "_states", lambda *_: torch.full((2, 3, 32), torch.inf)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing)
            with pytest.raises((OSError, ValueError), match=r"nothing of the features is left|states do not fit into"):
                answering.extract(runner, [ModelAnswer([5, 6], [7, 8])], (2, 4), tmp_path, 1e9, quiet)
        assert list(tmp_path.iterdir()) == [], name
    assert answering.extract(runner, [ModelAnswer([5, 6], [7, 8])], (2, 4), tmp_path, 1e9, quiet).bounds == [0, 2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": {"layers": [2, 6]}}, r"after layers 1 to 5 of this model, in order, found \[2, 6\]"),
        ({"heads": {"kind": "low_rank"}}, "a rank of at least 1 belongs to kind low_rank"),
        ({"heads": {"kind": "original"}}, "has nothing to train"),
        ({"training": {"lr": 1}}, "training: unknown setting 'lr'"),
        ({"answers": {"max_new_tokens": 600}}, "no prompt leaves room for 600 new tokens"),
        ({"heads": {"kind": "full", "vocabulary": 8}}, "a vocabulary belongs to heads that share the model's own LM head"),
    ],
)
def test_impossible_recipes_are_one_sentence(base: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        training.run(recipe(base, tmp_path / "run", **changes), base, say=quiet)


def test_presets_are_the_papers_and_unknown_ones_are_refused() -> None:
    paper = made({"output": "x", "prompts": [{"kind": "jsonl", "path": "p"}]}, "test", "paper").training
    assert paper == HeadSchedule(epochs=100, batch_size=128, learning_rate=5e-3, warmup=0.03, patience=None)
    with pytest.raises(ValueError, match="unknown preset 'long': expected one of quick, paper"):
        made({}, "test", "long")


def test_the_papers_schedule_is_adam_with_a_warm_up_and_half_a_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: of 300 answers of one token 285 train, in batches of 128, 128 and 29. So 100 epochs are 300 steps. Nine warm up
    to .005. The others follow half a cosine; its middle is between the steps 154 and 155."""
    rates, sizes = list[float](), list[int]()
    model = ModelRunner(llama(), "eager")
    heads = ExitHeads(new_card(model, (1, 2), "square"))
    features = answering.Features(torch.randn(300, 3, 32, generator=torch.Generator().manual_seed(0)), [*range(301)])
    run = training._HeadTrainingRun(heads, model, features, HeadSchedule(**PAPER), 0)

    def step(self: torch.optim.Adam, *_: Any) -> None:
        assert type(self) is torch.optim.Adam
        rates.append(self.param_groups[0]["lr"])

    def states_of(self: answering.Features, answers: Any) -> Tensor:
        sizes.append(len(answers))
        return self.states[list(answers)]

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    monkeypatch.setattr(answering.Features, "states_of", states_of)
    for run.epoch in (0, 2, 3, 51, 99):
        run.one_epoch()
    assert sizes == [128, 128, 29] * 5
    warm = [5e-3 * step / 9 for step in (1, 2, 3, 7, 8, 9)]
    assert rates[:9] == pytest.approx([*warm, 5e-3, 4.99985e-3, 4.99942e-3], rel=1e-5)
    assert rates[9:12] == pytest.approx([2.5405e-3, 2.5135e-3, 2.4865e-3], rel=1e-4)
    assert rates[12:] == pytest.approx([1.311e-6, 5.827e-7, 1.457e-7], rel=1e-3)


def test_answers_are_written_by_the_fastest_lossless_method(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batches try the model's own default and plain decoding; a lossy default is left out, a lossy wish refused."""
    used: list[str] = []
    clock = iter(range(10**6))
    costs = {"layerskip": 5, "autoregressive": 1}

    def generate(model: Any, rows: Any, method: Any, **options: Any) -> Any:
        used.append(method.name)
        for _ in range(costs[method.name]):
            next(clock)
        return whole(model, rows, method, **options)

    whole = answering.api.generate
    monkeypatch.setattr(answering.api, "generate", generate)
    monkeypatch.setattr(answering.time, "perf_counter", lambda: float(next(clock)))
    model, tokenizer = skipstone.load(base / "model")
    asked = [HeadPrompt(f"{letter} b c") for letter in "abcdefghij"]
    wish = AnswerSettings(max_new_tokens=4, batch_size=2)
    model.generation_config.skipstone = {"method": "layerskip", "exit_layer": 1}
    first, _ = answering.write(model, asked, tokenizer, wish, tmp_path / "own.jsonl", set(), quiet)
    assert used == ["layerskip", *["autoregressive"] * 4]
    costs["autoregressive"] = 9
    second, _ = answering.write(model, asked, tokenizer, wish, tmp_path / "plain.jsonl", set(), quiet)
    assert used[5:] == ["layerskip", "autoregressive", *["layerskip"] * 3]
    assert first == second, "all of them lossless"
    model.generation_config.skipstone = {"method": "early_exit", "exit_layer": 1}
    answering.write(model, asked, tokenizer, wish, tmp_path / "lossy.jsonl", set(), quiet)
    assert set(used[10:]) == {"autoregressive"}
    lossy = AnswerSettings(max_new_tokens=4, method={"method": "early_exit", "exit_layer": 1})
    with pytest.raises(ValueError, match=r"^early_exit may change the text"):
        answering.write(model, asked, tokenizer, lossy, tmp_path / "refused.jsonl", set(), quiet)


def test_heads_of_a_model_in_bfloat16_learn_in_float32(base: Path, tmp_path: Path) -> None:
    """A step of the optimiser is smaller than bfloat16 can tell; what is saved is the model's dtype, and decodes as it is."""
    wish = recipe(base, tmp_path / "run", model_dtype="bfloat16", heads={"kind": "full"}, training={"learning_rate": 1e-3})
    folder = training.run(wish, base, say=quiet)
    card = json.loads((folder / "exit_heads.json").read_text())
    for figures in card["metrics"].values():
        assert figures["divergence"] < figures["before"]["divergence"]
    weights = load_file(folder / "exit_heads.safetensors")
    assert {one.dtype for one in weights.values()} == {torch.bfloat16}
    model, _ = skipstone.load(base / "model", dtype=torch.bfloat16)
    for heads in (str(folder), exit_heads.load_heads(folder, ModelRunner(model)).float()):
        wanted = AdaDecode(heads, confidence_threshold=0.05)
        assert skipstone.generate(model, prompt(9), wanted, max_new_tokens=8, do_sample=False).new_tokens


def test_heads_for_another_vocabulary_are_refused() -> None:
    heads = ExitHeads(new_card(ModelRunner(llama(layers=6)), (2, 4), "square"))
    with pytest.raises(ValueError, match=r"^heads= holds heads for a vocabulary of"):
        AdaDecode(heads).check(ModelRunner(llama(layers=6, vocab=20)))


@pytest.mark.slow
def test_the_seed_decides_low_rank_heads_from_the_first(base: Path, tmp_path: Path) -> None:
    shape, made_of = {"kind": "low_rank", "rank": 2}, []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(len(made_of))
        wish = recipe(base, tmp_path / name, heads=shape, seed=seed, training={"epochs": 1})
        made_of.append(digests(training.run(wish, base, say=quiet))[exit_heads.WEIGHTS])
    assert made_of[0] == made_of[1] != made_of[2]
    folder = training.run(recipe(base, tmp_path / "all", heads={**shape, "vocabulary": 97}), base, say=quiet)
    card = json.loads((folder / "exit_heads.json").read_text())
    assert all(one["divergence"] < one["before"]["divergence"] for one in card["metrics"].values())
    model = ModelRunner(skipstone.load(base / "model")[0])
    assert exit_heads.load_heads(folder, model).shortlist is None, "all tokens need no shortlist"
