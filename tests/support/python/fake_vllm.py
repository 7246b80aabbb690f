"""A stand-in for vLLM 0.33.0, which has no wheel without a GPU.

It has the parts of vLLM that logprobd_adapters.vllm calls, with the signatures of vllm 0.33.0, and
runs the body of the model in transformers.
"""

import dataclasses
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModel


@dataclasses.dataclass
class PoolerConfig:  # of vllm.config.pooler; the fields that are used
    task: str | None = None
    use_activation: bool | None = None


@dataclasses.dataclass
class PoolingParams:  # of vllm.pooling_params; the fields that are used
    use_activation: bool | None = None


@dataclasses.dataclass
class PoolingOutput:  # of vllm.outputs
    data: torch.Tensor


class PoolingRequestOutput:  # of vllm.outputs
    def __init__(
        self,
        request_id: str,
        outputs: PoolingOutput,
        prompt_token_ids: list[int],
        num_cached_tokens: int,
        finished: bool,
    ) -> None:
        self.request_id = request_id
        self.outputs = outputs
        self.prompt_token_ids = prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.finished = finished


class LLM:  # of vllm.entrypoints.llm and vllm.entrypoints.pooling.offline
    def __init__(
        self,
        model: str,
        *,
        runner: str = "auto",
        convert: str = "auto",
        dtype: str = "auto",
        hf_overrides: dict[str, Any] | None = None,
        pooler_config: PoolerConfig | None = None,
        **kwargs: Any,
    ) -> None:
        assert (runner, convert) == ("pooling", "embed")
        assert pooler_config is not None
        assert pooler_config.task == "token_embed"
        self.head_dtype = (hf_overrides or {}).get("head_dtype", "float32")
        self.body = AutoModel.from_pretrained(model, dtype=dtype).eval()
        length = kwargs.get("max_model_len") or self.body.config.max_position_embeddings
        self.model_config = types.SimpleNamespace(max_model_len=length)

    @torch.inference_mode()
    def encode(
        self,
        prompts: Sequence[dict[str, list[int]]],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        assert pooling_task == "token_embed"
        outputs = []
        for number, prompt in enumerate(prompts):
            tokens = prompt["prompt_token_ids"]
            assert 0 < len(tokens) <= self.model_config.max_model_len
            states = self.body(torch.tensor([tokens])).last_hidden_state[0]
            if self.head_dtype != "model":
                states = states.float()
            if pooling_params is None or pooling_params.use_activation is not False:
                states = torch.nn.functional.normalize(states, dim=-1)
            output = PoolingOutput(states)
            outputs.append(PoolingRequestOutput(str(number), output, tokens, 0, True))
        return outputs


def modules() -> dict[str, types.ModuleType]:
    """Returns the stand-in as sys.modules has it."""
    here = sys.modules[__name__]
    vllm, config = types.ModuleType("vllm"), types.ModuleType("vllm.config")
    vllm.LLM, vllm.PoolingParams = here.LLM, here.PoolingParams
    config.PoolerConfig = here.PoolerConfig
    vllm.config = config
    return {"vllm": vllm, "vllm.config": config}
