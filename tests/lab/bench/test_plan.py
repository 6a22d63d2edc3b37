"""Plans: what is asked for becomes engines and settings, or one clear sentence."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from skipstone.assets import NANO
from skipstone.lab.bench import plan
from skipstone.lab.bench.peers.hf import HFEarlyExit
from skipstone.lab.bench.prompts import conversations, draw_places
from skipstone.lab.tasks.data_sets import untabbed
from skipstone.lab.tasks.dialogue import VICUNA, PromptBuilder, TaskConversation
from skipstone.lab.timing.measure import MethodBackend
from tests.helpers import families

TASKS_HERE = Path(__file__).parents[2] / "helpers" / "records"


def test_methods_with_choices_are_read_from_text_and_json() -> None:
    wish = plan.parse("layerskip exit-layer=3,6 confidence_threshold=none,0.4 reuse_cache=false label=ours")
    assert wish.pop("confidence_threshold") == [None, 0.4]
    assert wish == {"method": "layerskip", "exit_layer": [3, 6], "reuse_cache": False, "label": "ours"}
    assert plan.parse('{"method": "layerskip", "exit_layer": [1, 2]}') == {"method": "layerskip", "exit_layer": [1, 2]}


def test_every_combination_of_choices_is_a_candidate_and_tuning_adds_what_is_left_open() -> None:
    model = families.cached("llama")
    wishes = [plan.parse("layerskip exit_layer=1,2 num_speculative_tokens=2,3,4"), plan.parse("hf-early-exit exit_layer=1,3")]
    found, refused = plan.create_entries(wishes, model, tune=False)
    assert refused == {}
    ours = [engine.settings for engine in found[0].candidates if isinstance(engine, MethodBackend)]
    assert {(one["exit_layer"], one["num_speculative_tokens"]) for one in ours} == {(e, d) for e in (1, 2) for d in (2, 3, 4)}
    assert found[1].candidates == (HFEarlyExit(1), HFEarlyExit(3))
    assert (found[0].sampled, found[1].sampled) == (True, False)

    (entrant,), _ = plan.create_entries([plan.parse("layerskip exit_layer=2")], families.cached("llama"), tune=True)
    assert {engine.settings["exit_layer"] for engine in entrant.candidates} == {2}
    assert len(entrant.candidates) == 30


def test_a_family_without_early_exits_in_transformers_gets_a_reason_instead() -> None:
    wishes = [plan.parse("hf-early-exit exit_layer=2"), plan.parse("autoregressive")]
    found, refused = plan.create_entries(wishes, families.cached("gpt2"), tune=False)
    assert [entrant.label for entrant in found] == ["autoregressive"]
    assert "config.num_hidden_layers" in refused["hf-early-exit"]


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("layerskip exit_layer=2,4", "between 1 and 3"),
        ("hf-early-exit exit_layer=abc", "exit_layer takes int, found 'abc'"),
        ("hf-early-exit exit_layer=2 num_assistant_tokens=0", "num_assistant_tokens must be at least 1, found 0"),
        ("early_exit exit_layer=1,2", "a choice by speed would be none"),
        ("hf-early-exit", r"hf-early-exit needs exit_layer=\.\.\."),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_measured(wish: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan.create_entries([plan.parse(wish)], families.cached("llama"), tune=False)


def test_a_peer_without_an_exit_layer_takes_the_models_own() -> None:
    model = families.build("llama")
    model.generation_config.skipstone = {"method": "layerskip", "exit_layer": 3}
    (entrant,), _ = plan.create_entries([plan.parse("hf-early-exit")], model, tune=False)
    assert entrant.candidates == (HFEarlyExit(3),)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"methods": ["medusa"]},
            "unknown method 'medusa'; there are auto, autoregressive, early_exit, layerskip, swift, self_speculative",
        ),
        ({"methods": ["layerskip exit_layer"]}, "key=value or key=value,value; found 'exit_layer'"),
        ({"methods": ["layerskip", "layerskip exit_layer=2"]}, "two methods are called layerskip: give one of them a label"),
        ({"methods": [" "]}, "found nothing"),
        ({"methods": ['{"exit_layer": 3}']}, "names itself"),
        ({"tasks": ["gsm9k"]}, "unknown task 'gsm9k' (did you mean 'gsm8k'?); there are self, humaneval"),
        ({"tasks": ["gsm8k"], "protocol": "layerskip"}, "protocol layerskip has no task 'gsm8k'"),
        ({"top_p": 0.5}, "top_p=0.5 means nothing at temperature 0"),
        ({"tune_prompts": 3}, "tune_prompts has no effect: no setting is to be chosen"),
        ({"methods": ["layerskip exit_layer=3 exit-layer=4"]}, "exit_layer is given twice after layerskip"),
        ({"samples": 5}, "5 samples at temperature 0 would all be the same text"),
        ({"prompts": 5}, "unknown setting 'prompts' (did you mean 'num_prompts'?): expected one of"),
    ],
)
def test_mistakes_are_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        plan.read(None, given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_plan_from_a_file_is_overridden_by_flags_task_by_task(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "methods: [autoregressive, {method: layerskip, exit_layer: [1, 2]}]\nmax_new_tokens: 32\n"
        "tasks:\n  - {task: gsm8k, protocol: swift, num_prompts: 50}\n  - humaneval\n"
    )
    found = plan.read(path, {"temperature": 0.5})
    first, second = (settings for _, settings in plan.resolved(found))
    assert (first.shots, first.num_prompts, first.max_new_tokens, first.temperature) == (5, 50, 32, 0.5)
    assert (second.shots, second.num_prompts, second.max_new_tokens) == (0, None, 32)
    first, second = (settings for _, settings in plan.resolved(plan.read(path, {"num_prompts": 2, "protocol": "swift"})))
    assert (first.num_prompts, second.num_prompts, second.max_new_tokens) == (2, 2, 32), "flags go over a task's own say"
    path.write_text("methods: [autoregressive]\nmethods: [layerskip]\n")
    with pytest.raises(ValueError, match="'methods' is given twice"):
        plan.read(path, {})


def test_prompts_to_tune_and_to_report_are_drawn_by_the_seed_and_share_none() -> None:
    def drawn(**more: Any) -> Any:
        asked = {"tune_prompts": 8} if "tune" in more else {}
        made = plan.read(None, {"tasks": ["self"], "num_prompts": 30, **asked, **more})
        ((task, settings),) = plan.resolved(made)
        return conversations(task, settings, made, None)

    tune, report = drawn(tune=True)
    assert (len(tune), len(report)) == (8, 30)
    assert not {one.digest for one in tune} & {one.digest for one in report}
    assert [one.digest for one in report] == [one.digest for one in drawn()[1]] != [one.digest for one in drawn(seed=1)[1]]
    assert drawn()[0] == [], "nothing is put aside where nothing is chosen"
    assert len(drawn(num_prompts=38, tune=True)[0]) == 2, "what is left"
    with pytest.raises(ValueError, match="self has 40 in all: lower num_prompts or tune_prompts"):
        drawn(num_prompts=40, tune=True)
    with pytest.raises(ValueError, match="task self has 40 prompts, 41 are asked for"):
        drawn(num_prompts=41)


def test_places_name_the_prompts_in_their_order() -> None:
    def named(**task: Any) -> Any:
        made = plan.read(None, {"tasks": [{"task": "self", **task}], "tune": True, "tune_prompts": 3})
        ((task_of, settings),) = plan.resolved(made)
        return conversations(task_of, settings, made, None)

    tune, report = named(places=[7, 0, 39])
    assert [one.place for one in report] == [7, 0, 39]
    assert [one.source for one in report] == ["self 7", "self 0", "self 39"]
    assert len(tune) == 3
    assert not {one.place for one in tune} & {7, 0, 39}
    with pytest.raises(ValueError, match="task self has 40 prompts, none at place 40"):
        named(places=[40])
    for other in ({"num_prompts": 2}, {"skip_looping": True}):
        with pytest.raises(ValueError, match="task self: places name the prompts"):
            named(places=[1], **other)


def test_categories_take_turns() -> None:
    """As many of each as possible: two of every one in six, of which the rare one has only one."""
    names = ["a"] * 40 + ["b"] * 2 + ["c"] * 9 + [None]
    for seed in range(5):
        places = draw_places(names, seed)
        assert sorted(places) == list(range(52))
        assert sorted(str(names[place]) for place in places[:7]) == ["None", "a", "a", "b", "b", "c", "c"]
    assert draw_places(names, 1) != draw_places(names, 2)
    made = plan.read(None, {"tasks": ["spec-bench"], "num_prompts": 3, "data_dir": str(TASKS_HERE)})
    ((task, settings),) = plan.resolved(made)
    assert len({one.record["category"] for one in conversations(task, settings, made, TASKS_HERE)[1]}) == 3


def test_a_category_of_spec_bench_is_a_task() -> None:
    """SWIFT's Figure 7 asks one after the other. The protocol is that of the whole."""
    made = plan.read(None, {"tasks": ["spec-bench.writing"], "protocol": "spec-bench", "data_dir": str(TASKS_HERE)})
    ((task, settings),) = plan.resolved(made)
    asked = conversations(task, settings, made, TASKS_HERE)[1]
    assert {one.record["category"] for one in asked} == {"writing"}
    assert asked[0].source == "spec-bench.writing 0"
    assert settings.max_new_tokens == 1024
    with pytest.raises(ValueError, match=r"task spec-bench\.poems has no records"):
        plan.resolved(plan.read(None, {"tasks": ["spec-bench.poems"]}))[0][0].records(TASKS_HERE)


