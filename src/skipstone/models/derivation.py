"""Derives the `Family` of a model from a trace of its own forward.

If no `Family` can describe a trace, the model is refused with a sentence.
"""

import inspect
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from skipstone.models import altup
from skipstone.models.families import (
    PER_LAYER,
    SHARED,
    Family,
    InputStep,
    ReachKind,
    RotarySource,
    exceptions_of,
    stateful_kinds,
    submodule,
)
from skipstone.models.passes import AttentionReach, visible
from skipstone.models.trace import WINDOW, ModuleCall, Trace

PASS_ARGUMENTS = ("attention_mask", "position_ids", "position_embeddings")  # arguments of a layer that a pass can make
HARMLESS = ("use_cache", "return_dict")  # arguments of a layer that a pass may omit
CLOSE = 1e-3  # tolerance of equal tensors, relative to the largest entry
SCALES = ("embedding_multiplier", "scale_emb", "embedding_scale", "embed_scale", "hidden_multiplier")
"""Fields of a config that are tried first as the scale of the embeddings."""
OPERATIONS: tuple[tuple[Literal["divide", "multiply", "softcap"], str], ...] = (
    *(("softcap", "final_logit_softcapping"), ("multiply", "logit_scale"), ("multiply", "lm_head_multiplier")),
    ("divide", "logits_scaling"),
)
"""Operations on logits, with fields of a config that are tried first."""
BIASES = ("alibi", "position_bias")  # names of a layer's argument for linear position biases


class DerivationError(ValueError):
    """Something in a trace that skipstone does not support, as the end of a sentence."""


def find_layers(model: Any, config: Any) -> tuple[str, str, nn.ModuleList]:
    """(path from the model's decoder to the owner of its layers, name of their list, the list). ValueError without one."""
    decoder = model.get_decoder()
    for path, module in decoder.named_modules():  # the model itself first
        for name, child in module.named_children():
            is_long_list = isinstance(child, nn.ModuleList) and len(child) >= config.num_hidden_layers
            if is_long_list and all([*part.children()] for part in child):  # layers have children of their own
                return path, name, child
    raise DerivationError(f"keeps its {config.num_hidden_layers} layers in no list of its own")


def derive(model: Any, config: Any, trace: Trace, path: str, name: str) -> Family:
    """The family of a traced model. path, name: as in `find_layers`. DerivationError for an unsupported structure."""
    depth = config.num_hidden_layers
    owner = submodule(model.get_decoder(), path)
    if [number for number, _ in trace.layers] != list(range(depth)):
        raise DerivationError("does not run its layers once each, one after the other")
    calls = [call for _, call in trace.layers]
    streams = _streams(owner, calls)
    recurrent, plain = _recurrent(config, trace)
    attention, mlp, inner = _sublayers(trace.inside[plain], trace)
    entering, scale = _entering(owner, config, trace, calls[0].given[""] if streams == 1 else calls[0].given[""][0])
    cache_argument, takes, arguments, alibi = _arguments(trace, calls)
    attending = [one for layer, one in enumerate(getattr(owner, name)[:depth]) if not (recurrent and recurrent[layer])]
    modules = [getattr(one, attention, None) for one in attending]
    if None in modules:
        raise DerivationError(f"has layers without {attention}, which its first layer has")
    summed, replaced = _stream(trace.inside[plain], (attention, *mlp), calls[plain].given[""])
    changes_alone = replaced or _per_layer_inputs(calls) > 0 or streams > 1  # even if both sublayers add nothing
    interface = all("ALL_ATTENTION_FUNCTIONS" in _names(module) and "config" in vars(module) for module in modules)
    family = Family(
        decoder=path,
        layers=name,
        entering=entering,
        input_scale=scale,
        leaving=_leaving(owner, trace, streams),
        logits=_logits(config, trace),
        rotary=_rotary(trace, calls),
        attention=attention,
        mlp=mlp,
        inner=inner,
        summed=summed,
        returns=tuple(_returns(trace.returned[layer], attention, mlp) for layer in range(depth)),
        unskippable=_unskippable(trace, recurrent, plain, attention, mlp),
        cache_argument=cache_argument,
        arguments=arguments,
        pass_arguments=takes,
        reaches=_reaches(config, calls),
        attention_interface=interface,
        float_masks=any(torch.is_tensor(mask := _mask(call)) and mask.is_floating_point() for call in calls),
        hiding_masks=any(_hides(_mask(call)) for call in calls),
        post_norm=changes_alone or _ends_otherwise(trace.inside[plain], calls[plain], attending),
        alibi=alibi,
        per_layer_inputs=_per_layer_inputs(calls),
        streams=streams,
        shares=_shares(config, calls),
        recurrent=recurrent,
    )
    return replace(family, **exceptions_of(config))


