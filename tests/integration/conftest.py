"""Defines the models and servers of the tests of pushes."""

import pytest
from model_folder import ModelFolder


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
