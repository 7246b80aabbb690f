"""Hidden states from a stand-in for vLLM, with its head in a server, give the model's own scores."""

import sys

import fake_vllm
import logprobd
import numpy as np
import pytest
import torch
import vllm_backbone
from logprobd.errors import InvalidArgument
from logprobd_adapters import RemoteScorer, gateway
from logprobd_adapters.teacher import Prompt, Teacher
from logprobd_adapters.vllm import VllmBackbone
from server_process import ServerProcess
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5  # nats, of fp32 sums
PROMPTS = ([5, 17, 99, 3, 1023], [7], [8191, 0, 1])


@pytest.fixture(autouse=True)
def fake(monkeypatch) -> None:
    for name, module in fake_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(scope="module")
def model(folders):
    return AutoModelForCausalLM.from_pretrained(folders[torch.float32], dtype="auto").eval()


@pytest.fixture(scope="module")
def address(folders, binaries):
    with ServerProcess(binaries, "--model", str(folders[torch.float32])) as server:
        yield server.grpc


def exact(model, tokens: list[int]) -> torch.Tensor:
    """Returns [length - 1, V] log-probabilities of the model itself in double precision."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_hidden_states_are_the_inputs_of_the_head_in_the_models_dtype(folders, dtype) -> None:
    states = VllmBackbone(str(folders[dtype])).hidden_states(PROMPTS)

    body = AutoModelForCausalLM.from_pretrained(folders[dtype], dtype="auto").eval().base_model
    for state, prompt in zip(states, PROMPTS, strict=True):
        with torch.inference_mode():
            expected = body(torch.tensor([prompt])).last_hidden_state[0]
        assert state.dtype == dtype
        assert torch.equal(state, expected)


def test_rows_other_than_a_token_each_are_refused(folders, monkeypatch) -> None:
    backbone = VllmBackbone(str(folders[torch.float32]))
    encode = fake_vllm.LLM.encode

    def encode_last(self, *arguments, **keywords):
        outputs = encode(self, *arguments, **keywords)
        outputs[-1].outputs.data = outputs[-1].outputs.data[-1:]
        return outputs

    monkeypatch.setattr(fake_vllm.LLM, "encode", encode_last)
    with pytest.raises(InvalidArgument, match=r"\[1, 64\] of 3 tokens, expected a row a token"):
        backbone.hidden_states(PROMPTS)


def test_a_teacher_on_the_backbone_gives_the_models_scores(folders, address, model) -> None:
    with logprobd.Client(address) as client:
        backbone = VllmBackbone(str(folders[torch.float32]), max_model_len=32)
        teacher = Teacher(backbone, RemoteScorer(client), backbone.max_model_len)
        candidates = np.random.default_rng(0).integers(0, 8192, (4, 300))
        results = teacher.score(
            [Prompt(PROMPTS[0], top_k=5, candidates=candidates), Prompt(PROMPTS[2])]
        )

    assert backbone.max_model_len == 32
    truth = exact(model, PROMPTS[0])
    rows = torch.arange(4)[:, None]
    np.testing.assert_allclose(
        results[0].logprobs, truth[rows[:, 0], PROMPTS[0][1:]], rtol=0, atol=TOLERANCE
    )
    np.testing.assert_allclose(
        results[0].candidate_logprobs, truth[rows, candidates], rtol=0, atol=TOLERANCE
    )
    np.testing.assert_array_equal(results[0].top_ids, truth.topk(5).indices)
    np.testing.assert_allclose(
        results[1].logprobs,
        exact(model, PROMPTS[2])[torch.arange(2), PROMPTS[2][1:]],
        **{"rtol": 0, "atol": TOLERANCE},
    )


def test_the_gateway_takes_vllm_as_its_backbone(folders, address) -> None:
    options = gateway._parser().parse_args(
        ["--model", str(folders[torch.float32]), "--backbone", "vllm", "--address", address]
    )
    teacher = gateway._load(options)

    assert teacher.max_model_len == 64
    assert len(teacher.score([Prompt(PROMPTS[0])])[0].logprobs) == 4


def test_the_example_gives_exact_scores_entropy_and_candidates(
    folders, address, model, capsys
) -> None:
    tokens = PROMPTS[0]
    with logprobd.Client(address) as client:
        result = vllm_backbone.score(VllmBackbone(str(folders[torch.float32])), client, tokens, 256)
    truth = exact(model, tokens)
    entropy = -(truth.exp() * truth).sum(-1)
    np.testing.assert_allclose(result.entropy, entropy, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(result.candidate_logprobs, truth[:, :256], rtol=0, atol=TOLERANCE)

    vllm_backbone.main([str(folders[torch.float32]), "--address", address])

    assert len(capsys.readouterr().out.splitlines()) == 8
