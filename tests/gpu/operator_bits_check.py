#!/usr/bin/env python3
"""Checks that the service and the PyTorch operator score the same rows with the same bits.

    python3 tests/gpu/operator_bits_check.py SERVER_BINARY [--device cuda]

Writes heads of several sizes, dtypes and transforms, starts one server with all of them, scores rows with the Python
client and with linear_logprob, and compares logprob, entropy, lse and argmax. Where the server can split a head (on a
CPU, or with several GPUs), each head is also served in two shards. Prints a line for each head and dtype of rows, and
exits with 1 if bits differ. LINEAR_LOGPROB_LIBRARY names the operator's library. Needs torch, grpcio and ml_dtypes.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / folder)
    for folder in ("client/python", "kernels/torch_ops/python", "tests/support/python")
]

from logprobd import Client  # noqa: E402
from logprobd_ops import linear_logprob  # noqa: E402
from model_folder import write_safetensors  # noqa: E402
from server_process import ServerProcess  # noqa: E402

IGNORED = -100
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BITS = {BF16: ml_dtypes.bfloat16, F16: np.float16, F32: np.float32}
OUTPUTS = {"logprob": "logprob", "entropy": "entropy", "lse": "lse", "argmax": "argmax_id"}


@dataclasses.dataclass
class Head:
    """A head and the dtypes of rows that both sides must score with the same bits."""

    name: str
    hidden_size: int
    vocab: int
    dtype: torch.dtype = BF16
    scale: float = 1.0
    softcap: float | None = None
    has_bias: bool = False
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def row_dtypes(self) -> tuple[torch.dtype, ...]:
        # On a GPU, rows of another dtype than an fp16 head's are multiplied in fp32, by different products.
        is_on_gpu = self.weight is not None and self.weight.is_cuda
        return (F16,) if self.dtype == F16 and is_on_gpu else (BF16, F16, F32)

    def write(self, folder: pathlib.Path, device: str, seed: int) -> pathlib.Path:
        """Draws the head on the device and writes it as a model folder, which it returns."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.vocab, self.hidden_size)
        weight = torch.randn(shape, generator=generator, device=device) / self.hidden_size**0.5
        self.weight = weight.to(self.dtype)
        tensors = {"lm_head.weight": numpy_of(self.weight)}
        if self.has_bias:
            bias = torch.randn(self.vocab, generator=generator, device=device)
            self.bias = bias.to(self.dtype)
            tensors["lm_head.bias"] = numpy_of(self.bias)
        path = folder / self.name
        path.mkdir()
        write_safetensors(path / "model.safetensors", tensors)
        config = {
            "model_type": "muse_glimmer",  # has a scale and a cap
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "output_multiplier": self.scale,
            "final_logit_softcapping": self.softcap,
        }
        (path / "config.json").write_text(json.dumps(config))
        return path


def numpy_of(tensor: Tensor) -> np.ndarray:
    words = torch.int32 if tensor.element_size() == 4 else torch.int16
    return tensor.cpu().view(words).numpy().view(BITS[tensor.dtype])


TRANSFORMS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "cap": {"softcap": 30.0},
    "bias": {"has_bias": True},
    "all": {"scale": 1.7, "softcap": 30.0, "has_bias": True},
}


def heads_for(device: str) -> list[Head]:
    size = (1024, 5003) if device == "cuda" else (72, 1003)
    heads = [
        Head(f"{name}-{str(dtype).removeprefix('torch.')}", *size, dtype, **options)
        # On a GPU, all rows of fp32 heads are multiplied in fp32, by different products.
        for dtype in ((BF16, F16) if device == "cuda" else (BF16, F16, F32))
        for name, options in TRANSFORMS.items()
    ]
    if device == "cuda":
        # At H = 2048, unlike at the other sizes, fp32(0.7) and fp64(0.7) have scales of other bits.
        heads += [Head(f"{h}x{v}", h, v) for h, v in ((4096, 32_064), (1024, 50_257))]
        heads += [Head("2048x151936", 2048, 151_936)]
    return heads


def differences(client: Client, name: str, head: Head, row_dtype: torch.dtype) -> tuple[int, str]:
    """Returns the number of comparisons, and which of them differ."""
    device = head.weight.device
    generator = torch.Generator(device).manual_seed(7)
    counts = (1, 63, 300, 1024, 5000) if device.type == "cuda" else (1, 63, 300)
    rows = counts[-1]
    spread = torch.linspace(1, 20, rows, device=device).unsqueeze(1)  # flat to peaked rows
    hidden = torch.randn((rows, head.hidden_size), generator=generator, device=device) * spread
    hidden = hidden.to(row_dtype)
    targets = torch.randint(head.vocab, (rows,), generator=generator, device=device)
    targets[5::7] = IGNORED
    a_row = torch.rand(rows, generator=generator, device=device) * 2 + 0.3
    compared, wrong = 0, []
    for count in counts:
        for temperature in (0.7, a_row[:count]):
            by_operator = linear_logprob(
                hidden[:count],
                head.weight,
                targets[:count],
                head.bias,
                temperature=temperature,
                scale=head.scale,
                softcap=head.softcap,
                return_argmax=True,
            )
            by_server = client.score(
                hidden[:count].cpu(),
                targets[:count].cpu(),
                temperature=temperature if isinstance(temperature, float) else temperature.cpu(),
                outputs=tuple(OUTPUTS),
                head=name,
            )
            is_valid = targets[:count].cpu() != IGNORED
            for field, answer in OUTPUTS.items():
                ours = getattr(by_operator, field).cpu()[is_valid]
                theirs = torch.as_tensor(getattr(by_server, answer))[is_valid]
                compared += 1
                if not torch.equal(ours, theirs):
                    kind = "0.7" if isinstance(temperature, float) else "a row"
                    error = (ours.double() - theirs.double()).abs().max().item()
                    wrong.append(f"{field} of {count} rows, temperature {kind}: {error:.2g}")
    return compared, "; ".join(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("server", type=pathlib.Path, help="the built logprobd")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    has_shards = options.device == "cpu" or torch.cuda.device_count() > 1
    binary = options.server.resolve()
    right = total = 0
    with tempfile.TemporaryDirectory() as name:
        heads, arguments = {}, []
        for seed, head in enumerate(heads_for(options.device)):
            path = head.write(pathlib.Path(name), options.device, seed)
            for served, num_shards in ((head.name, 1), (f"{head.name}-in-2-shards", 2)):
                if num_shards == 1 or has_shards:
                    heads[served] = head
                    arguments += ["--model", f"{served}={path}"]
                    arguments += ["--shards", f"{served}={num_shards}"]
        process = ServerProcess(binary.parent, *arguments, device=options.device)
        with process, Client(process.grpc) as client:
            for served, head in heads.items():
                for row_dtype in head.row_dtypes:
                    compared, wrong = differences(client, served, head, row_dtype)
                    total += 1
                    right += not wrong
                    rows = f"{str(row_dtype).removeprefix('torch.')} rows"
                    print(f"{served:32s} {rows:14s} {compared:3d} {wrong or 'same bits'}")
    print(f"{right} of {total} right")
    return 0 if total and right == total else 1


if __name__ == "__main__":
    sys.exit(main())
