"""Model folders for tests, and the double-precision reference scores of their heads."""

import dataclasses
import json
import pathlib
import struct

import ml_dtypes
import numpy as np
from numpy_reference import entropy, log_softmax, logits_of

DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def write_safetensors(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    names = {np.dtype(v): k for k, v in DTYPES.items()}
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(array.tobytes())


def write_biased_head(path: pathlib.Path, weight: np.ndarray, bias: np.ndarray) -> pathlib.Path:
    """Writes a head of its own with a bias to one file. Returns the folder."""
    tensors = {"lm_head.weight": weight, "lm_head.bias": bias}
    write_safetensors(path / "model.safetensors", tensors)
    vocab, hidden = weight.shape
    config = {"model_type": "phi", "hidden_size": hidden, "vocab_size": vocab}
    (path / "config.json").write_text(json.dumps(config))
    return path


@dataclasses.dataclass
class Scores:
    """Scores of one row by the double-precision reference."""

    logprob: float
    entropy: float
    argmax: int


@dataclasses.dataclass
class ModelFolder:
    path: pathlib.Path
    weight: np.ndarray  # [vocab, hidden], as stored

    @classmethod
    def write(
        cls,
        path: pathlib.Path,
        *,
        vocab: int,
        hidden: int,
        dtype: str = "BF16",
        logit_stddev: float = 3.0,
        seed: int = 1,
    ) -> "ModelFolder":
        """Writes a tied head to one file. Logits of N(0, 1) hidden states have deviation `logit_stddev`."""
        random = np.random.default_rng(seed)
        weight = random.standard_normal((vocab, hidden), dtype=np.float32)
        weight = (weight * (logit_stddev / np.sqrt(hidden))).astype(DTYPES[dtype])
        write_safetensors(path / "model.safetensors", {"model.embed_tokens.weight": weight})
        config = {
            "model_type": "llama",
            "hidden_size": hidden,
            "vocab_size": vocab,
            "tie_word_embeddings": True,
        }
        (path / "config.json").write_text(json.dumps(config))
        return cls(path, weight)

    def score(self, hidden_row: np.ndarray, target: int, temperature: float = 1.0) -> Scores:
        """Returns the scores of one row, computed in double from the exact stored values."""
        logits = logits_of(self, hidden_row)
        return Scores(
            logprob=float(log_softmax(logits, temperature)[target]),
            entropy=float(entropy(logits, temperature)),
            argmax=int(logits.argmax()),
        )