def _streams(owner: Any, calls: list[ModuleCall]) -> int:
    """Number of streams of states between layers."""
    shapes = [call.given[""].shape for call in calls]
    if all(len(shape) == 3 for shape in shapes):
        return 1
    if {len(shape) for shape in shapes} != {4} or not (hasattr(owner, altup.MAKERS) and hasattr(owner, altup.MERGERS)):
        raise DerivationError("hands more than one stream of states from layer to layer")
    return shapes[0][0]


def _names(module: Any) -> Iterable[str]:
    """Global names in the forward of a module; empty for one that is not written in Python."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def close(result: Any, expected: Any) -> bool:
    """Whether two results are equal up to rounding."""
    if result.shape != expected.shape or not (result.is_floating_point() and expected.is_floating_point()):
        return False
    allowed = max(CLOSE, 4 * torch.finfo(expected.dtype).eps, 4 * torch.finfo(result.dtype).eps)
    expected = expected.to(result.device)  # layers may be on several
    largest = expected.float().abs().max()
    return bool(largest > 0) and bool((result.float() - expected.float()).abs().max() <= allowed * largest)


# ------------------------------------------------------------------------------------------------ around the layers


def _entering(owner: Any, config: Any, trace: Trace, entered: Tensor) -> tuple[tuple[InputStep, ...], str | None]:
    """(the modules from ids to the states that enter layer 0, the field of the config that scales them)."""
    positions = torch.arange(trace.ids.shape[1], device=trace.ids.device, dtype=torch.int64)[None]
    steps: list[InputStep] = []
    learned: list[tuple[InputStep, Tensor]] = []  # positions that are not added yet
    hidden: Any = None
    for call in trace.parts[: trace.before]:
        first, output = call.given.get(""), call.output
        if hidden is None:
            if torch.is_tensor(first) and torch.equal(first, trace.ids):
                steps.append(InputStep(call.path, "tokens"))
                hidden = output
            continue
        if not torch.is_tensor(output) or output.is_complex() or "per_layer" in call.path or call.path.startswith(altup.MAKERS):
            continue  # rotary phases, per-layer inputs and further streams
        summed = _summed(hidden, learned)
        if summed is not hidden and torch.is_tensor(first) and close(first, summed):
            steps += [step for step, _ in learned]
            learned, hidden = [], summed
        if torch.is_tensor(first) and close(first, hidden):
            if output is not first and not isinstance(submodule(owner, call.path), nn.Dropout):
                steps.append(InputStep(call.path, "apply"))
            hidden = output
        elif how := _learned(submodule(owner, call.path), call, positions):
            learned.append((InputStep(call.path, how), output))
    if hidden is None:
        raise DerivationError("embeds its ids where skipstone does not see it")
    steps += [step for step, _ in learned]
    return tuple(steps), _scale(config, _summed(hidden, learned), entered)


def _summed(hidden: Tensor, learned: list[tuple[InputStep, Tensor]]) -> Tensor:
    """Hidden states plus the positions that are not added yet, if they fit (OPT-350m adds them after a projection)."""
    for _, one in learned:
        if one.shape[-1] == hidden.shape[-1]:
            hidden = hidden + one.to(hidden.device)
    return hidden


def _learned(module: Any, call: ModuleCall, positions: Tensor) -> str | None:
    """How a module of learned positions is called; None for another module."""
    for how, ask in (
        ("positions", lambda: module(positions)),
        ("named positions", lambda: module(None, position_ids=positions)),
    ):
        try:
            if close(ask().expand_as(call.output), call.output):
                return how
        except (TypeError, RuntimeError, IndexError, AttributeError):
            continue
    return None


def _scale(config: Any, hidden: Tensor, entered: Tensor) -> str | None:
    """The field of a config that scales hidden states before layer 0."""
    if hidden.shape == entered.shape:
        for name in SCALES:  # the config comes first: a scale near 1 looks like none
            value = getattr(config, name, None)
            if isinstance(value, float) and close(hidden * value, entered):
                return name
        if close(hidden, entered):
            return None
        factor = float((hidden.float() * entered.float()).sum() / (hidden.float() ** 2).sum())
        if close(hidden * factor, entered):
            if (name := _field(config, factor, SCALES)) is not None:
                return name
            if abs(factor - config.hidden_size**0.5) < CLOSE * factor:
                return "sqrt"
    raise DerivationError("does something to its embeddings that skipstone does not know")


def _field(config: Any, value: float, first: Iterable[str] = ()) -> str | None:
    """The field of a config with a value."""
    for name in (*first, *config.to_dict()):
        one = getattr(config, name, None)
        if isinstance(one, (int, float)) and not isinstance(one, bool) and abs(one - value) <= CLOSE * abs(value):
            return name
    return None


def _leaving(owner: Any, trace: Trace, streams: int) -> tuple[str, ...]:
    """The modules between the last layer (after its streams are merged) and the LM head."""
    hidden = _states(trace.layers[-1][1].output)
    hidden = altup.merged(owner, hidden) if streams > 1 else hidden
    path: list[str] = []
    for call in trace.parts[trace.before :]:
        first = call.given.get("")
        if torch.is_tensor(first) and first.shape == hidden.shape and close(first, hidden) and torch.is_tensor(call.output):
            path.append(call.path)
            hidden = call.output
    if not trace.heads or not close(trace.heads[-1].given[""], hidden):
        raise DerivationError("does something after its last layer that skipstone does not know")
    return tuple(path)


def _logits(config: Any, trace: Trace) -> tuple[Literal["", "divide", "multiply", "softcap"], str]:
    """The operation on the output of the LM head, and its field of the config."""
    scores, logits = trace.heads[-1].output, trace.logits
    for operation in OPERATIONS:  # the config comes first: small logits look uncapped
        if getattr(config, operation[1], None) and close(Family(logits=operation).scored(scores, config), logits):
            return operation
    if close(scores, logits):
        return "", ""
    factor = float((scores.float() * logits.float()).sum() / (scores.float() ** 2).sum())
    if close(scores * factor, logits):
        if name := _field(config, factor, ("logit_scale", "lm_head_multiplier")):
            return "multiply", name
        if name := _field(config, 1 / factor, ("logits_scaling",)):
            return "divide", name
    raise DerivationError("does something to its logits that skipstone does not know")


def _states(output: Any) -> Tensor:
    """The hidden states in the output of a layer."""
    return output[0] if isinstance(output, (tuple, list)) else output


# --------------------------------------------------------------------------------------------------- of a layer


def _arguments(trace: Trace, calls: list[ModuleCall]) -> tuple[str, tuple[str, ...], tuple[tuple[str, Any], ...], str | None]:
    """The layers' arguments: (for the KV cache, those that depend on the pass, constants, for position biases)."""
    cache, fixed, alibi = None, {}, None
    takes = [name for name in PASS_ARGUMENTS if name in calls[0].given]
    for name, value in calls[0].given.items():
        if value is trace.cache:
            cache = name
        elif name in BIASES and torch.is_tensor(value):
            alibi = name
        elif name in ("", *takes, *HARMLESS, SHARED) or (name == PER_LAYER and torch.is_tensor(value)):
            continue
        elif not isinstance(value, (bool, int, float, str, type(None))) or any(call.given.get(name) != value for call in calls):
            raise DerivationError(f"gives its layers {name}, which skipstone does not know how to make")
        elif value is not None or name in BIASES:
            fixed[name] = value
    if cache is None:
        raise DerivationError("keeps no keys and values in a cache that its layers are given")
    return cache, tuple(takes), tuple(fixed.items()), alibi


