"""Access to the gateway: tokens, certificates, addresses, and TRL's clients over HTTPS."""

import asyncio
import base64
import datetime
import hmac
import json
import pathlib
import shutil
import signal
import ssl
import subprocess
import sys
import types
import urllib.error
import urllib.request
from contextlib import nullcontext
from unittest import mock

import distill_teacher
import numpy as np
import pytest
import torch
import transformers
import trl.generation.vllm_client
from aiohttp import ClientSession
from gateway_process import GatewayProcess
from logprobd.errors import InvalidArgument
from logprobd_adapters import gateway_command, http_access
from logprobd_adapters.gateway import Gateway
from logprobd_adapters.http_access import AccessError, Certificate, Tokens, check_reachable
from server_process import ServerProcess
from token_file import TokenFile
from waiting import wait_until

MODULE = [sys.executable, "-m", "logprobd_adapters.gateway_command"]
TOLERANCE = 1e-5  # nats
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def tokens(tmp_path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.toml")


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def test_a_token_with_the_scope_score_is_let_in(tokens) -> None:
    token = tokens.add("scorer", "score", tenant='"team"', share="0.5", priority_max='"low"')
    later = tokens.add("later", "score", "admin", not_after="2100-01-01T00:00:00Z")
    known = Tokens(tokens.path)

    for accepted in (
        f"Bearer {token}",
        f"bearer {later}",
        basic(f":{token}"),
        basic(f"any:{token}"),
    ):
        known.check(accepted)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer x",
        "Bearer " + "x" * 4000,
        "Basic !",
        "Basic /w==",
        "Digest x",
    ]
    + ["Bearer \udcff", "Basic \xff", basic("no colon")],
)
def test_a_header_without_a_known_token_is_refused(tokens, header) -> None:
    tokens.add("scorer", "score")

    with pytest.raises(AccessError) as error:
        Tokens(tokens.path).check(header)

    assert error.value.status == 401


def test_a_token_that_has_expired_or_lacks_the_scope_is_refused_with_a_reason(tokens) -> None:
    old = tokens.add("old", "score", not_after="2020-01-01T00:00:00Z")
    operator = tokens.add("operator", "verify", "admin")
    known = Tokens(tokens.path)

    for token, status, reason in (
        (old, 401, '"old" expired at 2020'),
        (operator, 403, '"operator" lacks the scope score'),
    ):
        with pytest.raises(AccessError, match=reason) as error:
            known.check(f"Bearer {token}")
        assert error.value.status == status


@pytest.mark.parametrize(("length", "problem"), [(512, "is unknown"), (513, "header must be")])
def test_a_token_of_512_characters_is_compared_and_a_longer_one_is_not(
    tokens, length, problem
) -> None:
    tokens.add("scorer", "score")

    with pytest.raises(AccessError, match=problem):
        Tokens(tokens.path).check("Bearer " + "x" * length)


