"""Reads how a model shapes its logits from its config.json, as the server does."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

from logprobd._head_folder import Config
from logprobd.errors import InvalidArgument

# The keys of server/weights/head_config.cc; tests compare the results with a server's.
_MULTIPLIERS = (
    *("logit_scale", "lm_head_multiplier", "output_multiplier"),
    *("output_multiplier_scale", "mup_output_mult"),
)


class LogitShape(NamedTuple):
    """Logits are z = cap(scale * (h . w) + bias), with cap(x) = softcap * tanh(x / softcap)."""

    scale: float
    """Above 0; 1 leaves the products unchanged."""
    softcap: float | None
    """Above 0; None: no cap."""


def logit_shape(config: str) -> LogitShape:
    """Returns the scale and the cap of a model's logits.

    Args:
        config: the text of the model's config.json, with the values that equal the defaults of its
            class. The server adds such values where a file leaves them out; in Transformers,
            `model.config.to_json_string(use_diff=False)` contains them all.

    Raises InvalidArgument for a value that is not a positive number, and ExportError if `config` is
    not a JSON object.
    """
    settings = Config(config)
    width = settings.hidden_size
    scale = 1.0
    for key in _MULTIPLIERS:
        if settings.find(key) == "inv_sqrt_d_model":  # MPT
            scale /= math.sqrt(_width(width, key))
        else:
            scale *= _factor(settings, key) or 1.0
    scale /= _factor(settings, "logits_scaling") or 1.0  # Granite
    base = _factor(settings, "dim_model_base")
    if base is not None:  # MiniCPM divides the hidden state
        scale *= base / _width(width, "dim_model_base")
    softcap = settings.find("final_logit_softcapping")
    is_off = isinstance(softcap, int | float) and softcap == 0
    return LogitShape(scale, None if is_off else _factor(settings, "final_logit_softcapping"))


def _factor(settings: Config, key: str) -> float | None:
    """Returns a factor or cap, or None if it is missing, null or false."""
    value = settings.find(key)
    if value is None or value is False:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < ctypes.c_float(value).value < math.inf:
        raise InvalidArgument(
            f"{key} of the config is {value!r}, expected a positive number that fits fp32"
        )
    return float(value)


def _width(width: int | None, key: str) -> int:
    if width is None:
        raise InvalidArgument(f"{key} of the config needs hidden_size, which is missing")
    return width
