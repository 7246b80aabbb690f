"""Gives the Python client's classes the docstrings and signatures that they have at run time.

griffe reads the source without running it. So it does not see a computed `__doc__`, nor what
functools.wraps copies.
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
        core = pkg["_core.ClientCore"].docstring
        # As in the source: indented, with the closing quotes in a line of their own.
        base = SimpleNamespace(__doc__=textwrap.indent(f"{core.value}\n", "    ") + "    ")
        for client in (pkg["client.Client"], pkg["aio.AsyncClient"]):
            text = eval(str(client["__doc__"].value), {"ClientCore": base})
            parser = {"parser": core.parser, "parser_options": core.parser_options}
            client.docstring = griffe.Docstring(inspect.cleandoc(text), parent=client, **parser)
        wrapped = pkg["score_args.ScoreMethod.score"]
        score = pkg["aio.AsyncClient.score"]
        score.docstring, score.parameters = wrapped.docstring, wrapped.parameters