class Clock(datetime.datetime):
    """Time that stands still."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return datetime.datetime(2030, 1, 31, 12, tzinfo=datetime.timezone.utc).astimezone(tz)


@pytest.mark.parametrize(
    ("not_after", "is_known"),
    [
        ("2030-01-31T12:00:01Z", True),
        ("2030-01-31T13:00:01+01:00", True),
        ("2030-01-31T12:00:00Z", False),
        ("2030-01-31T11:59:59Z", False),
        ("2030-01-31T12:59:59+01:00", False),
    ],
)
def test_a_token_expires_at_its_second(tokens, monkeypatch, not_after, is_known) -> None:
    token = tokens.add("scorer", "score", not_after=not_after)
    known = Tokens(tokens.path)
    clock = types.SimpleNamespace(datetime=Clock, timezone=datetime.timezone)
    monkeypatch.setattr(http_access, "datetime", clock)

    with nullcontext() if is_known else pytest.raises(AccessError, match="expired at 2030"):
        known.check(f"Bearer {token}")


@pytest.mark.parametrize("sent", ["wrong", "first", "last"])
def test_every_digest_is_compared_by_compare_digest(tokens, sent) -> None:
    texts = {"wrong": "x" * 43} | {
        name: tokens.add(name, "score") for name in ("first", "second", "last")
    }
    known = Tokens(tokens.path)

    with mock.patch.object(
        http_access.hmac, "compare_digest", wraps=hmac.compare_digest
    ) as compare:
        if sent == "wrong":
            with pytest.raises(AccessError, match="unknown"):
                known.check(f"Bearer {texts[sent]}")
        else:
            known.check(f"Bearer {texts[sent]}")

    # A loop that ends at a match would tell where in the file a token is.
    assert [[len(digest) for digest in call.args] for call in compare.mock_calls] == [[32, 32]] * 3


ENTRY = {"id": '"a"', "sha256": f'"{"0" * 64}"', "scopes": '["score"]'}


def entry(**keys: str | None) -> str:
    values = {key: value for key, value in (ENTRY | keys).items() if value is not None}
    return "[[token]]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"expected entries \[\[token\]\]"),
        ("token = 1", r"expected entries \[\[token\]\]"),
        ("token = [1]", "token 1: must be a table"),
        ("[[tokens]]", r"expected entries \[\[token\]\]"),
        ("[[token]", "tokens.toml: "),
        # Regression: the error of deep nesting was not one of the file.
        ("a = " + "[" * 10_000, "tokens.toml: .*nested too deeply"),
        (entry(id=None), "token 1: id must be"),
        (entry(id="3"), "token 1: id must be"),
        (entry(sha256=f'"{"0" * 63}"'), "sha256 must be 64 hexadecimal"),
        (entry(scopes="[]"), "scopes must be"),
        (entry(scopes='["score", "other"]'), "scopes must be"),
        (entry(scopes='[["score"]]'), "scopes must be"),
        (entry(not_after="2027-01-31"), "not_after must be a time with its zone"),
        (entry(not_afer="2027-01-31T00:00:00Z"), "not_afer is unknown"),
        (entry() + entry(id='"b"'), "two tokens have the same"),
        (entry() + entry(sha256=f'"{"1" * 64}"'), "two tokens have the same"),
    ],
)
def test_a_file_that_the_server_would_refuse_is_an_error(tokens, text, problem) -> None:
    tokens.path.write_text(text)

    with pytest.raises(InvalidArgument, match=problem):
        Tokens(tokens.path)


def test_entries_of_certificates_have_no_effect(tokens) -> None:
    token = tokens.add("scorer", "score")
    tokens.add_certificate("trainer.example", "score")

    Tokens(tokens.path).check(f"Bearer {token}")

    tokens.path.write_text('[[certificate]]\nname = "trainer.example"\nscopes = ["score"]\n')
    with pytest.raises(InvalidArgument, match=r"expected entries \[\[token\]\]"):
        Tokens(tokens.path)


def test_a_file_is_read_again_and_a_bad_one_changes_nothing(tokens) -> None:
    first = tokens.add("first", "score")
    known = Tokens(tokens.path)
    replaced = TokenFile(tokens.path)
    second = replaced.add("second", "score")

    known.reload()
    tokens.path.write_text("[[token]]\nid = 3\n")
    with pytest.raises(InvalidArgument):
        known.reload()

    known.check(f"Bearer {second}")
    with pytest.raises(AccessError):
        known.check(f"Bearer {first}")


# Regression: the log said that files were read again when they were not.
def test_the_log_says_which_files_were_read_again(tokens, security, caplog) -> None:
    caplog.set_level("INFO", logger="logprobd-gateway")
    tokens.add("scorer", "score")
    known = [Certificate(security.server_cert, security.server_key), Tokens(tokens.path)]
    tokens.path.write_text("[[token]]\nid = 3\n")

    gateway_command._reload(known)

    (read, failed) = (record.getMessage() for record in caplog.records)
    assert read == "read the certificate again"
    assert "id must be a string; what was read before stays in use" in failed


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_neither_tls_nor_tokens(host) -> None:
    check_reachable(host, has_tls=False, has_tokens=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-7"])
def test_other_addresses_need_both_or_to_be_asked_for(host) -> None:
    check_reachable(host, has_tls=True, has_tokens=True, insecure=False)
    for has_tls in (False, True):
        check_reachable(host, has_tls=has_tls, has_tokens=False, insecure=True)
        with pytest.raises(InvalidArgument, match="--https-cert, --https-key and --tokens"):
            check_reachable(host, has_tls=has_tls, has_tokens=False, insecure=False)
    for insecure in (False, True):
        with pytest.raises(InvalidArgument, match="in the clear|unencrypted"):
            check_reachable(host, has_tls=False, has_tokens=True, insecure=insecure)


def test_only_probes_need_no_token(security) -> None:
    async def main() -> None:
        gateway = Gateway("teacher", tokens=Tokens(security.tokens.path))
        runner, url = await gateway.listen("127.0.0.1", 0)
        try:
            async with ClientSession(url) as client:
                # The teacher is being loaded, so callers who are let in get 503.
                for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
                    headers = {"Authorization": f"Bearer {security.token}"}
                    async with client.request(method, path, headers=headers) as response:
                        assert response.status == 503
                    async with client.request(method, path) as response:
                        assert response.status == 401
                        assert response.headers["WWW-Authenticate"] == "Bearer"
                        assert "a token is needed" in (await response.json())["error"]["message"]
                async with client.get("/elsewhere") as response:
                    assert response.status == 401
                for path in ("/health", "/readyz"):
                    async with client.get(path) as response:
                        assert response.status == 503
        finally:
            await runner.cleanup()

    asyncio.run(main())


def test_a_call_without_a_token_is_refused_before_its_body_is_read(security) -> None:
    async def main() -> bytes:
        gateway = Gateway("teacher", tokens=Tokens(security.tokens.path))
        runner, url = await gateway.listen("127.0.0.1", 0)
        try:
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n"
            )
            line = await asyncio.wait_for(reader.readline(), 20)
            writer.close()
            return line
        finally:
            await runner.cleanup()

    assert b" 401 " in asyncio.run(main())


def served_certificate(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=20)


def test_a_certificate_is_read_again_and_a_wrong_pair_changes_nothing(security, tmp_path) -> None:
    cert, key = tmp_path / "live.pem", tmp_path / "live.key"

    def install(pair: tuple[pathlib.Path, pathlib.Path]) -> str:
        shutil.copy(pair[0], cert)
        shutil.copy(pair[1], key)
        return pair[0].read_text()

    first = install(security.authority.issue("first"))
    certificate = Certificate(cert, key)

    async def main() -> None:
        runner, url = await Gateway("teacher").listen("127.0.0.1", 0, certificate)
        assert url.startswith("https://")
        port = int(url.rpartition(":")[2])
        try:
            assert await asyncio.to_thread(served_certificate, port) == first
            second = install(security.authority.issue("second"))
            certificate.reload()
            assert await asyncio.to_thread(served_certificate, port) == second
            shutil.copy(security.server_key, key)
            with pytest.raises(InvalidArgument, match="its private key"):
                certificate.reload()
            assert await asyncio.to_thread(served_certificate, port) == second
        finally:
            await runner.cleanup()

    asyncio.run(main())


def test_a_key_with_a_passphrase_is_an_error(security, tmp_path) -> None:
    key = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", security.server_key, "-aes256", "-passout", "pass:secret"]
    key.write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)

    with pytest.raises(InvalidArgument, match="without a passphrase"):
        Certificate(security.server_cert, key)


def test_versions_before_tls_1_2_are_refused(security) -> None:
    context = Certificate(security.server_cert, security.server_key).context

    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--listen", "0.0.0.0:0"], "--https-cert, --https-key and --tokens"),
        (["--https-cert", "x"], "belong together"),
        (["--https-cert", "x", "--https-key", "y"], "x, y: expected a PEM certificate"),
        (["--tokens", "missing"], "file of tokens missing cannot be read"),
        (["--local", "--token-file", "x"], "--local needs no server"),
    ],
)
def test_the_command_does_not_start_with_wrong_settings(environment, options, problem) -> None:
    done = subprocess.run(
        [*MODULE, "--model", "x", *options],
        env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip

    assert done.returncode == 2
    assert problem in done.stderr.replace("\n", " ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("teacher")
    distill_teacher.make_model(seed=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gateway(folder, binaries, environment, security):
    """Runs a server and a gateway, which both demand a token and speak TLS only."""
    with ServerProcess(binaries, "--model", str(folder), *security.server_flags()) as server:
        options = ["--model", str(folder), "--address", server.grpc]
        for name, value in security.client_options().items():
            options += [f"--{name.replace('_', '-')}", value]
        options += ["--https-cert", str(security.server_cert)]
        options += ["--https-key", str(security.server_key)]
        options += ["--tokens", str(security.tokens.path)]
        with GatewayProcess(environment, *options) as process:
            yield process


def expected_logprobs(folder: pathlib.Path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1].double()
    targets = torch.tensor(TOKENS[1:])[:, None]
    return logits.log_softmax(-1).gather(1, targets)[:, 0].numpy()


@pytest.fixture
def trl_client(gateway, security, tmp_path, monkeypatch):
    """TRL's client, unmodified. It takes the CA and the token from files that requests reads."""
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login token password {security.token}\n")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(security.ca))
    monkeypatch.setenv("NETRC", str(netrc))
    with mock.patch.object(trl.generation.vllm_client, "is_vllm_available", return_value=True):
        yield trl.generation.vllm_client.VLLMClient(base_url=gateway.url)


