#!/usr/bin/env python3
"""Prints a SHA-256 digest of the result bits of the service and of the operator on seeded inputs.

    python3 tests/gpu/output_digest.py --bin-dir build/release/bin --library build/release/lib/liblogprobd_torch_ops.so

Two commits with the same digests give the same bits on this machine. The digests depend on the CPU or GPU
model and on the thread count, so compare them only within one machine. `--root` names the source tree whose
Python packages are used, which allows digests of an older build. Needs numpy, ml_dtypes, grpcio and torch.
"""

import argparse
import hashlib
import json
import pathlib
import sys
import tempfile

import ml_dtypes
import numpy as np

HERE = pathlib.Path(__file__).resolve().parents[2]
VOCAB, HIDDEN = 5_003, 256
OUTPUTS = (
    "logprob",
    "entropy",
    "lse",
    "argmax",
    "greedy",
    "sum_p_squared",
    "max_logit",
    "min_logit",
)
# Row counts around the edges of the row tiles (64, 128, 256), one of them odd.
SERVICE_ROWS = (1, 63, 200, 511)
OPERATOR_ROWS = (5, 129, 700)


class Digest:
    """SHA-256 over the dtype, shape and bytes of arrays, in the order in which they are added."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, array: object) -> None:
        if array is None:
            return
        values = np.ascontiguousarray(np.asarray(array))
        self._hash.update(f"{values.dtype}{values.shape}".encode())
        self._hash.update(values.tobytes())

    def hex(self) -> str:
        return self._hash.hexdigest()[:16]


def service_digests(bin_dir: pathlib.Path, device: str) -> dict[str, str]:
    """Returns a digest of all outputs of several requests for each head dtype and hidden dtype."""
    from logprobd import Client
    from model_folder import ModelFolder
    from server_process import ServerProcess

    digests = {}
    for head_dtype, stddev in (("BF16", 3.0), ("F16", 10.0), ("F32", 3.0)):
        with tempfile.TemporaryDirectory() as folder:
            model = ModelFolder.write(
                pathlib.Path(folder),
                vocab=VOCAB,
                hidden=HIDDEN,
                dtype=head_dtype,
                logit_stddev=stddev,
            )
            with ServerProcess(bin_dir, "--model", str(model.path), device=device) as server:
                client = Client(server.grpc)
                for dtype in (ml_dtypes.bfloat16, np.float16, np.float32):
                    digest = Digest()
                    for rows in SERVICE_ROWS:
                        add_service_results(digest, client, rows, dtype)
                    digests[f"service {head_dtype} {np.dtype(dtype).name}"] = digest.hex()
                client.close()
    return digests


def add_service_results(digest: Digest, client: object, rows: int, dtype: type) -> None:
    random = np.random.default_rng(rows)
    hidden = random.standard_normal((rows, HIDDEN), dtype=np.float32).astype(dtype)
    targets = random.integers(0, VOCAB, rows)
    targets[rows // 2] = -100
    temperatures = random.uniform(0.5, 2.0, rows).astype(np.float32)
    candidates = [random.integers(0, VOCAB, row % 4) for row in range(rows)]
    for temperature in (1.0, temperatures):
        result = client.score(  # type: ignore[attr-defined]
            hidden,
            targets,
            temperature=temperature,
            outputs=OUTPUTS,
            top_k=5,
            candidates=candidates,
        )
        for name in (
            "logprob",
            "entropy",
            "lse",
            "argmax_id",
            "argmax_logprob",
            "greedy",
            "sum_p_squared",
            "max_logit",
            "min_logit",
            "top_k_ids",
            "top_k_logprobs",
        ):
            digest.add(getattr(result, name))
        for row in result.candidate_logprobs:
            digest.add(row)


def operator_digests(device: str) -> dict[str, str]:
    """Returns digests of the operator's and its losses' scores and gradients for each dtype and memory mode."""
    import torch
    from logprobd_ops import linear_cross_entropy, linear_logprob

    def tensors(rows: int, dtype: "torch.dtype") -> tuple["torch.Tensor", ...]:
        random = np.random.default_rng(rows)
        hidden = torch.from_numpy(random.standard_normal((rows, HIDDEN), dtype=np.float32))
        weight = torch.from_numpy(random.standard_normal((VOCAB, HIDDEN), dtype=np.float32))
        target = torch.from_numpy(random.integers(0, VOCAB, rows))
        target[::7] = -100
        hidden, weight = hidden.to(device, dtype), (weight * 3 / HIDDEN**0.5).to(device, dtype)
        return hidden.requires_grad_(), weight.requires_grad_(), target.to(device)

    def add(digest: Digest, *values: "torch.Tensor") -> None:
        for value in values:
            digest.add(
                value.detach().cpu().to(torch.float64 if value.is_floating_point() else torch.int64)
            )

    digests = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for memory in ("recompute", "cached"):
            digest = Digest()
            for rows in OPERATOR_ROWS:
                hidden, weight, target = tensors(rows, dtype)
                scores = linear_logprob(hidden, weight, target, temperature=0.7, memory=memory)
                logprob, entropy, lse = scores[0], scores[1], scores[2]
                upstream = torch.linspace(-1, 1, rows, device=device)
                ((logprob + 0.1 * entropy + 0.01 * lse) * upstream).sum().backward()
                add(digest, logprob, entropy, lse, hidden.grad, weight.grad)
            digests[f"operator {dtype} {memory}"] = digest.hex()
        for name, keywords in {
            "mean loss": {},
            "smoothed capped loss": {"label_smoothing": 0.1, "softcap": 20.0, "z_loss": 1e-4},
        }.items():
            digest = Digest()
            for rows in OPERATOR_ROWS:
                hidden, weight, target = tensors(rows, dtype)
                loss = linear_cross_entropy(hidden, weight, target, **keywords)
                loss = loss if isinstance(loss, torch.Tensor) else loss[0]
                loss.backward()
                add(digest, loss, hidden.grad, weight.grad)
            digests[f"operator {dtype} {name}"] = digest.hex()
    return digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--bin-dir",
        type=pathlib.Path,
        help="folder with the logprobd binary; without it the service is skipped",
    )
    parser.add_argument(
        "--library", help="liblogprobd_torch_ops.so; without it the operator is skipped"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--root", type=pathlib.Path, default=HERE, help="source tree of the Python packages"
    )
    parser.add_argument("--out", type=pathlib.Path, help="write the digests as JSON to this file")
    arguments = parser.parse_args()

    root = arguments.root
    sys.path[:0] = [
        str(root / "client/python"),
        str(root / "tests/support/python"),
        str(root / "kernels/torch_ops/python"),
    ]
    digests = {}
    if arguments.bin_dir:
        digests |= service_digests(arguments.bin_dir, arguments.device)
    if arguments.library:
        import os

        os.environ["LINEAR_LOGPROB_LIBRARY"] = arguments.library
        digests |= operator_digests(arguments.device)
    for name, digest in digests.items():
        print(f"{digest}  {arguments.device} {name}")
    total = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]
    print(f"{total}  {arguments.device} all")
    if arguments.out:
        arguments.out.write_text(json.dumps(digests, indent=1))


if __name__ == "__main__":
    main()
