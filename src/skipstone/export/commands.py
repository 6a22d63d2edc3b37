"""Commands that load an export in other engines. docs/export.md says which of them were run."""

import json
import shlex
from pathlib import Path

from skipstone.export.draft import DraftLayers
from skipstone.export.gguf.write_gguf import DRAFT, TARGET


def for_draft(target: str, folder: Path, kept: DraftLayers) -> dict[str, str]:
    """Engine -> command for a draft checkpoint. target: the folder or hub id of the model."""
    model, draft, count = shlex.quote(target), shlex.quote(str(folder)), kept.drafts
    speculative = json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": count})
    return {
        "transformers": "target.generate(**inputs, "
        f"assistant_model=AutoModelForCausalLM.from_pretrained({json.dumps(str(folder))}, dtype=target.dtype))",
        "vLLM": f"vllm serve {model} --speculative-config {shlex.quote(speculative)}",
        "SGLang": f"python -m sglang.launch_server --model-path {model} --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path {draft} --speculative-num-steps {count} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {count + 1}",
        "TensorRT-LLM": f"LLM({json.dumps(target)}, disable_overlap_scheduler=True, speculative_config="
        f"DraftTargetDecodingConfig(max_draft_len={count}, speculative_model={json.dumps(str(folder))}))",
        "llama.cpp": "takes GGUF files: export the model once more, with --to gguf",
    }


def for_gguf(folder: Path, kept: DraftLayers) -> dict[str, str]:
    """Engine -> command for a pair of GGUF files."""
    target, draft = (shlex.quote(str(folder / name)) for name in (TARGET, DRAFT))
    command = f"llama-server -m {target} -md {draft} --spec-type draft-simple --spec-draft-n-max {kept.drafts}"
    return {"llama.cpp": command if kept.threshold is None else f"{command} --spec-draft-p-min {kept.threshold:g}"}