def _per_layer_inputs(calls: list[ModuleCall]) -> int:
    """`Family.per_layer_inputs`."""
    given = calls[0].given.get(PER_LAYER)
    return given.shape[-1] if torch.is_tensor(given) else 0


def _shares(config: Any, calls: list[ModuleCall]) -> tuple[tuple[str, int], ...]:
    """`Family.shares`."""
    modes = getattr(config, "kv_sharing_modes", None) or []
    if not any(modes):
        return ()
    if SHARED not in calls[0].given:
        raise DerivationError("shares keys and values between layers in a way that skipstone does not know")
    return tuple((config.layer_types[index], index) for index, mode in enumerate(modes) if mode == "store")


def _recurrent(config: Any, trace: Trace) -> tuple[tuple[str, ...], int]:
    """(`Family.recurrent`, the first layer with an attention)."""
    of_layers = stateful_kinds(config)
    names = {kind: _sublayers(trace.inside[of_layers.index(kind)], trace)[0] for kind in dict.fromkeys(of_layers) if kind}
    return tuple(names.get(kind, "") for kind in of_layers) if names else (), of_layers.index("")


def _sublayers(calls: list[ModuleCall], trace: Trace) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """(attention, modules of the MLP, the inner ones of these) of one layer. Routers are left out: they may run without the
    experts."""
    attention = next((call.path for call in calls if any(value is trace.cache for value in call.given.values())), None)
    if attention is None:
        raise DerivationError("has no attention sublayer that is given the KV cache")
    if sum(any(value is trace.cache for value in call.given.values()) for call in calls) > 1:
        raise DerivationError("has several attention sublayers in one layer")
    size = _states(trace.layers[0][1].output).shape[-1]
    weighty = [call for call in calls if call.path != attention and _weighty(call.path) and torch.is_tensor(call.given.get(""))]
    paths = [call.path for call in calls]
    after_attention = [call for call in weighty if paths.index(call.path) > paths.index(attention)]
    weighty = after_attention or weighty  # modules before the attention run in parallel to it (Gemma 3n's laurel)
    full_width = {call.path for call in weighty if _width(_first(call.output)) == size}
    # inside of the MLP a module's output has the width of the next one's input
    inner = {call.path for call, after in pairwise(weighty) if _width(call.output) == _width(after.given[""])}
    names = tuple(dict.fromkeys(call.path for call in weighty if call.path in full_width | inner))
    return attention, names, tuple(name for name in names if name not in full_width)


