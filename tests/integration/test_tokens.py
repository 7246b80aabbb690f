"""Tests tokens: who may call what, before a message is read, and how tokens change."""

import concurrent.futures
import os
import subprocess

import grpc
import logprobd
import numpy as np
import pytest
from attacks import Attackers, UnreadAnswers
from logprobd.errors import LogprobdError
from model_folder import ModelFolder
from scoring_rpc import Scoring, messages, request
from token_file import TokenFile

Code = grpc.StatusCode
SCORE, LIST, VERIFY = (
    f"/logprobd.v1.Scoring/{method}" for method in ("Score", "ListHeads", "Verify")
)
WEIGHTS = "/logprobd.v1.Weights/List"


@pytest.fixture
def start_with_tokens(start_server, model: ModelFolder, tokens):
    def start(*options: str):
        token = tokens.add("monitor", "metrics")
        server = start_server(
            *("--model", str(model.path), "--tokens", str(tokens.path)),
            *("--admin", "auto", *options),
        )
        server.http_token = token
        return server

    return start


def code_of(address: str, method: str, metadata, body: bytes = b"") -> Code:
    """Calls a unary method and returns its code."""
    with grpc.insecure_channel(
        address, options=(("grpc.use_local_subchannel_pool", 1),)
    ) as channel:
        try:
            channel.unary_unary(method)(body, metadata=metadata, timeout=20)
        except grpc.RpcError as error:
            return error.code()
        return Code.OK


def test_calls_without_a_valid_token_are_refused_on_every_listener(
    start_with_tokens, tokens, model, tmp_path
) -> None:
    tokens.add("scorer", "score")
    tokens.add("old", "score", "admin", not_after="2020-01-01T00:00:00Z")
    server = start_with_tokens("--local", str(tmp_path / "socket"))
    score = request(rows=1, hidden_size=model.weight.shape[1]).SerializeToString()
    unknown, ok = Code.UNAUTHENTICATED, Code.OK

    # The Unix socket is no way around the tokens.
    for address in (server.grpc, f"unix:{tmp_path}/socket"):
        assert code_of(address, SCORE, (), score) == unknown
        assert code_of(address, SCORE, tokens.metadata("old"), score) == unknown
        assert code_of(address, SCORE, tokens.metadata("scorer"), score) == ok
    assert code_of(server.admin, WEIGHTS, tokens.metadata("old")) == unknown
    wrongs = ("", "Bearer", "Bearer ", "Basic abc", "Bearer " + "x" * 4000, "Bearer x")
    for wrong in wrongs:
        assert code_of(server.grpc, SCORE, (("authorization", wrong),), score) == unknown, wrong
    for method, refused in ((VERIFY, server.grpc), (WEIGHTS, server.admin)):
        assert code_of(refused, method, tokens.metadata("scorer")) == Code.PERMISSION_DENIED
    assert server.metric("logprobd_rejected_total", reason="permission_denied") == 2
    assert server.metric("logprobd_rejected_total", reason="unauthenticated") == 5 + len(wrongs)


def test_a_refused_call_is_refused_before_its_message_is_buffered(
    start_with_tokens, tokens
) -> None:
    tokens.add("scorer", "score")
    server = start_with_tokens()
    code_of(server.grpc, SCORE, ())
    before = server.peak_memory_bytes()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        body = bytes(16 << 20)
        codes = list(pool.map(lambda _: code_of(server.grpc, SCORE, (), body), range(32)))

    assert codes == [Code.UNAUTHENTICATED] * 32
    # gRPC announces a window of 1 MiB on each of the connections, of which 8 are open at a time.
    assert server.peak_memory_bytes() - before < 8 << 20


