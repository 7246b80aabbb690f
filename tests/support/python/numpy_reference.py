"""Scores of one row of logits in double precision, straight from their definitions."""

import numpy as np


def log_softmax(logits, temperature=1.0):
    x = np.asarray(logits, np.float64) / temperature
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def entropy(logits, temperature=1.0):
    logp = log_softmax(logits, temperature)
    return -(np.exp(logp) * logp).sum()


def logits_of(head, hidden):
    """Logits of hidden rows. `head.weight` [vocab, hidden] has the stored values, which are used exactly."""
    return np.asarray(hidden, np.float64) @ np.asarray(head.weight, np.float64).T
