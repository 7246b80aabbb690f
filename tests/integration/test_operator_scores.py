"""The operator for PyTorch gives every bit of the server's scores for the same rows and head, on the CPU."""

import dataclasses
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import logprobd
import ml_dtypes
import numpy as np
import pytest
from model_folder import DTYPES, write_safetensors

ROWS, HIDDEN, VOCAB = (
    70,
    515,
    1003,
)  # the last tile and the last block of hidden elements are not whole
ROW_DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)
ROOT = pathlib.Path(__file__).resolve().parents[2]

if not (shutil.which("nvcc") or pathlib.Path("/usr/local/cuda/bin/nvcc").exists()):
    pytest.skip("the operator is built by default only with CUDA", allow_module_level=True)


@dataclasses.dataclass
class Head:
    dtype: str
    scale: float = 1.0
    softcap: float | None = None
    has_bias: bool = False

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the weight, and the bias if there is one, as the checkpoint stores them."""
        random = np.random.default_rng(3)
        weight = random.standard_normal((VOCAB, HIDDEN)) * (4 / self.scale / HIDDEN**0.5)
        arrays = {"weight": weight.astype(DTYPES[self.dtype])}
        if self.has_bias:
            arrays["bias"] = random.standard_normal(VOCAB).astype(DTYPES[self.dtype])
        return arrays

    def write(self, folder: pathlib.Path) -> None:
        tensors = {f"lm_head.{name}": array for name, array in self.arrays().items()}
        write_safetensors(folder / "model.safetensors", tensors)
        config = {
            "model_type": "muse_glimmer",  # has a scale and a cap
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "tie_word_embeddings": False,
            "output_multiplier": self.scale,
            "final_logit_softcapping": self.softcap,
        }
        (folder / "config.json").write_text(json.dumps(config))

    def options(self) -> dict:
        return self.arrays() | {"scale": self.scale, "softcap": self.softcap}


HEADS = {
    "bf16": Head("BF16"),
    "fp16 with scale": Head("F16", scale=0.3),
    "fp32 with bias": Head("F32", has_bias=True),
    **{
        f"{name} with scale, bias and cap": Head(dtype, scale=0.3, softcap=9.0, has_bias=True)
        for name, dtype in (("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32"))
    },
}
TEMPERATURES = {
    "1": 1.0,
    "0.7": 0.7,
    "a row": np.random.default_rng(4).uniform(0.3, 2, ROWS).astype(np.float32),
}
CASES = [(dtype, name) for dtype in ROW_DTYPES for name in TEMPERATURES]


def rows_of(dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns hidden states whose logits are flat in the first rows and peaked in the last, and targets."""
    random = np.random.default_rng(5)
    spread = np.linspace(0.2, 4, ROWS)[:, np.newaxis]
    hidden = (random.standard_normal((ROWS, HIDDEN)) * spread).astype(dtype)
    hidden[7, 3] = np.nan
    return hidden, random.integers(0, VOCAB, ROWS)


@pytest.fixture(scope="module")
def operator_scores(binaries) -> dict[str, list[dict[str, np.ndarray]]]:
    """Returns the operator's scores of CASES for each head."""
    cases = []
    for head in HEADS.values():
        for dtype, name in CASES:
            hidden, target = rows_of(dtype)
            temperature = TEMPERATURES[name]
            cases.append(
                {"hidden": hidden, "target": target, "temperature": temperature} | head.options()
            )
    script = ROOT / "tests" / "support" / "python" / "operator_scores.py"
    library = binaries.parent / "lib" / "liblogprobd_torch_ops.so"
    environment = os.environ | {
        "LINEAR_LOGPROB_LIBRARY": os.environ.get("LINEAR_LOGPROB_LIBRARY", str(library)),
        "PYTHONPATH": str(ROOT / "kernels" / "torch_ops" / "python"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    result = subprocess.run(
        [sys.executable, str(script)],
        input=pickle.dumps(cases),
        stdout=subprocess.PIPE,
        env=environment,
        timeout=120,
        check=True,
    )
    scores = pickle.loads(result.stdout)
    return {name: [scores.pop(0) for _ in CASES] for name in HEADS}


@pytest.mark.parametrize("shards", (1, 3))
@pytest.mark.parametrize("name", HEADS)
def test_the_operator_has_the_bits_of_the_server(
    operator_scores, start_server, tmp_path, name, shards
) -> None:
    HEADS[name].write(tmp_path)
    server = start_server("--model", str(tmp_path), "--shards", str(shards))

    with logprobd.Client(server.grpc) as client:
        for (dtype, temperature), expected in zip(CASES, operator_scores[name], strict=True):
            hidden, target = rows_of(dtype)
            ours = client.score(
                hidden,
                target,
                temperature=TEMPERATURES[temperature],
                outputs=("logprob", "entropy", "lse"),
            )

            assert np.isnan(ours.lse[7]) and np.isfinite(np.delete(ours.lse, 7)).all()
            for score, values in expected.items():
                bits = getattr(ours, score).view(np.uint32)
                np.testing.assert_array_equal(
                    np.delete(bits, 7),
                    np.delete(values.view(np.uint32), 7),
                    err_msg=f"{score} of {dtype.__name__} rows, temperature {temperature}",
                )
                assert np.isnan(values[7])
