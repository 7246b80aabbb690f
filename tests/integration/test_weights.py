"""Tests swaps of weights on a running server: rows C45 and C47 to C58 of tests/FAULTS.md."""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import subprocess
import tempfile
import threading

import grpc
import ml_dtypes
import numpy as np
import pytest
from model_folder import ModelFolder, write_safetensors
from scoring_rpc import Scoring, request
from server_process import ServerProcess
from weights_rpc import Weights

VOCAB, HIDDEN = 1003, 64
TENSOR = "model.embed_tokens.weight"
Code = grpc.StatusCode


def scores(response) -> tuple[bytes, bytes]:
    return response.logprob, response.entropy


def sha256_of(model: ModelFolder) -> str:
    return hashlib.sha256(model.weight.tobytes()).hexdigest()


def write_model(path: pathlib.Path, seed: int) -> ModelFolder:
    path.mkdir(parents=True)
    return ModelFolder.write(path, vocab=VOCAB, hidden=HIDDEN, seed=seed)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> pathlib.Path:
    """Returns the folder below which weights may be loaded."""
    return tmp_path_factory.mktemp("roots") / "allowed"


@pytest.fixture(scope="module", autouse=True)
def models(root) -> dict[str, ModelFolder]:
    """Writes two valid models. `one` is live at first, and tests load `two`."""
    return {"one": write_model(root / "one", seed=1), "two": write_model(root / "two", seed=2)}


@pytest.fixture
def start_swappable(start_server, root):
    def start(*options: str, model: pathlib.Path = root / "one", **keywords):
        return start_server(
            *("--model", str(model), "--admin", "auto", "--weights-root", str(root)),
            *options,
            **keywords,
        )

    return start


def bits_of(start_server, model: pathlib.Path, requests) -> list[tuple[bytes, bytes]]:
    """Returns the scores from a server that has only this model."""
    server = start_server("--model", str(model))
    with Scoring(server.grpc) as scoring:
        bits = [scores(scoring.score(message)) for message in requests]
    server.stop()
    return bits


def test_c47_swaps_under_load_fail_no_request_and_mix_no_versions(
    start_server, start_swappable, root
) -> None:
    requests = [request(rows=rows, seed=rows) for rows in (1, 3, 17, 64, 200, 500)]
    # Odd versions come from folder one, even versions from folder two.
    expected = {
        1: bits_of(start_server, root / "one", requests),
        0: bits_of(start_server, root / "two", requests),
    }
    assert all(a != b for a, b in zip(expected[0], expected[1], strict=True))
    server = start_swappable("--batch-rows", "256")
    is_over = threading.Event()

    def client(index: int) -> tuple[int, set[int]]:
        answers, versions = 0, set()
        with Scoring(server.grpc) as scoring:
            while not is_over.is_set():
                response = scoring.score(requests[index])
                version = response.weights_version
                assert scores(response) == expected[version % 2][index], version
                answers += 1
                versions.add(version)
        return answers, versions

    with (
        concurrent.futures.ThreadPoolExecutor(len(requests)) as pool,
        Weights(server.admin) as weights,
        Scoring(server.grpc) as scoring,
    ):
        clients = [pool.submit(client, index) for index in range(len(requests))]
        try:
            for version in range(2, 22):
                folder = root / ("one" if version % 2 else "two")
                at_once = version % 3 == 0
                assert weights.load(folder, commit=at_once).version == version
                if not at_once:
                    assert weights.commit(version=version).live.version == version
                assert scoring.score(requests[0]).weights_version == version
        finally:
            is_over.set()
        seen: set[int] = set()
        for future in clients:
            answers, versions = future.result()
            assert answers > 0
            seen |= versions
    assert len(seen) > 10, "too few answers arrived during the swaps"
    assert server.metric("logprobd_weights_swaps_total", result="committed") == 20
    assert server.metric("logprobd_weights_version") == 21


