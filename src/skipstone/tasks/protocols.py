"""How each paper measures: prompts, lengths, counts and sampling of its tasks, as presets.

What a paper does not state is marked `ours`, with what is taken instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """One task under one paper's protocol.

    shots: solved examples before the question. num_prompts: None takes all. temperature 0 is greedy. samples: outputs a prompt.
    chat: prompts are turns of a chat, in the model's template. tabs: code is indented by tabs. rouge: outputs are scored by
    ROUGE. ours: what the paper does not state.
    """

    shots: int = 0
    max_new_tokens: int = 512
    num_prompts: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    chat: bool = False
    tabs: bool = False
    rouge: bool = False
    ours: str = ""


PROTOCOLS: dict[str, dict[str, Preset]] = {
    # LayerSkip (arXiv 2404.16710), section 6.2 and its repository's defaults
    "layerskip": {
        "cnn_dm": Preset(shots=1, ours="a blank line between example and question"),
        "xsum": Preset(),
        "humaneval": Preset(rouge=True),
        "topv2": Preset(max_new_tokens=80),
    },
    # SWIFT (arXiv 2410.06916), section 5.1 and appendix B.1
    "swift": {
        "cnn_dm": Preset(shots=1, max_new_tokens=64, num_prompts=1000, ours="a blank line between example and question"),
        "gsm8k": Preset(
            shots=5,
            max_new_tokens=64,
            num_prompts=1000,
            ours="the wording of the prompt, and which examples are shown: the first ones",
        ),
        "tinystories": Preset(
            shots=1, max_new_tokens=128, num_prompts=1000, ours="the prompt: a story up to its 32nd word, after a whole one"
        ),
        "humaneval": Preset(tabs=True),
        "alpaca": Preset(num_prompts=1000, chat=True, ours="the prompt is the instruction as it is"),
    },
    # SWIFT, table 3: the sampled half
    "swift-pass10": {"humaneval": Preset(temperature=0.6, top_p=0.95, samples=10, tabs=True)},
    # AdaDecode (arXiv 2506.03700), appendix D: zero-shot, chat templates
    "adadecode": {
        "xsum": Preset(num_prompts=1000, chat=True),
        "humaneval": Preset(chat=True),
        "gsm8k": Preset(chat=True),
    },
    # AdaSD (arXiv 2512.11280), section 4: prompts and temperature are not stated
    "adasd": {
        "gsm8k": Preset(temperature=1.0, chat=True, ours="prompt, temperature and 512 new tokens"),
        "humaneval": Preset(temperature=1.0, chat=True, ours="prompt, temperature and 512 new tokens"),
        "mmlu": Preset(temperature=1.0, chat=True, ours="prompt, temperature and 512 new tokens"),
    },
    # Spec-Bench (arXiv 2401.07851)
    "spec-bench": {"spec-bench": Preset(max_new_tokens=1024, chat=True)},
}


def preset(protocol: str, task: str) -> Preset:
    """ValueError for a protocol that does not exist, or does not have the task."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown protocol {protocol!r}; there are {', '.join(PROTOCOLS)}")
    if task not in PROTOCOLS[protocol]:
        raise ValueError(f"protocol {protocol} has no task {task!r}; it has {', '.join(PROTOCOLS[protocol])}")
    return PROTOCOLS[protocol][task]
