"""Panels of what the server does: overview, latency, throughput, batching, saturation."""

from panel import Kind, Panel, Query, Row
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
        Panel(
            "Servers up",
            "Servers that Prometheus reaches.",
            one(f"sum(up{{{OURS}}})"),
            kind=Kind.STAT,
            width=3,
            red_below=1,
        ),
        Panel(
            "Servers unreachable",
            "Servers that Prometheus cannot scrape.",
            one(f"sum(up{{{OURS}}} == bool 0)"),
            kind=Kind.STAT,
            width=3,
            load_shows=False,
            red_above=1,
        ),
        Panel(
            "Heads ready",
            "Heads that can score now, over all servers.",
            one(gauge("logprobd_ready", HEAD)),
            kind=Kind.STAT,
            width=3,
            red_below=1,
        ),
        Panel(
            "Replicas failed",
            "Replicas that score no more; they come back when their server is started again.",
            one(gauge("logprobd_replicas", HEAD + ', state="failed"')),
            kind=Kind.STAT,
            width=3,
            load_shows=False,
            red_above=1,
        ),
        Panel(
            "Requests",
            "Calls answered a second, chunks of streams among them.",
            one(rate("logprobd_requests_total", HEAD)),
            "reqps",
            Kind.STAT,
            3,
        ),
        Panel(
            "Rows",
            "Rows scored a second.",
            one(rate("logprobd_rows_total", HEAD + ', kind="scored"')),
            "short",
            Kind.STAT,
            3,
        ),
        Panel(
            "Faults",
            "Share of calls that ended with a code for which the server answers: "
            + FAULTS.replace("|", ", ")
            + ".",
            one(fault_share()),
            "percentunit",
            Kind.STAT,
            3,
            load_shows=False,
            red_above=0.01,
            decimals=2,
        ),
        Panel(
            "Latency p95",
            "95 of 100 scoring calls were answered within this time.",
            one(quantile(0.95, LATENCY, SCORING)),
            "s",
            Kind.STAT,
            3,
        ),
        Panel(
            "Rows waiting",
            "Rows in the queues of all heads, waiting for a batch.",
            one(gauge("logprobd_queue_rows", HEAD)),
            kind=Kind.STAT,
            width=3,
            load_shows=False,
        ),
        Panel(
            "GPU memory free",
            "Free share of the GPU that has the least. The server reserves what it needs at its start.",
            one(f"min({FREE_SHARE})"),
            "percentunit",
            Kind.STAT,
            3,
            needs_gpu=True,
            red_below=0.05,
        ),
        Panel(
            "Share of peak",
            "Matrix products of all GPUs over what the variable `peak_tflops` says that they could do.",
            one(f"avg({TFLOPS}) / $peak_tflops"),
            "percentunit",
            Kind.STAT,
            3,
            needs_gpu=True,
        ),
        Panel(
            "Weights version",
            "The highest version that is live; the row Weights shows each server's.",
            one(f"max(logprobd_weights_version{{{HEAD}}})"),
            kind=Kind.STAT,
            width=3,
        ),
    ),
)

LATENCIES = Row(
    "Latency",
    (
        Panel(
            "Scoring calls",
            "From a call's arrival to its answer.",
            tuple(
                Query(quantile(q, LATENCY, SCORING), f"p{100 * q:g}")
                for q in (0.5, 0.9, 0.95, 0.99)
            ),
            "s",
        ),
        Panel(
            "Scoring calls, all",
            "Each column holds the calls of a moment by how long they took.",
            heatmap(LATENCY, SCORING),
            "s",
            Kind.HEATMAP,
        ),
        Panel(
            "p95 by head",
            "The slowest of 20 calls, head by head.",
            one(quantile(0.95, LATENCY, SCORING, "head"), "{{head}}"),
            "s",
        ),
        Panel(
            "p95 by transport",
            "tcp is everything that travels over gRPC; shm and cuda_ipc bring the rows another way.",
            one(quantile(0.95, LATENCY, SCORING, "transport"), "{{transport}}"),
            "s",
        ),
        Panel(
            "p95 by stage",
            "receive, queue and reply are of a request; copy, h2d, kernel, combine and d2h of a batch. An engine"
            " leaves out the stages that it does not have.",
            one(quantile(0.95, STAGES, OURS, "stage"), "{{stage}}"),
            "s",
        ),
        Panel(
            "Mean by stage",
            "Where the time goes: the means of the stages on each other.",
            one(mean(STAGES, OURS, "stage"), "{{stage}}"),
            "s",
            stacked=True,
        ),
        Panel(
            "Stage $stage, all",
            "Each column holds the passes through the stage that the variable `stage` names, by how long they took.",
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
            "Rows answered a second: scored, ignored (the target is the ignore_index) and nonfinite (NaN or Inf among"
            " their logits).",
            series(rate, "logprobd_rows_total", HEAD, "head, kind"),
            "short",
        ),
        Panel(
            "Calls by method",
            "Calls answered a second; a chunk of a stream counts as a call.",
            series(rate, "logprobd_requests_total", HEAD, "method"),
            "reqps",
        ),
        Panel(
            "Received",
            "Bytes of requests a second, by how they came.",
            series(rate, "logprobd_received_bytes_total", OURS, "transport"),
            "Bps",
        ),
        Panel(
            "Sent",
            "Bytes of answers a second, by how they left.",
            series(rate, "logprobd_sent_bytes_total", OURS, "transport"),
            "Bps",
        ),
        Panel(
            "Matrix products",
            "TFLOP/s of the head's matrix products, each GPU, idle time included.",
            one(TFLOPS, GPU_NAME),
            "short",
            needs_gpu=True,
        ),
        Panel(
            "Share of peak",
            "The same over `peak_tflops`, dashed where only the time counts in which kernels ran. A wide gap"
            " between the two: the GPU waits for work.",
            (
                Query(f"{TFLOPS} / $peak_tflops", GPU_NAME),
                Query(f"{TFLOPS} / {BUSY} / $peak_tflops >= 0", f"{GPU_NAME} while busy"),
            ),
            "percentunit",
            needs_gpu=True,
        ),
    ),
)

