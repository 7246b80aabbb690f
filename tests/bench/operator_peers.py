"""Imports the linear cross entropy functions of other packages for the benchmarks of the operator."""

import importlib
import os
from collections.abc import Callable, Mapping

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


def _liger_cute() -> Scores:
    # By default, Liger waits for the GPU in each call to check the targets.
    os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")
    module = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
    function = module.LigerFusedScaledCrossEntropySM90Function

    def scores(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        loss, entropy = function.apply(hidden, weight, target, 1.0, -100, 1, True)
        return -loss, entropy

    return scores


def _quack() -> Scores:
    _let_quack_name_unknown_objects()
    loss = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy

    def scores(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return (loss(hidden, weight, target, reduction="mean", tuned=False),)

    return scores


def _quack_forward() -> Scores:
    _let_quack_name_unknown_objects()
    # This is the path of chunked_linear_cross_entropy without gradients, before its reduction.
    loss = importlib.import_module("quack.linear_cross_entropy")._scaled_exp_lce_loss_only

    def scores(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return (-loss(hidden, weight, target, -100),)

    return scores


def _let_quack_name_unknown_objects() -> None:
    """Lets QuACK 0.6.5 run with nvidia-cutlass-dsl 4.7: its key for compiled kernels refuses some objects, which
    are named by their type here."""
    identity = importlib.import_module("quack.gemm_runtime.identity")
    known = identity.semantic_value_key

    def key(value: object, seen: object) -> object:
        try:
            return known(value, seen)
        except TypeError:
            return (
                "opaque",
                type(value).__module__,
                type(value).__qualname__,
                str(getattr(value, "__qualname__", getattr(value, "name", ""))),
            )

    identity.semantic_value_key = key


# verl and Liger CuTe return both scores of each token, CCE returns the loss of each token, and Liger (Triton) and
# QuACK return the mean loss.
PEERS = {
    "verl": _verl,
    "CCE, no entropy": _cce,
    "Liger Triton, mean loss, no entropy": _liger,
    "Liger CuTe": _liger_cute,
    "QuACK, mean loss, no entropy": _quack,
}
# These packages take about as long as the operator. The others would take minutes for large numbers of rows.
FAST_PEERS = ("Liger CuTe", "QuACK, mean loss, no entropy")


# The forwards that operator_forward_bench.py measures, without gradients.
FORWARD_PEERS = {
    "Liger CuTe": _liger_cute,
    "QuACK, no entropy": _quack_forward,
}


def importable(peers: Mapping[str, Callable[[], Scores]] = PEERS) -> dict[str, Scores]:
    """Returns the functions of those packages that can be imported."""
    found = {}
    for name, peer in peers.items():
        try:
            found[name] = peer()
        except (ImportError, AttributeError):
            continue
    return found
