"""Writes model folders with a random head of a realistic size within one or two seconds."""

import concurrent.futures
import json
import os
import pathlib
import struct

import numpy as np

BLOCK_ELEMENTS = 1 << 22


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Returns the bits of fp32 values after rounding to bf16, to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_head(
    folder: pathlib.Path, *, vocab: int, hidden: int, logit_stddev: float = 3.0, seed: int = 1
) -> pathlib.Path:
    """Writes a bf16 lm_head whose logits have the standard deviation `logit_stddev` for standard normal rows.

    Creates the folder and returns it. Its files are then in the page cache. The same seed gives the same head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    elements = vocab * hidden
    header = json.dumps(
        {
            "lm_head.weight": {
                "dtype": "BF16",
                "shape": [vocab, hidden],
                "data_offsets": [0, elements * 2],
            }
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + elements * 2)
    scale = np.float32(logit_stddev / np.sqrt(hidden))
    weight = np.memmap(path, np.uint16, "r+", offset=8 + len(header), shape=(elements,))

    def fill(block: int) -> None:
        begin = block * BLOCK_ELEMENTS
        end = min(begin + BLOCK_ELEMENTS, elements)
        random = np.random.Generator(np.random.SFC64([seed, block]))
        weight[begin:end] = to_bf16(random.standard_normal(end - begin, dtype=np.float32) * scale)

    # NumPy releases the GIL in these functions.
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(fill, range(-(-elements // BLOCK_ELEMENTS))))
    return folder
