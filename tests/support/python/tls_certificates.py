"""Makes certificates for tests with the openssl command."""

import pathlib
import subprocess


class Authority:
    """A certificate authority whose files are in `folder`; `name` is part of their names."""

    def __init__(self, folder: pathlib.Path, name: str = "ca") -> None:
        self.folder = folder
        self.name = name
        self.cert = folder / f"{name}.pem"
        self.key = folder / f"{name}.key"
        (folder / f"{name}.index").touch()
        _openssl(
            *_new_key("req", self.key), "-x509", "-days", "30", "-subj", f"/CN={name}",
            "-out", self.cert,
        )  # fmt: skip

    def renew(self) -> None:
        """Replaces the certificate by one with the same key and another serial number."""
        _openssl(
            *("req", "-x509", "-key", self.key, "-days", "30", "-subj", f"/CN={self.name}"),
            *("-out", self.cert),
        )

    def issue(
        self,
        name: str,
        *,
        hosts: str | None = "IP:127.0.0.1,DNS:localhost",
        begin: str = "20200101000000Z",
        end: str = "20991231235959Z",
        curve: str = "P-256",
    ) -> tuple[pathlib.Path, pathlib.Path]:
        """Returns the paths of a certificate for `hosts`, None for no alternative name, and of its key."""
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        request = self.folder / f"{name}.csr"
        _openssl(*_new_key("req", key, curve), "-subj", f"/CN={name}", "-out", request)
        self._ca(
            "-in", request, "-out", cert, "-startdate", begin, "-enddate", end,
            "-extensions", "leaf", hosts=hosts,
        )  # fmt: skip
        return cert, key

    def write_revocations(self, folder: pathlib.Path, *revoked: pathlib.Path) -> None:
        """Writes the list of revoked certificates to `folder`, under the name that OpenSSL looks for."""
        folder.mkdir(exist_ok=True)
        self.write_list(folder / "crl.pem", *revoked)
        _openssl("rehash", folder)

    def write_list(
        self, path: pathlib.Path, *revoked: pathlib.Path, is_expired: bool = False
    ) -> None:
        """Writes the list of revoked certificates to a file, in place."""
        for cert in revoked:
            self._ca("-revoke", cert)
        # Names the serial number of the certificate, too.
        extensions = ("-crlexts", "list")
        past = ("-crl_lastupdate", "20200101000000Z", "-crl_nextupdate", "20200201000000Z")
        self._ca(
            "-gencrl", *(past if is_expired else ("-crldays", "30")), *extensions, "-out", path
        )

    def _ca(self, *arguments: object, hosts: str | None = None) -> None:
        names = "" if hosts is None else f"subjectAltName = {hosts}\n"
        config = self.folder / f"{self.name}.cnf"
        config.write_text(
            "[ca]\ndefault_ca = this\n[this]\n"
            f"database = {self.folder}/{self.name}.index\nnew_certs_dir = {self.folder}\n"
            f"certificate = {self.cert}\nprivate_key = {self.key}\nrand_serial = yes\n"
            "default_md = sha256\npolicy = any\nunique_subject = no\n"
            f"[any]\ncommonName = supplied\n[leaf]\nbasicConstraints = CA:FALSE\n{names}"
            "[list]\nauthorityKeyIdentifier = keyid:always,issuer:always\n"
        )
        _openssl("ca", "-batch", "-notext", "-config", config, *arguments)


def self_signed(folder: pathlib.Path, name: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the paths of a certificate for loopback that no authority issued, and of its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    _openssl(
        *_new_key("req", key), "-x509", "-days", "30", "-subj", f"/CN={name}",
        "-addext", "subjectAltName=IP:127.0.0.1", "-out", cert,
    )  # fmt: skip
    return cert, key


def _new_key(command: str, key: pathlib.Path, curve: str = "P-256") -> list[object]:
    kind = ["-newkey", "ec", "-pkeyopt", f"ec_paramgen_curve:{curve}"]
    return [command, *kind, "-nodes", "-keyout", key]


def _openssl(*arguments: object) -> None:
    result = subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 0, result.stderr