def test_c45_a_pinned_version_that_is_not_live_is_refused_and_the_live_one_named(
    start_swappable, root
) -> None:
    server = start_swappable()
    with Weights(server.admin) as weights, Scoring(server.grpc) as scoring:
        assert scoring.score(request(weights_version=1)).weights_version == 1
        weights.load(root / "two", version=7, commit=True)

        for version in (1, 2):
            with pytest.raises(grpc.RpcError) as refused:
                scoring.score(request(weights_version=version))
            assert refused.value.code() == Code.FAILED_PRECONDITION
            assert "7" in refused.value.details()
        assert scoring.score(request(weights_version=7)).weights_version == 7


def test_rollback_restores_the_bits_of_the_previous_version(start_swappable, root) -> None:
    server = start_swappable()
    with Weights(server.admin) as weights, Scoring(server.grpc) as scoring:
        before = scoring.score(request())
        weights.load(root / "two", commit=True)
        between = scoring.score(request())

        head = weights.rollback()

        after = scoring.score(request())
        assert (before.weights_version, between.weights_version, after.weights_version) == (1, 2, 1)
        assert scores(after) == scores(before) != scores(between)
        assert (head.live.version, head.previous.version) == (1, 2)


def test_c55_a_rollback_without_a_previous_version_is_refused(start_swappable, root) -> None:
    server = start_swappable()
    with Weights(server.admin) as weights, Scoring(server.grpc) as scoring:
        with pytest.raises(grpc.RpcError) as at_first:
            weights.rollback()
        weights.load(root / "two", commit=True)
        bits = scores(scoring.score(request()))
        weights.discard(previous=True)

        with pytest.raises(grpc.RpcError) as later:
            weights.rollback()

        assert at_first.value.code() == later.value.code() == Code.FAILED_PRECONDITION
        response = scoring.score(request())
        assert (response.weights_version, scores(response)) == (2, bits)


def test_c52_a_commit_of_what_is_not_staged_is_refused(start_swappable, root) -> None:
    server = start_swappable()
    with Weights(server.admin) as weights, Scoring(server.grpc) as scoring:
        with pytest.raises(grpc.RpcError) as nothing:
            weights.commit()
        weights.load(root / "two")

        with pytest.raises(grpc.RpcError) as another:
            weights.commit(version=3)

        assert nothing.value.code() == another.value.code() == Code.FAILED_PRECONDITION
        assert "2" in another.value.details()
        assert scoring.score(request()).weights_version == 1
        assert weights.commit(version=2).live.version == 2


def test_list_reports_the_sha256_of_the_bytes_in_the_file(start_swappable, root, models) -> None:
    server = start_swappable()
    with Weights(server.admin) as weights:
        head = weights.list()
        assert head.live.sha256 == sha256_of(models["one"])
        assert head.live.source == str(root / "one")
        digest = sha256_of(models["two"])
        assert weights.load(root / "two", sha256=digest.upper()).sha256 == digest
        assert weights.list().staged.sha256 == digest


def test_in_place_answers_with_the_new_version_and_keeps_no_other(start_swappable, root) -> None:
    server = start_swappable()
    with Weights(server.admin) as weights, Scoring(server.grpc) as scoring:
        assert weights.load(root / "two", in_place=True).version == 2

        assert scoring.score(request()).weights_version == 2
        head = weights.list()
        assert head.live.version == 2
        assert not head.HasField("previous")


# The folders that these functions make must not become a version. Each function fills the given folder, which is
# below the root, and may return another path to load.


def write(path: pathlib.Path, weight: np.ndarray, config: dict | None = None) -> None:
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    config = {"model_type": "llama", "tie_word_embeddings": True} | sizes | (config or {})
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", {TENSOR: weight})


def zeros(rows: int = VOCAB, columns: int = HIDDEN) -> np.ndarray:
    return np.zeros((rows, columns), ml_dtypes.bfloat16)


def other_hidden(path: pathlib.Path) -> None:
    write(path, zeros(columns=32), {"hidden_size": 32})


def other_vocabulary(path: pathlib.Path) -> None:
    write(path, zeros(rows=1000), {"vocab_size": 1000})


def other_dtype(path: pathlib.Path) -> None:
    write(path, zeros().astype(np.float32))


def other_scale(path: pathlib.Path) -> None:
    write(path, zeros(), {"model_type": "granite", "logits_scaling": 8.0})


