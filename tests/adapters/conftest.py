"""Tests of client/adapters with the packages of the source tree, this build's server and the operator's library.

Tests of a framework are skipped where it is not installed, and tests that need the operator where that is not built.
In the environments of .ci/run-adapters, which have both, the plugin no_skips makes a failure of each of them.
"""

import importlib.util
import os
import pathlib
import sys
import tempfile

import pytest
import rank_pool
from model_folder import ModelFolder
from network_security import NetworkSecurity
from skipped_module import SkippedModule

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("TEST_BINARIES", ROOT / "build" / "release" / "bin"))
SOURCES = (
    ROOT / "client" / "python",
    ROOT / "client" / "adapters",
    ROOT / "kernels" / "torch_ops" / "python",
)
EXAMPLES = [
    ROOT / "client" / "adapters" / "examples" / name
    for name in (
        "distill_teacher",
        "eval_bf16_vs_exact",
        "grpo_reference",
        "ray_precompute",
        "vllm_backbone",
    )
]

os.environ.setdefault(
    "LINEAR_LOGPROB_LIBRARY", str(BINARIES.parent / "lib" / "liblogprobd_torch_ops.so")
)
# No test needs anything of Hugging Face's hub.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
sys.path[:0] = [str(path) for path in (*SOURCES, *EXAMPLES)]

FRAMEWORKS = {
    "distributed": ("deepspeed", "megatron", "transformers"),
    "gateway": ("aiohttp", "orjson", "trl"),
    "lighteval": ("lighteval",),
    "lm_eval": ("lm_eval",),
    "ray": ("ray",),
    "transformers": ("transformers",),
    "trl": ("trl",),
    "verl": ("verl",),
    "vllm": ("aiohttp", "orjson", "transformers"),
}


def pytest_pycollect_makemodule(
    module_path: pathlib.Path, parent: pytest.Collector
) -> pytest.Module | None:
    missing = [
        module
        for name, modules in FRAMEWORKS.items()
        if module_path.name.startswith(f"test_{name}")
        for module in modules
        if importlib.util.find_spec(module) is None
    ]
    if not missing:
        return None
    return SkippedModule.of(
        parent, module_path, f"needs packages that are missing: {', '.join(missing)}"
    )


if importlib.util.find_spec("verl") and pathlib.Path(os.environ["LINEAR_LOGPROB_LIBRARY"]).exists():
    # verl loads its plugins when the first test imports it, so that of the operator must be there by then.
    from operator_plugin import write_entry_points

    SITE = tempfile.TemporaryDirectory()
    write_entry_points(pathlib.Path(SITE.name))
    sys.path.insert(0, SITE.name)
    os.environ["LINEAR_LOGPROB_VERL"] = "1"


@pytest.fixture
def built_operator() -> None:
    """Skips a test if the operator is not built, as by default without CUDA."""
    if not pathlib.Path(os.environ["LINEAR_LOGPROB_LIBRARY"]).exists():
        pytest.skip(f"the operator is not built: no {os.environ['LINEAR_LOGPROB_LIBRARY']}")


@pytest.fixture(params=("remote", "local"))
def kind(request: pytest.FixtureRequest) -> str:
    """Names the scorer of a test that every scorer must pass."""
    if request.param == "local":
        request.getfixturevalue("built_operator")
    return request.param


@pytest.fixture
def server(tmp_path: pathlib.Path, binaries: pathlib.Path):
    """Yields a server of the small head of pushed_head."""
    import pushed_head

    ModelFolder.write(tmp_path, vocab=pushed_head.VOCAB, hidden=pushed_head.HIDDEN)
    with pushed_head.server_of(tmp_path, binaries) as server:
        yield server


@pytest.fixture
def secure_server(tmp_path: pathlib.Path, binaries: pathlib.Path, security: NetworkSecurity):
    """Yields such a server whose admin listener is on TCP and demands a certificate and a token."""
    import pushed_head

    ModelFolder.write(tmp_path, vocab=pushed_head.VOCAB, hidden=pushed_head.HIDDEN)
    with pushed_head.server_of(tmp_path, binaries, security) as server:
        yield server


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Runs RANKS ranks of a gloo group, as the test's module says. They answer within its ANSWERS_WITHIN_S, if it has
    that."""
    seconds = getattr(request.module, "ANSWERS_WITHIN_S", rank_pool.ANSWERS_WITHIN_S)
    folder = tmp_path_factory.mktemp("ranks")
    with rank_pool.RankPool(request.module.RANKS, folder, seconds) as pool:
        yield pool


@pytest.fixture(scope="module")
def sharded_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns the folder of a small model that ranks share."""
    import sharded_model  # needs transformers

    return sharded_model.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Returns the variables of commands that import the packages of the source tree and find the server."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}",
    }


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Returns the folders, by dtype, of a small model in fp32 and bf16."""
    import tiny_model  # needs transformers, which only the environments of the frameworks have
    import torch

    result = {}
    for dtype in (torch.float32, torch.bfloat16):
        result[dtype] = tmp_path_factory.mktemp(str(dtype))
        tiny_model.write_model(result[dtype], dtype)
    return result


@pytest.fixture
def backbone():
    """Yields the backbone of a small teacher, whose calls a test may hold up."""
    from gateway_scenario import Backbone  # needs the packages of the gateway

    backbone = Backbone()
    yield backbone
    backbone.release.set()


@pytest.fixture
def scorer():
    """Returns the scorer of the small teacher, which needs no operator."""
    import torch
    from gateway_scenario import HIDDEN, VOCAB
    from plain_scorer import PlainScorer

    torch.manual_seed(1)
    return PlainScorer(torch.randn(VOCAB, HIDDEN))


@pytest.fixture
def teacher(backbone, scorer):
    """Returns a small teacher."""
    from gateway_scenario import MAX_MODEL_LEN
    from logprobd_adapters.teacher import Teacher

    return Teacher(backbone, scorer, MAX_MODEL_LEN)
