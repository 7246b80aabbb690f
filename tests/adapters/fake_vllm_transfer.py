"""A stand-in for vLLM 0.33.0's trainer side of weight transfer, as far as the adapter uses it.

A test compares its signatures with those of vllm/distributed/weight_transfer/base.py and factory.py,
which tests/support/python/vllm_signatures.py records; vLLM itself needs a GPU. `install` puts the
modules in sys.modules.
"""

import abc
import dataclasses
import sys
import types
from typing import Any, ClassVar, Generic, TypeVar

Info = TypeVar("Info")


@dataclasses.dataclass(frozen=True)
class Replicate:
    pass


@dataclasses.dataclass(frozen=True)
class Shard:
    dim: int


@dataclasses.dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: Any
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    placements: tuple | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = dataclasses.field(kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not getattr(cls, "backend", None):
            raise TypeError(f"{cls.__name__} must set a class-level `backend` string")

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightSource(abc.ABC):
    @property
    @abc.abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not WeightSource.iter_full

    def implements_iter_local(self) -> bool:
        return type(self).iter_local is not WeightSource.iter_local

    def iter_full(self):
        raise NotImplementedError

    def iter_local(self):
        raise NotImplementedError


class TrainerWeightTransferEngine(abc.ABC, Generic[Info]):
    def __init__(self, *, client, source=None, is_sender: bool = True, rank: int = 0) -> None:
        self.is_sender, self.rank, self.client, self.source = is_sender, rank, client, source

    @classmethod
    @abc.abstractmethod
    def trainer_init(cls, init_info, *, client, source=None): ...

    @abc.abstractmethod
    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


class WeightTransferTrainerFactory:
    _registry: ClassVar[dict] = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls, class_name=None) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer trainer engine '{name}' is already registered.")
        cls._registry[name] = lambda: module_path_or_cls

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        engine = cls._registry[init_info.backend]()
        return engine.trainer_init(init_info=init_info, client=client, source=source)


def install() -> None:
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        sys.modules[name] = types.ModuleType(name)
    transfer = sys.modules["vllm.distributed.weight_transfer"]
    for each in (Shard, Replicate, ParamMeta, WeightSource, TrainerWeightTransferEngine):
        setattr(transfer, each.__name__, each)
    transfer.WeightTransferTrainerFactory = WeightTransferTrainerFactory
    base = sys.modules["vllm.distributed.weight_transfer.base"] = types.ModuleType("base")
    base.TrainerInitInfo = TrainerInitInfo
