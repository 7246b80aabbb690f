"""The files with which a server and its clients are safe on a network, for a test."""

import pathlib

from tls_certificates import Authority
from token_file import TokenFile


class NetworkSecurity:
    """A certificate authority, the certificates of a server and of a client, and tokens: one with the scope score, one
    with the scope admin, and one with the scope metrics.

    Args:
        hosts: names in the server's certificate, as Authority.issue takes them.
    """

    def __init__(
        self, folder: pathlib.Path, hosts: str = "IP:127.0.0.1,IP:127.0.0.2,IP:127.0.0.3"
    ) -> None:
        self.authority = Authority(folder)
        self.ca = self.authority.cert
        self.server_cert, self.server_key = self.authority.issue("server", hosts=hosts)
        self.client_cert, self.client_key = self.authority.issue("client")
        self.tokens = TokenFile(folder / "tokens.toml")
        self.token = self.tokens.add("scorer", "score")
        self.admin_token = self.tokens.add("operator", "admin")
        self.metrics_token = self.tokens.add("monitor", "metrics")
        self.token_file = folder / "token"
        self.token_file.write_text(f"{self.token}\n")
        self.admin_token_file = folder / "admin_token"
        self.admin_token_file.write_text(f"{self.admin_token}\n")

    def server_flags(self) -> list[str]:
        """Returns flags of a server that demands the certificate and the token."""
        return [
            *("--tls-cert", str(self.server_cert), "--tls-key", str(self.server_key)),
            *("--tls-client-ca", str(self.ca), "--tokens", str(self.tokens.path)),
        ]

    def client_tls(self) -> dict[str, str]:
        """Returns the arguments of a logprobd.Tls that presents the certificate."""
        return {"ca": str(self.ca), "cert": str(self.client_cert), "key": str(self.client_key)}

    def client_options(self) -> dict[str, str]:
        """Returns the options of an adapter that presents them."""
        files = {f"tls_{name}": path for name, path in self.client_tls().items()}
        return files | {"token_file": str(self.token_file)}

    def client_variables(self) -> dict[str, str]:
        """Returns the environment variables that say the same to any client."""
        files = {f"LOGPROBD_TLS_{name.upper()}": path for name, path in self.client_tls().items()}
        return files | {"LOGPROBD_TOKEN": self.token}
