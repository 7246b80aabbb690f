"""Tests entries of client certificates in the file of tokens: who may call what, and as whom."""

import pathlib

import grpc
import logprobd
import numpy as np
import pytest
from logprobd import Tls
from logprobd.errors import LogprobdError
from scoring_rpc import request
from tls_certificates import Authority
from token_file import TokenFile

pytestmark = pytest.mark.timeout(120)

Code = grpc.StatusCode
SCORE, LIST, VERIFY = (f"/logprobd.v1.Scoring/{name}" for name in ("Score", "ListHeads", "Verify"))
WEIGHTS = "/logprobd.v1.Weights/List"
COMMIT = "/logprobd.v1.Weights/Commit"
HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture
def start(start_server, model, tokens, ca, pair):
    """Starts a server that asks for certificates and reads the file of tokens."""
    cert, key = pair

    def run(*options: str, client_ca: bool = True, **keywords):
        return start_server(
            *("--model", str(model.path), "--tokens", str(tokens.path)),
            *("--tls-cert", str(cert), "--tls-key", str(key)),
            *(("--tls-client-ca", str(ca.cert)) if client_ca else ()),
            *options,
            **keywords,
        )

    return run


Pair = tuple[pathlib.Path, pathlib.Path]


def channel_of(address: str, ca: Authority, pair: Pair) -> grpc.Channel:
    cert, key = pair
    credentials = grpc.ssl_channel_credentials(
        ca.cert.read_bytes(), key.read_bytes(), cert.read_bytes()
    )
    return grpc.secure_channel(address, credentials, (("grpc.use_local_subchannel_pool", 1),))


def call(channel: grpc.Channel, method: str, metadata=(), body: bytes = b"") -> tuple[Code, str]:
    """Calls a unary method and returns its code and message."""
    try:
        channel.unary_unary(method)(body, metadata=metadata, timeout=20)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return Code.OK, ""


def test_each_method_needs_a_certificate_or_a_token_with_its_scope(
    start, tokens, ca, model, tmp_path
) -> None:
    certificates = {
        "scorer": ca.issue("scorer", hosts="DNS:other.example,DNS:scorer.example"),
        "verifier": ca.issue("verifier", hosts="URI:spiffe://cluster/ns/a/sa/verifier"),
        "operator": ca.issue("operator", hosts=None),  # its common name counts
        "old": ca.issue("old", hosts="DNS:old.example"),
        "stranger": ca.issue("stranger", hosts="DNS:stranger.example"),
        # A common name counts only without alternative names.
        "disguised": ca.issue("scorer.example", hosts="DNS:disguised.example"),
    }
    others = ("IP:127.0.0.1", "email:a@scorer.example", "RID:1.2.3.4")
    for number, hosts in enumerate(others):
        tokens.add_certificate(f"no-name-{number}", "score", "verify", "admin")
        certificates[f"no-name-{number}"] = ca.issue(f"no-name-{number}", hosts=hosts)
    tokens.add("verifying", "verify")
    tokens.add_certificate("scorer.example", "score")
    tokens.add_certificate("spiffe://cluster/ns/a/sa/verifier", "verify")
    tokens.add_certificate("operator", "admin")
    tokens.add_certificate("old.example", "score", "admin", not_after="2020-01-01T00:00:00Z")
    server = start("--admin", "127.0.0.1:0", "--local", str(tmp_path / "socket"))
    score = request(rows=1, hidden_size=model.weight.shape[1]).SerializeToString()
    calls = {SCORE: score, LIST: b"", VERIFY: b"", WEIGHTS: b"", HEALTH: b""}
    unknown, lacks, ok = Code.UNAUTHENTICATED, Code.PERMISSION_DENIED, Code.OK
    wrong = (("authorization", "Bearer wrong"),)
    table = {
        ("scorer", ()): (ok, ok, lacks, lacks, ok),
        ("verifier", ()): (lacks, lacks, ok, lacks, ok),
        ("operator", ()): (lacks, lacks, lacks, ok, ok),
        ("old", ()): (unknown, unknown, unknown, unknown, ok),
        ("stranger", ()): (unknown, unknown, unknown, unknown, ok),
        ("disguised", ()): (unknown, unknown, unknown, unknown, ok),
        **{
            (f"no-name-{number}", ()): (unknown, unknown, unknown, unknown, ok)
            for number in range(len(others))
        },
        # A token counts before the certificate, also if it is wrong or empty.
        ("scorer", tokens.metadata("verifying")): (lacks, lacks, ok, lacks, ok),
        ("stranger", tokens.metadata("verifying")): (lacks, lacks, ok, lacks, ok),
        ("scorer", wrong): (unknown, unknown, unknown, unknown, ok),
        ("scorer", (("authorization", ""),)): (unknown, unknown, unknown, unknown, ok),
    }
    for (name, metadata), codes in table.items():
        pair = certificates[name]
        with (
            channel_of(server.grpc, ca, pair) as data,
            channel_of(server.admin, ca, pair) as admin,
        ):
            for (method, body), expected in zip(calls.items(), codes, strict=True):
                channel = admin if method == WEIGHTS else data
                assert call(channel, method, metadata, body)[0] == expected, (name, method)

    # On a Unix socket there is no certificate.
    with grpc.insecure_channel(f"unix:{tmp_path}/socket") as unix:
        code, text = call(unix, VERIFY)
        assert code == unknown
        assert "needs a token" in text
        assert call(unix, VERIFY, tokens.metadata("verifying"))[0] == ok


