"""Imports the packages that logprobd_ops.compat replaces, from build/site-originals.

tests/run.sh installs them there without their dependencies (tests/requirements-originals.txt).
"""

import importlib
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types

import pytest
import torch

SITE = pathlib.Path(__file__).resolve().parents[4] / "build" / "site-originals"

# Packages of which the imported modules use nothing. They are 20 to 300 MB each, or not on PyPI for a CPU.
EMPTY = frozenset({"datasets", "megatron", "pandas", "ray"})
# Packages whose __init__ imports servers and their dependencies, which the modules below them do not need.
WITHOUT_INIT = frozenset(
    {
        "areal",
        "areal.infra",
        "areal.utils",
        "areal.utils.functional",
        "skyrl",
        "skyrl.backends",
        "skyrl.backends.skyrl_train",
        "skyrl.backends.skyrl_train.distributed",
        "skyrl.backends.skyrl_train.distributed.megatron",
    }
)


class EmptyModule(types.ModuleType):
    """A package in which every name is an empty class and every submodule is empty."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of EMPTY and of WITHOUT_INIT."""

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name in WITHOUT_INIT:
            spec.submodule_search_locations = [str(SITE / name.replace(".", "/"))]
            return spec
        return spec if name.partition(".")[0] in EMPTY else None

    def create_module(self, spec):
        is_empty = spec.name.partition(".")[0] in EMPTY
        return EmptyModule(spec.name) if is_empty else types.ModuleType(spec.name)

    def exec_module(self, module) -> None:
        pass


def skip_without_originals() -> None:
    """Skips the test if the packages are not installed. Tests whose ranks import them call it first."""
    if not SITE.is_dir():
        pytest.skip(
            f"the original packages are not installed in {SITE} (bash tests/run.sh --build)"
        )


def original(module: str) -> types.ModuleType:
    """Returns a module of an original package. Skips the test if the packages are not installed; an error in an
    installed package fails the test."""
    skip_without_originals()
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    if str(SITE) not in sys.path:  # Spawned ranks inherit the path.
        sys.path.append(str(SITE))  # The tests' own packages come first.
    return importlib.import_module(module)


def small_llama() -> torch.nn.Module:
    """Returns a causal Llama of transformers with two layers and 96 ids, the same at each call."""
    transformers = original("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)
