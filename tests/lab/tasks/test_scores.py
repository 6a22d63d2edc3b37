"""Scores against hand-made answers, against the papers' definitions, and against the references' own solutions."""

import itertools

import pytest

from skipstone.lab.tasks import sandbox, scores


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 - 4 = <<16-3-4=9>>9 eggs a day.\n9 * 2 = $18\n#### 18", 18),
        ("#### 1,234", 1234),
        ("it is 7.\n\nQuestion: 2 + 2?\nAnswer: 4", 7),
        ("The answer is 1,000,000 people, all told.", 1_000_000),
        ("#### none of them, so 5", 5),
        ("12 #### nothing", 12),
        ("no number at all", None),
    ],
)
def test_final_numbers(text: str, number: float | None) -> None:
    assert scores.final_number(text) == number


def test_sums_are_right_when_they_end_in_the_same_number() -> None:
    reference = "5 + 5 = <<5+5=10>>10\n#### 10"
    assert scores.same_number("it is 10.", reference)
    assert scores.same_number("it is $10.00", reference)
    assert not scores.same_number("10, or rather 11", reference)
    assert not scores.same_number("ten", reference)
    with pytest.raises(ValueError, match="ends in no number"):
        scores.same_number("10", "ten")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (" B. The second one", "B"),
        ("The answer is (c).", "C"),
        ("A tough question. Answer: D", "D"),
        ("The answer is a prime number, so C", "C"),
        ("ABBA", None),
    ],
)
def test_choices(text: str, letter: str | None) -> None:
    assert scores.choice(text) == letter


def test_rouge_is_that_of_bigrams_and_longest_common_subsequences() -> None:
    found = scores.rouge("the cat sat down", "the cat lay down")
    assert found["rouge_2"] == pytest.approx(1 / 3)  # "the cat" of three bigrams on either side
    assert found["rouge_l"] == pytest.approx(3 / 4)  # the, cat, down of four
    assert scores.rouge("dogs", "cats") == {"rouge_2": 0.0, "rouge_l": 0.0}


@pytest.mark.parametrize(("samples", "passed"), [(5, 0), (5, 2), (5, 5)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(samples: int, passed: int) -> None:
    for k in range(1, samples + 1):
        draws = list(itertools.combinations([1] * passed + [0] * (samples - passed), k))
        assert scores.pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    for wrong in ((samples, samples + 1, 1), (samples, passed, samples + 1), (samples, passed, 0), (samples, -1, 1)):
        with pytest.raises(ValueError, match="pass@k needs"):
            scores.pass_at_k(*wrong)


ROW = {
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum. total([1, 2]) is 3."""\n',
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}


@pytest.mark.parametrize(
    ("output", "passed"),
    [
        ("    return sum(xs)\n", True),
        ("    return sum(xs)\n\n\ndef other():\n    this is no Python", True),
        ("    return sum(xs)\n\nif __name__ == '__main__':\n    total(", True),
        ("    return 3\n", False),
        ('    return sum(xs)\n\n\ndef total(xs: List[int]) -> int:\n    """The su', True),
        ("Here it is:\n```python\nfrom typing import List\n\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```", True),
        ("```\ndef total(xs):\n    return 1\n```", False),
        ("    return sum(xs)\n\n```python\ndef total(xs):\n    return 1\n```", True),
    ],
)
def test_completions_of_human_eval_run_against_its_tests(output: str, passed: bool) -> None:
    assert sandbox.run(scores.human_eval_program(ROW, output)).passed is passed


def test_answers_of_mbpp_run_against_its_asserts() -> None:
    row = {"test_setup_code": "K = double(1)", "test_list": ["assert double(2) == 4", "assert double(K) == 4"]}
    assert sandbox.run(scores.mbpp_program(row, "def double(x):\r\n\treturn 2 * x\n[DONE]\nthis is no Python")).passed
    assert sandbox.run(scores.mbpp_program(row, "Sure:\n```python\ndef double(x):\n    return x + x\n```")).passed
    assert not sandbox.run(scores.mbpp_program(row, "def double(x):\n    return x")).passed
