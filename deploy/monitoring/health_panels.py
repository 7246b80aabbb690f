"""Panels about the server's health: memory, devices, errors, weights."""

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
            "Memory by use. Weights, workspace and staging are reserved at the start; other is all other memory in use,"
            " by any process, as reported by the driver.",
            series(gauge, GPU_MEMORY, OURS + ', gpu=~"$gpu"', "instance, kind"),
            "bytes",
            stacked=True,
            repeat="gpu",
        ),
        Panel(
            "Peak GPU memory",
            "Highest memory use since the start, by kind.",
            one(f"max by ({GPU}, kind) (logprobd_gpu_memory_peak_bytes{{{OURS}}})", GPU_KIND),
            "bytes",
        ),
        Panel(
            "Free GPU memory",
            "Free share of the GPU's memory.",
            one(FREE_SHARE, GPU_NAME),
            "percentunit",
            highest=1,
        ),
        Panel(
            "Host memory",
            "Memory reserved at the start, by use. receive is the upper bound for messages that are being received.",
            series(gauge, "logprobd_host_memory_bytes", OURS, "instance, kind"),
            "bytes",
            stacked=True,
        ),
        Panel(
            "Pinned host memory",
            "Page-locked memory for copies to GPUs.",
            series(gauge, "logprobd_host_pinned_bytes", OURS, "instance, state"),
            "bytes",
        ),
        Panel(
            "Resident memory",
            "Resident memory of the process, including file-backed weights.",
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
            "Share of time during which a kernel of any process was running, as reported by the driver.",
            each("logprobd_gpu_utilization_ratio", GPU_NAME),
            "percentunit",
            highest=1,
        ),
        Panel(
            "Power", "Power that the GPU draws.", each("logprobd_gpu_power_watts", GPU_NAME), "watt"
        ),
        Panel(
            "SM clock",
            "Clock rate of the SMs. It falls with power and heat, and so does the speed of matrix products.",
            each("logprobd_gpu_sm_clock_hertz", GPU_NAME),
            "hertz",
        ),
        Panel(
            "Reduced clocks",
            "1 while the reason applies. power_cap is normal under full load; the other reasons are not.",
            each("logprobd_gpu_throttled", GPU_NAME + " {{reason}}"),
            highest=1,
        ),
        Panel(
            "CPU",
            "Number of CPU cores that the process uses.",
            series(rate, "process_cpu_seconds_total", OURS, "instance"),
        ),
        Panel(
            "Open files",
            "Open file descriptors and their limit.",
            each("process_open_fds", "{{instance}}")
            + each("process_max_fds", "{{instance}} limit"),
        ),
        Panel(
            "Driver readings available",
            "1 if the driver's readings of a GPU are available. If it is 0, panels that show them show 0.",
            each("logprobd_gpu_nvml_up", GPU_NAME),
            highest=1,
        ),
        Panel(
            "Insecure listeners",
            "Listeners that others can use without authentication, because of --insecure. Others have no series.",
            one(f"logprobd_insecure_listener{{{OURS}}}", "{{instance}} {{flag}}"),
        ),
        Panel(
            "Certificate expires in",
            "Time until the first certificate of the server's chain expires; servers without TLS have none.",
            one(
                f"logprobd_tls_certificate_expiry_timestamp_seconds{{{OURS}}} - time()",
                "{{instance}}",
            ),
            "s",
        ),
        Panel(
            "Certificate reloads",
            "Reads of TLS certificates in the last hour. After a failure the old certificates stay in use.",
            one(f"increase(logprobd_tls_reloads_total{{{OURS}}}[1h])", "{{instance}} {{result}}"),
        ),
        Panel(
            "Revocation list expires in",
            "Time until the first revocation list expires, when all clients of its CA are refused.",
            one(
                f"logprobd_tls_revocation_expiry_timestamp_seconds{{{OURS}}} - time()",
                "{{instance}}",
            ),
            "s",
        ),
        Panel(
            "Unusable revocation lists",
            "Revocation lists that are damaged, forged, too old or gone. The last good ones stay in force.",
            one(f"logprobd_tls_revocation_problems{{{OURS}}}", "{{instance}}"),
        ),
        Panel(
            "Refused client certificates",
            "Connections whose client certificate was refused by revocation lists, by reason.",
            series(rate, "logprobd_tls_refused_certificates_total", OURS, "instance, reason"),
        ),
        Panel(
            "Uptime",
            "Time since the process started.",
            one(f"time() - process_start_time_seconds{{{OURS}}}", "{{instance}}"),
            "s",
        ),
    ),
    width=6,
)

