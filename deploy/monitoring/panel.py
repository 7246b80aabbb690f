"""What a panel of the dashboard is, Grafana's JSON aside."""

import dataclasses
import enum
import re


class Kind(enum.Enum):
    """Grafana's type of a panel."""

    STAT = "stat"
    LINES = "timeseries"
    HEATMAP = "heatmap"
    TABLE = "table"


@dataclasses.dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""  # Grafana's template of a series' name; empty: the panel's title


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    about: str  # what it means and what to make of it; the metrics' names are appended
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = Kind.LINES
    width: int = 8  # of 24
    stacked: bool = False
    load_shows: bool = True  # under load every query has a series above zero
    needs_gpu: bool = False
    red_above: float | None = None  # stats: the background turns red
    red_below: float | None = None
    decimals: int | None = None
    highest: float | None = None  # end of the axis, where there is one
    repeat: str | None = None  # a variable: one panel for each of its values

    def metrics(self) -> list[str]:
        """Names of the metrics that the queries read, histograms by their family."""
        names = re.findall(
            r"\b(?:logprobd|process)_\w+|\bup\b", " ".join(q.expr for q in self.queries)
        )
        families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
        return sorted(families)


@dataclasses.dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]
