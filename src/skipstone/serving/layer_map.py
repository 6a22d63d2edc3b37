"""Which layers of a model draft, for the playground's map."""

from typing import Any

from skipstone.decoding.drafter import layers_used
from skipstone.decoding.method import Method
from skipstone.decoding.session import Session


def describe_layers(method: Method, session: Session) -> dict[str, Any]:
    """Plain JSON values. count: the model's layers. lossless: of the method. drafters: `layers_used` of all that draft with
    layers of the model, by their name in `Step.drafter` or the method's."""
    depth, used = session.model.depth, session.store.layers
    drafters = session.drafter.describe(method.name)
    if used < depth:  # the method stops early, and nothing drafts
        drafters = [layers_used(method.name, exits=[used])]
    return {"count": depth, "lossless": method.lossless, "drafters": drafters}
