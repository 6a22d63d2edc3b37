"""Text or tensors in, text or tensors out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from skipstone.core import generation, options
from skipstone.core.types import Output

