"""The final norm of a model alone, for hidden states that were taken before it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from logprobd.errors import InvalidArgument
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModel

_WEIGHTS = "model.safetensors"
_OWN_MODULE = "Pass FinalNorm() a module that does all that follows the model's last layer"


class FinalNorm:
    """The final norm of a Hugging Face model. Its result is the input of the model's head.

    It is the module of transformers itself, so it has the bits of the model's own.

    Args:
        norm: the module, or any that computes the head's input from the output of the last layer.
    """

    def __init__(self, norm: torch.nn.Module) -> None:
        self._norm = norm

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> FinalNorm:
        """Reads the norm of a model folder, and no other tensor of it.

        Args:
            folder: config.json, and model.safetensors or the index of its shards.
            dtype: type of the norm's weights. None: that of the file.

        Raises InvalidArgument if transformers cannot run the model's class, if the last step of
        the model's body is not a norm, or if the folder lacks its tensors. Raises OSError if a file
        cannot be read.
        """
        folder = Path(folder)
        config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
        prefix, name, norm = _find(config)
        tensors = _read(folder, prefix, name, list(norm.state_dict()))
        norm.load_state_dict(tensors, assign=True)
        return cls(norm.to(device=device, dtype=dtype))

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalises rows.

        Args:
            hidden: [..., H], the output of the last layer, of the norm's dtype and on its device.

        Returns [..., H].
        """
        states: Tensor = self._norm(hidden)
        return states


def _find(config: Any) -> tuple[str, str, torch.nn.Module]:
    """Returns the prefix of a model's body in checkpoints, and the norm's name in it and module.

    A model without layers is run on one token, so that no table of models is needed. Its weights
    are random and its vocabulary is small.
    """
    kind = config.model_type
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 0, 1, None
    outputs: dict[str, Tensor] = {}
    hooks = []
    try:
        with torch.random.fork_rng(devices=[]):
            body = AutoModel.from_config(config).eval()
        for name, module in body.named_modules():
            if not list(module.children()):
                keep = functools.partial(_keep_output, outputs, name)
                hooks.append(module.register_forward_hook(keep))
        with torch.no_grad():
            states = body(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)[0]
    except Exception as error:
        raise InvalidArgument(
            f"{kind} without layers, which shows the final norm, failed in transformers with "
            f"{type(error).__name__}: {error}. {_OWN_MODULE}"
        ) from error
    finally:
        for hook in hooks:  # they would keep the newest result, and pickling would need them
            hook.remove()
    last = [
        name
        for name, output in outputs.items()
        if isinstance(output, Tensor) and output.is_set_to(states)
    ]
    # An encoder without layers ends with the norm of its embeddings.
    if len(last) == 1 and "embeddings" not in last[0].split("."):
        norm = body.get_submodule(last[0])
        if "norm" in type(norm).__name__.lower():
            return body.base_model_prefix, last[0], norm
    found = ", ".join(f"{name} ({type(body.get_submodule(name)).__name__})" for name in last)
    raise InvalidArgument(
        f"the last step of {kind} is {found or 'no module'}, expected a single norm. {_OWN_MODULE}"
    )


def _keep_output(
    outputs: dict[str, Tensor], name: str, _: torch.nn.Module, __: Any, output: Tensor
) -> None:
    outputs[name] = output


def _read(folder: Path, prefix: str, name: str, parameters: list[str]) -> dict[str, Tensor]:
    """Returns tensors of a module from a checkpoint of the body, of the model with its head, or of
    a model with images around it. The norms of other parts, such as mtp, have other names."""
    index = folder / f"{_WEIGHTS}.index.json"
    if index.exists():
        files = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(folder / _WEIGHTS, "pt") as file:
            files = dict.fromkeys(file.keys(), _WEIGHTS)
    places = (
        "",
        f"{prefix}.",
        "backbone.",
        f"{prefix}.language_model.",
        f"{prefix}.text_model.",
        f"language_model.{prefix}.",
    )
    tensors = {}
    for parameter in parameters:
        names = [f"{place}{name}.{parameter}" for place in places]
        known = [each for each in names if each in files]
        if not known:
            raise InvalidArgument(
                f"{folder} has none of the tensors {', '.join(names)}. {_OWN_MODULE}"
            )
        with safe_open(folder / files[known[0]], "pt") as file:
            tensors[parameter] = file.get_tensor(known[0])
    return tensors