ERRORS = Row(
    "Errors",
    (
        Panel(
            "Failed calls by code",
            "Calls per second that ended with any code except OK and CANCELLED.",
            series(rate, "logprobd_requests_total", HEAD + ', code!~"OK|CANCELLED"', "code"),
            "reqps",
        ),
        Panel(
            "Share of faults by head",
            "Share of calls that ended with a code that is the server's fault, as in the overview.",
            one(fault_share("head"), "{{head}}"),
            "percentunit",
        ),
        Panel(
            "Rows with NaN or Inf",
            "Rows per second that were answered with NaN because of bad hidden states or bad weights.",
            series(rate, "logprobd_rows_total", HEAD + ', kind="nonfinite"', "head"),
        ),
        Panel(
            "GPU errors",
            "Errors per second. A cuda error ends the replica; an out_of_memory error ends the batch.",
            one(rate("logprobd_gpu_errors_total", OURS, f"{GPU}, kind"), GPU_KIND),
            "ops",
        ),
        Panel(
            "GPU exchange errors",
            "Data exchanges between the GPUs of a server that failed or timed out, per second.",
            one(rate("logprobd_collective_errors_total", OURS, f"{GPU}, kind"), GPU_KIND),
            "ops",
        ),
        Panel(
            "GPU memory errors",
            "ECC errors since the driver was loaded. A GPU with uncorrected errors needs attention.",
            each("logprobd_gpu_ecc_errors_total", GPU_KIND),
        ),
        Panel(
            "GPU sums differ",
            "1 if the check at the start found that paths of a GPU sum with other bits (alert LogprobdUnequalSums).",
            each("logprobd_gpu_unequal_sums", GPU_NAME),
        ),
        Panel(
            "Lost log lines",
            "Lines in the last hour that could not be written to standard error (alerts LogprobdLogLinesLost and"
            " LogprobdAuditLinesLost).",
            one(f"increase(logprobd_log_lines_lost_total{{{OURS}}}[1h])", "{{instance}} {{kind}}"),
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
            "Version of the weights, 0 before they are loaded. While the lines differ, servers give different answers.",
            each("logprobd_weights_version", "{{instance}} {{head}}", HEAD),
        ),
        Panel(
            "Swaps",
            "Replacements of weights in the last hour, by result.",
            one(
                f"sum by (head, result) (increase(logprobd_weights_swaps_total{{{HEAD}}}[1h]))",
                "{{head}} {{result}}",
            ),
        ),
        Panel(
            "Time to load",
            "Mean duration of all loads since the start.",
            one(f"{LOADS}_sum{BY_HEAD} / {LOADS}_count{BY_HEAD} >= 0", "{{instance}} {{head}}"),
            "s",
        ),
        Panel(
            "Replicas",
            "Number of replicas by state: those that score, and those that have failed.",
            series(gauge, "logprobd_replicas", HEAD, "instance, head, state"),
        ),
        Panel(
            "Heads",
            "Properties of the served heads.",
            each("logprobd_head_info", "", HEAD),
            kind=Kind.TABLE,
            width=16,
        ),
        Panel(
            "Builds",
            "Version that each server runs.",
            each("logprobd_build_info", ""),
            kind=Kind.TABLE,
            width=8,
        ),
    ),
    width=6,
)
