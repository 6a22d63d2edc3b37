"""Tests run on one thread each: two workers share two cores, and results do not depend on how work is split."""

import torch

torch.set_num_threads(1)
