"""The demo model is a complete folder of a tied model, and the same seed gives the same bytes."""

import json
import struct
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from logprobd import demo_model

VOCAB, HIDDEN = 37, 24


@pytest.fixture
def folder(tmp_path):
    demo_model.write_model(tmp_path / "deep" / "model", VOCAB, HIDDEN)
    return tmp_path / "deep" / "model"


def load(folder):
    shards = sorted(folder.glob("*.safetensors"))
    return [safetensors.torch.load_file(shard) for shard in shards]


def test_the_tensors_of_a_small_llama_are_in_two_shards(folder):
    first, second = load(folder)

    layers = {
        "mlp.down_proj.weight": (HIDDEN, 64),
        "mlp.gate_proj.weight": (64, HIDDEN),
        "mlp.up_proj.weight": (64, HIDDEN),
        "input_layernorm.weight": (HIDDEN,),
    }
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == {
        "model.embed_tokens.weight": (VOCAB, HIDDEN)
    } | {f"model.layers.0.{name}": shape for name, shape in layers.items()}
    assert {name: tuple(tensor.shape) for name, tensor in second.items()} == {
        "model.norm.weight": (HIDDEN,)
    } | {f"model.layers.1.{name}": shape for name, shape in layers.items()}
    assert all(tensor.dtype == torch.bfloat16 for tensor in (first | second).values())
    assert all((first | second)[name].eq(1).all() for name in first | second if "norm" in name)
    assert float(first["model.layers.0.mlp.up_proj.weight"].std()) == pytest.approx(0.02, rel=0.1)


def test_the_index_places_every_tensor_and_counts_the_bytes(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())

    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    expected = {
        name: file for file, shard in zip(files, load(folder), strict=True) for name in shard
    }
    assert index["weight_map"] == expected
    assert list(index["weight_map"]) == sorted(expected)
    tensors = [tensor for shard in load(folder) for tensor in shard.values()]
    assert index["metadata"]["total_size"] == sum(2 * tensor.numel() for tensor in tensors)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*files, "config.json", "model.safetensors.index.json"]
    )


@pytest.mark.parametrize("length", range(1, 9))
def test_the_data_of_a_shard_is_aligned(tmp_path, length):
    shard = tmp_path / "a.safetensors"

    demo_model.write_safetensors(shard, {"a" * length: np.zeros(3, "<u2")})

    (length,) = struct.unpack("<Q", shard.read_bytes()[:8])
    assert length % 8 == 0
    assert shard.read_bytes()[8 + length - 8 : 8 + length].rstrip(b" ").endswith(b"}")


def test_the_config_has_the_sizes_and_ties_the_head(folder):
    config = json.loads((folder / "config.json").read_text())

    assert config["tie_word_embeddings"] is True
    assert (config["vocab_size"], config["hidden_size"]) == (VOCAB, HIDDEN)
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (2, 64)


def test_logits_of_normal_rows_have_a_standard_deviation_of_3(tmp_path):
    demo_model.write_model(tmp_path, 500, 256)
    weight = load(tmp_path)[0]["model.embed_tokens.weight"].double().numpy()

    logits = np.random.default_rng(1).standard_normal((100, 256)) @ weight.T

    assert logits.std() == pytest.approx(3, rel=0.05)


def test_the_seed_alone_decides_the_bytes(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    demo_model.write_model(folder, VOCAB, HIDDEN)  # replaces the files
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    demo_model.write_model(tmp_path / "other", VOCAB, HIDDEN, seed=1)

    for ours, others in zip(load(folder), load(tmp_path / "other"), strict=True):
        for name in ours:
            assert torch.equal(ours[name], others[name]) == ("norm" in name)


def test_the_command_writes_the_folder_and_says_what_it_wrote(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    command = ["demo_model", str(folder), "--vocab", "9", "--hidden", "8", "--seed", "1"]
    monkeypatch.setattr(sys, "argv", command)
    assert demo_model.main() == 0
    assert capsys.readouterr().out == f"{folder}: vocabulary 9, hidden 8, bf16, tied\n"
    demo_model.write_model(tmp_path / "same", 9, 8, 1)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "same" / path.name).read_bytes()

    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["demo_model", str(tmp_path / "file" / "model")])
    assert demo_model.main() == 1
    assert "cannot write the demo model: " in capsys.readouterr().err