def _weighty(path: str) -> bool:
    """Whether a part of a layer may belong to its MLP: no norm, dropout, activation or module for per-layer inputs."""
    name = path.lower()
    return not any(word in name for word in ("norm", "dropout", "act", "ln_", "drop", "per_layer"))


def _width(value: Any) -> int | None:
    return value.shape[-1] if torch.is_tensor(value) and value.is_floating_point() else None


def _stream(calls: list[ModuleCall], names: tuple[str, ...], stream: Tensor) -> tuple[str | None, bool]:
    """(`Family.summed`, whether that argument is ever something else than the residual stream, such as its norm in BLOOM).
    names: of the sublayers. stream: the layer's input, [2, T, d]."""
    summed, other = None, False
    for call in (one for one in calls if one.path in names):
        argument = next((name for name, value in call.given.items() if "residual" in name and torch.is_tensor(value)), None)
        output = _first(call.output)
        if argument is not None:
            summed, other = argument, other or not close(call.given[argument], stream)
            stream = output
        elif output is not None and output.shape == stream.shape:
            stream = stream + output
    return summed, other


def _ends_otherwise(inside: list[ModuleCall], call: ModuleCall, layers: list[nn.Module]) -> bool:
    """Whether layers end with a norm of the sum, or have numbers of their own that may scale it (Doge, Gemma 4). call: of one
    layer. inside: calls of its modules."""
    last = inside[-1]
    numbers = any(True for one in layers for _ in (*one.parameters(recurse=False), *one.buffers(recurse=False)))
    return numbers or ("norm" in last.path and close(last.output, _states(call.output)))


