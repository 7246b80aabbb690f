"""The server scores heads of 20 model classes as transformers does, by their configs and names alone."""

import json

import head_cases
import pytest
import torch
from model_folder import write_safetensors
from scoring_rpc import Scoring, request


@pytest.mark.parametrize("case", head_cases.load(), ids=lambda case: case["name"])
def test_a_head_is_scored_as_its_class_does(start_server, tmp_path, case) -> None:
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    tensors = {name: head_cases.values(*each).numpy() for name, each in case["tensors"].items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    hidden = case["hidden_size"]

    server = start_server("--model", str(tmp_path))
    with Scoring(server.grpc) as scoring:
        response = scoring.score(
            request(
                rows=head_cases.ROWS,
                hidden_size=hidden,
                hidden=head_cases.rows(hidden).numpy().tobytes(),
            )
        )

    found = torch.frombuffer(bytearray(response.logprob), dtype=torch.float32)
    assert (found - torch.tensor(case["logprobs"])).abs().max() < 1e-5
