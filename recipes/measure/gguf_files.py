"""GGUF files on skipstone and on llama.cpp: decoding, prefill, start and memory, in processes that take turns.

    python recipes/measure/gguf_files.py FILE.gguf ... --llama-cpp FOLDER [--methods autoregressive auto] [--rounds 5]

FOLDER has llama.cpp's programs llama-bench and llama-completion. Prints two Markdown tables with medians of the rounds, and the
processor's name. The first table has tokens per second of plain decoding and of a prefill of 512 tokens, as engines.py measures
them; a ratio is the median of the rounds' ratios. The second table has the starts of start.py: seconds from the start of a
process to its first and its 64th token, with an empty cache and with what the first start has left, and the peak of memory. The
row of imports is what Python's libraries take of both. Measure on an idle machine.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from engines import PREFILL, Speeds, llama_cpp_speeds, own_command, speeds_of
from start import IMPORTS, NEW_TOKENS, PROMPT, Start, command_of, started

from skipstone.utils.processor_watch import was_busy

WRITES_MEMORY = """
import mmap, sys
pages = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
pages.madvise(mmap.MADV_HUGEPAGE)
pages.write(bytes(len(pages)))
print(flush=True)
"""


def measure_starts(path: Path, methods: Iterable[str], peer: list[str]) -> dict[tuple[str, ...], Start]:
    """One round of starts. Returns them by (program, method, start).

    The host of a virtual machine gives it memory when it is first written, and takes seconds for it. So a process writes as
    much memory before the first start as both programs need."""
    started([sys.executable, "-c", WRITES_MEMORY, str(2 * path.stat().st_size)], Path())
    rows = {}
    for method in methods:
        with tempfile.TemporaryDirectory() as cache:
            for start in ("first", "second"):
                rows["skipstone", method, start] = started(command_of(str(path), method, NEW_TOKENS), Path(cache))
    imports = [sys.executable, "-c", f"import {', '.join(IMPORTS)}; print(flush=True)"]
    with tempfile.TemporaryDirectory() as cache:
        rows["llama.cpp", "", ""] = started(peer, Path(cache))
        rows["imports", "", ""] = started(imports, Path(cache))
    return rows


def report(path: Path, speeds: list[tuple[Speeds, Speeds]], starts: list[dict[tuple[str, ...], Start]]) -> None:
    """Print the tables of one file. speeds: of skipstone and of llama.cpp, round by round."""
    print(f"\n### {path.name}, {path.stat().st_size / 1e6:.0f} MB\n")
    print("| tokens/s | skipstone | llama.cpp | ratio |\n" + "| --- " * 4 + "|")
    for field, name in (("decoding", "decoding"), ("prefill", f"prefill of {PREFILL}")):
        ours, theirs = ([getattr(one, field) for one in column] for column in zip(*speeds, strict=True))
        ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
        cells = (f"{statistics.median(column):.1f} ({min(column):.1f}-{max(column):.1f})" for column in (ours, theirs))
        print(f"| {name} | {' | '.join(cells)} | {ratio:.2f} |")
    print(f"\n| program | method | start | first token, s | {NEW_TOKENS} tokens, s | peak MB |\n" + "| --- " * 6 + "|")
    for names in starts[0]:
        rows = [round_of_starts[names] for round_of_starts in starts]
        first, last, peak = (statistics.median(getattr(row, field) for row in rows) for field in ("first", "last", "peak"))
        print(f"| {' | '.join(names)} | {first:.2f} | {last:.2f} | {peak:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--methods", nargs="*", default=["autoregressive", "auto"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    if asked.llama_cpp is None:
        parser.error("--llama-cpp is the folder of llama.cpp's programs")
    options = ["-n", str(NEW_TOKENS), "-t", str(asked.threads), "--temp", "0"]
    options += ["--ignore-eos", "-no-cnv", "--no-warmup", "--no-display-prompt"]
    busy_shares: list[float] = []
    for path in asked.files:
        peer = [str(asked.llama_cpp / "llama-completion"), "-m", str(path), "-p", PROMPT, *options]
        speeds, starts = [], []
        for _ in range(asked.rounds):
            ours = speeds_of(own_command(str(path), ""))
            speeds.append((ours, llama_cpp_speeds(asked.llama_cpp, path, asked.threads)))
            starts.append(measure_starts(path, asked.methods, peer))
        report(path, speeds, starts)
        busy_shares += [start.busy_share for round_of_starts in starts for start in round_of_starts.values()]
    from skipstone.lab.timing.machine import cpu  # which imports torch

    print(f"\n{cpu()}, {asked.threads} threads of llama.cpp, {asked.rounds} rounds")
    if was_busy(busy_share := statistics.median(busy_shares)):
        print(f"the machine was busy: other programs used {busy_share:.0%} of the processors' time")


if __name__ == "__main__":
    main()
