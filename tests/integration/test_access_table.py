"""Tests the table in SECURITY.md of who may call what, cell by cell."""

import re

import grpc
from scoring_rpc import ROOT

# Without a valid token, and with one that lacks the scope.
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
HTTP_REFUSED = {401: REFUSED[0], 403: REFUSED[1]}


def table() -> dict[str, dict[str, bool]]:
    """Returns for each method and page whether the token of each scope, or none ("anyone"), may call it."""
    section = (
        (ROOT / "SECURITY.md").read_text().split("## Who may call what\n")[1].split("\n## ")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|") and not line.startswith("|-")
    ]
    callers = [cell.strip("`") for cell in rows[0][1:]]
    return {
        name: {caller: cell == "yes" for caller, cell in zip(callers, row[1:], strict=True)}
        for row in rows[1:]
        for name in re.findall("`([^`]+)`", row[0])
    }


def refusal_of(channel, method: str, metadata) -> grpc.StatusCode | None:
    """Calls a method with an empty message, and returns the code if the caller may not do so."""
    call = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=20)
    try:
        next(call, None)
    except grpc.RpcError as error:
        assert error.code() != grpc.StatusCode.DEADLINE_EXCEEDED, method
        return error.code() if error.code() in REFUSED else None
    finally:
        call.cancel()
    return None


def test_the_table_has_all_methods_of_both_services() -> None:
    methods = {
        f"{name.title()}/{method}"
        for name in ("scoring", "weights")
        for method in re.findall(
            r"^  rpc (\w+)",
            (ROOT / "proto" / "logprobd" / "v1" / f"{name}.proto").read_text(),
            re.M,
        )
    }
    assert len(methods) == 10
    assert methods <= set(table())


def test_every_caller_may_do_what_the_table_says(start_server, model, tokens) -> None:
    scopes = ("score", "verify", "admin", "metrics")
    for scope in scopes:
        tokens.add(scope, scope)
    tokens.add("expired", *scopes, not_after="2020-01-01T00:00:00Z")
    server = start_server(
        *("--model", str(model.path), "--tokens", str(tokens.path)),
        *("--admin", "auto", "--reflection"),
    )
    # An expired token is worth as much as none.
    callers = [(None, "anyone"), ("expired", "anyone"), *((scope, scope) for scope in scopes)]
    with grpc.insecure_channel(server.grpc) as data, grpc.insecure_channel(server.admin) as admin:
        for name, may_call in table().items():
            assert set(may_call) == {"anyone", *scopes}
            for token, column in callers:
                if name.startswith("/"):
                    server.http_token = tokens.tokens.get(token, "")
                    refusal = HTTP_REFUSED.get(server.get(name)[0])
                else:
                    package = "" if name.startswith("grpc.") else "logprobd.v1."
                    channel = admin if name.startswith("Weights/") else data
                    refusal = refusal_of(channel, f"/{package}{name}", tokens.metadata(token))
                lacks = REFUSED[column != "anyone"]
                assert refusal == (None if may_call[column] else lacks), (name, token)
