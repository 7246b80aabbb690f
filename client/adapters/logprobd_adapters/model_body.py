"""The body of a Hugging Face model, whose states a Scorer takes."""

from __future__ import annotations

from typing import Any

from logprobd.errors import InvalidArgument


def unwrapped(model: Any) -> Any:
    """Returns the Hugging Face model inside a PEFT model, with its adapters, or `model` itself.

    Raises InvalidArgument for prompt learning, which the model inside does not do.
    """
    if not hasattr(model, "peft_config"):
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
