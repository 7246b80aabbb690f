"""Gives the Python client's classes and methods the docstrings and arguments that they have at run time.

griffe reads the source without running it. So it sees neither what `with_score_args` does nor a computed `__doc__`.
"""

import inspect
import textwrap
from types import SimpleNamespace

import griffe


class ClientDocstrings(griffe.Extension):
    """Changes the two clients of the package logprobd."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        if pkg.name != "logprobd":
            return
        args = pkg["score_args.ScoreArgs"]
        fields = list(args.parameters)[1:]
        described = "Args:" + args.docstring.value.partition("Args:")[2]
        core = pkg["_core.ClientCore"].docstring
        # As in the source: indented, with the closing quotes in a line of their own.
        base = SimpleNamespace(__doc__=textwrap.indent(f"{core.value}\n", "    ") + "    ")
        for client in (pkg["client.Client"], pkg["aio.AsyncClient"]):
            text = eval(str(client["__doc__"].value), {"ClientCore": base})
            parser = {"parser": core.parser, "parser_options": core.parser_options}
            client.docstring = griffe.Docstring(inspect.cleandoc(text), parent=client, **parser)
            score = client["score"]
            score.parameters = griffe.Parameters(score.parameters["self"], *fields)
            score.docstring.value += f"\n\n{described}"
