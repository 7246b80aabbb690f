"""Description of a dashboard panel, independent of Grafana's JSON."""

import dataclasses
import enum
import re


class Kind(enum.Enum):
    """Grafana's panel type."""

    STAT = "stat"
    LINES = "timeseries"
    HEATMAP = "heatmap"
    TABLE = "table"


@dataclasses.dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""  # Grafana's template for series names; empty: the panel's title


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    about: str  # description; the names of the metrics are appended
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = Kind.LINES
    width: int = 8  # of 24 columns
    stacked: bool = False
    load_shows: bool = True  # under load, every query gives a series above zero
    needs_gpu: bool = False
    red_above: float | None = None  # bounds at which the background of a stat turns red
    red_below: float | None = None
    decimals: int | None = None
    highest: float | None = None  # end of the axis, if it is fixed
    repeat: str | None = None  # variable; the panel is repeated for each of its values

    def metrics(self) -> list[str]:
        """Names of the metrics that the queries read; histograms under their family name."""
        names = re.findall(
            r"\b(?:logprobd|process)_\w+|\bup\b", " ".join(q.expr for q in self.queries)
        )
        families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
        return sorted(families)


@dataclasses.dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]