def test_a_tenant_has_one_share_under_whatever_client_ids(start_with_tokens, tokens, model) -> None:
    tokens.add("a", "score", tenant='"team"', share="0.2")
    tokens.add("b", "score", tenant='"team"', share="0.2")
    tokens.add("other", "score")
    server = start_with_tokens("--queue-rows", "1000", "--batch-rows", "64")
    hidden_size = model.weight.shape[1]

    def score(name: str, client_id: str, rows: int) -> Code:
        metadata = (*tokens.metadata(name), ("client_id", client_id))
        body = request(rows=rows, hidden_size=hidden_size).SerializeToString()
        return code_of(server.grpc, SCORE, metadata, body)

    assert score("a", "x", 200) == Code.OK
    assert score("b", "y", 201) == Code.INVALID_ARGUMENT
    assert score("other", "x", 500) == Code.OK


# Regression: the token's id was kept with the connection, without a lock, and calls at once ended the server.
def test_many_calls_at_once_of_one_connection_are_answered(
    start_with_tokens, tokens, model
) -> None:
    names = ("first", "second")
    for name in names:
        tokens.add(name, "score")
    server = start_with_tokens()
    body = request(rows=1, hidden_size=model.weight.shape[1]).SerializeToString()
    with Scoring(server.grpc) as scoring:
        for _ in range(40):
            calls = [
                scoring.score_future(body, metadata=tokens.metadata(names[i % 2]))
                for i in range(200)  # fewer than --streams-max
            ]
            assert {call.code() for call in calls} == {Code.OK}


def test_a_tenant_that_reads_no_answers_leaves_the_others_theirs(
    start_with_tokens, tokens, model
) -> None:
    tokens.add("deaf", "score")
    tokens.add("other", "score")
    hidden_size = model.weight.shape[1]
    server = start_with_tokens("--queue-bytes", "64MiB")
    body = request(rows=4, hidden_size=hidden_size).SerializeToString()
    authorization = dict(tokens.metadata("deaf"))
    with Attackers(server, UnreadAnswers(hidden_size, authorization)):
        assert server.eventually(
            lambda: server.metric("logprobd_rejected_total", reason="answer_bytes") > 10
        )
        for _ in range(20):
            assert code_of(server.grpc, SCORE, tokens.metadata("other"), body) == Code.OK
        assert code_of(server.grpc, SCORE, tokens.metadata("deaf"), body) == Code.RESOURCE_EXHAUSTED


def test_a_priority_above_that_of_the_token_is_refused(start_with_tokens, tokens, model) -> None:
    tokens.add("low", "score", priority_max='"low"')
    server = start_with_tokens()
    hidden_size = model.weight.shape[1]
    for priority, expected in ((1, Code.PERMISSION_DENIED), (3, Code.OK)):
        body = request(rows=1, hidden_size=hidden_size, priority=priority).SerializeToString()
        assert code_of(server.grpc, SCORE, tokens.metadata("low"), body) == expected


def test_sighup_reads_the_tokens_again_and_a_bad_file_changes_nothing(
    start_with_tokens, tokens
) -> None:
    first = tokens.add("first", "score")
    server = start_with_tokens()
    second = TokenFile(tokens.path)
    second.add("second", "score")

    server.signal(1)
    assert server.eventually(
        lambda: code_of(server.grpc, LIST, second.metadata("second")) == Code.OK
    )
    assert code_of(server.grpc, LIST, tokens.metadata("first")) == Code.UNAUTHENTICATED
    assert first not in "".join(server.log)

    tokens.path.write_text("[[token]]\nid = 3\n")
    server.signal(1)
    assert server.eventually(lambda: any("token 1: id: must be" in line for line in server.log))
    assert code_of(server.grpc, LIST, second.metadata("second")) == Code.OK


def test_tokens_do_not_cross_a_network_in_the_clear(start_server, model, tokens) -> None:
    tokens.add("scorer", "score")
    server = start_server(
        *("--model", str(model.path), "--tokens", str(tokens.path)),
        *("--listen", "0.0.0.0:0", "--insecure"),
        wait=False,
    )
    assert server.wait() == 2
    assert any("tokens would cross the network unencrypted" in line for line in server.log)


