"""How fast the engines are, end to end through `skipstone.generate`, in one interleaved run.

    python recipes/measure/engines.py [MODEL] [--dtype float32] [--rounds 5] [--new 128] [--layerskip "layerskip exit_layer=6"]

Prints tokens a second (prefill included; the median over rounds of all prompts together) of every engine, plainly and with
LayerSkip where --layerskip names its settings; milliseconds a pass of 1 to 32 rows behind 150 tokens on the native engine; and
whether all texts of an engine are the same with and without drafts. Measure on an idle machine.
"""

import argparse
import statistics
import time

import torch

import skipstone
from skipstone.models.kvstore import KVStore
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass
from skipstone.tasks.sets import named

CONTEXT = 150  # tokens before the passes that are timed
REPEATS = 40  # passes of each width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--layerskip")
    asked = parser.parse_args()
    dtype = asked.dtype if asked.dtype == "auto" else getattr(torch, asked.dtype)
    model, tokenizer = skipstone.load(asked.model, dtype=dtype)
    task = named("self")
    prompts = [task.ask(row)[0] for row in task.records(None)[::5]]
    methods = ["autoregressive", *([asked.layerskip] if asked.layerskip else [])]
    rows = [(engine, method) for engine in ("eager", "native") for method in methods]
    speeds: dict[tuple[str, str], list[float]] = {row: [] for row in rows}
    texts: dict[tuple[str, str], list[list[int]]] = {}
    for round_number in range(asked.rounds + 1):  # the first round warms up
        for row in rows:
            engine, method = row
            tokens, seconds, found = 0, 0.0, []
            for prompt in prompts:
                start = time.perf_counter()
                out = skipstone.generate(
                    model, prompt, method, tokenizer=tokenizer, engine=engine, max_new_tokens=asked.new, eos_token_id=-1
                )
                seconds += time.perf_counter() - start
                assert out.new_tokens is not None
                tokens, found = tokens + len(out.new_tokens[0]), [*found, out.new_tokens[0]]
            texts[row] = found
            if round_number:
                speeds[row].append(tokens / seconds)
    print(f"{len(prompts)} prompts x {asked.new} tokens, {model.dtype} weights")
    for row in rows:
        engine, method = row
        values = speeds[row]
        same = texts[row] == texts[(engine, "autoregressive")]
        print(
            f"{engine:7} {method:50} {statistics.median(values):8.1f} tokens/s ({min(values):.1f} to {max(values):.1f}), "
            f"texts as plain: {same}"
        )
    passes(model)


@torch.inference_mode()
def passes(model: torch.nn.Module) -> None:
    """Milliseconds of a pass, logits included, by its rows."""
    layered = LayeredModel(model, "native")  # type: ignore[arg-type]
    print(layered.engine.detail)
    ids = torch.arange(CONTEXT + 32)[None] % layered.embeddings
    store = KVStore(1, layered.depth, 512)
    store.reserve(512)

    def run(start: int, stop: int) -> None:
        positions = torch.arange(start, stop)[None]
        at = Pass(positions, positions, None, slice(0, 1), stop, start)
        layered.logits(layered.run(layered.embed(ids[:, start:stop], positions), at, store, range(layered.depth)))

    run(0, CONTEXT)
    for rows in (1, 2, 4, 8, 16, 32):
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run(CONTEXT, CONTEXT + rows)
            times.append(time.perf_counter() - start)
        print(f"{rows:3} rows: {1000 * statistics.median(times):.3f} ms (least {1000 * min(times):.3f})")


if __name__ == "__main__":
    main()
