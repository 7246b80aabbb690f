"""FinalNorm gives the bits of the final norm inside of the models of transformers."""

import pytest
import torch
import transformers
from logprobd.errors import InvalidArgument
from logprobd_adapters.final_norm import FinalNorm
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "olmo2": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi": {},
    "phi3": {},
    "cohere": {},
    "gpt_neox": {},
    "starcoder2": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}


def write_model(folder, family: str, dtype: torch.dtype, **keywords):
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms begin with ones and zeros
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder, **keywords)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def inputs_and_outputs_of_the_last_norm(model):
    """Returns what the last module named as a norm got and gave in a forward of the model."""
    seen = []

    def hook(module, arguments, output) -> None:
        seen.append((arguments[0], output))

    norms = [
        module for module in model.base_model.modules() if "norm" in type(module).__name__.lower()
    ]
    for norm in norms:
        norm.register_forward_hook(hook)
    with torch.inference_mode():
        model(torch.arange(1, 20)[None])
    return seen[-1]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_those_of_the_models_norm(tmp_path, family, dtype) -> None:
    model = write_model(tmp_path, family, dtype)
    before, after = inputs_and_outputs_of_the_last_norm(model)
    assert before.dtype == dtype

    normed = FinalNorm.from_pretrained(tmp_path)(before)

    assert normed.dtype == dtype
    assert torch.equal(normed, after)
    assert not torch.equal(normed, before)
    with torch.inference_mode():  # it is the head's input, not another norm's output
        logits = model(torch.arange(1, 20)[None]).logits
        hidden = model.base_model(torch.arange(1, 20)[None]).last_hidden_state
    assert torch.equal(normed, hidden)
    assert logits.shape[-1] == 64


def test_a_checkpoint_in_several_files_gives_the_same_norm(tmp_path) -> None:
    model = write_model(tmp_path, "qwen3", torch.bfloat16, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    before, after = inputs_and_outputs_of_the_last_norm(model)

    assert torch.equal(FinalNorm.from_pretrained(tmp_path)(before), after)


def test_the_weight_can_have_another_dtype(tmp_path) -> None:
    write_model(tmp_path, "llama", torch.bfloat16)

    norm = FinalNorm.from_pretrained(tmp_path, dtype=torch.float32)

    assert norm(torch.ones(3, 32)).dtype == torch.float32


def test_a_model_without_a_known_norm_is_refused(tmp_path, monkeypatch) -> None:
    write_model(tmp_path, "llama", torch.float32)
    monkeypatch.setattr(transformers.AutoModel, "from_config", lambda config: torch.nn.Linear(1, 1))
    with pytest.raises(InvalidArgument, match="Linear has no final norm named norm, "):
        FinalNorm.from_pretrained(tmp_path)


def test_a_checkpoint_without_the_norm_is_refused(tmp_path) -> None:
    model = write_model(tmp_path, "llama", torch.float32)
    tensors = {k: v for k, v in model.state_dict().items() if k != "model.norm.weight"}
    model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(InvalidArgument, match=r"has 0 tensors named norm\.weight outside"):
        FinalNorm.from_pretrained(tmp_path)
