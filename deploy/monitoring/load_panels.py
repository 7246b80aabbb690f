"""Panels about the load: overview, latency, throughput, batching, saturation."""

from panel import Kind, Panel, Query, Row, stat
from promql import (
    BUSY,
    FAULTS,
    FREE_SHARE,
    GPU_NAME,
    HEAD,
    LATENCY,
    OURS,
    SCORING,
    STAGES,
    TFLOPS,
    fault_share,
    gauge,
    heatmap,
    mean,
    one,
    quantile,
    rate,
    series,
)

OVERVIEW = Row(
    "Overview",
    (
        stat(
            "Servers up", "Servers that Prometheus reaches.", one(f"sum(up{{{OURS}}})"), red_below=1
        ),
        stat(
            "Servers unreachable",
            "Servers that Prometheus cannot scrape.",
            one(f"sum(up{{{OURS}}} == bool 0)"),
            red_above=1,
        ),
        stat(
            "Heads ready",
            "Heads that can score now, over all servers.",
            one(gauge("logprobd_ready", HEAD)),
            red_below=1,
        ),
        stat(
            "Replicas failed",
            "Replicas that no longer score; they come back when their server is restarted.",
            one(gauge("logprobd_replicas", HEAD + ', state="failed"')),
            red_above=1,
        ),
        stat(
            "Requests",
            "Calls answered per second; each chunk of a stream counts as one call.",
            one(rate("logprobd_requests_total", HEAD)),
            "reqps",
        ),
        stat(
            "Rows",
            "Rows scored per second.",
            one(rate("logprobd_rows_total", HEAD + ', kind="scored"')),
        ),
        stat(
            "Faults",
            "Share of calls that ended with a code that is the server's fault: "
            + FAULTS.replace("|", ", ")
            + ".",
            one(fault_share()),
            "percentunit",
            red_above=0.01,
            decimals=2,
        ),
        stat(
            "Latency p95",
            "95 of 100 scoring calls are answered within this time.",
            one(quantile(0.95, LATENCY, SCORING)),
            "s",
        ),
        stat(
            "Rows waiting",
            "Rows that wait for a batch in the queues of all heads.",
            one(gauge("logprobd_queue_rows", HEAD)),
        ),
        stat(
            "GPU memory free",
            "Free share of memory on the GPU with the least free memory. The server reserves its memory at the start.",
            one(f"min({FREE_SHARE})"),
            "percentunit",
            red_below=0.05,
        ),
        stat(
            "Share of peak",
            "Rate of matrix products on all GPUs, relative to the variable `peak_tflops`.",
            one(f"avg({TFLOPS}) / $peak_tflops"),
            "percentunit",
        ),
        stat(
            "Weights version",
            "The highest live version; the row Weights shows the version of each server.",
            one(f"max(logprobd_weights_version{{{HEAD}}})"),
        ),
    ),
)

LATENCIES = Row(
    "Latency",
    (
        Panel(
            "Scoring calls",
            "Time from the arrival of a call to its answer.",
            tuple(
                Query(quantile(q, LATENCY, SCORING), f"p{100 * q:g}")
                for q in (0.5, 0.9, 0.95, 0.99)
            ),
            "s",
        ),
        Panel(
            "Distribution of scoring calls",
            "Each column shows the calls of one time step by their duration.",
            heatmap(LATENCY, SCORING),
            "s",
            Kind.HEATMAP,
        ),
        Panel(
            "p95 by head",
            "95 of 100 scoring calls are answered within this time, by head.",
            one(quantile(0.95, LATENCY, SCORING, "head"), "{{head}}"),
            "s",
        ),
        Panel(
            "p95 by transport",
            "With tcp, the rows are sent over gRPC; with shm and cuda_ipc, they are in shared memory or GPU memory.",
            one(quantile(0.95, LATENCY, SCORING, "transport"), "{{transport}}"),
            "s",
        ),
        Panel(
            "p95 by stage",
            "receive, queue and reply are stages of a request; copy, h2d, kernel, combine and d2h are stages of a"
            " batch. Stages that an engine does not have are missing.",
            one(quantile(0.95, STAGES, OURS, "stage"), "{{stage}}"),
            "s",
        ),
        Panel(
            "Mean by stage",
            "Mean durations of the stages, stacked.",
            one(mean(STAGES, OURS, "stage"), "{{stage}}"),
            "s",
            stacked=True,
        ),
        Panel(
            "Distribution of stage $stage",
            "Each column shows the durations of the stage that the variable `stage` names.",
            heatmap(STAGES, OURS + ', stage=~"$stage"'),
            "s",
            Kind.HEATMAP,
            24,
        ),
    ),
)

