"""What the tests of training share: tiny models, data and trainers, and runs in processes of their own that may be killed."""

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from skipstone.train.data.documents import collect
from skipstone.train.data.rows import IGNORED, RowPlan, TrainingData, prepare
from skipstone.train.heads.recipe import HeadsRecipe, made
from skipstone.train.layerskip.arguments import LayerSkipArguments
from skipstone.train.layerskip.metrics import JsonLog
from skipstone.train.layerskip.run import run
from skipstone.train.layerskip.schedules import EarlyExitLoss, LayerDropout
from skipstone.train.layerskip.trainer import LayerSkipTrainer
from skipstone.utils.files import read_lines
from tests.helpers import support
from tests.helpers.machine import llama

VOCAB, LENGTH, LAYERS = 61, 12, 3
PRELOADED = ["torch", "transformers", "skipstone.train.layerskip.run"]
OFF = LayerDropout(0.0)


def tiny(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A Llama of three layers in float32. Attention dropout makes training depend on torch's own random numbers."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | changes)))


def rows(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Rows that differ in how many of their tokens are to be learned."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (count, LENGTH), generator=made)
    labels = [one.clone() for one in ids]
    for index, one in enumerate(labels):
        one[: index * 5 % (LENGTH - 2)] = IGNORED
    return [{"input_ids": one, "labels": own} for one, own in zip(ids, labels, strict=True)]


def arguments(folder: Path, **changes: Any) -> LayerSkipArguments:
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        "dropout": LayerDropout(0.5),
        "exits": EarlyExitLoss(0.5, "none"),
        "train_sampling_strategy": "sequential",
    }
    return LayerSkipArguments(**(usual | changes))


def trainer(folder: Path, model: Any = None, data: Any = None, callbacks: Any = (), **changes: Any) -> LayerSkipTrainer:
    """A trainer that logs into metrics.jsonl and prints nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: changes.pop(name) for name in ("eval_dataset", "fingerprint", "data_collator") if name in changes}
    made = LayerSkipTrainer(
        tiny() if model is None else model,
        arguments(folder, **changes),
        train_dataset=rows(16) if data is None else data,
        callbacks=[JsonLog(folder / "metrics.jsonl"), *callbacks],
        **own,
    )
    made.remove_callback(next(one for one in made.callback_handler.callbacks if type(one).__name__ == "PrinterCallback"))
    return made


def logged(folder: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_lines(folder / "metrics.jsonl") if "train_runtime" not in entry]


def losses(folder: Path, name: str = "loss") -> list[float]:
    return [entry[name] for entry in logged(folder) if name in entry]


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in weights(model).values())).hexdigest()


def in_processes(
    target: Callable[..., None], *tasks: tuple[Any, ...], start: str = "forkserver", timeout: float = 120
) -> list[int | None]:
    """Run target(*task) in one process for each task, all at once. Returns the exit codes; -9 is a kill.

    start: "forkserver" forks a process that has imported everything, "fork" forks this one, which costs least.
    """
    context: Any = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=_guarded, args=(target, task)) for task in tasks]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout)
        assert not any(process.is_alive() for process in processes), "a process hangs"
    finally:
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes]


def _guarded(target: Callable[..., None], task: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        target(*task)
    except BaseException:
        traceback.print_exc()
        raise


def in_two_processes(
    work: Callable[[str, Path], dict[str, Any]], folder: Path, names: list[str], **environment: str
) -> dict[str, list[dict[str, Any]]]:
    """Do named work, one after the other, in two processes of one group (gloo), as `accelerate launch` starts them.

    work: called with a name and the folder of that name. Returns its results in both processes, by name.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tasks = [(number, port, work, folder, names, environment) for number in (0, 1)]
    assert in_processes(_work_as_rank, *tasks, timeout=400) == [0, 0]
    return {name: [json.loads((folder / f"{name}-{number}.json").read_text()) for number in (0, 1)] for name in names}


def _work_as_rank(number: int, port: int, work: Any, folder: Path, names: list[str], environment: dict[str, str]) -> None:
    world = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **environment, **{name: str(value) for name, value in world.items()}})
    for name in names:
        (folder / f"{name}-{number}.json").write_text(json.dumps(work(name, folder / name)))
    torch.distributed.destroy_process_group()


class Steps(TrainerCallback):
    """Calls back at the beginning of every step with its number."""

    def __init__(self, call: Callable[[int], None]) -> None:
        self.call = call

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.call(state.global_step)


