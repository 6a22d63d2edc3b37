"""Times of linear layers and attention over few tokens on a GPU: torch's kernels and those of compiled graphs.

    python recipes/measure/cuda_kernels.py [--dtype float32]

Prints two tables in Markdown, in microseconds: x W^T by F.linear and as W x^T, by number of tokens; attention with a mask by
torch's scaled_dot_product_attention and by two products and a softmax, by numbers of tokens and slots. Each time is the mean of
250 calls inside CUDA graphs, without the host's time.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from skipstone.engines.eager.attention import unfused
from skipstone.engines.eager.linear import transposed

CALLS = 50  # in a CUDA graph
REPLAYS = 5
SIZES = ((512, 192), (192, 512), (4096, 4096), (14336, 4096))
"""Outputs and inputs of linear layers of the bundled model and of a model of 8 billion parameters."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
HEADS = ((3, 1, 64), (32, 8, 128))
"""Query heads, key heads and head size of the same models."""
SLOTS = (128, 256, 2048)


def microseconds(call: Callable[[], Tensor]) -> float:
    """Device time of one call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(REPLAYS):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / REPLAYS / CALLS * 1e3


def linear_layers(dtype: torch.dtype) -> None:
    print("| outputs, inputs | tokens | x W^T | W x^T |\n| --- | --- | --- | --- |")
    for outputs, inputs in SIZES:
        weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype)  # [d_out, d_in]
        for rows in ROWS:
            x = torch.randn(rows, inputs, device="cuda", dtype=dtype)  # [rows, d_in]
            ours, theirs = microseconds(partial(transposed, x, weight, None)), microseconds(partial(F.linear, x, weight))
            print(f"| {outputs}, {inputs} | {rows} | {theirs:.1f} | {ours:.1f} |")


def attentions(dtype: torch.dtype) -> None:
    print("\n| heads | tokens | slots | torch's | unfused |\n| --- | --- | --- | --- | --- |")
    for heads, key_heads, size in HEADS:
        for width in (1, 16):
            for slots in SLOTS:
                shape = (1, key_heads, heads // key_heads * width, size)
                query = torch.randn(shape, device="cuda", dtype=dtype)  # [1, kv_heads, groups * n, d]
                key, value = torch.randn(2, 1, key_heads, slots, size, device="cuda", dtype=dtype)  # [1, kv_heads, extent, d]
                mask = torch.ones(1, 1, shape[2], slots, device="cuda", dtype=torch.bool)
                theirs = microseconds(partial(F.scaled_dot_product_attention, query, key, value, attn_mask=mask))
                ours = microseconds(partial(unfused, query, key, value, mask, None))
                print(f"| {heads} over {key_heads} of {size} | {width} | {slots} | {theirs:.1f} | {ours:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    dtype = getattr(torch, parser.parse_args().dtype)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {dtype}\n")
    with torch.inference_mode():
        linear_layers(dtype)
        attentions(dtype)


if __name__ == "__main__":
    main()
