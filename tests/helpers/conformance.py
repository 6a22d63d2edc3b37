"""What every method promises, as assertions, and a row for each. A new method is one row of ROWS."""

import functools
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from skipstone import (
    AdaDecode,
    AdaSD,
    Auto,
    Autoregressive,
    Eagle3,
    EarlyExit,
    Jacobi,
    LayerSkip,
    Lookahead,
    Method,
    Mtp,
    Output,
    PromptLookup,
    Recycle,
    SelfSpeculative,
    Speculative,
    Swift,
)
from tests.helpers import families
from tests.helpers.feature_heads import eagle3_folder
from tests.helpers.mtp_checkpoints import MTP_KINDS, MtpOptions, add_mtp_layers
from tests.helpers.support import assert_same_texts, decode, plainly, references

EXIT = 2
DRAFTS = (1, 4, 7)
OF_THE_LAST_LAYER = ".attention.dense_bias"  # only in a model's last layer (gpt_neox_japanese): left at random
FEW = 70  # tokens of the 97 that drafts are picked from in some rows


@functools.cache
@torch.no_grad()
def truncated(name: str) -> PreTrainedModel:
    """The first EXIT layers of a family's model as a model of its own. Of a weight with a part for every layer, those layers'
    parts."""
    full, short = families.cached(name).state_dict(), families.build(name, layers=EXIT)
    wanted = short.state_dict()
    missing = [weight for weight in wanted if weight not in full and not weight.endswith(OF_THE_LAST_LAYER)]
    assert not missing, missing
    assert len(full) > len(wanted), "there was nothing to cut off"
    for weight in wanted.keys() & full.keys():
        wanted[weight].copy_(full[weight][tuple(slice(size) for size in wanted[weight].shape)])
    return short


@functools.cache
def eagle3_head(family: str) -> str:
    """A random EAGLE-3 head for a family's model, in a folder that lasts as long as the tests."""
    folder = Path(tempfile.mkdtemp(dir=HEADS.name)) / family
    return str(eagle3_folder(folder, families.cached(family).config.get_text_config(), embedding="own"))


def give_mtp_layer(model: PreTrainedModel) -> None:
    """Save a model with a random MTP layer, and name that folder in its config."""
    if not model.config.name_or_path:
        model.config.name_or_path = str(add_mtp_layers(Path(tempfile.mkdtemp(dir=HEADS.name)), model, MtpOptions()))


HEADS = tempfile.TemporaryDirectory()  # deleted at the end of the process


@dataclass(frozen=True)
class Row:
    """make: (num_speculative_tokens, rejection_sample_method) -> the method. speculative: it drafts.

    same_text: rules under which sampling gives the text of plain sampling with the same seeds ("standard" if drafts are
    deterministic). oracle: for a lossy method, the model with its text. variant: another setting of a method that has a row.
    learns: the drafter grows better, so that all drafts of a short text may be right. second: makes the draft model for a
    family's. rare: it drafts repeated text, which random models seldom write; test_lookups.py has models that do. decides:
    whether it drafts is decided by the clock; tests/methods/auto has it draft. families: that have what it drafts with; None
    for all. refused: families that it cannot draft for.
    """

    make: Callable[[int, Any], Method]
    speculative: bool = True
    same_text: tuple[str, ...] = ("coupled",)
    oracle: Callable[[str], PreTrainedModel] | None = None
    variant: bool = False
    learns: bool = False
    second: Callable[[str], PreTrainedModel] = truncated
    rare: bool = False
    decides: bool = False
    families: tuple[str, ...] | None = None
    refused: tuple[str, ...] = ()

    def method(self, family: str, drafts: int, rule: str) -> Method:
        method = self.make(drafts, rule)
        names = {field.name for field in fields(method)}
        if isinstance(method, Mtp):
            give_mtp_layer(families.cached(family))
        if "head" in names:
            return replace(method, head=eagle3_head(family))  # type: ignore[call-arg]
        return replace(method, draft_model=self.second(family)) if "draft_model" in names else method  # type: ignore[call-arg]


SWIFT = functools.partial(Swift, skip_ratio=0.5, context_window=6)
"""It always drafts, and judges layer sets from the seventh token on."""

