"""Writes tests/helpers/records/speculators_eagle3: folders that the `speculators` package saves, and the logits it computes.

    python -m venv oracle && oracle/bin/pip install torch speculators==0.9.0
    PYTHONPATH=. oracle/bin/python tests/helpers/speculators_oracle.py

speculators runs all columns of a text at once, once for every depth. At depth k the column of token p reads the token k places
later, so its logits are those of a chain with the drafts tokens[p + 2 : p + 2 + k]. It computes in float64 here.
"""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.feature_heads import LLAMA3_ROPE, eagle3_folder, read_weights

RECORDS = Path(__file__).parent / "records" / "speculators_eagle3"
TARGET = SimpleNamespace(hidden_size=16, vocab_size=40, num_hidden_layers=8)
DEPTHS, TOKENS = 3, 10
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"draft_vocab": 25},
    "llama_scaled": {"draft_vocab": 25, "norm_before_fc": True, "norm_before_residual": True, "rope_scaling": LLAMA3_ROPE},
    "qwen3": {"kind": "qwen3", "draft_vocab": None, "layer_ids": [1, 3, 5, 8]},
    "qwen3_normed": {
        **{"kind": "qwen3", "draft_vocab": 25, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
        "layer_ids": [2, 4, 5],
    },
}
"""Fields of `Eagle3Options`."""


@torch.no_grad()
def write(name: str, options: dict[str, Any]) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    generator = torch.Generator().manual_seed(len(name))
    with tempfile.TemporaryDirectory() as folder:
        written = eagle3_folder(Path(folder), TARGET, layout="speculators", embedding="own", old_rope=False, **options)
        fields = json.loads((written / "config.json").read_text())
        weights = read_weights(written)
    for field in ("speculators_version", "architectures"):
        del fields[field]
    config = Eagle3SpeculatorConfig(**fields)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config)
    if "d2t" in weights:
        model.load_vocab_mappings(weights["t2d"], weights["d2t"])
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert all(key.startswith("verifier_") for key in missing), missing
    assert not unexpected, unexpected
    model.save_pretrained(RECORDS / name)
    (RECORDS / name / "config.py").unlink()  # a copy of code of speculators

    states = 3 * torch.randn(TOKENS, len(options.get("layer_ids", range(3))) * TARGET.hidden_size, generator=generator)
    tokens = torch.randint(TARGET.vocab_size, (1, TOKENS + 1), generator=generator)
    found: list[torch.Tensor] = []
    model.double().lm_head.register_forward_hook(lambda module, entered, left: found.append(left[0]))
    model(states[None].double(), tokens[:, 1:], torch.zeros_like(tokens[:, 1:]), ttt_steps=DEPTHS)
    logits = torch.stack(found, 1).float()  # [T, K, S]
    save_file({"states": states, "tokens": tokens[0], "logits": logits}, RECORDS / name / "oracle.st")


if __name__ == "__main__":
    for name, options in VARIANTS.items():
        write(name, options)