def two_different_heads(path: pathlib.Path) -> None:
    write(path, zeros())
    tensors = {TENSOR: zeros(), "lm_head.weight": zeros() + 1}
    write_safetensors(path / "model.safetensors", tensors)


def unknown_key(path: pathlib.Path) -> None:
    write(path, zeros(), {"logit_boost": 2.0})


def integers(path: pathlib.Path) -> None:
    write(path, zeros())
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"I16" '))


def missing_rows(path: pathlib.Path) -> None:
    write(path, zeros(rows=VOCAB - 1))


def missing_file(path: pathlib.Path) -> None:
    write(path, zeros())
    os.remove(path / "model.safetensors")
    index = {"weight_map": {TENSOR: "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def truncated(path: pathlib.Path) -> None:
    write(path, zeros())
    os.truncate(path / "model.safetensors", 5_000)


def not_finite(value: float):
    def fill(path: pathlib.Path) -> None:
        weight = zeros()
        weight[VOCAB - 1, HIDDEN - 1] = value
        write(path, weight)

    return fill


def link_out(path: pathlib.Path) -> None:
    outside = path.parent.parent / f"outside-{path.name}"
    outside.mkdir()
    write(outside, zeros())
    path.rmdir()
    path.symlink_to(outside)


def file_linked_out(path: pathlib.Path) -> None:
    write(path, zeros())
    outside = path.parent.parent / f"outside-{path.name}.safetensors"
    (path / "model.safetensors").rename(outside)
    (path / "model.safetensors").symlink_to(outside)


def fifo(path: pathlib.Path) -> None:
    write(path, zeros())
    os.remove(path / "model.safetensors")
    os.mkfifo(path / "model.safetensors")


def dots(path: pathlib.Path) -> pathlib.Path:
    write(path, zeros())
    return path.parent / "one" / ".." / path.name


def outside(path: pathlib.Path) -> pathlib.Path:
    other = path.parent.parent / f"outside-{path.name}"
    other.mkdir()
    write(other, zeros())
    return other


def device(_: pathlib.Path) -> pathlib.Path:
    return pathlib.Path("/dev/zero")


def absent(path: pathlib.Path) -> pathlib.Path:
    return path / "absent"


def pickled(path: pathlib.Path) -> None:
    (path / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "vocab_size": VOCAB}))
    (path / "pytorch_model.bin").write_bytes(b"x")


def garbage(path: pathlib.Path) -> None:
    write(path, zeros())
    (path / "model.safetensors").write_bytes(b"\xff" * 4096)


def no_config(path: pathlib.Path) -> None:
    write(path, zeros())
    os.remove(path / "config.json")


BAD_FOLDERS = [
    ("C49", other_hidden, Code.INVALID_ARGUMENT, "hidden_size"),
    ("C49", other_vocabulary, Code.INVALID_ARGUMENT, "vocab_size"),
    ("C49", other_dtype, Code.INVALID_ARGUMENT, "dtype: the folder's head has f32"),
    ("C49", other_scale, Code.INVALID_ARGUMENT, "scale: the folder's head has 0.125"),
    ("C49", two_different_heads, Code.INVALID_ARGUMENT, "--head-tensor lm_head.weight"),
    ("C49", unknown_key, Code.UNIMPLEMENTED, "--ignore-config-key 'logit_boost'"),
    ("C49", integers, Code.UNIMPLEMENTED, "I16"),
    ("C49", missing_rows, Code.INVALID_ARGUMENT, "1002"),
    ("C49", missing_file, Code.NOT_FOUND, "model-00001-of-00002.safetensors"),
    ("C54", not_finite(np.nan), Code.INVALID_ARGUMENT, "row 1002 column 63 is NaN or Inf"),
    ("C54", not_finite(-np.inf), Code.INVALID_ARGUMENT, "row 1002 column 63 is NaN or Inf"),
    ("C56", link_out, Code.PERMISSION_DENIED, "leads out"),
    ("C56", file_linked_out, Code.PERMISSION_DENIED, "leads out"),
    ("C56", fifo, Code.INVALID_ARGUMENT, "model.safetensors"),
    ("C56", dots, Code.PERMISSION_DENIED, ".."),
    ("C56", outside, Code.PERMISSION_DENIED, "not below an allowed root"),
    ("C56", device, Code.PERMISSION_DENIED, "not below an allowed root"),
    ("C56", absent, Code.NOT_FOUND, "absent"),
    ("C56", pickled, Code.UNIMPLEMENTED, "pytorch_model.bin"),
    ("C57", truncated, Code.INVALID_ARGUMENT, "model.safetensors"),
    ("C57", garbage, Code.INVALID_ARGUMENT, "header"),
    ("C57", no_config, Code.NOT_FOUND, "config.json"),
]


