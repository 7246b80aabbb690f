"""FinalNorm gives the bits of the final norms of transformers' models."""

import pickle
import weakref

import pytest
import torch
from document_examples import run_example
from logprobd.errors import InvalidArgument
from logprobd_adapters import LocalScorer
from logprobd_adapters.final_norm import FinalNorm
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The final norm of each kind of model, and what its config needs beside SMALL.
NORMS = {
    "llama": ("norm", {}),
    "mistral": ("norm", {}),
    "qwen2": ("norm", {}),
    "qwen3": ("norm", {}),
    "qwen3_moe": (
        "norm",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma": ("norm", {}),
    "gemma2": ("norm", {}),
    "gemma3_text": ("norm", {}),
    "phi3": ("norm", {}),
    "granite": ("norm", {}),
    "glm4": ("norm", {}),
    "olmo": ("norm", {}),
    "olmo2": ("norm", {}),
    "cohere": ("norm", {}),
    "cohere2": ("norm", {}),
    "nemotron": ("norm", {}),
    "stablelm": ("norm", {}),
    "starcoder2": ("norm", {}),
    "phi": ("final_layernorm", {}),
    "lfm2": ("embedding_norm", {}),
    "gpt2": ("ln_f", {}),
    "gptj": ("ln_f", {"rotary_dim": 4}),
    "gpt_neox": ("final_layer_norm", {}),
    "bloom": ("ln_f", {}),
    "falcon": ("ln_f", {}),
    "opt": ("decoder.final_layer_norm", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "biogpt": ("layer_norm", {}),
    "recurrent_gemma": ("final_norm", {"lru_width": 32, "attention_window_size": 8}),
    "mamba": ("norm_f", {"state_size": 4, "time_step_rank": 4}),
    "nemotron_h": ("norm_f", {}),
}


def make_model(kind: str, dtype: torch.dtype = torch.float32):
    """Returns a model with random weights, those of its norms included."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SMALL | NORMS[kind][1]))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.to(dtype).eval()


@torch.no_grad()
def around_norm(model, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input of the final norm of a model and its last hidden state."""
    inputs: list[torch.Tensor] = []
    norm = model.base_model.get_submodule(name)
    norm.register_forward_hook(lambda _, arguments, __: inputs.append(arguments[0]))
    tokens = torch.arange(3, 15).reshape(2, 6)
    after = model.base_model(tokens, use_cache=False).last_hidden_state
    (before,) = inputs
    return before, after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_the_norm_has_the_bits_of_the_models_own(tmp_path, kind, dtype) -> None:
    model = make_model(kind, dtype)
    model.save_pretrained(tmp_path)
    before, after = around_norm(model, NORMS[kind][0])

    states = FinalNorm.from_pretrained(tmp_path)(before)

    assert states.dtype == after.dtype and states.shape == (2, 6, 32)
    assert not torch.equal(states, before)
    assert torch.equal(states, after)


def test_only_the_shard_of_the_norm_is_read(tmp_path) -> None:
    model = make_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    others = [path for path in shards if "model.norm.weight" not in load_file(path)]
    assert len(others) == len(shards) - 1 > 0
    for path in others:
        path.unlink()

    norm = FinalNorm.from_pretrained(tmp_path)

    before, after = around_norm(model, "norm")
    assert torch.equal(norm(before), after)


@pytest.mark.parametrize(
    "place",
    ["", "model.", "model.language_model.", "model.text_model.", "language_model.model."],
    ids=repr,
)
def test_the_norm_is_found_in_each_layout_of_a_checkpoint(tmp_path, place) -> None:
    model = make_model("gemma3_text")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("model.", place, 1): tensor for name, tensor in load_file(file).items()}
    for other in ("vision_tower", "model.mtp", "mtp", "mtp.layers.0", "multi_modal_projector"):
        tensors[f"{other}.norm.weight"] = torch.zeros(7)
    save_file(tensors, file)

    norm = FinalNorm.from_pretrained(tmp_path)

    before, after = around_norm(model, "norm")
    assert torch.equal(norm(before), after)


def test_a_model_with_images_has_the_norm_of_its_text_model(tmp_path) -> None:
    model = make_model("gemma3_text")
    model.save_pretrained(tmp_path)
    text = model.config.to_dict()
    AutoConfig.for_model("gemma3", text_config=text).save_pretrained(tmp_path)

    norm = FinalNorm.from_pretrained(tmp_path)

    before, after = around_norm(model, "norm")
    assert torch.equal(norm(before), after)


def test_the_weights_can_be_cast(tmp_path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)

    norm = FinalNorm.from_pretrained(tmp_path, dtype=torch.bfloat16)

    before, after = around_norm(model.to(torch.bfloat16), "norm")
    assert torch.equal(norm(before), after)


def test_the_example_of_the_document_scores(built_operator, tmp_path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    before, after = around_norm(model, "norm")
    targets = torch.arange(12).reshape(2, 6)
    given = {"scorer": LocalScorer.from_model(model), "states": before, "targets": targets}

    names = run_example(
        "docs/VLLM.md", "FinalNorm", {"models/Qwen3-8B": str(tmp_path), "cuda": "cpu"}, **given
    )

    exact = (after.double() @ model.lm_head.weight.double().T).log_softmax(-1)
    expected = exact.gather(-1, targets[..., None])[..., 0].float()
    torch.testing.assert_close(names["scores"].logprob, expected, atol=1e-5, rtol=0)


# Regression: the hooks that find the norm stayed, kept the newest result, and could not be pickled.
def test_a_norm_keeps_no_result_and_can_be_pickled(tmp_path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    norm = FinalNorm.from_pretrained(tmp_path)
    result = norm(torch.ones(3, 32))
    kept = weakref.ref(result)

    copy = pickle.loads(pickle.dumps(norm))

    assert torch.equal(copy(torch.ones(3, 32)), result)
    del result
    assert kept() is None


# Regression: the random weights of the model that shows the norm took the caller's random numbers.
def test_reading_a_norm_leaves_the_random_numbers_as_they_are(tmp_path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    before = torch.random.get_rng_state()

    FinalNorm.from_pretrained(tmp_path)

    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_result_has_no_gradient(tmp_path) -> None:
    make_model("llama").save_pretrained(tmp_path)

    assert not FinalNorm.from_pretrained(tmp_path)(torch.ones(3, 32)).requires_grad


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 16}, r"opt is decoder.project_out \(Linear"),
        ("openai-gpt", {}, r"the last step of openai-gpt is drop \(Dropout\), expected a single"),
        ("bert", {}, r"embeddings.LayerNorm \(LayerNorm\), embeddings.dropout"),
        ("big_bird", {}, r"embeddings.LayerNorm \(LayerNorm\), expected"),
        ("reformer", {}, "reformer without layers, which shows the final norm, failed in trans"),
    ],
)
def test_a_model_without_a_known_final_norm_is_refused(tmp_path, kind, fields, message) -> None:
    AutoConfig.for_model(kind, **(SMALL | fields)).save_pretrained(tmp_path)

    with pytest.raises(InvalidArgument, match=message):
        FinalNorm.from_pretrained(tmp_path)


@torch.no_grad()
def test_a_module_of_ones_own_serves_a_model_that_is_refused(tmp_path) -> None:
    config = AutoConfig.for_model("opt", **(SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 16}))
    decoder = AutoModelForCausalLM.from_config(config).eval().base_model.decoder
    config.save_pretrained(tmp_path)
    inputs: list[torch.Tensor] = []
    decoder.final_layer_norm.register_forward_hook(lambda _, given, __: inputs.append(given[0]))
    after = decoder(torch.arange(3, 9)[None]).last_hidden_state
    with pytest.raises(InvalidArgument, match=r"Pass FinalNorm\(\) a module that does all"):
        FinalNorm.from_pretrained(tmp_path)

    norm = FinalNorm(torch.nn.Sequential(decoder.final_layer_norm, decoder.project_out))

    assert torch.equal(norm(inputs[0]), after)


def test_a_folder_without_the_tensors_is_refused(tmp_path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")

    with pytest.raises(
        InvalidArgument, match=r"none of the tensors norm.weight, model.norm.weight"
    ):
        FinalNorm.from_pretrained(tmp_path)
