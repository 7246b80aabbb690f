"""Scores cases with the operator for PyTorch on the CPU.

It runs in a process of its own, which reads a pickled list of keyword arguments of linear_logprob from stdin and writes
the pickled list of scores to stdout. Arrays are NumPy's.
"""

import pickle
import sys

import numpy as np
import torch
from logprobd_ops import linear_logprob

SCORES = ("logprob", "entropy", "lse")


def to_torch(value):
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def score(case: dict) -> dict[str, np.ndarray]:
    output = linear_logprob(**{name: to_torch(value) for name, value in case.items()})
    return {name: getattr(output, name).numpy() for name in SCORES}


if __name__ == "__main__":
    pickle.dump([score(case) for case in pickle.load(sys.stdin.buffer)], sys.stdout.buffer)
