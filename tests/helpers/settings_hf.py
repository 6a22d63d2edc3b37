"""skipstone behind `model.generate`, and the settings it is tested with."""

from __future__ import annotations

from typing import Any

import pytest

from skipstone import LayerSkip

SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=4)
COUPLED = LayerSkip(exit_layer=2, num_speculative_tokens=4, rejection_sample_method="coupled")
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 30}
# how fast a tiny model runs is no matter here
QUIET = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")
