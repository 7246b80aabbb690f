"""Scores of one row, computed from their definitions in double precision."""

import numpy as np


def log_softmax(logits, temperature=1.0):
    x = np.asarray(logits, np.float64) / temperature
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def entropy(logits, temperature=1.0):
    logp = log_softmax(logits, temperature)
    return -(np.exp(logp) * logp).sum()


def logits_of(server, hidden):
    return np.asarray(hidden, np.float64) @ np.asarray(server.weight, np.float64).T
