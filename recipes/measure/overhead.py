"""Training time of LayerSkip's recipe compared with plain training, all variants alternating.

    python recipes/measure/overhead.py [--layers 24 --hidden 192 --rounds 12 --bf16]

Plain training is transformers' own forward with labels. The recipe: rotational exits with R = L / 3 by cross-entropy (the
paper's loss), the same with the divergence from the last layer (ours), and layer dropout at several rates without exits, next
to the share of layer passes that dropout skips. Prints a table in Markdown and, as its last line, one JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from skipstone.train.layerskip.objective import LayerSkipObjective
from skipstone.train.layerskip.schedules import EarlyExitLoss, LayerDropout, LayerSkipRecipe

STEPS = 1000  # of the schedules
WARM_UP = 2
LAST_ALONE = EarlyExitLoss(0.0, "none")


def model(layers: int, hidden: int, vocab: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def variants(network: Any, layers: int) -> dict[str, Callable[[Tensor, int], Tensor]]:
    """Name -> (ids [B, T], step) -> loss."""

    def plain(ids: Tensor, _: int) -> Tensor:
        return network(input_ids=ids, labels=ids).loss

    def recipe(p_max: float, exits: EarlyExitLoss) -> Callable[[Tensor, int], Tensor]:
        objective = LayerSkipObjective(network, LayerSkipRecipe(LayerDropout(p_max), exits), STEPS, seed=0)

        def loss(ids: Tensor, step: int) -> Tensor:
            objective.step = objective.micro = step
            return objective.loss(ids, labels=ids)

        return loss

    third = layers // 3
    return {
        "plain": plain,
        f"exits, rotational, R = {third}": recipe(0.0, EarlyExitLoss(0.2, "rotational", third)),
        f"exits, rotational, R = {third}, divergence": recipe(0.0, EarlyExitLoss(0.2, "rotational", third, kl_weight=1.0)),
        **{f"layer dropout, p_max = {p}": recipe(p, LAST_ALONE) for p in (0.1, 0.5, 1.0)},
        f"the paper's: exits, R = {third}, and layer dropout, p_max = 0.1": recipe(
            0.1, EarlyExitLoss(0.2, "rotational", third)
        ),
    }


def dropped(p_max: float, layers: int) -> float:
    """Mean share of layer passes that dropout skips."""
    return statistics.fmean(LayerDropout(p_max).rates(0, layers, STEPS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    network = model(args.layers, args.hidden, args.vocab)
    losses = variants(network, args.layers)
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    made = torch.Generator().manual_seed(0)
    for number in range(WARM_UP + args.rounds):
        ids = torch.randint(args.vocab, (args.batch, args.length), generator=made)
        order = [*losses][number % len(losses) :] + [*losses][: number % len(losses)]
        for name in order:
            network.zero_grad()
            started = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16) if args.bf16 else nullcontext():
                loss = losses[name](ids, number)
            loss.backward()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    total = {name: sum(own) for name, own in seconds.items()}
    rows = {name: {"ms_per_step": 1000 * own / args.rounds, "over_plain": own / total["plain"]} for name, own in total.items()}
    print("| variant | ms a step (forward and backward) | x plain |\n| --- | --- | --- |")
    for name, row in rows.items():
        print(f"| {name} | {row['ms_per_step']:.0f} | {row['over_plain']:.2f} |")
    left_out = {p: dropped(p, args.layers) for p in (0.1, 0.5, 1.0)}
    print("\nSkipped layer passes: " + ", ".join(f"{100 * share:.1f} % at p_max = {p}" for p, share in left_out.items()))
    print(json.dumps({"kind": "training-overhead", "settings": vars(args), "rows": rows, "left_out": left_out}))


if __name__ == "__main__":
    main()
