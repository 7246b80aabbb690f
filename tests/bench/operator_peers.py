"""Imports the linear cross entropy functions of other packages for operator_bench.py."""

import importlib
from collections.abc import Callable

from torch import Tensor

Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _verl() -> Scores:
    score = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def scores(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return score(hidden, weight, target, 1.0, "none")

    return scores


def _cce() -> Scores:
    loss = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def scores(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return (loss(hidden, weight, target, reduction="none"),)

    return scores


def _liger() -> Scores:
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")

    def scores(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        # ignore_index, lse_square_scale and label_smoothing have their default values.
        function = module.LigerFusedLinearCrossEntropyFunction
        loss = function.apply(hidden, weight, target, None, None, -100, 0.0, 0.0, "mean")
        return (loss[0] if isinstance(loss, tuple) else loss,)

    return scores


# verl returns both scores of each token, CCE returns the loss of each token, and Liger (Triton) returns the mean loss.
PEERS = {
    "verl": _verl,
    "CCE, no entropy": _cce,
    "Liger Triton, mean loss, no entropy": _liger,
}


def importable() -> dict[str, Scores]:
    found = {}
    for name, peer in PEERS.items():
        try:
            found[name] = peer()
        except ImportError:
            continue
    return found
