"""Checkpoint engines of verl push the head as it passes through, and hand on all weights."""

import asyncio
import gc
import pathlib
import re
import threading
import unittest.mock

import pytest
import torch
from document_examples import ADAPTERS
from hydra import compose, initialize_config_module
from logprobd import InvalidArgument, LogprobdError, Tls, WeightsClient
from omegaconf import OmegaConf
from pushed_head import HIDDEN, VOCAB, digest, server_of, write_bf16_head
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import import_external_libs


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
    assert (state.live.version, state.live.sha256) == (2, digest(given["lm_head.weight"]))


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
    assert state.live.sha256 == digest(weights()["lm_head.weight"])


def test_a_push_that_fails_without_an_answer_stops_no_transfer(server, monkeypatch) -> None:
    engine = make(server)
    monkeypatch.setattr(WeightsClient, "push", unittest.mock.Mock(side_effect=OSError("no push")))

    with pytest.raises(OSError, match="no push"):
        asyncio.run(engine.send_weights(iter(weights().items())))

    assert list(engine.sent) == list(weights())


# Regression: the version was asked for and committed on the event loop.
def test_the_event_loop_goes_on_while_a_version_is_begun_and_committed(server, monkeypatch) -> None:
    def after_a_turn_of_the_loop(call, loop):
        def called(*arguments, **keywords):
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            assert turned.wait(10), f"{call.__name__} held up the event loop"
            return call(*arguments, **keywords)

        return called

    async def step() -> dict:
        for name in ("list", "commit"):
            call = getattr(WeightsClient, name)
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(WeightsClient, name, after_a_turn_of_the_loop(call, loop))
        return await make(server).send_weights(iter(weights().items()))

    assert asyncio.run(step())["logprobd/weights_version"] == 2


# Regression: the bias was not pushed, and a version that was not staged was committed.
def test_a_bias_is_pushed_with_the_weight(tmp_path, binaries) -> None:
    given = {name: tensor.float() for name, tensor in weights().items()}
    given["lm_head.bias"] = torch.randn(VOCAB)
    head = [given["lm_head.weight"], given["lm_head.bias"]]
    write_bf16_head(tmp_path, *head)
    with server_of(tmp_path, binaries) as server:
        asyncio.run(make(server, dtype="bf16").send_weights(iter(given.items())))

        with WeightsClient(server.admin) as client:
            assert client.list()[0].live.sha256 == digest(*head)
        del given["lm_head.bias"]
        with pytest.raises(InvalidArgument, match="set tensor .* and bias to that of its bias"):
            asyncio.run(make(server, dtype="bf16").send_weights(iter(given.items())))


def test_settings_of_the_client_are_passed_on(monkeypatch, tmp_path) -> None:
    made = unittest.mock.create_autospec(WeightsClient)
    monkeypatch.setattr("logprobd_adapters.verl_push.WeightsClient", made)
    settings = {"timeout": 3.0, "load_timeout": 5.0, "scoring_address": "a:1"}
    engine = {"bucket_size": 1 << 20, "address": "a:2", **settings}
    tls = OmegaConf.create({"server_name": "scorer"})
    token_file = tmp_path / "token"
    token_file.write_text("secret\n")

    for is_master, path in ((True, token_file), (False, "/nowhere")):  # others may lack the files
        CheckpointEngineRegistry.new(
            "logprobd_collecting", is_master=is_master, tls=tls, token_file=str(path), **engine
        )

    made.assert_called_once_with("a:2", tls=Tls(server_name="scorer"), token="secret", **settings)


def test_the_master_pushes_over_tls_with_a_token_of_the_scope_admin(
    secure_server, security
) -> None:
    tls = OmegaConf.create(security.client_tls())

    def step(token_file: pathlib.Path) -> dict:
        engine = make(secure_server, tls=tls, token_file=str(token_file))
        return asyncio.run(engine.send_weights(iter(weights().items())))

    with WeightsClient(secure_server.admin, tls=Tls(**tls), token=security.admin_token) as client:
        with pytest.raises(LogprobdError, match="PERMISSION_DENIED: .*scope admin"):
            step(security.token_file)
        assert client.list()[0].highest_version == 1

        assert step(security.admin_token_file) == {"steps": None, "logprobd/weights_version": 2}

        assert client.list()[0].live.sha256 == digest(weights()["lm_head.weight"])


# Regression: verl prints its configuration, with the token in it.
@pytest.mark.parametrize("is_master", [True, False])
def test_a_token_in_the_configuration_is_refused_and_not_shown(is_master) -> None:
    engine = {"bucket_size": 1 << 20, "address": "a:2", "token": "secret"}

    with pytest.raises(InvalidArgument, match="set token_file, or set the variable") as caught:
        CheckpointEngineRegistry.new("logprobd_collecting", is_master=is_master, **engine)

    assert "secret" not in str(caught.value)


def test_the_client_is_closed_with_the_engine(server, monkeypatch) -> None:
    closed = unittest.mock.Mock()
    monkeypatch.setattr(WeightsClient, "close", closed)
    engine = make(server)

    del engine
    gc.collect()

    closed.assert_called_once()


def test_verl_reads_the_settings_of_the_document() -> None:
    overrides = re.findall(
        r"^\+?actor_rollout_ref\.rollout\.checkpoint_engine\.\S+$",
        (ADAPTERS / "docs" / "PUSH.md").read_text(),
        re.MULTILINE,
    )
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)

    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)

    assert engine.backend == "logprobd_nccl"
    assert engine.custom_backend_module == "logprobd_adapters.verl_push"
    assert engine.engine_kwargs == {"logprobd_nccl": {"address": "scorer:8471"}}


def test_an_absent_head_is_an_error_that_names_the_setting(server) -> None:
    engine = make(server, tensor="model.embed_tokens.weight")

    with pytest.raises(InvalidArgument, match="set tensor to the name"):
        asyncio.run(engine.send_weights(iter(weights().items())))


def test_engines_without_a_stream_of_weights_get_no_tee() -> None:
    with pytest.raises(ValueError, match="logprobd_naive not registered"):
        CheckpointEngineRegistry.get("logprobd_naive")