def test_changes_of_weights_leave_an_audit_line_at_every_log_level(
    start_with_tokens, tokens, model
) -> None:
    tokens.add("operator", "admin")
    server = start_with_tokens("--log-level", "error", "--weights-root", str(model.path.parent))
    module = messages("weights")
    load = module.LoadWeightsRequest(path=str(model.path), version=7).SerializeToString()
    with grpc.insecure_channel(server.admin) as channel:
        loaded = list(
            channel.unary_stream("/logprobd.v1.Weights/Load")(
                load, metadata=tokens.metadata("operator"), timeout=60
            )
        )
    digest = module.LoadWeightsProgress.FromString(loaded[-1]).done.sha256
    commit = module.CommitWeightsRequest(version=8).SerializeToString()
    assert (
        code_of(server.admin, "/logprobd.v1.Weights/Commit", tokens.metadata("operator"), commit)
        == Code.FAILED_PRECONDITION
    )
    assert server.eventually(lambda: sum(" audit method=" in line for line in server.log) == 2)
    first, second = (line for line in server.log if " audit method=" in line)
    connection = f" audit connection=--admin user={os.geteuid()} process={os.getpid()}\n"
    assert any(line.endswith(connection) for line in server.log)
    for part in ("method=Load", "token=operator", "version=7", f"sha256={digest}", "outcome=OK"):
        assert part in first
    assert f"path={model.path}" in first
    assert "method=Commit" in second
    assert "outcome=FAILED_PRECONDITION" in second


def test_scores_with_a_token_are_those_without(start_with_tokens, server, tokens, model) -> None:
    tokens.add("scorer", "score")
    message = request(rows=5, hidden_size=model.weight.shape[1])
    with Scoring(start_with_tokens().grpc) as with_token, Scoring(server.grpc) as without:
        scored = messages().ScoreResponse.FromString(
            with_token.score_raw(message.SerializeToString(), metadata=tokens.metadata("scorer"))
        )
        assert scored.logprob == without.score(message).logprob


def test_clients_present_their_token_and_name_what_is_missing(
    binaries, start_with_tokens, tokens, model, tmp_path, monkeypatch
) -> None:
    token = tokens.add("all", "score", "verify", "admin")
    tokens.add("operator", "admin")
    server = start_with_tokens("--weights-root", str(model.path.parent))
    hidden = np.ones((3, model.weight.shape[1]), np.float32)
    with logprobd.Client(server.grpc) as client, pytest.raises(LogprobdError) as missing:
        client.score(hidden, [1, 2, 3])
    assert missing.value.code == "UNAUTHENTICATED"
    assert "needs a token" in str(missing.value)
    with logprobd.Client(server.grpc, token=tokens.tokens["operator"]) as client:
        with pytest.raises(LogprobdError, match='token "operator" lacks the scope score'):
            client.score(hidden, [1, 2, 3])
    with logprobd.Client(server.grpc, token=token) as client:
        assert len(client.score(hidden, [1, 2, 3]).logprob) == 3
        assert token not in repr(client._settings)
    monkeypatch.setenv("LOGPROBD_TOKEN", token)
    with logprobd.Client(server.grpc) as client:
        client.wait_ready(20)
    with logprobd.WeightsClient(server.admin) as weights:
        assert weights.list()[0].live.version == 1
    monkeypatch.delenv("LOGPROBD_TOKEN")
    with logprobd.WeightsClient(server.admin) as weights:
        with pytest.raises(LogprobdError) as refused:
            weights.list()
        assert refused.value.code == "UNAUTHENTICATED"

    def logprobctl(*arguments: str) -> subprocess.CompletedProcess:
        command = [binaries / "logprobctl", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    path = tmp_path / "token"
    path.write_text(f"{token}\n")
    with_token = ("--token-file", str(path))
    assert "needs a token" in logprobctl("info", "--address", server.grpc).stderr
    assert logprobctl("selftest", "--address", server.grpc, *with_token).returncode == 0
    assert logprobctl("weights", "list", "--admin", server.admin, *with_token).returncode == 0
    path.write_text("\n")
    empty = logprobctl("info", "--address", server.grpc, *with_token)
    assert (empty.returncode, "has no token" in empty.stderr) == (2, True)
