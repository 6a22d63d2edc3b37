"""Tests run on one thread each: two workers share two cores, and results do not depend on how work is split."""

import gc

import torch

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look through torch and transformers again and again."""
    gc.collect()
    gc.freeze()
