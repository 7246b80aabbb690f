"""Panels of what the server is made of: memory, devices, errors, weights."""

from panel import Kind, Panel, Row
from promql import (
    FREE_SHARE,
    GPU,
    GPU_KIND,
    GPU_MEMORY,
    GPU_NAME,
    HEAD,
    OURS,
    each,
    fault_share,
    gauge,
    one,
    rate,
    series,
)

MEMORY = Row(
    "Memory",
    (
        Panel(
            "GPU $gpu",
            "What the memory holds: weights, workspace and staging are reserved at the start; other is what the driver"
            " counts beyond that, of all processes.",
            series(gauge, GPU_MEMORY, OURS + ', gpu=~"$gpu"', "instance, kind"),
            "bytes",
            stacked=True,
            needs_gpu=True,
            repeat="gpu",
        ),
        Panel(
            "Peaks on GPUs",
            "The most since the start, by kind.",
            one(f"max by ({GPU}, kind) (logprobd_gpu_memory_peak_bytes{{{OURS}}})", GPU_KIND),
            "bytes",
            needs_gpu=True,
        ),
        Panel(
            "Free on GPUs",
            "Free share of the memory.",
            one(FREE_SHARE, GPU_NAME),
            "percentunit",
            needs_gpu=True,
            highest=1,
        ),
        Panel(
            "Host memory",
            "What is reserved at the start, by what it is for; receive is a bound on messages being received.",
            series(gauge, "logprobd_host_memory_bytes", OURS, "instance, kind"),
            "bytes",
            stacked=True,
        ),
        Panel(
            "Pinned host memory",
            "Page-locked, for copies to GPUs.",
            series(gauge, "logprobd_host_pinned_bytes", OURS, "instance, state"),
            "bytes",
            needs_gpu=True,
        ),
        Panel(
            "Resident memory",
            "Of the process, file-backed weights included.",
            each("process_resident_memory_bytes", "{{instance}}"),
            "bytes",
        ),
    ),
)

DEVICES = Row(
    "GPUs and process",
    (
        Panel(
            "Utilization",
            "Share of time with a kernel running, of any process, as the driver says.",
            each("logprobd_gpu_utilization_ratio", GPU_NAME),
            "percentunit",
            width=6,
            needs_gpu=True,
            highest=1,
        ),
        Panel(
            "Power",
            "Power drawn.",
            each("logprobd_gpu_power_watts", GPU_NAME),
            "watt",
            width=6,
            needs_gpu=True,
        ),
        Panel(
            "SM clock",
            "Falls with power and heat, and the speed of matrix products with it.",
            each("logprobd_gpu_sm_clock_hertz", GPU_NAME),
            "hertz",
            width=6,
            needs_gpu=True,
        ),
        Panel(
            "Clocks held down",
            "1 while the reason holds. power_cap is usual under full load; the others are not.",
            each("logprobd_gpu_throttled", GPU_NAME + " {{reason}}"),
            width=6,
            needs_gpu=True,
            highest=1,
        ),
        Panel(
            "CPU",
            "Cores in use by the process.",
            series(rate, "process_cpu_seconds_total", OURS, "instance"),
            width=6,
        ),
        Panel(
            "Open files",
            "Open file descriptors, and the most that may be open.",
            each("process_open_fds", "{{instance}}")
            + each("process_max_fds", "{{instance}} limit"),
            width=6,
        ),
        Panel(
            "Driver answers",
            "1 where the driver's figures of a GPU could be read; else they show 0.",
            each("logprobd_gpu_nvml_up", GPU_NAME),
            width=6,
            needs_gpu=True,
            highest=1,
        ),
        Panel(
            "Running for",
            "Time since the process was started.",
            one(f"time() - process_start_time_seconds{{{OURS}}}", "{{instance}}"),
            "s",
            width=6,
        ),
    ),
)

ERRORS = Row(
    "Errors",
    (
        Panel(
            "Calls that failed, by code",
            "Every code but OK and CANCELLED.",
            series(rate, "logprobd_requests_total", HEAD + ', code!~"OK|CANCELLED"', "code"),
            "reqps",
        ),
        Panel(
            "Share of faults by head",
            "As in the overview.",
            one(fault_share("head"), "{{head}}"),
            "percentunit",
            load_shows=False,
        ),
        Panel(
            "Rows with NaN or Inf",
            "Bad hidden states or bad weights: the rows answer NaN.",
            series(rate, "logprobd_rows_total", HEAD + ', kind="nonfinite"', "head"),
            "short",
        ),
        Panel(
            "Errors of GPUs",
            "cuda ends the replica, out_of_memory the batch.",
            one(rate("logprobd_gpu_errors_total", OURS, f"{GPU}, kind"), GPU_KIND),
            "ops",
            needs_gpu=True,
            load_shows=False,
        ),
        Panel(
            "Errors between GPUs",
            "Where a server has several: exchanges that failed or took too long.",
            one(rate("logprobd_collective_errors_total", OURS, f"{GPU}, kind"), GPU_KIND),
            "ops",
            needs_gpu=True,
            load_shows=False,
        ),
        Panel(
            "Memory errors of GPUs",
            "ECC, since the driver was loaded. Uncorrected: look at the GPU.",
            each("logprobd_gpu_ecc_errors_total", GPU_KIND),
            needs_gpu=True,
            load_shows=False,
        ),
    ),
)

LOADS = "logprobd_weights_load_duration_seconds"
BY_HEAD = f"{{{HEAD}}}"
WEIGHTS = Row(
    "Weights",
    (
        Panel(
            "Live version",
            "0 before the weights are loaded. Lines that stay apart: servers answer differently.",
            each("logprobd_weights_version", "{{instance}} {{head}}", HEAD),
            width=6,
        ),
        Panel(
            "Swaps",
            "Replacements of weights in the last hour, by result.",
            one(
                f"sum by (head, result) (increase(logprobd_weights_swaps_total{{{HEAD}}}[1h]))",
                "{{head}} {{result}}",
            ),
            width=6,
            load_shows=False,
        ),
        Panel(
            "Time to load",
            "Mean of all loads since the start.",
            one(f"{LOADS}_sum{BY_HEAD} / {LOADS}_count{BY_HEAD} >= 0", "{{instance}} {{head}}"),
            "s",
            width=6,
        ),
        Panel(
            "Replicas",
            "Replicas that score, and those that no longer do.",
            series(gauge, "logprobd_replicas", HEAD, "instance, head, state"),
            width=6,
        ),
        Panel(
            "Heads",
            "The facts of the heads that are served.",
            each("logprobd_head_info", "", HEAD),
            kind=Kind.TABLE,
            width=16,
        ),
        Panel(
            "Builds",
            "Which version runs where.",
            each("logprobd_build_info", ""),
            kind=Kind.TABLE,
        ),
    ),
)