@pytest.fixture(scope="module")
def unharmed(binaries, root, models):
    """Runs a server and yields its Weights and a check that the live version is unchanged."""
    options = ("--model", str(root / "one"), "--admin", "auto", "--weights-root", str(root))
    with ServerProcess(binaries, *options) as server, Weights(server.admin) as weights:
        with Scoring(server.grpc) as scoring:
            bits = scores(scoring.score(request()))

            def check() -> None:
                response = scoring.score(request())
                assert (response.weights_version, scores(response)) == (1, bits)
                head = weights.list()
                assert head.live.version == 1
                assert not head.HasField("staged") and not head.HasField("previous")

            yield weights, check


@pytest.fixture
def tmp_folder(root) -> pathlib.Path:
    """Returns an empty folder below the root."""
    return pathlib.Path(tempfile.mkdtemp(prefix="bad-", dir=root))


@pytest.mark.parametrize("in_place", [False, True], ids=["next to live", "in_place"])
@pytest.mark.parametrize(
    "row, fill, code, word",
    BAD_FOLDERS,
    ids=[f"{row}-{fill.__name__}-{number}" for number, (row, fill, _, _) in enumerate(BAD_FOLDERS)],
)
def test_bad_folders_are_refused_and_the_live_version_stays(
    unharmed, tmp_folder, row, fill, code, word, in_place
) -> None:
    weights, check = unharmed
    path = tmp_folder

    with pytest.raises(grpc.RpcError) as refused:
        weights.load(fill(path) or path, commit=True, in_place=in_place)

    assert refused.value.code() == code, refused.value.details()
    assert word in refused.value.details()
    check()


