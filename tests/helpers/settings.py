"""ServerSettings that the proofs of edges, of options and of transformers' own ways decode with."""

from typing import Any

import pytest

from skipstone import LayerSkip

SKIP = LayerSkip(exit_layer=2, num_speculative_tokens=5)
COUPLED = LayerSkip(exit_layer=2, num_speculative_tokens=5, rejection_sample_method="coupled")
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_k": 0}
# how fast a tiny model runs is no matter here
QUIET = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")
