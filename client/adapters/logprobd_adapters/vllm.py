"""Hidden states from vLLM, which then runs a model without its head.

vLLM's pooling runner builds the body of a model alone. A server or the operator has the head, with
exact log-probabilities, the entropy over the whole vocabulary and any number of candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from logprobd.errors import InvalidArgument
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class VllmBackbone:
    """The body of a model in vLLM 0.33: tokens in, hidden states after the final norm out.

    It is a Backbone of logprobd_adapters.teacher. Use it from one thread at a time.

    The signatures are those of vLLM 0.33.0. The tests run a stand-in with them; vLLM itself was not
    run.

    Args:
        model: folder or id of a Hugging Face causal model.
        engine: further arguments of vllm.LLM, for example tensor_parallel_size, max_model_len and
            gpu_memory_utilization.

    Raises ImportError without vLLM, and vLLM's own errors.
    """

    def __init__(self, model: str, **engine: Any) -> None:
        # The gateway imports this module also without vLLM.
        from vllm import LLM, PoolingParams  # noqa: PLC0415
        from vllm.config import PoolerConfig  # noqa: PLC0415

        # By default vLLM casts what the pooler returns to fp32.
        overrides = {"head_dtype": "model", **engine.pop("hf_overrides", {})}
        self._llm = LLM(
            model,
            runner="pooling",
            convert="embed",
            pooler_config=PoolerConfig(task="token_embed"),
            hf_overrides=overrides,
            **engine,
        )
        # The pooler's activation divides each row by its norm.
        self._params = PoolingParams(use_activation=False)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt."""
        length: int = self._llm.model_config.max_model_len
        return length

    def hidden_states(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Returns the hidden states [length, H] of each prompt, in the model's dtype, on the CPU.

        Args:
            prompts: the tokens of each prompt, from 1 to max_model_len.

        Raises InvalidArgument if vLLM returns other than a row a token.
        """
        outputs = self._llm.encode(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            self._params,
            use_tqdm=False,
            pooling_task="token_embed",
        )
        states = [output.outputs.data for output in outputs]
        for state, prompt in zip(states, prompts, strict=True):
            if state.ndim != 2 or state.shape[0] != len(prompt):
                raise InvalidArgument(
                    f"vLLM returned hidden states {list(state.shape)} of {len(prompt)} tokens, "
                    "expected a row a token"
                )
        return states

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns the hidden states [prompts, length, H] of tokens [prompts, length]."""
        with torch.inference_mode():
            return pad_sequence(self.hidden_states(tokens.tolist()), batch_first=True)
