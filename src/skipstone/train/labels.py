"""What a position of a row is to predict."""

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of a token that is not to be predicted, as in transformers


def shifted(labels: Tensor) -> Tensor:
    """labels [B, T] -> what every position predicts [B, T]: its right neighbour's label, nothing at the end."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