def test_trls_client_scores_over_https_with_a_token(trl_client, folder) -> None:
    result = trl_client.get_sequence_logprobs([TOKENS], [1], top_logprobs=2)

    actual = np.array(result["actual_logprobs"][0])[:, 0]
    np.testing.assert_allclose(actual, expected_logprobs(folder), atol=TOLERANCE, rtol=0)


def test_trls_client_takes_the_token_in_the_url_too(
    gateway, security, trl_client, monkeypatch
) -> None:
    monkeypatch.setenv("NETRC", "/dev/null")
    url = gateway.url.replace("https://", f"https://token:{security.token}@")

    client = type(trl_client)(base_url=url)

    assert client.model == trl_client.model
    with pytest.raises(Exception, match="401.*unknown"):
        type(trl_client)(base_url=url.replace(security.token, "other"))


def test_aiohttp_takes_the_token_in_the_url(gateway, security) -> None:
    # The rollout worker of TRL's AsyncDistillation sends such requests, with the CA of SSL_CERT_FILE.
    async def main() -> int:
        context = ssl.create_default_context(cafile=security.ca)
        url = gateway.url.replace("https://", f"https://token:{security.token}@")
        async with ClientSession() as session:
            body = {"prompt": TOKENS, "prompt_logprobs": 1, "max_tokens": 1}
            async with session.post(f"{url}/v1/completions", json=body, ssl=context) as response:
                return response.status

    assert asyncio.run(main()) == 200


