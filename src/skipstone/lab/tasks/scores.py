"""Scores of an output: final answers, choices, overlap with references, and the programs that test a completion."""

import math
import re
from typing import Any

from skipstone.utils.extras import installed

CODE_ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\nassert ", "\n```", "\n@")
"""Texts that end a completion of a function (HumanEval's stop sequences and similar ones)."""
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> float | None:
    """The final number of a worked sum: the one after the first `####` (GSM8K, arXiv 2110.14168), else the last, else None.

    Text after a further "Question:" does not count.
    """
    text = text.partition("Question:")[0]
    marked = text.partition("####")[2]
    found = _NUMBER.findall(marked)[:1] or _NUMBER.findall(text)[-1:]
    return float(found[0].replace(",", "").replace("$", "")) if found else None


def same_number(output: str, reference: str) -> bool:
    """Whether two worked sums end in the same number. ValueError for a reference without one."""
    wanted, found = final_number(reference), final_number(output)
    if wanted is None:
        raise ValueError(f"the reference {reference!r:.80} ends in no number")
    return found is not None and math.isclose(found, wanted, rel_tol=0, abs_tol=1e-6)


def choice(text: str) -> str | None:
    """The chosen letter, A to D: the one after "answer is" or "answer:", else the first letter that stands alone."""
    told = re.search(r"(?i:answer(?:\s+is)?)\s*[:\-]?\s*(?:\(([A-Da-d])\)|([A-D])\b)", text)
    if told:
        return (told[1] or told[2]).upper()
    found = re.search(r"\b([A-D])\b", text)
    return found[1] if found else None


def exact(output: str, reference: str) -> bool:
    """Whether two texts are equal up to surrounding white space."""
    return output.strip() == reference.strip()


def rouge_scorer() -> Any:
    """The module rouge_scorer. ImportError that says what to install without rouge-score."""
    return installed("rouge_score.rouge_scorer", "ROUGE needs rouge-score")


def rouge(output: str, reference: str) -> dict[str, float]:
    """F-measures of ROUGE-2 and ROUGE-L with stemming."""
    found = rouge_scorer().RougeScorer(["rouge2", "rougeL"], use_stemmer=True).score(reference, output)
    return {"rouge_2": found["rouge2"].fmeasure, "rouge_l": found["rougeL"].fmeasure}


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """P(one of k samples passes), without bias from `passed` of `samples` (Chen et al., arXiv 2107.03374, Eq. 1)."""
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@k needs 0 <= passed <= samples and 1 <= k <= samples, found {passed}, {samples}, {k}")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def completion(output: str) -> str:
    """The part of an output that belongs to the function it continues."""
    cut = min((place for end in CODE_ENDS if (place := output.find(end)) >= 0), default=len(output))
    return output[:cut]


def fenced(output: str) -> str:
    """The program in an answer: its first fenced block where it has one, else all of it up to [DONE]."""
    block = re.search(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", output, re.DOTALL)
    return block[1] if block else output.partition("[DONE]")[0]


def human_eval_program(record: dict[str, Any], output: str) -> str:
    """HumanEval's test of one completion: prompt, completion, test, call.

    A chat answer that repeats the function replaces the prompt's function.
    """
    whole = fenced(output)
    continues = output.lstrip("\n").startswith((" ", "\t"))
    told = f"def {record['entry_point']}(" in whole and not continues
    program = f"{record['prompt']}\n    pass\n\n{whole}" if told else record["prompt"] + completion(output)
    return f"{program}\n\n{record['test']}\n\ncheck({record['entry_point']})\n"


def mbpp_program(record: dict[str, Any], output: str) -> str:
    """MBPP's test of one answer: program, set-up (which may use the program's classes), asserts."""
    return "\n".join([fenced(output), record.get("test_setup_code") or "", *record["test_list"]]) + "\n"
