"""The demo model is what it claims to be, and the comparison notices a wrong server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[4]
DEMO = ROOT / "deploy" / "demo"
sys.path[:0] = [str(DEMO), str(ROOT / "client" / "python")]

import score_demo
from logprobd import demo_model
from logprobd.testing import FakeServer

VOCAB, HIDDEN = 1003, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    demo_model.write_model(folder, VOCAB, HIDDEN)
    return folder


@pytest.fixture
def weight(model):
    stored, kind = score_demo.open_tensor(model, demo_model.HEAD)
    return score_demo.as_double(stored, kind)


def run_score_demo(model, server, *arguments):
    return subprocess.run(
        [
            sys.executable,
            str(DEMO / "score_demo.py"),
            f"--model={model}",
            f"--address={server.address}",
            "--timeout=20",
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "client" / "python")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_shards_are_read_by_the_safetensors_library(model, weight):
    index = json.loads((model / "model.safetensors.index.json").read_text())

    assert len(set(index["weight_map"].values())) == 2
    total = 0
    for name, file_name in index["weight_map"].items():
        with safe_open(model / file_name, framework="pt") as file:
            tensor = file.get_tensor(name)
            assert str(tensor.dtype) == "torch.bfloat16"
            total += tensor.numel() * 2
            if name == demo_model.HEAD:
                assert np.array_equal(tensor.double().numpy(), weight)
    assert index["metadata"]["total_size"] == total
    assert sorted(path.name for path in model.glob("*.safetensors")) == sorted(
        set(index["weight_map"].values())
    )


def test_the_config_ties_the_head(model):
    config = json.loads((model / "config.json").read_text())

    assert config["tie_word_embeddings"] is True
    assert (config["vocab_size"], config["hidden_size"]) == (VOCAB, HIDDEN)
    assert demo_model.VOCAB_SIZE % 256 != 0


def test_logits_of_normal_rows_have_standard_deviation_3(weight):
    hidden = np.random.default_rng(0).standard_normal((64, HIDDEN))

    assert (hidden @ weight.T).std() == pytest.approx(3.0, rel=0.05)


def test_the_same_seed_gives_the_same_bytes(model, tmp_path):
    demo_model.write_model(tmp_path, VOCAB, HIDDEN)

    for path in model.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_bf16_rounds_to_nearest_even():
    values = np.random.default_rng(2).standard_normal(100_000, dtype=np.float32)

    expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert np.array_equal(demo_model.bf16(values), expected)


@pytest.mark.parametrize("transform", [{}, {"scale": 0.5, "softcap": 5.0}])
def test_a_right_server_passes(model, weight, transform):
    with FakeServer(
        weight=weight.astype(np.float32), tensor=demo_model.HEAD, **transform
    ) as server:
        done = run_score_demo(model, server, "--rows=3")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert "largest difference" in lines[-1]


def test_a_wrong_server_fails(model, weight):
    with FakeServer(weight=weight.astype(np.float32) * 1.01, tensor=demo_model.HEAD) as server:
        done = run_score_demo(model, server)

    assert done.returncode == 1
    assert "above 0.001" in done.stderr


def test_a_bias_is_read_beside_the_weight(tmp_path):
    draw = np.random.default_rng(4)
    weight = demo_model.bf16(draw.standard_normal((50, 8), dtype=np.float32))
    bias = demo_model.bf16(draw.standard_normal(50, dtype=np.float32))
    demo_model.write_safetensors(
        tmp_path / "model.safetensors", {"lm_head.weight": weight, "lm_head.bias": bias}
    )
    with FakeServer(
        weight=score_demo.as_double(weight, "BF16").astype(np.float32),
        bias=score_demo.as_double(bias, "BF16"),
    ) as server:
        done = run_score_demo(tmp_path, server)

    assert done.returncode == 0, done.stderr


def test_a_missing_tensor_is_one_clear_line(model):
    with FakeServer(hidden_size=HIDDEN, tensor="other.weight") as server:
        done = run_score_demo(model, server)

    assert done.returncode == 1
    assert "does not name other.weight" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_script_writes_the_full_model_quickly(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "logprobd.demo_model", str(tmp_path)],
        cwd=ROOT / "client" / "python",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert "vocabulary 32003, hidden 512" in done.stdout
    stored, _ = score_demo.open_tensor(tmp_path, demo_model.HEAD)
    assert stored.shape == (32_003, 512)
