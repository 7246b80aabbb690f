"""Finds and loads the library that registers torch.ops.logprobd."""

import os
import pathlib

import torch

NAME = "liblogprobd_torch_ops.so"
# Not LOGPROBD_...: those are settings of the server, which refuses ones that it does not know.
VARIABLE = "LINEAR_LOGPROB_LIBRARY"


def load() -> None:
    """Loads the library named by LINEAR_LOGPROB_LIBRARY, or the one in this package. ImportError says
    how to get one."""
    path = os.environ.get(VARIABLE) or pathlib.Path(__file__).with_name(NAME)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"cannot load {path}: {error}. Build the target logprobd_torch_ops with the torch that "
            f"is imported here ({torch.__version__}), and name the library in {VARIABLE}"
        ) from None
