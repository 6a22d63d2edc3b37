"""`skipstone chat`: answers, what is read again, commands, Ctrl-C, pipes and terminals."""

import builtins
import itertools
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skipstone
from skipstone.cli import chat, runs
from skipstone.cli.runs import Run
from skipstone.decoding.prefill import Prefill
from skipstone.engines.model_runner import ModelRunner
from skipstone.serving.batch_group import BatchGroup
from skipstone.serving.conversation import Conversation, plain_text
from tests.helpers.commandline import LAYERSKIP, Screen, assert_refused, run, succeed

SPELLED = LAYERSKIP[1]
EOS = 96  # of the checkpoint
SHORT = ("--max-new-tokens", 12)
METHODS = (SPELLED, "autoregressive", f"auto candidates='prompt_lookup;{SPELLED}'", "self_speculative draft_quantize=int8")


pytestmark = pytest.mark.filterwarnings("ignore:.* x the speed of plain decoding:RuntimeWarning")


def answered(place: Path | None, lines: list[str], *, most: int = 12, method: str = SPELLED, **options: Any) -> list[str]:
    model, tokenizer = skipstone.load(place)
    messages: list[dict[str, str]] = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        prompt = messages if tokenizer.chat_template else plain_text(messages)
        options = {"do_sample": False, **options}
        text = skipstone.generate(model, prompt, method, tokenizer=tokenizer, max_new_tokens=most, **options).text
        messages.append({"role": "assistant", "content": str(text)})
    return [one["content"] for one in messages if one["role"] == "assistant"]


def piped(answers: list[str]) -> str:
    return "".join(f"{one}\n" for one in answers)


@pytest.fixture
def endless(variant: Callable[..., Path]) -> Path:
    """A checkpoint whose answers end at their most tokens alone, and that writes no special tokens, which are no text."""
    return variant("generation_config.json", eos_token_id=None, suppress_tokens=[EOS])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    own = Prefill._pass

    def counting(prompts: Prefill, rows: range, counts: list[int]) -> Any:
        counted.append(sum(counts))
        return own(prompts, rows, counts)

    monkeypatch.setattr(Prefill, "_pass", counting)
    return counted


def interrupt(monkeypatch: pytest.MonkeyPatch, number: int, inside: bool = False) -> None:
    """Ctrl-C in a step of the answers, which are counted from 1 on over all of them. inside: the step does not end."""
    own, steps = BatchGroup.step, itertools.count(1)

    def step(group: BatchGroup) -> Any:
        if next(steps) == number:
            if inside:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)
        return own(group)

    monkeypatch.setattr(BatchGroup, "step", step)


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_what_generate_writes_for_the_same_messages(folder: Path, method: str) -> None:
    lines = ["hi there", "and who are you?", "so"]
    typed = "\n".join(["hi there", "/stats", *lines[1:]]).encode() + b"\nabc\xff\r\n"
    result = run("chat", folder, "--method", method, *SHORT, stdin=typed)
    assert result.exit_code == 0
    assert result.stdout == piped(answered(folder, lines, method=method))
    assert "\x1b" not in result.stdout + result.stderr
    assert "A line that is not UTF-8 was left out." in result.stderr
    if method.startswith("auto "):
        assert re.search(r"^turns by what drafted: \w+ \d+", result.stderr, flags=re.MULTILINE)
        assert re.search(r"^last decision: \w.*, because \w+", result.stderr, flags=re.MULTILINE)


def test_answers_drawn_at_random_are_those_of_the_seed(folder: Path) -> None:
    common = ("chat", folder, "--method", "autoregressive", *SHORT, "--temperature", 1, "--top-p", 0.9)
    one, two = (succeed(*common, "--seed", seed, stdin="hi there").stdout for seed in (1, 2))
    options = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "seed": 1}
    assert one == piped(answered(folder, ["hi there"], method="autoregressive", **options)) != two
    said = succeed(*common, stdin="hi there\n/stats\nhi there\n/stats\n").stderr
    assert len(set(re.findall(r"^seed (\d+)$", said, flags=re.MULTILINE))) == 2


