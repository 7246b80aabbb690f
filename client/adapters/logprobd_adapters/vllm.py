"""Hidden states from vLLM, which runs a model without its head. A Scorer has the head.

Needs vLLM 0.33, with whose signatures it was written. It was tested with a stand-in that has them,
and has not run with vLLM itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig


class VllmBackbone:
    """A causal model in vLLM without its head, as a pooling model that returns each token's state.

    Use it from one thread at a time.

    Args:
        model: folder or id of a Hugging Face model.
        dtype: type of the body and of the states. "auto": that of config.json, or float32, which
            holds all others, if it names none. vLLM's own "auto" runs fp32 pooling models in fp16.
        hf_overrides: changes of the model's config.
        engine_arguments: other arguments of vllm.LLM, such as tensor_parallel_size, max_model_len
            and gpu_memory_utilization.

    Raises TypeError for an argument that vllm.LLM does not have or that is set here, the errors of
    vllm.LLM, and OSError if config.json cannot be read.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        hf_overrides: dict[str, Any] | None = None,
        **engine_arguments: Any,
    ) -> None:
        if dtype == "auto":
            dtype = _checkpoint_dtype(model, engine_arguments)
        self._llm = LLM(
            model,
            runner="pooling",
            convert="embed",
            pooler_config=PoolerConfig(task="token_embed", tok_pooling_type="ALL"),
            dtype=dtype,
            # The default of a pooling model is to return fp32.
            hf_overrides={"head_dtype": "model"} | (hf_overrides or {}),
            **engine_arguments,
        )

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt."""
        return self._llm.model_config.max_model_len

    def hidden_states(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Returns the hidden states [length, H] of each prompt, after the final norm, on the CPU in
        the body's dtype. This method is a Backbone of logprobd_adapters.teacher.

        vLLM orders and batches the prompts, without padding, so the last bits of a state may depend
        on the others.

        Args:
            prompts: token ids, from 1 to max_model_len for each prompt.

        Raises VLLMValidationError of vLLM for a prompt that is empty or too long, and RuntimeError
        if vLLM returns other than a row a token.
        """
        outputs = self._llm.encode(
            [{"prompt_token_ids": list(tokens)} for tokens in prompts],
            pooling_task="token_embed",
            # The activation of this task scales each state to length 1.
            pooling_params=PoolingParams(use_activation=False),
            use_tqdm=False,
        )
        hidden: list[Tensor] = [output.outputs.data for output in outputs]
        for states, tokens in zip(hidden, prompts, strict=True):
            if states.ndim != 2 or len(states) != len(tokens):
                raise RuntimeError(
                    f"vLLM returned states {list(states.shape)} for {len(tokens)} tokens, expected "
                    "a row a token"
                )
        return hidden


def _checkpoint_dtype(model: str, engine_arguments: dict[str, Any]) -> str:
    names = ("revision", "trust_remote_code")
    config = AutoConfig.from_pretrained(
        model, **{name: engine_arguments[name] for name in names if name in engine_arguments}
    )
    dtype = config.dtype or config.get_text_config().dtype or torch.float32
    return str(dtype).removeprefix("torch.")
