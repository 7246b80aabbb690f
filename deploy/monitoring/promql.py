"""PromQL expressions that the panels share. server/metrics/README.md lists the metrics and their labels."""

from collections.abc import Callable

from panel import Query

OURS = 'job=~"$job", instance=~"$instance"'
HEAD = f'{OURS}, head=~"$head"'
# The methods that score rows; the other calls are small and would distort latencies.
SCORING = f'{HEAD}, method=~"Score|ScoreStream"'
# These codes are the server's fault. Refusals (RESOURCE_EXHAUSTED) tell clients to retry and have their own panel; the
# other codes are caused by clients.
FAULTS = "UNKNOWN|DEADLINE_EXCEEDED|ABORTED|INTERNAL|UNAVAILABLE|DATA_LOSS"
FAULTY = HEAD + f', code=~"{FAULTS}"'
LATENCY = "logprobd_request_duration_seconds"
STAGES = "logprobd_stage_duration_seconds"
GPU = "instance, gpu"
GPU_NAME = "{{instance}} GPU {{gpu}}"
GPU_KIND = GPU_NAME + " {{kind}}"
GPU_MEMORY = "logprobd_gpu_memory_bytes"


def rate(metric: str, labels: str, by: str = "") -> str:
    """Returns the sum of a counter's rates, in total or grouped by labels."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(q: float, histogram: str, labels: str, by: str = "") -> str:
    """Returns a quantile of a histogram; leaves out series without traffic, which would be NaN."""
    grouping = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels, grouping)}) >= 0"


def mean(histogram: str, labels: str, by: str = "") -> str:
    total, count = (rate(f"{histogram}_{part}", labels, by) for part in ("sum", "count"))
    return f"{total} / {count} >= 0"


def heatmap(histogram: str, labels: str) -> tuple[Query, ...]:
    buckets = f"sum by (le) (increase({histogram}_bucket{{{labels}}}[$__rate_interval]))"
    return (Query(buckets, "{{le}}"),)


def gauge(metric: str, labels: str, by: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({metric}{{{labels}}})"


def one(expr: str, legend: str = "") -> tuple[Query, ...]:
    return (Query(expr, legend),)


def series(
    expr: Callable[..., str], metric: str, labels: str, by: str, what: str = ""
) -> tuple[Query, ...]:
    """Returns `expr` (rate or gauge) of a metric, grouped by labels; label values and `what` name each series."""
    names = [f"{{{{{label}}}}}" for label in by.split(", ")]
    return one(expr(metric, labels, by), " ".join([*names, what]).rstrip())


def each(metric: str, legend: str, labels: str = OURS) -> tuple[Query, ...]:
    """Returns a query for all series of a metric, unchanged."""
    return one(f"{metric}{{{labels}}}", legend)


def fault_share(by: str = "") -> str:
    """Returns the share of calls that ended with a code that is the server's fault."""
    calls = "logprobd_requests_total"
    return f"{rate(calls, FAULTY, by)} / {rate(calls, HEAD, by)} >= 0"


FREE_SHARE = gauge(GPU_MEMORY, OURS + ', kind="free"', GPU) + " / " + gauge(GPU_MEMORY, OURS, GPU)
TFLOPS = f"{rate('logprobd_flops_total', OURS, GPU)} / 1e12"
BUSY = rate("logprobd_gpu_busy_seconds_total", OURS, GPU)