ROWS: dict[str, Row] = {
    "auto": Row(lambda d, rule: Auto(own=(LayerSkip(EXIT),)), same_text=("standard",), decides=True),
    "autoregressive": Row(lambda d, rule: Autoregressive(), speculative=False, same_text=("standard",)),
    "early_exit": Row(lambda d, rule: EarlyExit(exit_layer=EXIT), speculative=False, same_text=(), oracle=truncated),
    "layerskip": Row(lambda d, rule: LayerSkip(exit_layer=EXIT, num_speculative_tokens=d, rejection_sample_method=rule)),
    "layerskip, cache not reused": Row(
        lambda d, rule: LayerSkip(EXIT, d, reuse_cache=False, rejection_sample_method=rule), variant=True
    ),
    "layerskip, confident": Row(
        lambda d, rule: LayerSkip(EXIT, d, confidence_threshold=0.2, rejection_sample_method=rule), variant=True
    ),
    "layerskip, some tokens": Row(
        lambda d, rule: LayerSkip(EXIT, d, rejection_sample_method=rule, draft_vocabulary=FEW), variant=True
    ),
    "swift": Row(lambda d, rule: SWIFT(num_speculative_tokens=d, rejection_sample_method=rule), learns=True),
    "self_speculative": Row(lambda d, rule: SelfSpeculative((1,), (2,), None, d), same_text=("standard",)),
    "adadecode": Row(lambda d, rule: AdaDecode("original", 0.3, d, exit_layers=(1, EXIT), rejection_sample_method=rule)),
    "adadecode, deeper heads look again": Row(
        lambda d, rule: AdaDecode("original", 0.2, d, recheck=True, rejection_sample_method=rule), variant=True
    ),
    "speculative": Row(lambda d, rule: Speculative(None, d, rejection_sample_method=rule)),
    "speculative, heuristic schedule": Row(
        lambda d, rule: Speculative(None, d, "heuristic", rejection_sample_method=rule), variant=True
    ),
    "speculative, confident": Row(
        lambda d, rule: Speculative(None, d, "confidence", 0.2, rejection_sample_method=rule), variant=True
    ),
    "adasd": Row(lambda d, rule: AdaSD(None, d, relaxed=False, rejection_sample_method=rule)),
    "eagle3": Row(
        lambda d, rule: Eagle3(num_speculative_tokens=d, rejection_sample_method=rule),
        rare=True,
        refused=("gemma3n_text", "gemma4_text"),  # their layers read more than one state per token
    ),
    "mtp": Row(lambda d, rule: Mtp(num_speculative_tokens=d, rejection_sample_method=rule), rare=True, families=MTP_KINDS),
    "prompt_lookup": Row(lambda d, rule: PromptLookup(num_speculative_tokens=d), same_text=("standard",), rare=True),
    "prompt_lookup, first place": Row(
        lambda d, rule: PromptLookup(num_speculative_tokens=d, prefer="first"), same_text=("standard",), variant=True, rare=True
    ),
    "jacobi": Row(lambda d, rule: Jacobi(d), same_text=("standard",), rare=True),
    "lookahead": Row(lambda d, rule: Lookahead(d, 3, d), same_text=("standard",), rare=True),
    "recycle": Row(lambda d, rule: Recycle(3 * d, 4), same_text=("standard",), rare=True),
    "swift, chains that never stop early": Row(
        lambda d, rule: SWIFT(skip_ratio=0.75, num_speculative_tokens=d, confidence_threshold=None, dynamic_verification=False),
        same_text=("standard",),
        variant=True,
        learns=True,
    ),
}
LOSSLESS = [name for name, row in ROWS.items() if row.oracle is None and row.families is None]
"""Lossless methods for every family."""
COMMON = {name: row for name, row in ROWS.items() if row.families is None and not row.variant}
"""Methods for every family, without variants."""


def is_telling(row: Row, output: Output) -> bool:
    """Whether drafts were accepted and rejected, as far as a row's method must have both."""
    stats: Any = output.stats
    if row.decides or not row.speculative:
        return row.decides or stats.drafted == 0
    few = row.learns and stats.drafted < 20
    accepted, rejected = stats.accepted > 0 or row.rare, stats.drafted > stats.accepted or few
    return stats.drafted > 0 and accepted and rejected


def assert_greedy_equals_alone(row: Row, family: str, rows: int, drafts: int, new: int, options: dict[str, Any]) -> None:
    method = row.method(family, drafts, "standard")

    def tells(asked: int, more: dict[str, Any]) -> bool:
        prompts, expected = references(family, rows, asked=asked, **more)
        return _tells(row, method, family, prompts, expected, more)

    assert_some_text_tells(tells, new, options)


def assert_sampling_equals_plain(
    row: Row, family: str, rows: int, drafts: int, rule: str, new: int, options: dict[str, Any]
) -> None:
    method = row.method(family, drafts, rule)

    def tells(asked: int, more: dict[str, Any]) -> bool:
        more = {"seed": 11, **more}
        return _tells(row, method, family, *plainly(family, rows, asked=asked, **more), more)

    assert_some_text_tells(tells, new, options)


def _tells(row: Row, method: Method, family: str, prompts: Any, expected: Any, options: dict[str, Any]) -> bool:
    output = decode(families.cached(family), prompts, method, **options)
    assert_same_texts(families.cached(family), prompts, expected, output, options)
    return is_telling(row, output)


def assert_some_text_tells(tells: Callable[[int, dict[str, Any]], bool], new: int, options: dict[str, Any]) -> None:
    """Drafts were accepted and rejected in a text of `new` tokens, or of two or four times as many, or after other prompts.
    tells: (the prompts' seed, options) -> whether one text had both."""
    tries = itertools.product((1, 2, 3), (new, 2 * new, 4 * new))
    both = any(tells(asked, {"max_new_tokens": count, **options}) for asked, count in tries)
    assert both, "no draft was ever accepted, or none rejected"
