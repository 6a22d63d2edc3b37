"""Things that go to the hub, small: a model and a draft model, exit heads, profiles."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from skipstone import ExitHeads
from skipstone.engines.model_runner import ModelRunner
from skipstone.export.draft import DraftLayers, write_draft
from skipstone.methods.adadecode.heads import new_card
from skipstone.methods.auto import saved_profile
from skipstone.methods.drafting.layer_sets import save_profile
from tests.helpers.machine import llama, prompt
from tests.helpers.support import tokenizer

OWN = {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 3}


def target(layers: int = 6, seed: int = 0) -> ModelRunner:
    return ModelRunner(llama(layers=layers, seed=seed))


def model_folder(folder: Path, own: dict[str, Any] | None = OWN, seed: int = 0, **saving: Any) -> Path:
    """A model with a tokenizer and, as its generation defaults, a method of its own."""
    model = target(seed=seed).model
    if own is not None:
        model.generation_config.skipstone = own  # type: ignore[union-attr]
        model.generation_config._from_model_config = False  # type: ignore[union-attr]
    model.save_pretrained(folder, **saving)
    tokenizer().save_pretrained(folder)
    if own is None:
        content = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps({k: v for k, v in content.items() if k != "skipstone"}))
    return folder


def draft_folder(folder: Path) -> Path:
    """The first two layers of the target, as `skipstone export` writes them."""
    write_draft(target(), tokenizer(), DraftLayers((0, 1), 6, drafts=3), folder)
    return folder


def heads_folder(folder: Path, seed: int = 0, name: str = "mine", **card: Any) -> Path:
    """Exit heads after layers 2 and 4, which are not the identity."""
    model = target()
    heads = ExitHeads(new_card(model, (2, 4), "square", name=name).model_copy(update=card))
    torch.manual_seed(seed)
    with torch.no_grad():
        for one in heads.parameters():
            one += 0.05 * torch.randn_like(one)
    heads.save(folder)
    return folder


def profile_file(path: Path) -> Path:
    """A layer set without the attention of layer 2 and the MLP of layer 3."""
    save_profile(path, target().model, {"speed": 1.25, "trials": 7}, [2], [3], "me/target")
    return path


def tuned_file(cache: Path, about: dict[str, Any]) -> Path:
    """What `auto` has learnt of the target, as `skipstone tune` keeps it in a cache."""
    from skipstone.lab.search.tune import tune

    model = target()
    *_, found = tune(model.model, [prompt(9)], (), 1.0, {"max_new_tokens": 24, "do_sample": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPSTONE_CACHE", str(cache))
        key = saved_profile.key_of(model)
        return saved_profile.save_profile(model, saved_profile.SavedPolicy(found.policy, found.identities, about, key))


def everything(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
