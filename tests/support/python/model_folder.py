"""Model folders for tests, and the double-precision truth of their heads."""

import dataclasses
import json
import pathlib
import struct

import ml_dtypes
import numpy as np

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


@dataclasses.dataclass
class Scores:
    """What the double reference says of a row."""

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
        """A tied head in one file, scaled so that logits of N(0, 1) hidden states have that spread."""
        random = np.random.default_rng(seed)
        weight = random.standard_normal((vocab, hidden), dtype=np.float32)
        weight = (weight * (logit_stddev / np.sqrt(hidden))).astype(DTYPES[dtype])
        write_safetensors(path / "model.safetensors", {"model.embed_tokens.weight": weight})
        config = {
            "model_type": "test",
            "hidden_size": hidden,
            "vocab_size": vocab,
            "tie_word_embeddings": True,
        }
        (path / "config.json").write_text(json.dumps(config))
        return cls(path, weight)

    def score(self, hidden_row: np.ndarray, target: int, temperature: float = 1.0) -> Scores:
        """The truth of one row, in double on the exact stored values."""
        logits = self.weight.astype(np.float64) @ hidden_row.astype(np.float64) / temperature
        shifted = logits - logits.max()
        log_sum = np.log(np.exp(shifted).sum())
        p = np.exp(shifted - log_sum)
        return Scores(
            logprob=float(shifted[target] - log_sum),
            entropy=float(log_sum - (p * shifted).sum()),
            argmax=int(logits.argmax()),
        )