def _returns(counts: dict[str, int], attention: str, mlp: tuple[str, ...]) -> tuple[int, ...]:
    """`Family.returns` of one layer. counts: of values by module."""
    return tuple(counts.get(name, 0) for name in (attention, *mlp)) if attention in counts else ()


def _unskippable(trace: Trace, recurrent: tuple[str, ...], plain: int, attention: str, mlp: tuple[str, ...]) -> str:
    """`Family.unskippable`. plain: the first layer with an attention."""
    states = _states(trace.layers[plain][1].output)
    mixed = next(_first(call.output) for call in trace.inside[plain] if call.path == attention)
    if mixed is None or mixed.shape != states.shape[-3:]:  # there may be several streams
        return f"does not return the hidden states first from {attention}"
    if not mlp:
        return "has no modules for the MLPs of its layers"
    called = {
        layer: {*filter(_weighty, counts)} for layer, counts in trace.returned.items() if not recurrent or not recurrent[layer]
    }
    other = next((layer for layer, names in called.items() if names != called[plain]), None)
    return "" if other is None else f"has other modules in layer {other} than in layer {plain}"


def _mask(call: ModuleCall) -> Any:
    return call.given.get("attention_mask")


def _hides(mask: Any) -> bool:
    """Whether True in a boolean mask hides. Every token attends to itself."""
    return torch.is_tensor(mask) and mask.dtype == torch.bool and not bool(mask[0, 0, 0, 0])


def _reaches(config: Any, calls: list[ModuleCall]) -> tuple[ReachKind, ...]:
    """How far back every layer attends, by its mask."""
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    forms: list[tuple[ReachKind, AttentionReach]] = [("full", AttentionReach())]
    if window:
        forms.append(("sliding", AttentionReach(window=min(window, WINDOW))))
    if chunk:
        forms.append(("chunked", AttentionReach(chunk=min(chunk, WINDOW))))
    return tuple(_reach(_mask(call), call.given[""].shape[-2], forms) for call in calls)


def _reach(mask: Any, length: int, forms: list[tuple[ReachKind, AttentionReach]]) -> ReachKind:
    if not torch.is_tensor(mask):
        return "full"
    seen = mask == 0 if mask.is_floating_point() or _hides(mask) else mask  # [b, 1, T, T]
    positions = torch.arange(length, device=seen.device, dtype=torch.int64)
    for kind, reach in forms:
        if (seen == visible(positions[:, None], positions[None], reach)).all():
            return kind
    raise DerivationError("gives its layers masks that are neither causal nor of a sliding window or chunks")


def _rotary(trace: Trace, calls: list[ModuleCall]) -> tuple[RotarySource | None, ...]:
    """The source of every layer's rotary phases."""
    makers = [call for call in trace.parts[: trace.before] if _first(call.output) is not None]
    rotary: list[RotarySource | None] = []
    for call in calls:
        phases = _first(call.given.get("position_embeddings"))
        if phases is None:
            rotary.append(None)
            continue
        maker = next((one for one in makers if _first(one.output) is phases), None)
        maker = maker or next((one for one in makers if close(_first(one.output), phases)), None)  # a slice of its output
        if maker is None:
            raise DerivationError("gives its layers rotary phases that come from no module of its decoder")
        extra = [value for name, value in maker.given.items() if isinstance(value, str)]
        positions = next(value for name, value in maker.given.items() if name and torch.is_tensor(value))
        rotary.append(RotarySource(maker.path, extra[0] if extra else "", positions.shape[0] if positions.ndim == 3 else 0))
    return tuple(rotary)


def _first(value: Any) -> Any:
    """The first tensor of a value that may be rotary phases."""
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    return value if torch.is_tensor(value) else None
