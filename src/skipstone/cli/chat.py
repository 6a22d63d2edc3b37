"""`skipstone chat`: a conversation with a model. Answers go to stdout while they are decoded, everything else to stderr."""

import json
import secrets
import signal
import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from skipstone.cli import terminal
from skipstone.cli.option_groups import GenerationModelOptions, MethodOptions, SamplingOptions, expect_parent_folder
from skipstone.cli.options import option
from skipstone.cli.terminal import report_error
from skipstone.utils.files import write_whole

if TYPE_CHECKING:
    from skipstone.cli.runs import Run, RunInput
    from skipstone.decoding.draft import Step
    from skipstone.serving.conversation import Conversation, PendingAnswer

PROMPT = ">>> "
"""Printed before a line that is typed."""
COMMANDS = ("method", "stats", "save", "reset", "help")  # methods of `Chat`
HELP = """\
/method NAME [settings]  write with another method from the next answer on; without a name: say which one writes
/stats                   figures of the last answer
/save FILE               write the conversation to a new file, as JSON messages with "role" and "content"
/reset                   forget the conversation; --system stays
/help                    print this list
/quit                    leave, as Ctrl-D does
Ctrl-C stops an answer that is being written, or clears the line that is typed.
A message that begins with a slash needs a space before it."""


@dataclass(frozen=True)
class ChatSamplingOptions(SamplingOptions, panel="Decoding"):
    """How the tokens of answers are chosen."""

    max_new_tokens: int = option(512, "Most tokens of an answer.", min=1)
    seed: int | None = option(None, "Of random draws, for every answer. Default: a new one each, named by /stats.", min=0)


def chat(
    *,
    method: MethodOptions,
    system: str | None = option(None, "A message to the model before all others.", rich_help_panel="Conversation"),
    sampling: ChatSamplingOptions,
    model: GenerationModelOptions,
    color: bool | None = option(None, "Mark accepted drafts. Default: on terminals.", rich_help_panel="Output"),
) -> None:
    """Talk with a model. A line is a message; /help lists the commands; earlier turns are not read again."""
    chosen = method.parse_for(model.model)
    loaded, tokenizer = model.load()
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.hf.generate_call import resolve_for
    from skipstone.hf.generation_defaults import expect_usable_defaults
    from skipstone.serving.conversation import Conversation

    runner, resolved = ModelRunner(loaded), resolve_for(loaded, chosen)
    expect_usable_defaults(runner, tokenizer)
    conversation = Conversation(runner, tokenizer, resolved, sampling.generation_options(), sampling.max_new_tokens, system)
    Chat(conversation, sampling.seed, color).talk(model.name)


