"""Makes tokens and the server's file of tokens and certificates for a test."""

import hashlib
import pathlib
import secrets


class TokenFile:
    """A file of tokens, and the tokens by their ids."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.tokens: dict[str, str] = {}
        self.text = ""

    def add(self, name: str, *scopes: str, **keys: str) -> str:
        """Writes an entry with further keys as TOML, and returns the new token."""
        token = self.tokens[name] = secrets.token_urlsafe(32)
        self.text += f'[[token]]\nid = "{name}"\nscopes = {list(scopes)}\n'
        self.text += f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
        self.text += "".join(f"{key} = {value}\n" for key, value in keys.items())
        self.path.write_text(self.text)
        return token

    def add_certificate(self, name: str, *scopes: str, **keys: str) -> None:
        """Writes the entry of a client certificate with further keys as TOML."""
        self.text += f'[[certificate]]\nname = "{name}"\nscopes = {list(scopes)}\n'
        self.text += "".join(f"{key} = {value}\n" for key, value in keys.items())
        self.path.write_text(self.text)

    def metadata(self, name: str | None) -> tuple[tuple[str, str], ...]:
        return () if name is None else (("authorization", f"Bearer {self.tokens[name]}"),)
