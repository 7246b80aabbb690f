"""Log-probability and entropy of tokens from hidden states and a head's weight, with gradients.

    from logprobd_ops import linear_logprob
    logprob, entropy, lse = linear_logprob(hidden, weight, target, temperature=0.7)
    (advantage * logprob).sum().backward()

Never holds [rows, vocabulary] logits. `linear_cross_entropy` has the usual losses on top of it, and
`logprobd_ops.compat` drop-ins for the operators of other packages.
"""

from logprobd_ops.linear_logprob import linear_logprob
from logprobd_ops.linear_logprob_loss import linear_logprob_loss
from logprobd_ops.losses import linear_cross_entropy

__all__ = ["linear_cross_entropy", "linear_logprob", "linear_logprob_loss"]