def test_the_system_message_survives_a_reset_and_what_the_template_refuses_is_not_taken(
    variant: Callable[..., Path], tmp_path: Path
) -> None:
    path, file = variant(), tmp_path / "saved.json"
    template = (path / "chat_template.jinja").read_text()
    refusing = "{% if 'bad' in messages[-1].content %}{{ raise_exception('not that one') }}{% endif %}"
    (path / "chat_template.jinja").write_text(refusing + template)
    result = succeed("chat", path, *LAYERSKIP, *SHORT, "--system", "be kind", stdin=f"hi\n/reset\nbad\nhi\n/save {file}\n")
    assert "skipstone: the model's chat template refuses the messages: not that one\n" in result.stderr
    first, second = result.stdout[: len(result.stdout) // 2], result.stdout[len(result.stdout) // 2 :]
    assert first == second
    saved = json.loads(file.read_text())
    assert saved[:2] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert saved[2:] == [{"role": "assistant", "content": second.removesuffix("\n")}]


def test_without_a_chat_template_the_conversation_is_one_plain_text() -> None:
    lines = ["> wake me up at 7 am tomorrow", "> add milk and two lemons to the shopping list"]
    result = succeed("chat", "--max-new-tokens", 64, stdin=piped(lines))
    answers = [json.loads(line) for line in result.stdout.splitlines() if line]
    assert [one["intent"] for one in answers] == ["set_alarm", "add_items"]
    assert result.stdout == piped(answered(None, lines, most=64, method="layerskip"))
    assert result.stderr.startswith("skipstone-nano has no chat template: ")


def test_a_turn_reads_only_what_is_new_of_its_prompt(folder: Path, read: list[int]) -> None:
    talk = conversation(folder, skipstone.LayerSkip(2, 4))
    lengths = []
    for text in ("hi there, who are you?", "and now?", "so"):
        request = talk.ask(text, 0)
        tokens = [token for step in talk.answer(request) for token in step.tokens[0]]
        talk.keep(request, tokens)
        lengths.append((len(request.pending.prompt_ids), len(tokens)))
    known = [0] + [prompt + new - 1 for prompt, new in lengths[:-1]]
    assert read == [prompt - had for (prompt, _), had in zip(lengths, known, strict=True)]
    assert max(read[1:]) < read[0], "a later prompt is longer, and less of it is read"


def test_another_method_reads_the_conversation_once_and_one_that_cannot_be_changes_nothing(
    folder: Path, read: list[int]
) -> None:
    refused = ["/method sorcery", "/method layerskip exit_layer=9", "/method layerskip exit_layer"]
    lines = ["hi there", *refused, "/method", "/method autoregressive", "/stats", "and now?", "/stats", "so"]
    result = succeed("chat", folder, *LAYERSKIP, *SHORT, stdin=piped(lines))
    assert result.stdout == piped(answered(folder, ["hi there", "and now?", "so"]))
    refusals = [line for line in result.stderr.splitlines() if line.startswith("skipstone: ")]
    assert len(refusals) == 3
    assert "unknown method 'sorcery'" in refusals[0]
    assert "layerskip exit_layer=2" in result.stderr
    heads = re.findall(r"^(\w+) ?.*: (\d+) prompt tokens, 12 new in .* ended by length$", result.stderr, flags=re.MULTILINE)
    assert [name for name, _ in heads] == ["layerskip", "autoregressive"], "figures are those of the last answer"
    assert int(heads[0][1]) == len("[user] hi there\n[assistant] ")
    first, second, third = read[:3]  # then those of `answered`
    assert second > first > third


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_stops_the_answer_which_stays_and_not_the_program(
    endless: Path, tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "saved.json"
    interrupt(monkeypatch, 4)
    result = succeed("chat", endless, *LAYERSKIP, "--max-new-tokens", 60, stdin=f"hi there\nand now?\n/stats\n/save {file}\n")
    (stopped,) = re.findall(r"Stopped after (\d+) tokens, which stay", result.stderr)
    (known, prompt), first = re.findall(r"(\d+) of (\d+) prompt tokens were known", result.stderr)[0], read[0]
    assert int(known) == first + int(stopped) - 1
    assert read == [first, int(prompt) - int(known)], "what was read and written before is not read again"
    saved = json.loads(file.read_text())
    assert [one["role"] for one in saved] == ["user", "assistant"] * 2
    partial, whole = saved[1]["content"], answered(endless, ["hi there"], most=60)[0]
    assert whole.startswith(partial)
    assert 0 < len(partial) < len(whole) == 60 == len(saved[3]["content"])
    assert result.stdout == piped([partial, saved[3]["content"]])
    model, tokenizer = skipstone.load(endless)
    again = skipstone.generate(model, saved[:3], SPELLED, tokenizer=tokenizer, max_new_tokens=60, do_sample=False)
    assert saved[3]["content"] == again.text, "the partial answer is a part of the conversation"


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_before_the_first_token_takes_the_message_back_and_at_a_pipe_ends_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 1, inside=True)
    result = succeed("chat", folder, *LAYERSKIP, *SHORT, stdin="this one\nhi there\n")
    assert "your message was taken back" in result.stderr
    assert result.stdout == piped(["", *answered(folder, ["hi there"])])
    monkeypatch.setattr(chat, "_read_piped_line", lambda: signal.raise_signal(signal.SIGINT))
    assert run("chat", folder, *LAYERSKIP).exit_code == 130


def test_a_second_ctrl_c_does_not_wait(hears_ctrl_c: None) -> None:
    with chat.DelayedInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def typing(monkeypatch: pytest.MonkeyPatch, *events: str | type[BaseException]) -> Screen:
    """Somebody at a terminal who types lines, presses Ctrl-C (KeyboardInterrupt), and then Ctrl-D. Returns what they see."""
    screen, coming = Screen(), iter(events)

    def type_in(_: str) -> str:
        event = next(coming, EOFError)
        if isinstance(event, str):
            return event
        raise event

    monkeypatch.setattr(sys, "stdin", Screen())
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(builtins, "input", type_in)
    return screen


def conversation(folder: Path, method: Any = None, most: int = 12) -> Conversation:
    model, tokenizer = skipstone.load(folder)
    return Conversation(ModelRunner(model), tokenizer, method or skipstone.Autoregressive(), {"do_sample": False}, most)


def test_ctrl_c_at_a_prompt_that_is_typed_keeps_the_conversation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(monkeypatch, KeyboardInterrupt, "hi there", KeyboardInterrupt, KeyboardInterrupt, "and now?")
    talk = conversation(folder)
    chat.Chat(talk, None, False).talk("tiny")
    assert [one["content"] for one in talk.messages[::2]] == ["hi there", "and now?"]
    said = capsys.readouterr().err
    assert said.count("Ctrl-D") >= 3
    assert "/save" in said


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize(("owner", "place"), [(runs, "collect_run"), (Run, "finish_reason")])
def test_ctrl_c_right_after_an_answer_keeps_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: object, place: str
) -> None:
    """The signal comes when the last token is there, or when the answer's end is told."""
    own = getattr(owner, place)

    def and_ctrl_c(*arguments: Any) -> Any:
        result = own(*arguments)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, place, and_ctrl_c)
    typing(monkeypatch, "hi there", "and now?")
    talk = conversation(folder)
    chat.Chat(talk, None, False).talk("tiny")
    assert [one["role"] for one in talk.messages] == ["user", "assistant"] * 2
    assert all(one["content"] for one in talk.messages)


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_what_auto_has_learnt_is_saved_at_the_end(
    command: str, endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat saves that of all its methods; `generate` only if there was a copy of the weights."""
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path / "cache"))
    methods = [f"auto candidates='{one}'" for one in ("prompt_lookup", "self_speculative draft_quantize=int4")]
    common = (endless, "--max-new-tokens", 200, "--method")
    if command == "chat":
        succeed("chat", *common, methods[0], stdin="hi\n/method autoregressive\n")
    else:
        succeed("generate", *common, methods[0], "--prompt", "hi")
        assert not (tmp_path / "cache" / "auto").exists()
        succeed("generate", *common, methods[1], "--prompt", "hi")
    assert len([*(tmp_path / "cache" / "auto").iterdir()]) == 1


def test_commands_say_what_they_did(folder: Path, tmp_path: Path) -> None:
    there, new = tmp_path / "there.json", tmp_path / "with space.json"
    there.write_text("mine")
    lines = ["/stats", "hi there", f"/save {there}", f"/save {new}", f"/save {tmp_path}/no/x", "/save", "/help"]
    lines += ["/nothing of the kind", " /help is a message", "", "/quit", "never asked"]
    result = succeed("chat", folder, *LAYERSKIP, *SHORT, stdin=piped(lines))
    assert result.stdout == piped(answered(folder, ["hi there", " /help is a message"]))
    for said in (
        "no figures yet",
        f"{there} is there already",
        "no: no such folder",
        "/save FILE",
        "There is no command /nothing",
    ):
        assert said in result.stderr
    assert there.read_text() == "mine"
    assert [one["role"] for one in json.loads(new.read_text())] == ["user", "assistant"]


def test_a_full_context_is_said_and_reset_helps(variant: Callable[..., Path], tmp_path: Path) -> None:
    narrow, file = variant("config.json", max_position_embeddings=64), tmp_path / "saved.json"
    settings = json.loads((narrow / "generation_config.json").read_text())
    (narrow / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": None}))
    lines = ["hi there", "too much", f"/save {file}", "/reset", "hi there"]
    result = succeed("chat", narrow, *LAYERSKIP, "--max-new-tokens", 60, stdin=piped(lines))
    (answer,) = answered(narrow, ["hi there"], most=64 - len("[user] hi there\n[assistant] "))
    assert result.stdout == piped([answer, answer])
    assert result.stderr.count("The context is full: the answer was cut after") == 2
    assert re.search(r"^the context is full: .* and the model takes 64; /reset begins a new", result.stderr, re.MULTILINE)
    assert len(json.loads(file.read_text())) == 2, "the message that did not fit is not in it"


def test_what_would_be_ignored_is_refused(folder: Path) -> None:
    for flag in ("--top-p", "--seed"):
        assert_refused(run("chat", folder, *LAYERSKIP, flag, 1), f"{flag} has no effect at temperature 0")
