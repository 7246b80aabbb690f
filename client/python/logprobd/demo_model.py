"""Writes a small model folder in the Hugging Face layout, for trying logprobd without a download.

    python -m logprobd.demo_model DIR

The folder contains config.json and two safetensors shards with an index. The head is tied to the
embedding and stored in bfloat16. The vocabulary size is not a multiple of 256. Rows drawn from
N(0, 1) give logits with standard deviation 3. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from logprobd.arrays import bf16_from_fp32 as bf16

VOCAB_SIZE = 32_003
HIDDEN_SIZE = 512
INTERMEDIATE_SIZE = 64
LAYERS = 2
LOGIT_STDDEV = 3.0
HEAD = "model.embed_tokens.weight"

Bits = npt.NDArray[np.uint16]


def make_tensors(vocab: int, hidden: int, seed: int) -> dict[str, Bits]:
    """Returns the tensors by name. All but the head and the norms only make the model complete."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int, stddev: float) -> Bits:
        return bf16(draw.standard_normal(shape, dtype=np.float32) * np.float32(stddev))

    tensors = {HEAD: normal(vocab, hidden, stddev=LOGIT_STDDEV / math.sqrt(hidden))}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("mlp.down_proj.weight", (hidden, INTERMEDIATE_SIZE)),
            ("mlp.gate_proj.weight", (INTERMEDIATE_SIZE, hidden)),
            ("mlp.up_proj.weight", (INTERMEDIATE_SIZE, hidden)),
        ):
            tensors[f"{prefix}.{name}"] = normal(*shape, stddev=0.02)
        tensors[f"{prefix}.input_layernorm.weight"] = bf16(np.ones(hidden, np.float32))
    tensors["model.norm.weight"] = bf16(np.ones(hidden, np.float32))
    return tensors


def write_safetensors(path: Path, tensors: dict[str, Bits]) -> int:
    """Writes one shard. Returns the number of bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in sorted(tensors.items()):
        header[name] = {
            "dtype": "BF16",
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes, as other writers do
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in sorted(tensors.items()):
            file.write(np.ascontiguousarray(values, "<u2").data)
    return offset


def make_config(vocab: int, hidden: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def write_model(
    folder: str | os.PathLike[str],
    vocab: int = VOCAB_SIZE,
    hidden: int = HIDDEN_SIZE,
    seed: int = 0,
) -> None:
    """Writes the folder. Replaces existing files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = make_tensors(vocab, hidden, seed)
    first = {name for name in tensors if name == HEAD or ".layers.0." in name}
    shards = [
        {name: values for name, values in tensors.items() if (name in first) == is_first}
        for is_first in (True, False)
    ]
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += write_safetensors(folder / file_name, shard)
        weight_map.update(dict.fromkeys(shard, file_name))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(make_config(vocab, hidden), indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab", type=int, default=VOCAB_SIZE, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=HIDDEN_SIZE, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        write_model(arguments.folder, arguments.vocab, arguments.hidden, arguments.seed)
    except OSError as error:
        print(f"cannot write the demo model: {error}", file=sys.stderr)
        return 1
    print(
        f"{arguments.folder}: vocabulary {arguments.vocab}, hidden {arguments.hidden}, bf16, tied"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