BATCH_ROWS = "logprobd_batch_rows"
BATCHING = Row(
    "Batching",
    (
        Panel(
            "Rows a batch",
            "More rows a batch use a GPU better; few at a high load mean that clients wait for one another.",
            (
                Query(mean(BATCH_ROWS, HEAD), "mean"),
                Query(quantile(0.5, BATCH_ROWS, HEAD), "p50"),
                Query(quantile(0.95, BATCH_ROWS, HEAD), "p95"),
            ),
            "short",
            width=6,
        ),
        Panel(
            "Rows a batch, all",
            "Each column holds the batches of a moment by their rows.",
            heatmap(BATCH_ROWS, HEAD),
            "short",
            Kind.HEATMAP,
            6,
        ),
        Panel(
            "Requests a batch",
            "How many requests share a batch.",
            (
                Query(mean("logprobd_batch_requests", HEAD), "mean"),
                Query(quantile(0.95, "logprobd_batch_requests", HEAD), "p95"),
            ),
            "short",
            width=6,
        ),
        Panel(
            "Batches",
            "Calls of the engine a second.",
            series(rate, f"{BATCH_ROWS}_count", HEAD, "head"),
            "ops",
            width=6,
        ),
    ),
)

SATURATION = Row(
    "Saturation",
    (
        Panel(
            "Rows waiting",
            "Rows in the queue by head and priority. Beyond `--queue-rows` requests are refused.",
            series(gauge, "logprobd_queue_rows", HEAD, "head, priority"),
            stacked=True,
            load_shows=False,
        ),
        Panel(
            "Oldest in the queue",
            "How long the request that waits the longest has waited.",
            one(f"max by (head) (logprobd_queue_oldest_age_seconds{{{HEAD}}})", "{{head}}"),
            "s",
            load_shows=False,
        ),
        Panel(
            "Requests waiting",
            "Requests in the queue.",
            series(gauge, "logprobd_queue_requests", HEAD, "head"),
            load_shows=False,
        ),
        Panel(
            "Bytes of requests at hand",
            "Against `--queue-bytes`. Each of several heads has an equal part, beyond which its requests are refused.",
            series(gauge, "logprobd_inflight_bytes", OURS, "instance")
            + series(gauge, "logprobd_inflight_bytes_limit", OURS, "instance", "limit"),
            "bytes",
            load_shows=False,
        ),
        Panel(
            "Refused by reason",
            "Requests refused before they were queued. queue_*, client_share and answer_bytes: too much work; the"
            " clients are told when to come back.",
            series(rate, "logprobd_rejected_total", OURS, "reason"),
            "reqps",
        ),
        Panel(
            "Cancelled, and too late",
            "Requests whose client left or whose deadline passed, by where they were.",
            (
                Query(rate("logprobd_cancelled_total", OURS, "stage"), "cancelled at {{stage}}"),
                Query(
                    rate("logprobd_deadline_exceeded_total", OURS, "stage"), "too late at {{stage}}"
                ),
            ),
            "reqps",
        ),
        Panel(
            "GPU busy",
            "Share of the time in which batches were in kernels.",
            one(BUSY, GPU_NAME),
            "percentunit",
            needs_gpu=True,
        ),
        Panel(
            "Shared with clients",
            "Shared-memory regions and CUDA IPC mappings that are open.",
            series(gauge, "logprobd_shm_regions", OURS, "instance", "regions")
            + series(gauge, "logprobd_cuda_ipc_mappings", OURS, "instance", "mappings"),
            load_shows=False,
        ),
        Panel(
            "Shared memory of clients",
            "Size of the regions together.",
            series(gauge, "logprobd_shm_bytes", OURS, "instance"),
            "bytes",
            load_shows=False,
        ),
    ),
)