DECODING = {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 3}
EVALUATED: dict[str, Any] = {"training__eval_strategy": "steps", "training__eval_steps": 2, "decoding": DECODING}


class Interrupted(Exception):
    """An interruption of a test's own."""


def interrupt_at(wanted: int) -> Steps:
    def call(step: int) -> None:
        if step == wanted:
            raise Interrupted

    return Steps(call)


WATCHED = frozenset(("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "training.step"))


def kill_when(folder: Path, moment: int | str, note: Path) -> None:
    """Kill this process by SIGKILL before a file of the run is opened, made, renamed or removed, or before a step.

    moment: the number of such events until then, or a part of the event as text. note: what it was is appended there.
    """
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in WATCHED:
            return
        text = f"{event} {' '.join(str(arg) for arg in args[:2])}"
        if str(folder) not in text and event not in ("os.remove", "os.rmdir", "training.step"):
            return
        text = text.replace(str(folder), "RUN")
        count += 1
        if count == moment or (isinstance(moment, str) and moment in text):
            handle = os.open(note, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # not in the run's folder: not counted
            os.write(handle, f"{text}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def recipe(folder: Path, **changes: Any) -> Path:
    """A small run from one file, from scratch, with a tokenizer of its own. changes: part__key=value; `...` takes it out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, line in (
        ("code", "def f{0}(x):\n    return x + {1}\n"),
        ("sums", "{0} and {0} are {2}, {0} times {0} is {1}.\n"),
    ):
        texts = (line.format(i, i * i, i + i) for i in range(40))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shape = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    sources = [{"name": name, "kind": "jsonl", "path": f"{name}.jsonl", "template": "{text}"} for name in ("code", "sums")]
    values: dict[str, Any] = {
        "output": str(folder / "out"),
        "model": {"config": {**shape, "num_attention_heads": 2, "num_key_value_heads": 1}},
        "tokenizer": {"vocab_size": 270},
        "data": {"length": 16, "held_out": 0.1, "sources": sources},
        "exits": {"dilation": 2},
        "training": {"max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 2},
    }
    for name, value in changes.items():
        part, _, key = name.partition("__")
        place, key = (values.setdefault(part, {}), key) if key else (values, part)
        if value is ...:
            del place[key]
        else:
            place[key] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def quiet(text: str) -> None:
    """Says nothing."""


def finished_run(folder: Path) -> Path:
    """Train what `recipe` says, with evaluations. Returns the recipe; the run is in `out` beside it."""
    path = recipe(folder, **EVALUATED)
    assert run(path, say=quiet) == folder / "out" / "model"
    return path


def stop_at(monkeypatch: pytest.MonkeyPatch, wanted: int) -> None:
    real = LayerSkipTrainer.training_step

    def training_step(self: LayerSkipTrainer, *args: Any) -> Tensor:
        if self.state.global_step == wanted:
            raise Interrupted
        return real(self, *args)

    monkeypatch.setattr(LayerSkipTrainer, "training_step", training_step)


def prepared_rows(sources: Any, tokenizer: Any, plan: RowPlan, base: Path, cache: Path | None = None) -> TrainingData:
    """Rows of the documents that sources have, by the sources' own weights."""
    return prepare(collect(sources, base), {source.name: source.weight for source in sources}, tokenizer, plan, cache)


def heads_base(folder: Path) -> Path:
    """A folder with a model of 6 layers and its tokenizer, and a file of 24 prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    llama(layers=6, head=2.0).save_pretrained(folder / "model")
    support.tokenizer().save_pretrained(folder / "model")
    letters = [chr(97 + place) for place in range(26)]
    texts = [" ".join(letters[(start + step * 3) % 26] for step in range(4)) for start in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return folder


def heads_recipe(base: Path, output: Path, **changes: Any) -> HeadsRecipe:
    """A small recipe for exit heads in a folder that `heads_base` has made. changes: parts, or settings within them."""
    values: dict[str, Any] = {
        "output": str(output),
        "model": str(base / "model"),
        "prompts": [{"kind": "jsonl", "path": str(base / "prompts.jsonl"), "template": "{prompt}"}],
        "answers": {"max_new_tokens": 12, "batch_size": 8},
        "heads": {"layers": [2, 4]},
        "training": {"epochs": 6, "batch_size": 4, "patience": None, "held_out": 0.2},
    }
    for name, change in changes.items():
        values[name] = {**values[name], **change} if isinstance(change, dict) else change
    return made(values, "test")
