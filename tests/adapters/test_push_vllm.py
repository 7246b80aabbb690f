"""vLLM's trainer pushes the head and moves all weights by another backend (recorded signatures)."""

import dataclasses
import hashlib
import importlib
import sys
import types
from typing import ClassVar

import fake_vllm_transfer as vllm
import pytest
import torch
from logprobd import InvalidArgument, WeightsClient
from model_folder import ModelFolder
from server_process import ServerProcess

VOCAB, HIDDEN = 1003, 64


@pytest.fixture(scope="module", autouse=True)
def adapter():
    before = set(sys.modules)
    vllm.install()
    yield importlib.import_module("logprobd_adapters.vllm_push")
    for name in set(sys.modules) - before:
        if name.startswith(("vllm", "logprobd_adapters.vllm_push")):
            del sys.modules[name]


@pytest.fixture
def server(tmp_path, binaries):
    ModelFolder.write(tmp_path, vocab=VOCAB, hidden=HIDDEN)
    options = ("--model", str(tmp_path), "--admin", "127.0.0.1:0")
    with ServerProcess(binaries, *options) as server:
        yield server


@dataclasses.dataclass
class InnerInfo(vllm.TrainerInitInfo):
    backend: ClassVar[str] = "inner"


class InnerEngine(vllm.TrainerWeightTransferEngine):
    """Drives vLLM's client as its engines do, and keeps what was sent."""

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source)

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.client.update_weights({"names": [name for name, _ in self.source.iter_full()]})
        self.client.finish_weight_update()


vllm.WeightTransferTrainerFactory.register_engine("inner", InnerEngine)


class Client:
    """Records the calls of vLLM's weight sync client."""

    def __init__(self) -> None:
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))


class FullSource(vllm.WeightSource):
    def __init__(self, head: torch.Tensor, meta: vllm.ParamMeta) -> None:
        norm = torch.ones(HIDDEN)
        self.tensors = {"model.norm.weight": norm, "lm_head.weight": head}
        self.metadata = [vllm.ParamMeta("model.norm.weight", norm.dtype, (HIDDEN,)), meta]

    def iter_full(self):
        yield from self.tensors.items()


class LocalSource(FullSource):
    def iter_local(self):
        yield from self.tensors.items()


def head() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(VOCAB, HIDDEN).bfloat16()


def digest(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.view(torch.int16).numpy().tobytes()).hexdigest()


def start(adapter, server, source, rank=0, client=None, **options):
    info = adapter.LogprobdTrainerInitInfo(server.admin, rank=rank, **options)
    factory = vllm.WeightTransferTrainerFactory
    return factory.trainer_init(info, client=client or Client(), source=source)


def live(server):
    with WeightsClient(server.admin) as client:
        return client.list()[0].live


def test_each_step_pushes_the_head_and_the_inner_engine_sends_all(adapter, server) -> None:
    client = Client()
    source = FullSource(head(), vllm.ParamMeta("lm_head.weight", torch.bfloat16, (VOCAB, HIDDEN)))
    engine = start(adapter, server, source, client=client, inner=InnerInfo(rank=0))

    engine.send_weights()
    engine.send_weights()

    update = ("update_weights", {"names": ["model.norm.weight", "lm_head.weight"]})
    step = [("start_weight_update",), update, ("finish_weight_update",)]
    assert client.calls == [("init_weight_transfer_engine", {}), *step, *step]
    assert (live(server).version, live(server).sha256) == (3, digest(head()))
    engine.shutdown()


def test_owners_of_shards_push_their_own_rows(adapter, server, monkeypatch) -> None:
    """Ranks of a mesh [2 replicas, 2 shards] run one after another, with the master last."""
    layout = {"mesh_shape": (2, 2), "placements": (vllm.Replicate(), vllm.Shard(0))}
    meta = vllm.ParamMeta(
        "lm_head.weight", torch.bfloat16, (VOCAB, HIDDEN), owners=(0, 1, 2, 3), **layout
    )
    pushed = types.SimpleNamespace(ranks=[])
    original = WeightsClient.push

    def push(self, rows, **options):
        pushed.ranks.append((len(rows), options["row_begin"]))
        return original(self, rows, **options)

    monkeypatch.setattr(WeightsClient, "push", push)
    for rank in (3, 2, 1, 0):
        piece = head().chunk(2)[rank % 2]
        start(adapter, server, LocalSource(piece, meta), rank=rank).send_weights()

    assert pushed.ranks == [(501, 502), (502, 0)]
    assert (live(server).version, live(server).sha256) == (2, digest(head()))


def test_columns_and_unknown_names_are_refused(adapter, server) -> None:
    shape = (VOCAB, HIDDEN)
    columns = vllm.ParamMeta(
        "lm_head.weight", torch.bfloat16, shape, owners=(0,), placements=(vllm.Shard(1),)
    )
    with pytest.raises(InvalidArgument, match="sharded on its columns"):
        start(adapter, server, LocalSource(head(), columns)).send_weights()
    with pytest.raises(InvalidArgument, match='no tensor "model.embed_tokens.weight"'):
        start(adapter, server, FullSource(head(), columns), tensor="model.embed_tokens.weight")
