"""Adapters of logprobd for evaluation and training frameworks.

A Scorer computes log-probabilities of tokens from hidden states: RemoteScorer by a logprobd server,
LocalScorer by the operator logprobd_ops in this process. Each adapter works with both.
"""

from logprobd_adapters.scorer import LocalScorer, RemoteScorer, Scorer, Scores

__all__ = ["LocalScorer", "RemoteScorer", "Scorer", "Scores"]

__version__ = "0.2.0"
