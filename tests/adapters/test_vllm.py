"""VllmBackbone, the gateway on it and its example, with a stand-in for vLLM (tests/support/fake_vllm)."""

import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.request

import distill_teacher
import logprobd
import numpy as np
import pytest
import torch
from document_examples import run_example
from gateway_process import GatewayProcess
from logprobd_adapters import RemoteScorer
from logprobd_adapters.teacher import Prompt, Teacher
from server_process import ServerProcess
from transformers import AutoModelForCausalLM

ROOT = pathlib.Path(__file__).parents[2]
FAKE = ROOT / "tests" / "support" / "fake_vllm"
EXAMPLE = ROOT / "client" / "adapters" / "examples" / "vllm_backbone" / "vllm_backbone.py"
GATEWAY = [sys.executable, "-m", "logprobd_adapters.gateway_command"]
PORT = ("--listen", "127.0.0.1:0")
TOLERANCE = 1e-5  # nats, of fp32 sums
PROMPTS = [[5, 17, 4000, 3, 8191, 12], [9], [7, 7, 2, 100]]


@pytest.fixture
def adapter(monkeypatch):
    """The module logprobd_adapters.vllm, whose vllm is the stand-in for the length of a test."""
    monkeypatch.syspath_prepend(FAKE)
    yield importlib.import_module("logprobd_adapters.vllm")
    for name in ("vllm", "vllm.config", "logprobd_adapters.vllm"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def fake_environment(environment):
    """The variables of commands that import the stand-in."""
    paths = f"{environment['PYTHONPATH']}{os.pathsep}{FAKE}"
    return environment | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(folders) -> str:
    return str(folders[torch.float32])


@pytest.fixture(scope="module")
def address(folder, binaries):
    with ServerProcess(binaries, "--model", folder) as server:
        yield server.grpc


@torch.no_grad()
def exact_logprobs(folder: str, tokens: list[int]) -> torch.Tensor:
    """Returns [length - 1, V] log-probabilities of a model in double precision."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


@pytest.mark.parametrize(
    ("stored", "dtype", "expected"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "float16", torch.float16),
    ],
    ids=str,
)
def test_states_are_those_after_the_final_norm_in_the_dtype_of_the_model(
    adapter, folders, stored, dtype, expected
) -> None:
    folder = str(folders[stored])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=expected)

    hidden = adapter.VllmBackbone(folder, dtype=dtype).hidden_states(PROMPTS)

    assert [states.dtype for states in hidden] == [expected] * 3
    with torch.no_grad():
        for states, tokens in zip(hidden, PROMPTS, strict=True):
            last = model.base_model(torch.tensor([tokens])).last_hidden_state[0]
            assert torch.equal(states, last)


def test_a_config_without_a_dtype_runs_in_fp32(adapter, folders, tmp_path) -> None:
    shutil.copytree(folders[torch.bfloat16], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    (states,) = adapter.VllmBackbone(str(tmp_path)).hidden_states([[1, 2]])

    assert states.dtype == torch.float32


def test_the_stand_in_runs_fp32_models_in_fp16_by_default_as_vllm_does(adapter, folder) -> None:
    pooler = adapter.PoolerConfig(task="token_embed", tok_pooling_type="ALL")

    engine = adapter.LLM(folder, runner="pooling", convert="embed", pooler_config=pooler)

    assert engine.model_config.dtype == torch.float16


def test_engine_arguments_reach_vllm(adapter, folder) -> None:
    backbone = adapter.VllmBackbone(
        folder, dtype="bfloat16", max_model_len=16, hf_overrides={"rope_theta": 1e6}
    )

    assert backbone.max_model_len == 16
    (states,) = backbone.hidden_states([[1, 2]])
    assert states.dtype == torch.bfloat16  # not fp32: head_dtype was not lost


@pytest.mark.parametrize("name", ["no_such_argument", "runner", "pooler_config"])
def test_an_argument_that_vllm_does_not_have_or_that_is_set_is_refused(
    adapter, folder, name
) -> None:
    with pytest.raises(TypeError, match=name):
        adapter.VllmBackbone(folder, **{name: 1})


def test_rows_other_than_one_for_each_token_are_refused(adapter, folder, monkeypatch) -> None:
    backbone = adapter.VllmBackbone(folder)
    encode = adapter.LLM.encode

    def encode_last(self, *positional, **named):
        outputs = encode(self, *positional, **named)
        outputs[-1].outputs.data = outputs[-1].outputs.data[-1:]
        return outputs

    monkeypatch.setattr(adapter.LLM, "encode", encode_last)

    with pytest.raises(RuntimeError, match=r"\[1, 64\] for 4 tokens, expected a row a token"):
        backbone.hidden_states(PROMPTS)


def test_a_teacher_on_the_backbone_has_the_models_scores(
    adapter, folder, address, monkeypatch
) -> None:
    lengths: list[int] = []
    encode = adapter.LLM.encode

    def encode_and_count(self, prompts, *positional, **named):
        lengths.extend(len(prompt["prompt_token_ids"]) for prompt in prompts)
        return encode(self, prompts, *positional, **named)

    monkeypatch.setattr(adapter.LLM, "encode", encode_and_count)
    backbone = adapter.VllmBackbone(folder)
    candidates = np.random.default_rng(0).integers(0, 8192, (5, 300))
    with logprobd.Client(address) as client:
        teacher = Teacher(backbone.hidden_states, RemoteScorer(client), backbone.max_model_len)

        scores = teacher.score(
            [Prompt(PROMPTS[0], candidates=candidates), *(Prompt(each) for each in PROMPTS[1:])]
        )

    assert lengths == [6, 1, 4]  # no padding runs through vLLM
    for tokens, of_prompt in zip(PROMPTS, scores, strict=True):
        exact = exact_logprobs(folder, tokens).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert of_prompt.logprobs == pytest.approx(exact.numpy(), abs=TOLERANCE)
    exact = exact_logprobs(folder, PROMPTS[0]).gather(1, torch.from_numpy(candidates))
    assert scores[0].candidate_logprobs == pytest.approx(exact.numpy(), abs=TOLERANCE)


def test_the_example_of_the_document_scores(adapter, folder, address) -> None:
    replaced = {"Qwen/Qwen3-8B": folder, "127.0.0.1:8470": address, "9707": "970"}

    names = run_example("docs/VLLM.md", "VllmBackbone", replaced)

    assert [len(states) for states in names["hidden"]] == [3, 2]
    exact = exact_logprobs(folder, [970, 11, 1879])[[0, 1], [11, 1879]]
    assert names["scores"].logprobs == pytest.approx(exact.numpy(), abs=TOLERANCE)


def test_the_gateway_serves_a_model_in_vllm(fake_environment, folder, address) -> None:
    options = ("--backbone", "vllm", "--model", folder, "--address", address)
    tokens = PROMPTS[0]
    with GatewayProcess(
        fake_environment, *options, "--vllm-arguments", '{"max_model_len": 6}'
    ) as gateway:
        body = json.dumps({"prompt": tokens, "prompt_logprobs": 3}).encode()
        with urllib.request.urlopen(f"{gateway.url}/v1/completions", body) as response:
            (choice,) = json.load(response)["choices"]
        assert gateway.stop() == 0

    exact = exact_logprobs(folder, tokens)
    assert choice["prompt_logprobs"][0] is None
    for row, token, entries in zip(exact, tokens[1:], choice["prompt_logprobs"][1:], strict=True):
        assert {int(key) for key in entries} == {token, *row.topk(3).indices.tolist()}
        for key, entry in entries.items():
            assert entry["logprob"] == pytest.approx(row[int(key)].item(), abs=TOLERANCE)
            assert entry["rank"] == 1 + (row > row[int(key)]).sum().item()
    log = "".join(gateway.log)
    assert "by vllm" in log and "max_model_len 6; the head has the model's hidden size" in log


def test_a_head_of_another_size_ends_the_gateway_before_it_is_ready(
    fake_environment, folder, binaries, tmp_path
) -> None:
    distill_teacher.make_model(seed=0, hidden_size=32).save_pretrained(tmp_path)
    with ServerProcess(binaries, "--model", str(tmp_path)) as server:
        options = ("--backbone", "vllm", "--model", folder, "--address", server.grpc)
        done = run(fake_environment, *GATEWAY, *options, *PORT)

    assert done.returncode == 1 and "hidden" in done.stderr
    assert "ready" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--backbone", "vllm", "--local"), 2, "the head is not in vLLM"),
        (("--local", "--vllm-arguments", "{}"), 2, "--vllm-arguments needs --backbone vllm"),
        (("--backbone", "vllm", "--vllm-arguments", "{"), 2, "'{' is no JSON"),
        (("--backbone", "vllm", "--vllm-arguments", "[]"), 2, "'[]' is no JSON object"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(environment, options, code, message) -> None:
    done = run(environment, *GATEWAY, "--model", "m", *options)

    assert done.returncode == code and message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [('{"max_model_length": 6}', "max_model_length"), ('{"runner": "generate"}', "runner")],
)
def test_an_argument_that_vllm_does_not_take_ends_the_gateway(
    fake_environment, folder, address, arguments, message
) -> None:
    options = ("--backbone", "vllm", "--vllm-arguments", arguments)

    done = run(fake_environment, *GATEWAY, *options, "--model", folder, "--address", address, *PORT)

    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(f"vLLM does not take these arguments: .*{message}", done.stderr)


def test_a_gateway_without_vllm_says_so(environment, folder, address) -> None:
    options = ("--backbone", "vllm", "--model", folder, "--address", address)

    done = run(environment, *GATEWAY, *options, *PORT)

    assert done.returncode == 1 and "No module named 'vllm'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_example_prints_exact_scores(fake_environment, folder) -> None:
    tokens, candidates = PROMPTS[0], [0, 4095, 8191]
    options = (str(tokens), "--candidates", *map(str, candidates))

    done = run(fake_environment, sys.executable, str(EXAMPLE), folder, *options, "--device", "cpu")

    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        [float(cell) for cell in re.findall(r"-?[\d.]+", line)]
        for line in done.stdout.splitlines()
        if re.match(r"\| \d", line)
    ]
    exact = exact_logprobs(folder, tokens)
    assert len(rows) == len(exact)
    for (token, logprob, rank, entropy, *of_candidates), row in zip(rows, exact, strict=True):
        own = row[int(token)]
        assert (logprob, entropy) == pytest.approx(
            (own.item(), -(row.exp() * row).sum().item()), abs=TOLERANCE
        )
        assert rank == 1 + (row > own).sum().item()
        assert of_candidates == pytest.approx(row[candidates].tolist(), abs=TOLERANCE)
