"""Whether entropy and Jensen-Shannon distance separate accepted from rejected drafts (AdaSD, Figures 2 and 3).

    python recipes/measure/separation.py gsm8k --data-dir FOLDER --picture docs/figures/adasd-separation.png [--draft PATH]

nano-draft drafts for nano in windows of 20, verified by the ordinary rule at temperature 1 (`--temperature 0`: greedily).
Prints a table in Markdown and, as its last line, one JSON document. "Nearer than half-way" is the share of drafts with a
distance below the middle of both means. The picture shows every prompt's means and the distances of all tokens.
"""

import argparse
import json
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor

import skipstone
from skipstone import AdaSD
from skipstone.decoding.draft import Draft, GreedyVerdict, Verdict
from skipstone.lab.bench.plan import read, resolved
from skipstone.lab.bench.prompts import conversations
from skipstone.lab.tasks.dialogue import PromptBuilder
from skipstone.methods.adasd import adasd
from skipstone.methods.adasd.adasd import AdaSDDrafter

Tokens = list[tuple[bool, float, float]]
"""(accepted, entropy in bits, distance) of every verified draft token."""


class RecordingDrafter(AdaSDDrafter):
    """Records entropies and distances, and waives no token."""

    judged_tokens: Tokens = []  # noqa: RUF012 - one list for all drafters of this script

    def waive_tokens(self, draft: Draft, scores: Any) -> None:
        super().waive_tokens(draft, scores)

    def observe_scores(self, draft: Draft, scores: Any, verdict: Verdict | GreedyVerdict) -> Tensor | None:
        if self._distances is not None and self._entropies is not None:
            num_accepted, num_judged = int(verdict.accepted[0]), min(int(verdict.accepted[0]) + 1, int(draft.valid.sum()))
            figures = zip(self._entropies[0, :num_judged].tolist(), self._distances[0, :num_judged].tolist(), strict=True)
            self.judged_tokens += [(place < num_accepted, *one) for place, one in enumerate(figures)]
        return super().observe_scores(draft, scores, verdict)


def save_figure(samples: list[Tokens], path: Path) -> None:
    """Draw Figures 2 and 3."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8))
    for axis, place, name in ((left, 1, "mean entropy (bits)"), (middle, 2, "mean JS distance")):
        for accepted, colour, marker in ((True, "tab:blue", "o"), (False, "tab:orange", "x")):
            values = [[one[place] for one in sample if one[0] is accepted] for sample in samples]
            points = [(number, mean(one)) for number, one in enumerate(values) if one]
            axis.scatter(*zip(*points, strict=True), c=colour, marker=marker, label="accepted" if accepted else "rejected")
        axis.set(xlabel="prompt", ylabel=name)
    for accepted, colour in ((True, "tab:blue"), (False, "tab:orange")):
        values = [one[2] for sample in samples for one in sample if one[0] is accepted]
        right.hist(
            values, 40, range=(0, 1), color=colour, alpha=0.6, density=True, label="accepted" if accepted else "rejected"
        )
    right.set(xlabel="JS distance", ylabel="density")
    figure.legend(*right.get_legend_handles_labels(), loc="upper center", ncols=2)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(path, dpi=110)


def table(samples: list[Tokens]) -> None:
    """Counts and means of accepted and of rejected drafts."""
    tokens = [one for sample in samples for one in sample]
    middle_distance = mean(mean(one[2] for one in tokens if one[0] is accepted) for accepted in (True, False))
    columns = ["drafts", "tokens", "mean entropy (bits)", "mean JS distance", "nearer than half-way"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for accepted in (True, False):
        group = [one for one in tokens if one[0] is accepted]
        figures = [f"{mean(one[1] for one in group):.2f}", f"{mean(one[2] for one in group):.3f}"]
        figures.append(f"{mean(one[2] < middle_distance for one in group):.2f}")
        print(f"| {'accepted' if accepted else 'rejected'} | {len(group)} | {' | '.join(figures)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--draft", default=None)
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    model, tokenizer = skipstone.load()
    task_settings = {"task": args.task, "num_prompts": args.num_prompts, "max_new_tokens": args.max_new_tokens}
    plan = read(None, {"methods": ["autoregressive"], "tasks": [task_settings]})
    ((task, settings),) = resolved(plan)
    _, questions = conversations(task, settings, plan, args.data_dir)
    prompt_builder = PromptBuilder(tokenizer, settings.chat, 2048 - args.max_new_tokens)
    adasd.AdaSDDrafter = RecordingDrafter  # type: ignore[misc]
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    samples: list[Tokens] = []
    for seed, one in enumerate(questions):
        RecordingDrafter.judged_tokens = []
        options = {"max_new_tokens": args.max_new_tokens, "seed": seed, "eos_token_id": None, "top_k": 0, **sampling}
        with warnings.catch_warnings():  # windows of 20 are known to be slow
            warnings.simplefilter("ignore", RuntimeWarning)
            method = AdaSD(args.draft, num_speculative_tokens=20, adaptive_length=False)
            skipstone.generate(model, prompt_builder.ids(one), method, **options)
        samples.append(RecordingDrafter.judged_tokens)
    table(samples)
    if args.picture is not None:
        save_figure(samples, args.picture)
    print(json.dumps({"prompts": len(samples), "tokens": sum(map(len, samples))}))


if __name__ == "__main__":
    main()
