"""The protocol of each paper: prompts, lengths, counts and sampling of its tasks.

`ours` names the settings that a paper does not state and that we chose.
"""

from dataclasses import dataclass

from skipstone.utils.spelling import did_you_mean


@dataclass(frozen=True)
class TaskSettings:
    """All settings of one task."""

    shots: int = 0  # solved examples before the question
    num_prompts: int | None = None  # prompts to report; None takes all
    places: tuple[int, ...] | None = None  # these records of the data set, in this order, instead of drawn ones
    skip_looping: bool = False  # replace prompts on which plain greedy decoding repeats itself
    prompt_tokens: int | None = None  # longer prompts lose their beginning
    max_new_tokens: int = 512  # of every turn
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    samples: int = 1  # outputs of each prompt
    chat: bool = False  # prompts are turns of a chat, in the model's template
    tabs: bool = False  # code is indented by tabs
    rouge: bool = False  # outputs are scored by ROUGE
    protocol: str | None = None  # the paper whose settings these are
    ours: str = ""  # settings that the paper does not state


USUAL = TaskSettings(max_new_tokens=128)  # without a protocol
_ADASD = TaskSettings(temperature=1.0, chat=True, ours="prompt, temperature and 512 new tokens")

PROTOCOLS: dict[str, dict[str, TaskSettings]] = {
    # LayerSkip (arXiv 2404.16710), section 6.2 and its repository's defaults
    "layerskip": {
        "cnn_dm": TaskSettings(shots=1, ours="a blank line between example and question"),
        "xsum": TaskSettings(),
        "humaneval": TaskSettings(rouge=True),
        "topv2": TaskSettings(max_new_tokens=80),
    },
    # SWIFT (arXiv 2410.06916), section 5.1 and appendix B.1
    "swift": {
        "cnn_dm": TaskSettings(shots=1, num_prompts=1000, max_new_tokens=64, ours="a blank line between example and question"),
        "gsm8k": TaskSettings(shots=5, num_prompts=1000, max_new_tokens=64, ours="the prompt's wording; the first examples"),
        "tinystories": TaskSettings(shots=1, num_prompts=1000, max_new_tokens=128, ours="32 words of a story after a full one"),
        "humaneval": TaskSettings(tabs=True),
        "alpaca": TaskSettings(num_prompts=1000, chat=True, ours="the prompt is the instruction as it is"),
    },
    # SWIFT, table 3: the sampled half
    "swift-pass10": {"humaneval": TaskSettings(temperature=0.6, top_p=0.95, samples=10, tabs=True)},
    # AdaDecode (arXiv 2506.03700), appendix D: zero-shot, chat templates
    "adadecode": {
        "xsum": TaskSettings(num_prompts=1000, chat=True),
        "humaneval": TaskSettings(chat=True),
        "gsm8k": TaskSettings(chat=True),
    },
    # AdaSD (arXiv 2512.11280), section 4: prompts and temperature are not stated
    "adasd": {"gsm8k": _ADASD, "humaneval": _ADASD, "mmlu": _ADASD},
    # Spec-Bench (arXiv 2401.07851)
    "spec-bench": {"spec-bench": TaskSettings(max_new_tokens=1024, chat=True)},
}


def settings(protocol: str, task: str) -> TaskSettings:
    """A paper's settings of a task. ValueError for an unknown protocol or a task that it does not have."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown protocol {protocol!r}{did_you_mean(protocol, PROTOCOLS)}; there are {', '.join(PROTOCOLS)}")
    whole = task.partition(".")[0]  # of a category
    if whole not in PROTOCOLS[protocol]:
        raise ValueError(f"protocol {protocol} has no task {task!r}; it has {', '.join(PROTOCOLS[protocol])}")
    return PROTOCOLS[protocol][whole]
