"""The body of a Hugging Face model, whose states a Scorer takes."""

from __future__ import annotations

import inspect
from typing import Any

from logprobd.errors import InvalidArgument
from torch import Tensor


def unwrapped(model: Any) -> Any:
    """Returns the Hugging Face model inside a PEFT model, with its adapters, or `model` itself.

    Raises InvalidArgument for prompt learning, which the model inside does not do.
    """
    if not hasattr(model, "get_base_model"):  # The model inside has peft_config, too.
        return model
    if model.active_peft_config.is_prompt_learning:
        raise InvalidArgument(
            "prompt learning of PEFT adds tokens to the input: use the framework's own model"
        )
    return model.get_base_model()


def body_of(model: Any) -> Any:
    """Returns the model without its head, whose last_hidden_state is the head's input.

    Raises InvalidArgument if the model has no separate body.
    """
    model = unwrapped(model)
    if model.base_model is model:
        raise InvalidArgument(
            f"{type(model).__name__} has no separate body: use the framework's own model"
        )
    return model.base_model


def hidden_states(body: Any, tokens: Tensor) -> Tensor:
    """Returns the states [batch, length, H] of tokens [batch, length] on the body's device."""
    states: Tensor = body(tokens.to(body.device), **without_cache(body)).last_hidden_state
    return states


def without_cache(model: Any) -> dict[str, bool]:
    """Returns the argument by which a call keeps no keys and values of its tokens, which nothing
    reads; {} for a model that has none."""
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    is_taken = any(each.name == "use_cache" or each.kind is each.VAR_KEYWORD for each in parameters)
    return {"use_cache": False} if is_taken else {}
