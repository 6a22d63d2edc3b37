"""Every tensor that the package creates says its dtype and device, and C is handed memory in one place only."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "skipstone"
TRAINING = ("train/", "lab/synthetic/", "lab/tasks/")
"""Rooms that train models or prepare data for it: nothing in them runs while a model decodes."""
CREATE = {
    *("tensor", "as_tensor", "asarray", "scalar_tensor", "zeros", "ones", "empty", "full", "eye", "empty_strided"),
    *("arange", "range", "linspace", "logspace", "rand", "randn", "randint", "randperm", "tril_indices", "triu_indices"),
}
"""Functions of torch that take the default device, and often the default dtype, where they are not told."""
LAYERS = {"Linear", "Embedding", "LayerNorm", "RMSNorm", "Conv1d", "Bilinear"}
"""Modules of torch.nn that do the same for their weights."""


def vague(source: str) -> Iterator[str]:
    """Calls that create a tensor without saying its dtype or its device."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        named = {keyword.arg for keyword in node.keywords}
        if isinstance(owner, ast.Name) and owner.id == "nn" and name in LAYERS and not {"dtype", "device"} <= named:
            yield f"{node.lineno}: {ast.unparse(node)}"
        if isinstance(owner, ast.Name) and owner.id == "torch":
            if name in CREATE and not {"dtype", "device"} <= named:
                yield f"{node.lineno}: {ast.unparse(node)}"
            if name.endswith("Tensor"):  # torch.FloatTensor and its kin
                yield f"{node.lineno}: {ast.unparse(node)}"


def sources() -> Iterator[tuple[Path, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE), path.read_text(encoding="utf-8")


def test_tensors_name_their_dtype_and_device() -> None:
    found = [f"{path}:{call}" for path, text in sources() if not path.as_posix().startswith(TRAINING) for call in vague(text)]
    assert not found, "these depend on torch's default dtype or device:\n" + "\n".join(found)


def test_the_check_finds_what_it_looks_for() -> None:
    text = "torch.zeros(3)\ntorch.empty(1, dtype=torch.int64)\ntorch.full((), 1.0, device=d)\ntorch.FloatTensor(3)"
    assert len(list(vague(text))) == 4
    assert len(list(vague("nn.Linear(3, 4, device=d)"))) == 1
    assert not list(vague("torch.zeros(3, dtype=d, device=e)\nx.new_zeros(3)\ntorch.zeros_like(x)\ntorch.cat(y)"))


def test_addresses_are_taken_in_one_place() -> None:
    places = {str(path) for path, text in sources() if "data_ptr" in text}
    assert places == {"engines/host_transfer.py", "models/weight_version.py"}, "to hand memory to C, and to compare addresses"


def test_process_wide_state_is_left_alone() -> None:
    """Nothing but the measuring of whole runs, and a process that was just forked, sets torch's defaults or threads."""
    setters = r"\.(set_default_dtype|set_default_device|set_flush_denormal|set_num_threads|use_deterministic_algorithms)\b"
    found = {str(path) for path, text in sources() if re.search(setters, text)}
    assert found <= {"lab/bench/run.py", "lab/synthetic/surrogate.py", "engines/model_lock.py"}, found
