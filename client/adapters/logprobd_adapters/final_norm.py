"""The final norm of a model, for hidden states from before it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from logprobd.errors import InvalidArgument
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig, AutoModel

_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
"""Names of the norm in the bodies of transformers' models."""

_LAYER = re.compile(r"\b(layers?|h|blocks?)\.\d+\.")
"""A tensor of one of a model's layers."""

_OTHER_PART = re.compile(r"\b(mtp|multi_modal_projector|vision\w*|visual)\.")
"""A tensor of a part that is not the text model."""


class FinalNorm(Module):
    """Applies a model's final norm, which the input of the head has passed.

    It is the module of the model's class in transformers, so that its results have the bits of the
    model's own norm: RMSNorm, RMSNorm with 1 + w, or LayerNorm, with their epsilon.
    """

    def __init__(self, norm: Module) -> None:
        super().__init__()
        self.norm = norm

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> FinalNorm:
        """Reads the norm alone, a few kilobytes, from a Hugging Face folder with safetensors.

        Args:
            folder: model folder with config.json.
            dtype: of the norm's weight. None: that of the checkpoint.

        Raises InvalidArgument if the body of the model's class has no final norm of a known name,
        or if the folder does not have its tensors.
        """
        folder = Path(folder)
        config = AutoConfig.from_pretrained(folder).get_text_config()
        with torch.device("meta"):
            body = AutoModel.from_config(config)
        name = next((name for name in _NAMES if isinstance(_norm(body, name), Module)), None)
        if name is None:
            raise InvalidArgument(
                f"{type(body).__name__} has no final norm named {', '.join(_NAMES)}: pass the "
                "module to FinalNorm()"
            )
        norm = _norm(body, name)
        tensors = {
            key: _read(folder, f"{name}.{key}").to(device, dtype) for key in norm.state_dict()
        }
        norm.load_state_dict(tensors, assign=True)
        return cls(norm.eval())

    @torch.inference_mode()
    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the input of the head of hidden states from before the norm, both [..., H]."""
        normed: Tensor = self.norm(hidden)
        return normed


def _norm(body: Any, name: str) -> Any:
    # Some bodies keep their layers and the norm in a decoder.
    return getattr(body, name, None) or getattr(getattr(body, "decoder", None), name, None)


def _read(folder: Path, suffix: str) -> Tensor:
    """Reads the tensor whose name ends with `suffix` and that belongs to no layer."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(folder / "model.safetensors", "pt") as file:
            files = dict.fromkeys(file.keys(), "model.safetensors")
    names = [
        name
        for name in files
        if (name == suffix or name.endswith("." + suffix))
        and not _LAYER.search(name)
        and not _OTHER_PART.search(name)
    ]
    if len(names) != 1:
        raise InvalidArgument(
            f"{folder} has {len(names)} tensors named {suffix} outside of its layers, expected one"
        )
    with safe_open(folder / files[names[0]], "pt") as file:
        return file.get_tensor(names[0])
