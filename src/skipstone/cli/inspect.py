"""`skipstone inspect`: what every layer already knows of a text, and where an early exit would pay."""

import sys
import time
from dataclasses import asdict
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from skipstone.cli import option_groups, terminal
from skipstone.cli.method_table import known_methods
from skipstone.cli.option_groups import ModelOptions, PromptOptions, encode_texts, expect_model
from skipstone.cli.options import AS_JSON, option

if TYPE_CHECKING:
    from skipstone.engines.model_runner import ModelRunner
    from skipstone.lab.inspect.feature_heads import FeatureHeadForecast
    from skipstone.lab.inspect.lens import HeadLens, Lens
    from skipstone.lab.inspect.policy_replay import ReplayedDecision
    from skipstone.methods.drafting.feature_drafter import FeatureMethod

SHOWN_DRAFTS = 3  # columns of the table


def inspect(
    *,
    prompt: list[str] | None = option(None, "What to continue; may be given several times. Default: bundled prompts."),
    max_new_tokens: int = option(32, "Tokens to look at, of each prompt.", min=1),
    heads: str | None = option(None, "Look through AdaDecode's exit heads too: a folder, a hub id, or a name."),
    method: str | None = option(None, 'Look at a head too: "eagle3 head=FOLDER". The checkpoint\'s MTP layer needs no option.'),
    replay: Path | None = option(None, "Decide again what a log of auto's decisions holds (`auto log=FILE`)."),
    out: Path | None = option(None, "Save the pictures: a .png file, or a .html page; with --replay .png or .svg."),
    model: ModelOptions,
    as_json: bool = AS_JSON,
) -> None:
    """The logit lens: each layer's best token, agreement, similarity and time, and the speed-up on this machine if its first
    layers or its heads drafted."""
    suffix, kind = (".html", "page") if replay is None else (".svg", "one")
    if out is not None and out.suffix not in (".png", suffix):
        raise ValueError(f"--out is a .png file or a {suffix} {kind}, found {out}")
    if method is not None:
        option_groups.check_method_text(method, known_methods())
    option_groups.expect_writable(out)
    option_groups.expect_readable(replay)
    if replay is not None:
        show_decisions(replay, as_json, out)
    else:
        _look_through_layers(model, PromptOptions(prompt).texts(), max_new_tokens, heads, method, out, as_json)


