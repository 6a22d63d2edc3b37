"""torch's own threads, kept quiet while an engine computes with threads of its own."""

import torch


class OneThread:
    """Inside, torch computes on one thread for the host thread that is in. After an operator on several, the others wait for
    the next one in a loop for milliseconds, on cores that the engine's threads need."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)
