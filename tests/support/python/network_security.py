"""The files with which a server and its clients are safe on a network, for a test."""

import pathlib

from tls_certificates import Authority
from token_file import TokenFile


class NetworkSecurity:
    """A certificate authority, the certificates of a server and of a client, and tokens: one with the scope score, and
    one with the scope metrics.

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
        self.metrics_token = self.tokens.add("monitor", "metrics")
        self.token_file = folder / "token"
        self.token_file.write_text(f"{self.token}\n")

    def server_flags(self) -> list[str]:
        """Returns flags of a server that demands the certificate and the token."""
        return [
            *("--tls-cert", str(self.server_cert), "--tls-key", str(self.server_key)),
            *("--tls-client-ca", str(self.ca), "--tokens", str(self.tokens.path)),
        ]

    def client_options(self) -> dict[str, str]:
        """Returns the options of an adapter that presents them."""
        return {
            "tls_ca": str(self.ca),
            "tls_cert": str(self.client_cert),
            "tls_key": str(self.client_key),
            "token_file": str(self.token_file),
        }

    def client_variables(self) -> dict[str, str]:
        """Returns the environment variables that say the same to any client."""
        return {
            "LOGPROBD_TLS_CA": str(self.ca),
            "LOGPROBD_TLS_CERT": str(self.client_cert),
            "LOGPROBD_TLS_KEY": str(self.client_key),
            "LOGPROBD_TOKEN": self.token,
        }