def test_a_client_sends_a_bearer_token(gateway, security, folder) -> None:
    context = ssl.create_default_context(cafile=security.ca)
    body = json.dumps({"prompt": TOKENS, "prompt_logprobs": 0}).encode()
    request = urllib.request.Request(f"{gateway.url}/v1/completions", body)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, context=context)

    request.add_header("Authorization", f"Bearer {security.token}")
    with urllib.request.urlopen(request, context=context) as response:
        rows = json.load(response)["choices"][0]["prompt_logprobs"][1:]

    found = [row[str(token)]["logprob"] for row, token in zip(rows, TOKENS[1:], strict=True)]
    np.testing.assert_allclose(found, expected_logprobs(folder), atol=TOLERANCE, rtol=0)
    assert security.token not in "".join(gateway.log)


def status_of(url: str, token: str) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_sighup_reads_the_tokens_again(built_operator, environment, folder, tokens) -> None:
    first = tokens.add("first", "score")
    options = ("--local", "--model", str(folder), "--tokens", str(tokens.path))
    with GatewayProcess(environment, *options) as gateway:
        models = f"{gateway.url}/v1/models"
        assert status_of(models, first) == 200
        second = TokenFile(tokens.path).add("second", "score")
        gateway.process.send_signal(signal.SIGHUP)

        wait_until(lambda: status_of(models, second) == 200, gateway.log)
        assert status_of(models, first) == 401
