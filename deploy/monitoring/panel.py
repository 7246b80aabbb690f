"""Description of a dashboard panel, independent of Grafana's JSON."""

import dataclasses
import enum
import functools
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
    legend: str = ""  # Grafana's template for series names; if empty, the panel's title is used


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    about: str  # description; the names of the metrics are appended
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = Kind.LINES
    width: int = 0  # in columns; 0: that of the row
    stacked: bool = False
    red_above: float | None = None  # bounds beyond which the background of a stat turns red
    red_below: float | None = None
    decimals: int | None = None
    highest: float | None = None  # upper end of the axis, if it is fixed
    repeat: str | None = None  # variable; the panel is repeated for each of its values

    def metrics(self) -> list[str]:
        """Returns the names of the metrics that the queries read; a histogram is named by its family."""
        names = re.findall(
            r"\b(?:logprobd|process)_\w+|\bup\b", " ".join(q.expr for q in self.queries)
        )
        families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
        return sorted(families)


# A number in the overview.
stat = functools.partial(Panel, kind=Kind.STAT, width=3)


@dataclasses.dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]
    width: int = 8  # of panels without a width of their own, in columns; a dashboard has 24
