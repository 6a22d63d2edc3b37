"""All decoding methods, written out."""

from skipstone.core.protocol import Method
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.early_exit import EarlyExit
from skipstone.methods.layerskip import LayerSkip

METHODS: dict[str, type[Method]] = {
    "autoregressive": Autoregressive,
    "early_exit": EarlyExit,
    "layerskip": LayerSkip,
}
