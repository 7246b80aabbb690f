"""vLLM's trainer pushes the head and moves all weights by another backend (recorded signatures)."""

import dataclasses
import functools
import importlib
import inspect
import json
import sys
import unittest.mock
from typing import Any, ClassVar

import fake_vllm_transfer as vllm
import pytest
import torch
from document_examples import ADAPTERS, run_example
from logprobd import InvalidArgument, LogprobdError, Tls, WeightsClient
from pushed_head import HIDDEN, VOCAB, digest, server_of, write_bf16_head

SHAPE = (VOCAB, HIDDEN)
RANKS = 4


@pytest.fixture(scope="module", autouse=True)
def adapter():
    before = set(sys.modules)
    vllm.install()
    yield importlib.import_module("logprobd_adapters.vllm_push")
    for name in set(sys.modules) - before:
        if name.startswith(("vllm", "logprobd_adapters.vllm_push")):
            del sys.modules[name]


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
    def __init__(self, tensors: dict[str, torch.Tensor], **layout: Any) -> None:
        """`layout` is that of `tensors`, of which a rank may have a part."""
        self.tensors = {"model.norm.weight": torch.ones(HIDDEN)} | tensors
        self.layout = layout

    @functools.cached_property
    def metadata(self) -> list[vllm.ParamMeta]:
        (norm_name, norm), *head = self.tensors.items()
        return [vllm.ParamMeta(norm_name, norm.dtype, (HIDDEN,))] + [
            vllm.ParamMeta(name, tensor.dtype, (VOCAB, *tensor.shape[1:]), **self.layout)
            for name, tensor in head
        ]

    def iter_full(self):
        yield from self.tensors.items()


class LocalSource(FullSource):
    def iter_local(self):
        yield from self.tensors.items()