# Regression: selftest said "do not use this server", as if the engine were wrong.
def test_selftest_names_the_weights_if_they_are_not_finite(
    start_swappable, binaries, tmp_folder
) -> None:
    not_finite(np.nan)(tmp_folder)
    server = start_swappable()
    with Weights(server.admin) as weights:
        weights.load(tmp_folder, commit=True, allow_nonfinite=True)

    result = subprocess.run(
        [binaries / "logprobctl", "selftest", "--address", server.grpc],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 1
    assert "row 1002 column 63 is NaN or Inf" in result.stderr
    assert "the engine is not at fault" in result.stderr
    assert "do not use this server" not in result.stderr


def test_c48_weights_of_another_sha256_are_refused(unharmed, root, models) -> None:
    weights, check = unharmed

    with pytest.raises(grpc.RpcError) as refused:
        weights.load(root / "two", sha256="0" * 64, commit=True)

    assert refused.value.code() == Code.DATA_LOSS
    assert sha256_of(models["two"]) in refused.value.details()
    check()


# Regression: `--version 3` was loaded while version 7 was live.
def test_a_number_below_the_live_one_is_refused(start_swappable, binaries, root) -> None:
    server = start_swappable()
    with Weights(server.admin) as weights:
        weights.load(root / "two", version=7, commit=True)
    command = [binaries / "logprobctl", "weights", "load", "--admin", server.admin]

    result = subprocess.run(
        [*command, "--version", "3", root / "one"],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 1
    assert "version: 3, must be above 7, which is live" in result.stderr
    assert "the next free number is 8" in result.stderr
    audit = [line for line in server.log if "audit method=Load" in line]
    assert "head=default version=3" in audit[-1]
    # Regression: a warning had the same text.
    assert sum("must be above 7" in line for line in server.log) == 1


def test_a_tensor_other_than_the_live_one_is_a_warning(start_swappable, root) -> None:
    for name, tensor, is_tied in (
        ("tied", "model.embed_tokens.weight", True),
        ("alone", "lm_head.weight", False),
    ):
        (root / name).mkdir()
        write_safetensors(root / name / "model.safetensors", {tensor: zeros()})
        config = {"model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB}
        config |= {"tie_word_embeddings": is_tied}
        (root / name / "config.json").write_text(json.dumps(config))
    server = start_swappable(model=root / "tied")

    with Weights(server.admin) as weights:
        weights.load(root / "alone", version=2, commit=True)

    server.wait_for_log("the new head is another tensor than the live one")


def test_c51_one_load_at_a_time(start_swappable, large, root) -> None:
    server = start_swappable(model=large / "one")
    with Weights(server.admin) as weights:
        call = weights.load_call(large / "two")
        assert next(call).phase == "checking"

        with pytest.raises(grpc.RpcError) as refused:
            weights.load(large / "two")

        assert refused.value.code() == Code.ABORTED
        assert list(call)[-1].done.version == 2


@pytest.fixture(scope="module")
def large(root, models) -> pathlib.Path:
    """Writes two heads that take long enough to load for other calls to happen meanwhile."""
    folder = root / "large"
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        write(
            folder / name,
            np.full((60_000, 1024), 0.5 if name == "one" else 0.25, ml_dtypes.bfloat16),
            {"hidden_size": 1024, "vocab_size": 60_000},
        )
    return folder


@pytest.mark.parametrize("phase", ["checking", "verifying", "loading"])
def test_c50_a_cancelled_load_changes_nothing(start_swappable, large, phase) -> None:
    server = start_swappable(model=large / "one")
    with Weights(server.admin) as weights, Scoring(server.grpc) as scoring:
        bits = scores(scoring.score(request(hidden_size=1024)))
        call = weights.load_call(large / "two", commit=True)
        while next(call).phase != phase:
            pass

        call.cancel()

        assert server.eventually(
            lambda: server.metric("logprobd_weights_swaps_total", result="cancelled") == 1
        )
        response = scoring.score(request(hidden_size=1024))
        assert (response.weights_version, scores(response)) == (1, bits)
        assert not weights.list().HasField("staged")
        assert weights.load(large / "two", commit=True).version == 2


def test_c50_sigterm_during_a_load_exits_0(start_swappable, large) -> None:
    server = start_swappable(model=large / "one")
    with Weights(server.admin) as weights:
        call = weights.load_call(large / "two", commit=True)
        assert next(call).phase == "checking"

        server.signal()

        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.code() == Code.UNAVAILABLE
        assert server.wait() == 0


def test_nothing_is_loaded_without_an_allowed_root(start_server, root) -> None:
    server = start_server(
        *("--model", str(root / "one"), "--admin", "auto", "--weights-root", "none")
    )
    with Weights(server.admin) as weights:
        with pytest.raises(grpc.RpcError) as refused:
            weights.load(root / "two")
        assert refused.value.code() == Code.PERMISSION_DENIED
        assert "--weights-root" in refused.value.details()
        assert weights.list().live.version == 1


def test_the_parent_folder_of_the_model_is_allowed_by_default(start_server, root) -> None:
    server = start_server("--model", str(root / "one"), "--admin", "auto")
    with Weights(server.admin) as weights:
        assert weights.load(root / "two").version == 2


def test_logprobctl_loads_commits_rolls_back_and_lists(binaries, start_swappable, root) -> None:
    server = start_swappable()

    def weights(*arguments: str, code: int = 0) -> str:
        result = subprocess.run(
            [binaries / "logprobctl", "weights", *arguments, "--admin", server.admin],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == code, result.stderr
        return result.stdout if code == 0 else result.stderr

    assert "version 2 is staged" in weights("load", str(root / "two"))
    assert json.loads(weights("list", "--json"))["heads"][0]["staged"]["version"] == 2
    assert json.loads(weights("commit", "--json"))["live"]["version"] == 2
    assert json.loads(weights("rollback", "--json"))["live"]["version"] == 1
    assert json.loads(weights("discard", "--previous", "--json"))["previous"] is None
    assert "FAILED_PRECONDITION" in weights("rollback", code=1)
    assert "PERMISSION_DENIED" in weights("load", "/etc", code=1)
