"""Log-probability and entropy of tokens from hidden states and the head's weight, with gradients.

    from logprobd_ops import linear_logprob
    scores = linear_logprob(hidden, weight, target, temperature=0.7)
    (advantage * scores.logprob).sum().backward()

By default, no tensor of [rows, vocabulary] logits is created. `linear_cross_entropy` computes the
usual losses, `linear_divergence` compares a student with a teacher, and `logprobd_ops.compat` has
replacements for the operators of other packages.
"""

from logprobd_ops.linear_divergence import (
    LinearDivergenceLossOutput,
    LinearDivergenceOutput,
    linear_divergence,
    linear_divergence_loss,
)
from logprobd_ops.linear_logprob import LinearLogprobOutput, linear_logprob
from logprobd_ops.linear_logprob_loss import LinearLogprobLossOutput, linear_logprob_loss
from logprobd_ops.losses import LinearCrossEntropyOutput, linear_cross_entropy

__all__ = [
    "LinearCrossEntropyOutput",
    "LinearDivergenceLossOutput",
    "LinearDivergenceOutput",
    "LinearLogprobLossOutput",
    "LinearLogprobOutput",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_divergence_loss",
    "linear_logprob",
    "linear_logprob_loss",
]
