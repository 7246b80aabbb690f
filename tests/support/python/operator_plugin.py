"""Makes the entry points of logprobd_ops visible, as if the package of the source tree were installed."""

import pathlib

import tomllib
from logprobd_ops._operator import VERSION

PACKAGE = pathlib.Path(__file__).resolve().parents[3] / "kernels" / "torch_ops" / "python"


def write_entry_points(folder: pathlib.Path) -> None:
    """Writes the metadata of the package into `folder`, which is to be on Python's path."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = folder / f"logprobd_ops-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: logprobd_ops\nVersion: {VERSION}\n")
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
            for group, entries in project["entry-points"].items()
        )
    )
