"""logprobd.logit_shape reads scale and cap of a config.json as the server does."""

import json
import subprocess

import pytest
from logprobd.errors import InvalidArgument
from logprobd.logit_shape import logit_shape
from model_folder import ModelFolder

HIDDEN, VOCAB = 32, 64


@pytest.fixture
def plan(binaries, tmp_path):
    """Returns a function that gives the server's plan for a model folder with these settings in its config.json."""
    ModelFolder.write(tmp_path, vocab=VOCAB, hidden=HIDDEN)

    def run(config: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "config.json").write_text(config)
        command = [binaries / "logprobd", "--device", "cpu", "--model", tmp_path, "--dry-run"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run


def config_with(settings: dict) -> str:
    base = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "tie_word_embeddings": True}
    return json.dumps(base | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"logit_scale": 0.0625},
        {"logit_scale": "inv_sqrt_d_model"},
        {"logit_scale": None, "final_logit_softcapping": 30},
        {"lm_head_multiplier": 0.3, "output_multiplier": 2, "final_logit_softcapping": False},
        {"output_multiplier_scale": 0.7, "mup_output_mult": 3.5},
        {"logits_scaling": 8.0, "final_logit_softcapping": 0},
        {"dim_model_base": 8},
        {"text_config": {"logit_scale": 0.25, "final_logit_softcapping": 12.5}},
    ],
    ids=str,
)
def test_scale_and_cap_are_those_of_the_server(plan, settings) -> None:
    config = config_with(settings)

    shape = logit_shape(config)

    printed = dict(line.split(None, 1) for line in plan(config).stdout.splitlines() if line)
    expected = {name: printed[name].strip() for name in ("scale", "cap")}
    # The plan has six digits.
    assert {
        "scale": "none" if shape.scale == 1 else f"{shape.scale:.6g}",
        "cap": "none" if shape.softcap is None else f"{shape.softcap:.6g}",
    } == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_scale": 0},
        {"logit_scale": True},
        {"logit_scale": "2"},
        {"logits_scaling": -1},
        {"logit_scale": 1e-50},
        {"final_logit_softcapping": -30},
        {"final_logit_softcapping": "30"},
        {"dim_model_base": "wide"},
    ],
    ids=str,
)
def test_values_that_the_server_refuses_are_refused(plan, settings) -> None:
    config = config_with(settings)

    with pytest.raises(InvalidArgument, match=next(iter(settings))):
        logit_shape(config)

    assert plan(config).returncode != 0
