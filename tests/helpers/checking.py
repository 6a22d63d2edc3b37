"""`Checker` with some of its probes."""

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel

from skipstone import Method
from skipstone.lab.check.check import Checker, CheckReport, CheckScale


class PartialChecker(Checker):
    """Plain decoding's probe and one other."""

    only = ""

    def _probes(self) -> list[tuple[str, Callable[[], None]]]:
        return [one for number, one in enumerate(super()._probes()) if number == 0 or one[0] == self.only]


def run_probe(model: PreTrainedModel, method: Method, prompts: list[Tensor], only: str, samples: int = 200) -> CheckReport:
    checker = PartialChecker(model, method, prompts, CheckScale(max_new_tokens=24, samples=samples))
    checker.only = only
    report = checker.run()
    assert [finding.name for finding in report.findings][1:] == [only]
    return report
