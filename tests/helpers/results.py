"""The lines of a run made by hand, and files of them."""

from pathlib import Path
from typing import Any

from skipstone.decoding.stats import Stats
from skipstone.lab.bench.run_file import RunFile


def stats(new: int, steps: int, accepted: int = 0, drafted: int = 0, **seconds: float) -> dict[str, Any]:
    one = Stats(
        tokens=new - 1, prefill_tokens=1, steps=steps, turns=steps, accepted=accepted, draft_steps=drafted, drafted=drafted
    )
    for name, value in seconds.items():
        setattr(one, f"seconds_{name}", value)
    one.histogram.update([accepted // max(steps, 1)] * steps)
    return one.summary()


def row(tokens: int, seconds: float, digest: str, summary: Any = None, **more: Any) -> dict[str, Any]:
    usual = {"first_seconds": 0.1, "calls": 1, "repeated_share": 0.0, "memory": 1 << 20, "scores": [], "text": "t"}
    return {"tokens": tokens, "seconds": seconds, "digests": [digest], "stats": summary, **usual, **more}


CELL = {"model": "m", "number": 0, "task": "sums", "temperature": 0.0, "question": "q"}


def about() -> list[dict[str, Any]]:
    names = ("hf-generate", "autoregressive", "layerskip")
    methods = {name: {"method": name, "settings": {}, "lossless": True} for name in names}
    facts: dict[str, Any] = {
        "type": "llama",
        "layers": 4,
        "dtype": "float32",
        "device": "cpu",
        "synthetic": None,
        "weights": "w",
    }
    facts |= {
        "ceiling": {"tokens_per_second": 400.0, "bandwidth_gb_per_second": 10.0},
        "refused": {"hf-early-exit": "it cannot"},
    }
    trials = [{"settings": {"exit_layer": e}, "prompts": 2, "tokens_per_second": 10.0 * e} for e in (1, 2)]
    tuned = {"method": "layerskip", "candidate": 0, "chosen": {"exit_layer": 2}, "candidates": 2, "calls": 4, "trials": trials}
    model = {"kind": "model", "model": "m", **facts, "methods": methods}
    return [model, {"kind": "tuned", **CELL, **tuned}]


def lines(**changes: Any) -> list[dict[str, Any]]:
    """Three prompts, three methods; the last prompt loops for one of them; layerskip is twice as fast as plain decoding."""
    found = about()
    for index in range(3):
        plain = stats(101, 100, prefill=0.1, score=0.9)
        own = stats(101, 50, 50, 100, prefill=0.1, draft=0.15, score=0.25, other=0.01)
        digest, score = f"a{index}", {"exact_match": float(index == 0)}
        looping = 0.9 * (index == 2)
        rows = {
            "hf-generate": row(101, 1.25, digest),
            "autoregressive": row(101, 1.0 + 0.1, digest, plain, scores=[{**score}]),
            "layerskip": row(101, 0.5 + 0.05, digest if index else "other", own, repeated_share=looping, scores=[score]),
        }
        prompt = {"index": index, "place": 10 + index, "digest": f"d{index}", "prompt_tokens": [7]}
        found.append({"kind": "prompt", **CELL, **prompt, "rows": {**rows, **changes}})
    return found


def written(path: Path, found: list[dict[str, Any]]) -> Path:
    provenance = {"argv": ["skipstone", "bench"], "packages": {"torch": "2"}, "cpu": "c", "threads": 2, "git": None}
    with RunFile(path, {"seed": 0}, provenance, fresh=True) as file:
        for line in found:
            file.add(line)
    return path
