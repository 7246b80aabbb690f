"""Defines what several modules use: certificates and tokens, and the models and servers of the tests of pushes."""

import pathlib

import pytest
from model_folder import ModelFolder
from tls_certificates import Authority
from token_file import TokenFile


@pytest.fixture(scope="module")
def ca(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pair(ca) -> tuple[pathlib.Path, pathlib.Path]:
    """The certificate of a server and its key."""
    return ca.issue("server")


@pytest.fixture
def tokens(tmp_path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.toml")


@pytest.fixture(scope="module")
def models(request, tmp_path_factory) -> list[ModelFolder]:
    """Two models of the test module's VOCAB and HIDDEN. The first is live at first, and tests push the second."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    return [
        ModelFolder.write(
            folder, vocab=request.module.VOCAB, hidden=request.module.HIDDEN, seed=seed
        )
        for seed, folder in enumerate(folders)
    ]


@pytest.fixture
def start_pushable(start_server, models):
    def start(*options: str, model: ModelFolder = models[0]):
        return start_server("--model", str(model.path), "--admin", "auto", *options)

    return start
