"""Checkpoint engines of verl push the head as it passes through, and hand on all weights."""

import asyncio
import hashlib

import pytest
import torch
from logprobd import InvalidArgument, WeightsClient
from model_folder import ModelFolder
from server_process import ServerProcess
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

VOCAB, HIDDEN = 1003, 64


@CheckpointEngineRegistry.register("collecting")
class CollectingEngine(CheckpointEngine):
    """Keeps what it is given, in place of a transfer to rollouts."""

    def __init__(self, bucket_size: int, is_master: bool = False, label: str = "") -> None:
        self.arguments = (bucket_size, is_master, label)
        self.sent = {}

    def prepare(self):
        return {"label": self.arguments[2]}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        return {"rank": [0]}, {"rank": [1]}

    def init_process_group(self, **kwargs):
        pass

    def finalize(self):
        pass

    async def send_weights(self, weights, global_steps=None):
        self.sent = dict(weights)
        return {"steps": global_steps}

    async def receive_weights(self, global_steps=None):
        yield "a", torch.zeros(1)


import_external_libs("logprobd_adapters.verl_push")


@pytest.fixture
def server(tmp_path, binaries):
    ModelFolder.write(tmp_path, vocab=VOCAB, hidden=HIDDEN)
    options = ("--model", str(tmp_path), "--admin", "127.0.0.1:0")
    with ServerProcess(binaries, *options) as server:
        yield server


def make(server, *, is_master: bool = True, **options) -> CheckpointEngine:
    engine = {"bucket_size": 1 << 20, "address": server.admin, **options}
    return CheckpointEngineRegistry.new("logprobd_collecting", is_master=is_master, **engine)


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.randn(VOCAB, HIDDEN).bfloat16()
    return {"model.norm.weight": torch.ones(HIDDEN), "lm_head.weight": head}


def test_the_master_pushes_the_head_and_all_weights_pass(server) -> None:
    engine = make(server, label="inner")
    given = weights()

    metrics = asyncio.run(engine.send_weights(iter(given.items()), global_steps=1))

    assert metrics == {"steps": 1, "logprobd/weights_version": 2}
    assert list(engine.sent) == list(given)
    assert all(engine.sent[name] is given[name] for name in given)
    assert (engine.arguments, engine.prepare()) == ((1 << 20, True, "inner"), {"label": "inner"})
    with WeightsClient(server.admin) as client:
        (state,) = client.list()
    expected = hashlib.sha256(given["lm_head.weight"].view(torch.int16).numpy().tobytes())
    assert (state.live.version, state.live.sha256) == (2, expected.hexdigest())


def test_other_ranks_push_nothing(server) -> None:
    engine = make(server, is_master=False)

    asyncio.run(engine.send_weights(iter(weights().items()), global_steps=3))

    assert list(engine.sent) == list(weights())
    with WeightsClient(server.admin) as client:
        assert client.list()[0].live.version == 1


def test_a_failed_push_is_raised_after_all_weights_are_sent(server) -> None:
    engine = make(server)
    given = weights()
    given["lm_head.weight"][5, 7] = torch.nan

    with pytest.raises(InvalidArgument, match="row 5 column 7 is NaN"):
        asyncio.run(engine.send_weights(iter(given.items())))

    assert list(engine.sent) == list(given)


# Regression: rows or a version that a failed step had left refused every later step.
@pytest.mark.parametrize("rows", [100, VOCAB], ids=["some-rows", "staged"])
def test_a_step_follows_one_that_ended_before_its_commit(server, rows) -> None:
    with WeightsClient(server.admin) as client:
        old = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)
        client.push(old, version=2, vocab_rows=VOCAB)

        metrics = asyncio.run(make(server).send_weights(iter(weights().items())))

        (state,) = client.list()
    assert state.live.version == metrics["logprobd/weights_version"]
    expected = hashlib.sha256(weights()["lm_head.weight"].view(torch.int16).numpy().tobytes())
    assert state.live.sha256 == expected.hexdigest()


def test_an_absent_head_is_an_error_that_names_the_setting(server) -> None:
    engine = make(server, tensor="model.embed_tokens.weight")

    with pytest.raises(InvalidArgument, match="set tensor to the name"):
        asyncio.run(engine.send_weights(iter(weights().items())))


def test_engines_without_a_stream_of_weights_get_no_tee() -> None:
    with pytest.raises(ValueError, match="logprobd_naive not registered"):
        CheckpointEngineRegistry.get("logprobd_naive")