def test_clients_need_no_token_beside_a_known_certificate(start, tokens, ca, model) -> None:
    tokens.add_certificate("trainer.example", "score")
    token = tokens.add("monitor", "metrics")
    server = start()
    server.http_token = token
    hidden = np.ones((3, model.weight.shape[1]), np.float32)

    def tls(name: str) -> Tls:
        cert, key = ca.issue(name, hosts=f"DNS:{name}.example")
        return Tls(ca=ca.cert, cert=cert, key=key)

    with logprobd.Client(server.grpc, tls=tls("trainer")) as client:
        assert len(client.score(hidden, [1, 2, 3]).logprob) == 3
    with logprobd.Client(server.grpc, tls=tls("evaluator")) as client:
        with pytest.raises(
            LogprobdError, match=r"\[\[certificate\]\] named .evaluator.example"
        ) as e:
            client.score(hidden, [1, 2, 3])
        assert e.value.code == "UNAUTHENTICATED"
    assert server.metric("logprobd_rejected_total", reason="unauthenticated") >= 1


def test_a_certificate_has_the_share_and_the_priority_of_its_entry(
    start, tokens, ca, model
) -> None:
    keys = {"tenant": '"team"', "share": "0.2", "priority_max": '"normal"'}
    tokens.add_certificate("trainer.example", "score", **keys)
    tokens.add("other", "score")
    server = start("--queue-rows", "1000", "--batch-rows", "64")
    pair = ca.issue("trainer", hosts="DNS:trainer.example")
    with channel_of(server.grpc, ca, pair) as channel:

        def score(rows: int, metadata=(), priority: int = 0) -> Code:
            message = request(rows=rows, hidden_size=model.weight.shape[1], priority=priority)
            return call(channel, SCORE, metadata, message.SerializeToString())[0]

        assert score(200, (("client_id", "x"),)) == Code.OK
        assert score(201, (("client_id", "y"),)) == Code.INVALID_ARGUMENT
        assert score(201, tokens.metadata("other")) == Code.OK
        assert score(1, priority=2) == Code.OK
        assert score(1, priority=1) == Code.PERMISSION_DENIED


def test_sighup_adds_and_removes_certificates_also_on_open_connections(start, tokens, ca) -> None:
    tokens.add_certificate("first.example", "score")
    server = start()
    with (
        channel_of(server.grpc, ca, ca.issue("first", hosts="DNS:first.example")) as first,
        channel_of(server.grpc, ca, ca.issue("second", hosts="DNS:second.example")) as second,
    ):
        assert call(first, LIST)[0] == Code.OK
        assert call(second, LIST)[0] == Code.UNAUTHENTICATED

        TokenFile(tokens.path).add_certificate("second.example", "score")
        server.signal(1)
        assert server.eventually(lambda: call(second, LIST)[0] == Code.OK)
        assert call(first, LIST)[0] == Code.UNAUTHENTICATED

        tokens.path.write_text('[[certificate]]\nname = "first.example"\n')
        server.signal(1)
        server.wait_for_log("certificate 1: scopes: is missing")
        assert call(second, LIST)[0] == Code.OK
        assert call(first, LIST)[0] == Code.UNAUTHENTICATED


def test_audit_lines_name_the_certificate(start, tokens, ca) -> None:
    tokens.add_certificate("spiffe://cluster/operator", "admin")
    tokens.add("pusher", "admin")
    server = start("--admin", "127.0.0.1:0", "--log-level", "error")
    pair = ca.issue("operator", hosts="DNS:a.example,URI:spiffe://cluster/operator")
    with channel_of(server.admin, ca, pair) as channel:
        assert call(channel, COMMIT)[0] == Code.FAILED_PRECONDITION
        assert call(channel, COMMIT, tokens.metadata("pusher"))[0] == Code.FAILED_PRECONDITION

    assert server.eventually(lambda: sum(" audit method=" in line for line in server.log) == 2)
    by_certificate, by_token = (line for line in server.log if " audit method=" in line)
    assert "token=none certificate=spiffe://cluster/operator peer=ipv4:" in by_certificate
    assert "token=pusher certificate=a.example peer=ipv4:" in by_token


def test_lines_about_refusals_name_the_method_the_caller_and_the_reason(start, tokens, ca) -> None:
    tokens.add_certificate("verifier.example", "verify")
    tokens.add("verifying", "verify")
    server = start()
    begin = f"a call was refused method={LIST} "
    with channel_of(server.grpc, ca, ca.issue("v", hosts="DNS:verifier.example")) as channel:
        for metadata, code, caller in (
            ((), Code.PERMISSION_DENIED, "token=none certificate=verifier.example"),
            (
                tokens.metadata("verifying"),
                Code.PERMISSION_DENIED,
                "token=verifying certificate=verifier.example",
            ),
            (
                (("authorization", "Bearer wrong"),),
                Code.UNAUTHENTICATED,
                "token=none certificate=verifier.example",
            ),
        ):
            assert call(channel, LIST, metadata)[0] == code
            server.wait_for_log(f"{begin}{caller} reason=")


def test_a_server_that_asks_for_no_certificates_refuses_entries_of_them(start, tokens) -> None:
    tokens.add_certificate("trainer.example", "score")
    server = start(client_ca=False, wait=False)
    assert server.wait() != 0
    assert any("needs --tls-client-ca" in line for line in server.log)
