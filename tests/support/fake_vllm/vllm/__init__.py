"""A stand-in for vLLM 0.33.0: a pooling model whose body transformers runs on the CPU.

Calls must fit the signatures that were recorded from vLLM (signatures.json). What vLLM does by default, and the
adapter has to change, is done here too: scaled states in fp32, and fp16 for fp32 models.
"""

import inspect
import json
import pathlib
import types
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

_RECORD = json.loads((pathlib.Path(__file__).parent / "signatures.json").read_text())
SIGNATURES = {
    name: inspect.signature(eval(f"lambda {text}: None"))
    for name, text in _RECORD.items()
    if name != "version"
}


def bind(name: str, *positional: Any, **named: Any) -> types.SimpleNamespace:
    """Returns the arguments of a call with defaults. Raises TypeError if vLLM's signature does not take them."""
    bound = SIGNATURES[name].bind(*positional, **named)
    bound.apply_defaults()
    return types.SimpleNamespace(**bound.arguments)


def PoolingParams(**fields: Any) -> types.SimpleNamespace:
    return bind("PoolingParams", **fields)


class LLM:
    def __init__(self, *positional: Any, **named: Any) -> None:
        given = bind("LLM", *positional, **named)
        bind("EngineArgs", **given.kwargs)
        self.pooling_task = given.pooler_config.task
        assert given.runner == "pooling" and given.convert == "embed"
        assert given.pooler_config.tok_pooling_type == "ALL"
        dtype = given.dtype
        if dtype == "auto":
            stored = AutoConfig.from_pretrained(given.model).dtype
            dtype = torch.float16 if stored == torch.float32 else stored
        self._body = AutoModel.from_pretrained(given.model, dtype=dtype).eval()
        head_dtype = (given.hf_overrides or {}).get("head_dtype")
        self._dtype = self._body.dtype if head_dtype == "model" else torch.float32
        longest = self._body.config.max_position_embeddings
        self.model_config = types.SimpleNamespace(
            max_model_len=given.kwargs.get("max_model_len", longest), dtype=self._body.dtype
        )

    @torch.no_grad()
    def encode(self, *positional: Any, **named: Any) -> list[types.SimpleNamespace]:
        given = bind("LLM.encode", *positional, **named)
        if given.pooling_task != self.pooling_task:
            raise ValueError(f"the task is {given.pooling_task}, expected {self.pooling_task}")
        outputs = []
        for number, prompt in enumerate(given.prompts):
            tokens = prompt["prompt_token_ids"]
            assert 0 < len(tokens) <= self.model_config.max_model_len
            states = self._body(torch.tensor([tokens])).last_hidden_state[0].to(self._dtype)
            if given.pooling_params.use_activation is not False:
                states = torch.nn.functional.normalize(states, dim=-1)
            output = bind("PoolingOutput", states)
            outputs.append(bind("PoolingRequestOutput", str(number), output, tokens, 0, True))
        return outputs