class Chat:
    """A conversation with somebody at a terminal or behind a pipe. seed: of every answer, None for a new one each. color: as in
    `TokenPrinter`."""

    def __init__(self, conversation: "Conversation", seed: int | None, color: bool | None) -> None:
        self.conversation, self.seed, self.color = conversation, seed, color
        self.last_answer: tuple[RunInput, PendingAnswer, Run] | None = None

    def talk(self, name: str) -> None:
        """Read messages and commands until the input ends. name: of the model."""
        from skipstone.decoding.method_states import save_learned

        if not self.conversation.has_template:
            say(f"{name} has no chat template: your lines and its answers are continued as one plain text.")
        if is_interactive():
            say(f"{name}, {self.conversation.method.name}. /help lists the commands, Ctrl-D ends.")
            with suppress(ImportError):  # not on Windows
                import readline  # noqa: F401  # lets `input` edit a line and go back to earlier ones
        is_over = False
        while not is_over:
            try:
                is_over = self._take_turn()
            except KeyboardInterrupt:
                if sys.stdin is None or not sys.stdin.isatty():
                    raise
                say("Ctrl-D or /quit ends the conversation; /save FILE writes it to a file.")
        save_learned(self.conversation.model)

    def _take_turn(self) -> bool:
        """Read one line and do what it says. Returns whether it was the last one."""
        line = read_line()
        if line is None or line.rstrip() == "/quit":
            return True
        if line.startswith("/"):
            name, _, argument = line[1:].partition(" ")
            if name in COMMANDS:
                getattr(self, f"_{name}")(argument.strip())
            else:
                say(f"There is no command /{name}; /help lists those that there are.")
        elif line.strip():
            self._answer(line)
        return False

    def _answer(self, text: str) -> None:
        """Write the answer to a message, to its end or to Ctrl-C."""
        from skipstone.serving.conversation import ContextFull

        try:
            pending = self.conversation.ask(text, secrets.randbits(32) if self.seed is None else self.seed)
            steps = self.conversation.answer(pending)
        except ContextFull as error:
            say(f"{error}; /reset begins a new conversation.")
            return
        except (ValueError, OSError) as error:
            report_error(error)
            return
        with DelayedInterrupt() as interrupt:  # until the answer is kept: Ctrl-C after its last token must not lose it
            job, run = self._print_answer(pending, steps, interrupt)
            if run.tokens or not run.interrupted:
                self.conversation.keep(pending, run.tokens)
                self.last_answer = job, pending, run
        reason, count = run.finish_reason(job), len(run.tokens)
        if run.interrupted and not count:
            say("Stopped before the first token: your message was taken back.")
        elif reason == "interrupted":
            say(f"Stopped after {count} tokens, which stay in the conversation.")
        elif reason == "length" and pending.is_cut:
            say(f"The context is full: the answer was cut after {count} tokens; /reset begins a new conversation.")
        elif reason == "length":
            say(f"The answer was cut after {count} tokens; --max-new-tokens allows more.")

    def _print_answer(self, pending: "PendingAnswer", steps: Any, interrupt: "DelayedInterrupt") -> "tuple[RunInput, Run]":
        """Print the steps of an answer while they are made."""
        import torch

        from skipstone.cli.runs import RunInput, TokenPrinter, collect_run

        conversation = self.conversation
        ids = torch.tensor([pending.pending.prompt_ids], dtype=torch.int64, device=conversation.model.device)
        job = RunInput(conversation.model.model, conversation.tokenizer, ids, pending.options, pending.seed)
        printer = TokenPrinter(job, self.color)

        def show(step: "Step") -> None:
            printer.show(step)
            interrupt.check()

        with closing(steps):
            run = collect_run(lambda: steps, show)
        printer.end(legend=self.last_answer is None)
        if not printer.on_terminal:
            print(flush=True)  # lines separate answers in a pipe
        return job, run

    def _method(self, text: str) -> None:
        from skipstone.hf.generate_call import resolve_for
        from skipstone.methods import spell

        conversation = self.conversation
        if not text:
            say(f"{spell(conversation.method)} writes the answers.")
            return
        try:
            conversation.use(resolve_for(conversation.model.model, text))
        except (ValueError, OSError, ImportError) as error:
            report_error(error)
        else:
            say(f"{conversation.method.name} writes from the next answer on, which reads the conversation once more.")

    def _stats(self, _: str) -> None:
        from skipstone.cli.runs import figure_lines

        if self.last_answer is None:
            say("There are no figures yet: nothing was answered.")
            return
        job, answer, run = self.last_answer
        pending = answer.pending
        for line in figure_lines(job, pending.method, run):
            say(line)
        say(f"{pending.stats.cached_tokens} of {len(pending.prompt_ids)} prompt tokens were known from earlier turns")
        decisions = [step for step in run.steps if step.reason]
        if decisions:
            say(f"last decision: {decisions[-1].drafter}, because {decisions[-1].reason}")

    def _save(self, name: str) -> None:
        path = Path(name).expanduser()
        if not name:
            say("Say where to: /save FILE.")
        elif path.exists():
            say(f"{path} is there already and was left as it is; give another name.")
        else:
            messages = self.conversation.messages
            try:
                expect_parent_folder(path)
                write_whole(path, json.dumps(messages, ensure_ascii=False, indent=1) + "\n")
            except (OSError, ValueError) as error:
                report_error(error)
            else:
                say(f"{len(messages)} messages are in {path}.")

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        say("The conversation begins anew.")

    def _help(self, _: str) -> None:
        say(HELP)


class DelayedInterrupt:
    """Inside, Ctrl-C waits for the end of the current step, so that the row stays whole. A second Ctrl-C does not wait."""

    def __enter__(self) -> Self:
        self._is_requested = False
        self._previous_handler = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def _request(self, *_: object) -> None:
        self.check()
        self._is_requested = True

    def check(self) -> None:
        """Called between two steps. KeyboardInterrupt if Ctrl-C was pressed."""
        if self._is_requested:
            raise KeyboardInterrupt


def say(text: str) -> None:
    """Print a message to the user on stderr; stdout has answers only."""
    print(terminal.harmless(text), file=sys.stderr)


def is_interactive() -> bool:
    """Whether somebody types the lines and sees the answers."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def read_line() -> str | None:
    """The next line, without its end; None after the last one. KeyboardInterrupt for Ctrl-C."""
    try:
        return input(PROMPT) if is_interactive() else _read_piped_line()
    except UnicodeDecodeError:
        say("A line that is not UTF-8 was left out.")
        return ""
    except EOFError:
        print(file=sys.stderr)  # the shell's next output begins a line
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise


def _read_piped_line() -> str | None:
    line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
    return line.decode().rstrip("\r\n") if line else None
