"""Which layers of a model draft: what a page needs to draw a map of them."""

from typing import Any

from skipstone.decoding.method import Method
from skipstone.decoding.session import Session
from skipstone.methods.adadecode.adadecode import AdaDecodeSession
from skipstone.methods.auto.auto import AutoSession
from skipstone.methods.auto.drafters import LayersDrafter, OwnRule
from skipstone.methods.layerskip import LayerSkipSession
from skipstone.methods.shared.skipping_session import SkippingSession
from skipstone.methods.swift.swift import SwiftSession
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import SkipSet


def layers_of(method: Method, session: Session) -> dict[str, Any]:
    """Plain JSON values. count: the model's layers. lossless: of the method. drafters: those that are layers of the model, each
    with its `name` as in `Step.drafter` or the method's, `exits`, after how many layers it predicts, `skip_attention` and
    `skip_mlp`, layers counted from 0 that it leaves out, and `quantize`, the bits that it computes in, None for the model's."""
    return {"count": session.model.depth, "lossless": method.lossless, "drafters": _drafters(method.name, session)}


def _drafters(name: str, session: Any) -> list[dict[str, Any]]:
    """session: a session, or a drafter of `auto`."""
    if isinstance(session, AutoSession):
        inner = {own: one.session if isinstance(one, OwnRule) else one for own, one in session.drafters.items()}
        return [found for own, one in inner.items() for found in _drafters(own, one)]
    if isinstance(session, AdaDecodeSession):
        return [_drafter(name, [layer for _, layer in session.exits])]
    if isinstance(session, LayerSkipSession):
        return [_drafter(name, [session.exit_layer])]
    if isinstance(session, SwiftSession):
        return [_drafter(name, [], session.optimisation.skip)]
    if isinstance(session, SkippingSession):
        return [_drafter(name, [], session.skip, session.drafter)]
    if isinstance(session, LayersDrafter):
        exits = [session.layers] if session.layers < session.model.depth else []
        return [_drafter(name, exits, session.skip, session.drafter)]
    if session.store.layers < session.model.depth:
        return [_drafter(name, [session.store.layers])]
    return []


def _drafter(
    name: str, exits: list[int], skip: SkipSet | None = None, in_fewer_bits: LayeredModel | None = None
) -> dict[str, Any]:
    skip = skip or SkipSet()
    return {
        "name": name,
        "exits": exits,
        "skip_attention": sorted(skip.attention),
        "skip_mlp": sorted(skip.mlp),
        "quantize": None if in_fewer_bits is None else in_fewer_bits.engine.quantize,
    }