def _look_through_layers(
    model: ModelOptions,
    texts: list[str],
    max_new_tokens: int,
    heads: str | None,
    method: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    expect_model(model.model)
    import torch

    from skipstone.engines.model_runner import ModelRunner
    from skipstone.lab.inspect.feature_heads import forecast
    from skipstone.lab.inspect.lens import look, save, through
    from skipstone.methods.adadecode.heads import load_heads

    asked = None if method is None else _feature_method(method)
    loaded, tokenizer = model.load()
    runner = ModelRunner(loaded)
    exit_heads = None if heads is None else load_heads(heads, runner)
    if asked is not None:
        asked.check(runner)
    prompts = encode_texts(texts, tokenizer)
    lens = look(loaded, prompts, max_new_tokens)
    words = [[str(tokenizer.decode([token])) for token in row] for row in lens.top]  # [L][n], every layer's best tokens
    final = [str(tokenizer.decode([token])) for token in lens.tokens]  # [n], those that were generated
    answers = torch.tensor(lens.tokens, dtype=torch.int64, device="cpu").tensor_split(lens.breaks[1:])
    pairs = list(zip(prompts, answers, strict=True))
    head_lens = None if exit_heads is None else through(loaded, exit_heads, pairs)
    forecasts = [forecast(one, runner, pairs, lens.costs) for one in _feature_methods(runner, asked)]
    for path in () if out is None else save(lens, words, final, out, head_lens):
        print(f"skipstone: {path}", file=sys.stderr)
    if as_json:
        engine, dtype = runner.engine, str(loaded.dtype).removeprefix("torch.")
        document = {"kind": "skipstone-inspect", "model": model.name, "dtype": dtype, "device": str(loaded.device)}
        document |= {"engine": engine.name, "quantize": engine.quantize, "compute_dtype": engine.compute_dtype}
        document |= {"prompts": texts, "texts": final, "top_texts": words, **asdict(lens)}
        document["feature_heads"] = [asdict(one) for one in forecasts]
        terminal.print_json(document if head_lens is None else {**document, "heads": asdict(head_lens)})
        return
    show_layers(lens)
    if head_lens is not None:
        show_heads(head_lens)
    if forecasts:
        show_feature_heads(forecasts)


def _feature_method(text: str) -> "FeatureMethod":
    """ValueError for a method without a head that reads hidden states."""
    from skipstone.methods import resolve
    from skipstone.methods.drafting.feature_drafter import FeatureMethod

    method = resolve(text)
    if not isinstance(method, FeatureMethod):
        raise ValueError(f"--method takes eagle3 or mtp, found {text!r}; the lens of the layers needs no method")
    return method


def _feature_methods(runner: "ModelRunner", asked: "FeatureMethod | None") -> "list[FeatureMethod]":
    """Methods of the heads that a model has, and of the one that the user names."""
    from skipstone.engines.mtp_head import attached_mtp
    from skipstone.methods.mtp import Mtp

    own = [Mtp()] if attached_mtp(runner) is not None and not isinstance(asked, Mtp) else []
    return [*own, *([] if asked is None else [asked])]


def show_decisions(path: Path, as_json: bool, out: Path | None) -> None:
    """Every decision of a log, made again from the same numbers, and how many of them are the recorded ones."""
    from skipstone.lab.inspect.policy_replay import replay_decisions, save

    plans = list(replay_decisions(path, time.perf_counter))
    if out is not None:
        save(plans, out)
        print(f"skipstone: {out}", file=sys.stderr)
    same = sum(plan.is_same for plan in plans)
    if as_json:
        decisions = [
            {
                **{name: getattr(plan, name) for name in ("position", "tokens")},
                "same": plan.is_same,
                **{name: getattr(plan.again, name) for name in ("kind", "reason")},
                "plain_steps_lost": plan.lost,
            }
            for plan in plans
        ]
        terminal.print_json({"kind": "skipstone-replay", "decisions": decisions, "same": same})
        return
    groups = [(*key, list(members)) for key, members in groupby(plans, lambda plan: (plan.again.kind, plan.again.reason))]
    rows = [(group[0].position, *_sums(group, kind), reason) for kind, reason, group in groups]
    terminal.print_table(("at token", "steps", "drafter", "tokens", "because"), rows)
    kinds = {kind: [plan for plan in plans if plan.again.kind == kind] for kind in {plan.again.kind for plan in plans}}
    losses = {kind: sum(plan.lost for plan in group) for kind, group in kinds.items()}
    ranked = sorted(kinds, key=lambda kind: -losses[kind])
    rows = [(kind, len(kinds[kind]), *_sums(kinds[kind]), f"{losses[kind]:.1f}") for kind in ranked]
    terminal.print_table(("drafter", "plans", "steps", "tokens", "plain steps lost"), rows)
    print(f"{same} of {len(plans)} decisions are as recorded{_durations(plans) if plans else ''}")


def _sums(plans: "list[ReplayedDecision]", *between: str) -> tuple[str, ...]:
    """Steps and tokens of some plans, as cells of a table."""
    return str(sum(plan.steps for plan in plans)), *between, f"{sum(plan.tokens for plan in plans):g}"


def _durations(plans: "list[ReplayedDecision]") -> str:
    """How long the policy takes now."""
    from statistics import median

    deciding, learning = 1e6 * median(plan.deciding for plan in plans), 1e6 * median(plan.learning for plan in plans)
    steps = sum(plan.steps for plan in plans) / len(plans)
    return f", {deciding:.0f} us to decide and {learning:.0f} us to learn from it, in the middle, for {steps:.1f} steps"


def show_layers(lens: "Lens") -> None:
    """A line per layer, and the best exit."""
    best, rows = max(lens.expected, key=lambda one: one.speed_up, default=None), []
    for layer, (agreement, similarity, seconds, exit_) in enumerate(
        zip_longest(lens.agreement, lens.similarity, lens.costs.layers, lens.expected), 1
    ):
        final = sum(first <= layer for first in lens.first) / len(lens.first)
        pays = ("", "") if exit_ is None else (exit_.num_speculative_tokens, f"{exit_.speed_up:.2f}{' *' * (exit_ is best)}")
        rows.append((layer, f"{agreement:.2f}", f"{final:.2f}", f"{similarity:.3f}", f"{1000 * seconds:.2f}", *pays))
    titles = ("layer", "agreement", "final from here on", "cosine", "ms", "draft length", "expected x plain")
    terminal.print_table(titles, rows)
    if best is not None and best.speed_up > 1:
        method = f"layerskip exit_layer={best.exit_layer} num_speculative_tokens={best.num_speculative_tokens}"
        gain = f"{best.speed_up:.2f} x plain decoding, were agreement {best.agreement:.2f} at every token"
        print(f'LayerSkip would pay most with --method "{method}": {gain}.')
    else:
        print("No early exit of this model pays: its layers agree too late. Train one, or use a method without exits.")


def show_heads(lens: "HeadLens") -> None:
    """A line per exit: as the model's own head reads it, and as the exit head does."""
    figures = (lens.own.divergence, lens.trained.divergence, lens.own.agreement, lens.trained.agreement)
    columns = [[f"{value:.{digits}f}" for value in column] for column, digits in zip(figures, (3, 3, 2, 2), strict=True)]
    rows = [*zip(lens.layers, *columns, strict=True)][:-1]  # the last layer is no exit
    terminal.print_table(("exit", "KL, LM head", "KL, exit head", "agreement, LM head", "agreement, exit head"), rows)


def show_feature_heads(heads: "list[FeatureHeadForecast]") -> None:
    """A line per head, and the best one."""
    rows, best = [], max(heads, key=lambda head: head.speed_up)
    for head in heads:
        accepted = " ".join(f"{share:.2f}" for share in head.accepted[:SHOWN_DRAFTS])
        layers, size = ", ".join(map(str, head.layers)), f"{head.nbytes / 1e6:.1f}"
        rows.append(
            (head.kind, layers, size, f"{head.weights_read:.2f}", accepted, head.num_speculative_tokens, f"{head.speed_up:.2f}")
        )
    titles = ("head", "reads layers", "MB", "weights a draft", "first 1, 2, 3 accepted", "draft length", "expected x plain")
    terminal.print_table(titles, rows)
    if best.speed_up > 1:
        setting = f"{best.kind} with num_speculative_tokens={best.num_speculative_tokens}"
        print(f"Of the heads {setting} would pay most: {best.speed_up:.2f} x plain decoding on texts like these.")
    else:
        print("No head pays on texts like these.")
