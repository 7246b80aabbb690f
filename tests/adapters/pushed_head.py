"""The small head of the tests that push one: a server of it, and digests of what is pushed."""

import hashlib
import pathlib

import ml_dtypes
import torch
from model_folder import write_biased_head
from network_security import NetworkSecurity
from server_process import ServerProcess

VOCAB, HIDDEN = 1003, 64  # odd, so that two ranks have different numbers of rows


def server_of(
    folder: pathlib.Path, binaries: pathlib.Path, security: NetworkSecurity | None = None
) -> ServerProcess:
    """Returns a server, yet to be started, whose admin listener takes pushes: on a Unix socket, or with `security` on
    TCP from clients with its certificate and a token."""
    admin = ["--admin", "auto"]
    if security is not None:
        admin = ["--admin", "127.0.0.1:0", *security.server_flags()]
    return ServerProcess(binaries, "--model", str(folder), *admin)


def write_bf16_head(folder: pathlib.Path, weight: torch.Tensor, bias: torch.Tensor) -> pathlib.Path:
    """Writes a head with a bias, rounded to bf16 as those that are pushed to it must be. Returns the folder."""
    arrays = (each.float().numpy().astype(ml_dtypes.bfloat16) for each in (weight, bias))
    return write_biased_head(folder, *arrays)


def digest(*tensors: torch.Tensor) -> str:
    """Returns the sha256 of a version whose weight, and bias if it has one, are these, rounded to bf16."""
    rounded = [each.float().numpy().astype(ml_dtypes.bfloat16).tobytes() for each in tensors]
    return hashlib.sha256(b"".join(rounded)).hexdigest()