def head(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(SHAPE).bfloat16()


def start(adapter, address, source, rank=0, client=None, **options):
    info = adapter.LogprobdTrainerInitInfo(address, rank=rank, **options)
    factory = vllm.WeightTransferTrainerFactory
    return factory.trainer_init(info, client=client or Client(), source=source)


def live(server, **options):
    with WeightsClient(server.admin, **options) as client:
        return client.list()[0].live


RECORD = json.loads(
    (ADAPTERS.parents[1] / "tests/support/fake_vllm/vllm/signatures.json").read_text()
)


@pytest.mark.parametrize("name", [name for name in RECORD if hasattr(vllm, name.split(".")[0])])
def test_the_stand_in_has_the_signatures_of_vllm(name) -> None:
    def described(signature: inspect.Signature) -> list[tuple]:
        return [
            (each.name, each.kind, each.default)
            for each in signature.parameters.values()
            if each.name != "self"
        ]

    owner, _, function = name.partition(".")
    of_class = getattr(vllm, owner)

    found = inspect.signature(getattr(of_class, function) if function else of_class)

    assert described(found) == described(inspect.signature(eval(f"lambda {RECORD[name]}: None")))


STEP = [
    ("start_weight_update",),
    ("update_weights", {"names": ["model.norm.weight", "lm_head.weight"]}),
    ("finish_weight_update",),
]


def test_each_step_pushes_the_head_and_the_inner_engine_sends_all(adapter, server) -> None:
    client = Client()
    source = FullSource({"lm_head.weight": head()})
    engine = start(adapter, server.admin, source, client=client, inner=InnerInfo(rank=0))

    engine.send_weights()
    engine.send_weights()

    assert client.calls == [("init_weight_transfer_engine", {}), *STEP, *STEP]
    assert (live(server).version, live(server).sha256) == (3, digest(head()))
    engine.shutdown()


# Regression: rows or a version that a failed step had left refused every later step.
@pytest.mark.parametrize("rows", [100, VOCAB], ids=["some-rows", "staged"])
def test_a_step_follows_one_that_ended_before_its_commit(adapter, server, rows) -> None:
    with WeightsClient(server.admin) as client:
        client.push(head(1)[:rows], version=2, vocab_rows=VOCAB)

    start(adapter, server.admin, FullSource({"lm_head.weight": head()})).send_weights()

    assert live(server).sha256 == digest(head())


def test_a_bias_is_pushed_with_the_weight(adapter, tmp_path, binaries) -> None:
    weight, bias = head().float(), torch.randn(VOCAB)
    write_bf16_head(tmp_path, weight, bias)
    tensors = {"lm_head.weight": weight, "lm_head.bias": bias}
    with server_of(tmp_path, binaries) as server:
        start(adapter, server.admin, FullSource(tensors), dtype="bf16").send_weights()
        assert live(server).sha256 == digest(weight, bias)
        engine = start(adapter, server.admin, FullSource({"lm_head.weight": weight}), dtype="bf16")
        with pytest.raises(InvalidArgument, match="set tensor .* and bias to that of its bias"):
            engine.send_weights()


def test_columns_and_unknown_names_are_refused(adapter, server) -> None:
    columns = {"owners": (0,), "placements": (vllm.Shard(1),)}
    tensors = {"lm_head.weight": head()}
    with pytest.raises(InvalidArgument, match="sharded on its columns"):
        start(adapter, server.admin, LocalSource(tensors, **columns)).send_weights()
    with pytest.raises(InvalidArgument, match='no tensor "model.embed_tokens.weight"'):
        start(adapter, server.admin, FullSource(tensors), tensor="model.embed_tokens.weight")


def test_settings_of_the_client_are_passed_on(adapter, monkeypatch) -> None:
    made = unittest.mock.create_autospec(WeightsClient)
    monkeypatch.setattr(adapter, "WeightsClient", made)
    settings = {
        "timeout": 3.0,
        "load_timeout": 5.0,
        "scoring_address": "a:1",
        "tls": Tls(server_name="scorer"),
        "token": "secret",
    }

    start(adapter, "a:2", FullSource({"lm_head.weight": head()}), **settings)

    made.assert_called_once_with("a:2", **settings)
    assert "secret" not in repr(adapter.LogprobdTrainerInitInfo("a:2", rank=0, token="secret"))


def test_the_head_is_pushed_over_tls_with_a_token_of_the_scope_admin(
    adapter, secure_server, security
) -> None:
    tls = Tls(**security.client_tls())
    source = FullSource({"lm_head.weight": head()})

    def step(token: str) -> None:
        start(adapter, secure_server.admin, source, tls=tls, token=token).send_weights()

    with pytest.raises(LogprobdError, match="PERMISSION_DENIED: .*scope admin"):
        step(security.token)
    assert live(secure_server, tls=tls, token=security.admin_token).version == 1

    step(security.admin_token)

    assert live(secure_server, tls=tls, token=security.admin_token).sha256 == digest(head())


def test_the_example_of_the_document_moves_the_head(server) -> None:
    make_engine = run_example("docs/PUSH.md", "Trainers of vLLM")["make_engine"]
    client, source = Client(), FullSource({"lm_head.weight": head()})

    make_engine(server.admin, InnerInfo(rank=0), client, source, rank=0).send_weights()

    assert live(server).sha256 == digest(head())
    assert client.calls[1:] == STEP


# The functions below run on each rank.

MESH: dict[str, Any] = {
    "owners": (0, 1, 2, 3),
    "mesh_shape": (2, 2),
    "placements": (vllm.Replicate(), vllm.Shard(0)),
}
"""2 replicas of 2 shards."""


def shard_engine(rank: int, address: str, client: Client, seed: int = 0, **options: Any):
    if "vllm" not in sys.modules:
        vllm.install()
    adapter = importlib.import_module("logprobd_adapters.vllm_push")
    source = LocalSource({"lm_head.weight": head(seed).chunk(2)[rank % 2]}, **MESH)
    return start(
        adapter, address, source, rank, client=client, inner=InnerInfo(rank=rank), **options
    )


def pushes_of_shards(rank: int, size: int, address: str, sender: int) -> list[tuple[int, int]]:
    """Returns the pushes of one step, each as its number of rows and its first row. vLLM's rank 0 is `sender` of the
    process group."""
    engine = shard_engine((rank - sender) % size, address, Client())
    with unittest.mock.patch.object(engine._weights, "push", wraps=engine._weights.push) as push:
        engine.send_weights()
    return [(len(call.args[0]), call.kwargs["row_begin"]) for call in push.call_args_list]


def fail_and_recover(rank: int, _: int, address: str, place: str) -> tuple[str, list]:
    """Runs a step that fails on one rank, and one that does not. Returns the error and the calls of vLLM's client."""
    client = Client()
    is_failing = rank == (0 if place in ("begin_version", "commit") else 1)
    options = {"head": "none"} if is_failing and place == "begin_version" else {}
    engine = shard_engine(rank, address, client, seed=1, **options)
    if is_failing and place == "source":
        engine.source.iter_local = unittest.mock.Mock(side_effect=OSError("no such weights"))
    elif is_failing and place == "inner":
        engine._inner.send_weights = unittest.mock.Mock(side_effect=OSError("vLLM is gone"))
    elif is_failing and place in ("push", "commit"):
        fault = unittest.mock.Mock(side_effect=OSError(f"no {place}"))
        setattr(engine._weights, place, fault)
    message = ""
    try:
        engine.send_weights()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    shard_engine(rank, address, Client()).send_weights()
    return message, client.calls


# Regression: all ranks took the version from rank 0 of the process group, which need not be the sender.
@pytest.mark.parametrize("sender", [0, 3])
def test_owners_of_shards_push_their_own_rows(ranks, server, sender) -> None:
    pushed = ranks.results(pushes_of_shards, server.admin, sender)

    expected = [[(502, 0)], [(501, 502)], [], []]
    assert pushed == [expected[(rank - sender) % RANKS] for rank in range(RANKS)]
    assert (live(server).version, live(server).sha256) == (2, digest(head()))


# Regression: the other ranks waited forever, and without the inner engine's send.
@pytest.mark.parametrize(
    ("place", "failing", "text"),
    [
        ("begin_version", 0, "NotFound: "),
        ("source", 1, "OSError: no such weights"),
        ("push", 1, "OSError: no push"),
        ("inner", 1, "OSError: vLLM is gone"),
        ("commit", 0, "OSError: no commit"),
    ],
)
def test_all_ranks_raise_the_error_of_one_and_the_next_step_succeeds(
    ranks, server, place, failing, text
) -> None:
    outcomes = ranks.results(fail_and_recover, server.admin, place)

    for rank, (message, calls) in enumerate(outcomes):
        expected = text if rank == failing else f"LogprobdError: rank {failing} failed: {text}"
        assert message.startswith(expected)
        is_sent = place != "inner" or rank != failing
        assert calls == [("init_weight_transfer_engine", {}), *(STEP if is_sent else [])]
    assert live(server).sha256 == digest(head())