THROUGHPUT = Row(
    "Throughput",
    (
        Panel(
            "Rows by head",
            "Rows answered per second: scored, ignored (the target is ignore_index) and nonfinite (the logits hold"
            " NaN or Inf).",
            series(rate, "logprobd_rows_total", HEAD, "head, kind"),
        ),
        Panel(
            "Calls by method",
            "Calls answered per second; each chunk of a stream counts as one call.",
            series(rate, "logprobd_requests_total", HEAD, "method"),
            "reqps",
        ),
        Panel(
            "Received",
            "Bytes of requests per second, by transport.",
            series(rate, "logprobd_received_bytes_total", OURS, "transport"),
            "Bps",
        ),
        Panel(
            "Sent",
            "Bytes of answers per second, by transport.",
            series(rate, "logprobd_sent_bytes_total", OURS, "transport"),
            "Bps",
        ),
        Panel(
            "Matrix products",
            "TFLOP/s of the heads' matrix products on each GPU, including idle time.",
            one(TFLOPS, GPU_NAME),
        ),
        Panel(
            "Share of peak",
            "The rate of matrix products relative to `peak_tflops`. The dashed line counts only the time in which"
            " kernels ran. A wide gap between the two lines means that the GPU waits for work.",
            (
                Query(f"{TFLOPS} / $peak_tflops", GPU_NAME),
                Query(f"{TFLOPS} / {BUSY} / $peak_tflops >= 0", f"{GPU_NAME} while busy"),
            ),
            "percentunit",
        ),
    ),
)

BATCH_ROWS = "logprobd_batch_rows"
BATCHING = Row(
    "Batching",
    (
        Panel(
            "Rows per batch",
            "More rows per batch use a GPU better. Few rows per batch under high load mean that clients wait for each"
            " other.",
            (
                Query(mean(BATCH_ROWS, HEAD), "mean"),
                Query(quantile(0.5, BATCH_ROWS, HEAD), "p50"),
                Query(quantile(0.95, BATCH_ROWS, HEAD), "p95"),
            ),
        ),
        Panel(
            "Distribution of rows per batch",
            "Each column shows the batches of one time step by their number of rows.",
            heatmap(BATCH_ROWS, HEAD),
            kind=Kind.HEATMAP,
        ),
        Panel(
            "Requests per batch",
            "Number of requests that share a batch.",
            (
                Query(mean("logprobd_batch_requests", HEAD), "mean"),
                Query(quantile(0.95, "logprobd_batch_requests", HEAD), "p95"),
            ),
        ),
        Panel(
            "Batches",
            "Batches per second.",
            series(rate, f"{BATCH_ROWS}_count", HEAD, "head"),
            "ops",
        ),
    ),
    width=6,
)

SATURATION = Row(
    "Saturation",
    (
        Panel(
            "Rows waiting",
            "Rows in the queue by head and priority. Requests beyond `--queue-rows` are refused.",
            series(gauge, "logprobd_queue_rows", HEAD, "head, priority"),
            stacked=True,
        ),
        Panel(
            "Oldest in the queue",
            "Waiting time of the longest-waiting request.",
            one(f"max by (head) (logprobd_queue_oldest_age_seconds{{{HEAD}}})", "{{head}}"),
            "s",
        ),
        Panel(
            "Requests waiting",
            "Requests in the queue.",
            series(gauge, "logprobd_queue_requests", HEAD, "head"),
        ),
        Panel(
            "Bytes held for requests",
            "The limit is `--queue-bytes`, of which each head has an equal part. Requests beyond it are refused.",
            series(gauge, "logprobd_inflight_bytes", OURS, "instance")
            + series(gauge, "logprobd_inflight_bytes_limit", OURS, "instance", "limit"),
            "bytes",
        ),
        Panel(
            "Refused by reason",
            "Requests refused before they were queued. queue_*, client_share and answer_bytes mean that there is too"
            " much work; the answer tells the client when to retry.",
            series(rate, "logprobd_rejected_total", OURS, "reason"),
            "reqps",
        ),
        Panel(
            "Cancelled and expired requests",
            "Requests that their client cancelled or whose deadline passed, by the stage in which this happened.",
            (
                Query(rate("logprobd_cancelled_total", OURS, "stage"), "cancelled in {{stage}}"),
                Query(
                    rate("logprobd_deadline_exceeded_total", OURS, "stage"), "expired in {{stage}}"
                ),
            ),
            "reqps",
        ),
        Panel(
            "GPU busy",
            "Share of time during which kernels processed batches.",
            one(BUSY, GPU_NAME),
            "percentunit",
        ),
        Panel(
            "Shared with clients",
            "Number of open shared-memory regions and CUDA IPC mappings of clients.",
            series(gauge, "logprobd_shm_regions", OURS, "instance", "regions")
            + series(gauge, "logprobd_cuda_ipc_mappings", OURS, "instance", "mappings"),
        ),
        Panel(
            "Shared memory of clients",
            "Total size of the shared-memory regions.",
            series(gauge, "logprobd_shm_bytes", OURS, "instance"),
            "bytes",
        ),
    ),
)
