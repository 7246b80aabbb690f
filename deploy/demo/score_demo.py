#!/usr/bin/env python3
"""Scores a few rows on a running server and in double precision, and compares the results.

    python3 deploy/demo/score_demo.py --model DIR [--address 127.0.0.1:8470]

The rows are drawn from N(0, 1) and rounded to bfloat16. The reference reads the tensor of the
served head from the model folder, a block of rows at a time. Exits with 1 if a difference exceeds
the tolerance or an error occurs. Needs the logprobd package and NumPy.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import logprobd
import numpy as np
import numpy.typing as npt
from logprobd.demo_model import bf16

Floats = npt.NDArray[np.float64]

BLOCK_BYTES = 64 << 20  # size of a block of the weight in double precision
TYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}


class ModelError(Exception):
    """Raised if the model folder cannot be read."""


def tensor_file(folder: Path, tensor: str) -> Path:
    """Returns the safetensors file that contains a tensor."""
    index = folder / "model.safetensors.index.json"
    if folder.is_file():
        return folder
    if index.is_file():
        name: str | None = json.loads(index.read_text())["weight_map"].get(tensor)
        if name is None:
            raise ModelError(f"{index} does not name {tensor}")
        return folder / name
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelError(f"{folder} has {len(files)} safetensors files and no index")
    return files[0]


def open_tensor(folder: Path, tensor: str) -> tuple[npt.NDArray[np.generic], str]:
    """Maps a tensor as it is stored. Returns the mapped array and the name of its type."""
    path = tensor_file(folder, tensor)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length)).get(tensor)
    if entry is None or entry["dtype"] not in TYPES:
        raise ModelError(f"{path} has no {tensor} of type {', '.join(TYPES)}")
    begin = 8 + length + entry["data_offsets"][0]
    shape = tuple(entry["shape"])
    return np.memmap(path, TYPES[entry["dtype"]], "r", begin, shape), entry["dtype"]


def as_double(values: npt.NDArray[np.generic], kind: str) -> Floats:
    if kind == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def logits(model: Path, head: logprobd.HeadInfo, hidden: Floats) -> Floats:
    """Computes the logits [rows, vocab_size]: applies the scale, then the bias, then the cap."""
    weight, kind = open_tensor(model, head.tensor)
    step = max(1, BLOCK_BYTES // (8 * head.hidden_size))
    z = np.empty((len(hidden), head.vocab_size))
    for begin in range(0, head.vocab_size, step):
        end = min(begin + step, head.vocab_size)
        z[:, begin:end] = hidden @ as_double(weight[begin:end], kind).T
    z *= head.scale
    if head.has_bias:
        bias, kind = open_tensor(model, head.tensor.removesuffix("weight") + "bias")
        z += as_double(bias[: head.vocab_size], kind)
    return head.softcap * np.tanh(z / head.softcap) if head.softcap > 0 else z


def reference(z: Floats, targets: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Returns the logprob of each target and the entropy of each row."""
    shifted = z - z.max(axis=1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logp[np.arange(len(z)), targets], -(np.exp(logp) * logp).sum(axis=1)


def compare(arguments: argparse.Namespace) -> float:
    """Prints the table. Returns the largest difference."""
    with logprobd.Client(arguments.address, timeout=arguments.timeout) as client:
        client.wait_ready()
        head = client.info(arguments.head)
        draw = np.random.default_rng(arguments.seed)
        normal = draw.standard_normal((arguments.rows, head.hidden_size), dtype=np.float32)
        bits = bf16(normal)
        targets = draw.integers(0, head.vocab_size, arguments.rows)
        result = client.score(bits, targets, dtype="bf16", head=head.name)
    z = logits(arguments.model, head, as_double(bits, "BF16"))
    logprob, entropy = reference(z, targets)
    difference = np.maximum(np.abs(result.logprob - logprob), np.abs(result.entropy - entropy))
    for line in table(targets, result, logprob, entropy, difference):
        print(line)
    # A NaN counts as an infinite difference.
    return float(np.where(np.isnan(difference), np.inf, difference).max())


def table(
    targets: npt.NDArray[np.int64],
    result: logprobd.ScoreResult,
    logprob: Floats,
    entropy: Floats,
    difference: Floats,
) -> Iterator[str]:
    """Yields the lines of the table, one for each row after two lines of titles."""
    yield "                     server                reference (double)"
    yield "row   target     logprob   entropy      logprob     entropy   difference"
    for row, target in enumerate(targets):
        yield (
            f"{row:3d}  {target:7d}  {result.logprob[row]:10.5f}  {result.entropy[row]:8.5f}"
            f"  {logprob[row]:11.6f}  {entropy[row]:10.6f}   {difference[row]:10.1e}"
        )


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the served model")
    parser.add_argument("--address", help="default: LOGPROBD_ADDRESS, else 127.0.0.1:8470")
    parser.add_argument("--head", default="", help="name of the head; default: the only head")
    parser.add_argument("--rows", type=positive, default=8, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="nats, default: %(default)s")
    parser.add_argument("--timeout", type=float, default=60, help="seconds, default: %(default)s")
    arguments = parser.parse_args()
    try:
        worst = compare(arguments)
    except (logprobd.LogprobdError, ModelError, OSError, ValueError) as error:
        print(f"score_demo: {error}", file=sys.stderr)
        return 1
    if not worst <= arguments.tolerance:
        print(
            f"score_demo: a difference is above {arguments.tolerance:g} nats: {worst:.1e}",
            file=sys.stderr,
        )
        return 1
    print(f"the largest difference, {worst:.1e} nats, is within {arguments.tolerance:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