def test_swift_gives_programs_with_tabs() -> None:
    for protocol, samples in (("swift", 1), ("swift-pass10", 10)):
        made = plan.read(None, {"tasks": ["humaneval"], "num_prompts": 1, "protocol": protocol, "data_dir": str(TASKS_HERE)})
        ((task, settings),) = plan.resolved(made)
        assert (settings.samples, settings.temperature, settings.top_p) == ((10, 0.6, 0.95) if samples > 1 else (1, 0, 1))
        (one,) = conversations(task, settings, made, TASKS_HERE)[1]
        assert '\n\t"""' in one.turns[0]
        assert untabbed(one.turns[0]) == one.record["prompt"]


class Chatting:
    chat_template = "own"
    bos_token_id = eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{turn['role'][0]}>{turn['content']}" for turn in turns) + "<a>"

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def read(reader: PromptBuilder, said: Any = ()) -> str:
    return "".join(map(chr, reader.ids(TaskConversation("c", ("one", "two")), said).tolist()))


def test_turns_become_prompts_with_and_without_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = Chatting()
    monkeypatch.setattr("skipstone.lab.tasks.dialogue.bos_prefix", lambda _: [])
    assert read(PromptBuilder(tokenizer, True, 99)) == "<u>one<a>"
    assert read(PromptBuilder(tokenizer, True, 99), [("one", "yes")]) == "<u>one<a>yes<u>two<a>"
    assert read(PromptBuilder(tokenizer, False, 99)) == "one"
    assert read(PromptBuilder(tokenizer, False, 99), [("one", " yes")]) == "one yes\n\ntwo"
    assert read(PromptBuilder(tokenizer, False, 2)) == "ne", "a long prompt loses its beginning"
    tokenizer.chat_template = None
    assert (
        read(PromptBuilder(tokenizer, True, 999), [("one", "yes")]) == f"{VICUNA} USER: one ASSISTANT: yes USER: two ASSISTANT:"
    )
    monkeypatch.setattr("skipstone.lab.tasks.dialogue.bos_prefix", lambda _: [111])  # "o"
    assert read(PromptBuilder(tokenizer, False, 2)) == "oe", "the first token stays where the tokenizer begins with one"


def test_the_last_word_of_an_answer_has_the_white_space_around_it() -> None:
    by_letter: Any = Chatting()
    answer = PromptBuilder(by_letter, False, 9).answer(" is 7 72\n")
    assert (answer.ids.tolist(), answer.last_word, answer.characters) == ([*map(ord, " is 7 72\n")], 5, 7)
    assert PromptBuilder(by_letter, False, 9).answer(" B").last_word == 0, "one word is the whole answer"
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    for before, word in (
        (" He sold 24.\n####", " 72"),
        ("    return", " foo(a)\n\n"),
        ("", " signs"),
        (" na\u00efve", " caf\u00e9"),
    ):
        found = PromptBuilder(tokenizer, False, 9).answer(before + word)
        assert [tokenizer.decode(part) for part in (found.ids[: found.last_word], found.ids[found.last_word :])] == [
            before,
            word,
        ]
