"""`skipstone chat`: a conversation with a model. Answers go to stdout as they are made, everything else to stderr."""

import json
import secrets
import signal
import sys
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Self

from skipstone.cli import options, terminal
from skipstone.cli.options import grouped
from skipstone.utils.files import write_whole

if TYPE_CHECKING:
    from skipstone.cli.runs import Run, RunInput
    from skipstone.decoding.draft import Step
    from skipstone.serving.conversation import Conversation, PendingAnswer

PROMPT = ">>> "
"""What stands before a line that is typed."""
HELP = """\
/method NAME [settings]  write with another method from the next answer on; without a name: say which one writes
/stats                   figures of the last answer
/save FILE               write the conversation to a new file, as JSON messages with "role" and "content"
/reset                   forget the conversation; --system stays
/help                    print this list
/quit                    leave, as Ctrl-D does
Ctrl-C stops an answer that is being written, or clears the line that is typed.
A message that begins with a slash needs a space before it."""


def chat(
    model: options.Model = None,
    method: options.MethodText = None,
    speculative_config: options.MethodConfig = None,
    system: Annotated[str | None, grouped("Conversation", "What the model is told before anything else.")] = None,
    max_new_tokens: Annotated[int, grouped("Decoding", "Most tokens of an answer.", min=1)] = 512,
    temperature: Annotated[float, grouped("Decoding", "0 is greedy.", min=0.0)] = 0.0,
    top_p: Annotated[float | None, grouped("Decoding", "Default: the model's own, or 1.", min=0.0, max=1.0)] = None,
    seed: Annotated[
        int | None, grouped("Decoding", "Of random draws, for every answer. Default: a new one each, named by /stats.", min=0)
    ] = None,
    generation_config: options.GenerationConfig = "auto",
    override_generation_config: options.OverrideGenerationConfig = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "auto",
    quantize: options.Quantize = "none",
    kv_dtype: options.KvDtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    color: Annotated[bool | None, grouped("Output", "Mark accepted drafts. Default: on terminals.", show_default=False)] = None,
    debug: options.Debug = False,
) -> None:
    """Talk with a model. A line is a message; /help lists the commands; earlier turns are not read again."""
    flags = SimpleNamespace(**locals())
    for name in ("top_p", "seed"):
        if temperature == 0 and getattr(flags, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect at temperature 0: pass --temperature too")
    asked = options.checked_method(model, method, speculative_config)
    names = ("engine", "quantize", "kv_dtype", "trust_remote_code", "generation_config", "override_generation_config")
    setup = {name: getattr(flags, name) for name in names}
    loaded, tokenizer = options.load(model, dtype, device, **setup, keep_weights=False)
    from skipstone.engines.loading import BUNDLED
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.hf.generate_call import resolve_for
    from skipstone.hf.generation_defaults import expect_usable_defaults
    from skipstone.hf.requests import generation_options
    from skipstone.serving.conversation import Conversation

    decoding = generation_options(temperature=temperature, top_p=top_p)
    runner, chosen = ModelRunner(loaded), resolve_for(loaded, asked)
    expect_usable_defaults(runner, tokenizer)
    conversation = Conversation(runner, tokenizer, chosen, decoding, max_new_tokens, system)
    Chat(conversation, seed, color).talk(model or BUNDLED)


class Chat:
    """A conversation with somebody at a terminal or behind a pipe. seed: of every answer, None for a new one each. color: as in
    `TokenPrinter`."""

    def __init__(self, conversation: "Conversation", seed: int | None, color: bool | None) -> None:
        self.conversation, self.seed, self.color = conversation, seed, color
        self.last: tuple[RunInput, PendingAnswer, Run] | None = None  # the last answer
        commands = {"method": self._method, "stats": self._stats, "save": self._save, "reset": self._reset, "help": self._help}
        self.commands = commands

    def talk(self, name: str) -> None:
        """Read messages and commands until there are no more. name: of the model."""
        if not self.conversation.has_template:
            say(f"{name} has no chat template: your lines and its answers are continued as one plain text.")
        if typed():
            say(f"{name}, {self.conversation.method.name}. /help lists the commands, Ctrl-D ends.")
            with suppress(ImportError):  # not on Windows
                import readline  # noqa: F401  # lets `input` edit a line and go back to earlier ones
        is_over = False
        while not is_over:
            try:
                is_over = self._turn()
            except KeyboardInterrupt:
                if sys.stdin is None or not sys.stdin.isatty():
                    raise
                say("Ctrl-D or /quit ends the conversation; /save FILE writes it to a file.")

    def _turn(self) -> bool:
        """Read one line and do what it says. Returns whether it was the last one."""
        line = next_line()
        if line is None or line.rstrip() == "/quit":
            return True
        if line.startswith("/"):
            self._obey(line)
        elif line.strip():
            self._answer(line)
        return False

    # ------------------------------------------------------------------------------------------------------ answers

    def _answer(self, text: str) -> None:
        """Write the answer to a message, to its end or to Ctrl-C."""
        from skipstone.serving.conversation import ContextFull

        try:
            asked = self.conversation.ask(text, secrets.randbits(32) if self.seed is None else self.seed)
            steps = self.conversation.answer(asked)
        except ContextFull as error:
            say(f"{error}; /reset begins a new conversation.")
            return
        except ValueError as error:
            terminal.report(error)
            return
        with InterruptHandler() as brake:  # until the answer is kept: Ctrl-C after its last token must not lose it
            job, run = self._shown(asked, steps, brake)
            if run.tokens or not run.interrupted:
                self.conversation.keep(asked, run.tokens)
                self.last = job, asked, run
        if run.interrupted and not run.tokens:
            say("Stopped before the first token: your message was taken back.")
            return
        self._say_why_it_ended(job, asked, run)

    def _shown(self, asked: "PendingAnswer", steps: Any, brake: "InterruptHandler") -> "tuple[RunInput, Run]":
        """Print the steps of an answer as they are made."""
        import torch

        from skipstone.cli.runs import RunInput, follow
        from skipstone.cli.showing import TokenPrinter

        talk = self.conversation
        ids = torch.tensor([asked.pending.prompt_ids], dtype=torch.int64, device=talk.model.device)
        job = RunInput(talk.model.model, talk.tokenizer, ids, asked.options, asked.seed)
        painter = TokenPrinter(job, self.color)

        def show(step: "Step") -> None:
            painter.show(step)
            brake.check()

        with closing(steps):
            run = follow(lambda: steps, show)
        painter.end(legend=self.last is None)
        if not painter.on_terminal:
            print(flush=True)  # answers in a pipe are told apart by lines
        return job, run

    def _say_why_it_ended(self, job: "RunInput", asked: "PendingAnswer", run: "Run") -> None:
        """Where that is not the model's own doing."""
        from skipstone.cli.runs import finish_reason

        reason, count = finish_reason(run, job), len(run.tokens)
        if reason == "interrupted":
            say(f"Stopped after {count} tokens, which stay in the conversation.")
        elif reason == "length" and asked.is_cut:
            say(f"The context is full: the answer was cut after {count} tokens; /reset begins a new conversation.")
        elif reason == "length":
            say(f"The answer was cut after {count} tokens; --max-new-tokens allows more.")

    # ----------------------------------------------------------------------------------------------------- commands

    def _obey(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        command = self.commands.get(name)
        if command is None:
            say(f"There is no command /{name}; /help lists those that there are.")
        else:
            command(rest.strip())

    def _method(self, text: str) -> None:
        from skipstone.hf.generate_call import resolve_for
        from skipstone.methods import spell

        talk = self.conversation
        if not text:
            say(f"{spell(talk.method)} writes the answers.")
            return
        try:
            talk.use(resolve_for(talk.model.model, text))
        except (ValueError, OSError, ImportError) as error:
            terminal.report(error)
        else:
            say(f"{talk.method.name} writes from the next answer on, which reads the conversation once more.")

    def _stats(self, _: str) -> None:
        from skipstone.cli.showing import figures

        if self.last is None:
            say("There are no figures yet: nothing was answered.")
            return
        job, asked, run = self.last
        for line in figures(job, asked.pending.method, run):
            say(line)
        pending = asked.pending
        say(f"{pending.stats.cached_tokens} of {len(pending.prompt_ids)} prompt tokens were known from earlier turns")
        decided = [step for step in run.steps if step.reason]
        if decided:
            say(f"last decision: {decided[-1].drafter}, because {decided[-1].reason}")

    def _save(self, name: str) -> None:
        if not name:
            say("Say where to: /save FILE.")
            return
        path = Path(name).expanduser()
        if path.exists():
            say(f"{path} is there already and was left as it is; give another name.")
            return
        messages = self.conversation.messages
        try:
            options.check_folder_of(path)
            write_whole(path, json.dumps(messages, ensure_ascii=False, indent=1) + "\n")
        except (OSError, ValueError) as error:
            terminal.report(error)
        else:
            say(f"{len(messages)} messages are in {path}.")

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        say("The conversation begins anew.")

    def _help(self, _: str) -> None:
        say(HELP)


class InterruptHandler:
    """While a text is written, Ctrl-C waits for the end of the step that is being taken, so that the row stays whole. A second
    one does not wait."""

    def __enter__(self) -> Self:
        self._pulled = False
        self._before = signal.signal(signal.SIGINT, self._pull)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _pull(self, *_: object) -> None:
        if self._pulled:
            raise KeyboardInterrupt
        self._pulled = True

    def check(self) -> None:
        """Between two steps: KeyboardInterrupt where Ctrl-C came."""
        if self._pulled:
            raise KeyboardInterrupt


def say(text: str) -> None:
    """Print what is no answer, on stderr."""
    print(terminal.harmless(text), file=sys.stderr)


def typed() -> bool:
    """Whether somebody types the lines and sees the answers."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def next_line() -> str | None:
    """The next line, without its end; None after the last one. KeyboardInterrupt for Ctrl-C."""
    try:
        return input(PROMPT) if typed() else _piped_line()
    except UnicodeDecodeError:
        say("A line that is not UTF-8 was left out.")
        return ""
    except EOFError:
        print(file=sys.stderr)  # what the shell writes next begins a line
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise


def _piped_line() -> str | None:
    line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
    return line.decode().rstrip("\r\n") if line else None
