"""llama-cpp-python's prompt lookup, as far as it is used."""

from typing import Any

import numpy as np


class LlamaPromptLookupDecoding:
    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.count = num_pred_tokens

    def __call__(self, text: Any) -> Any:
        places = [place for place in range(2, len(text)) if (text[place - 2 : place] == text[-2:]).all()]
        return text[places[0] : places[0] + self.count] if places else np.array([], dtype=np.intc)
