"""Defines the layout of each result file's tables, which render_tables.py renders.

A pattern matches the whole `what` of a record. Its named groups become the label columns of a row, except for
the group `column`, each value of which becomes a separate column. The records of a file that no view matches
are shown in a plain table with a row for each record.
"""

from typing import NamedTuple


class Note(NamedTuple):
    """A column with a part of the note: the groups of `pattern`, joined by slashes."""

    heading: str
    pattern: str


class View(NamedTuple):
    """One table of a result file."""

    title: str  # line above the table
    pattern: str  # must match all of `what`
    fields: tuple[str | Note, ...] = ("figure", "spread", "ratio", "target")
    has_baseline: bool = True  # adds a column with the figure of each baseline
    by_baseline: bool = False  # makes a group of columns for each baseline of a row
    columns: tuple[str, ...] = ()  # values of `column` in this order; default: in order of records
    is_sorted: bool = False  # sorts the rows by their numbers; default: the order of the records
    blank: str = ""  # text for a label group that matched nothing


SHAPE = r"H=(?P<H>\d+), V=(?P<V>\d+), T=(?P<T>\d+)"
OPERATOR_SHAPE = r"T=(?P<T>\d+), H=(?P<H>\d+), V=(?P<V>\d+)"
OURS = (
    "operator",
    "operator, logits kept",
    "operator, logits kept in part",
    "operator, mean loss, gradients in the forward",
)
PACKAGES = (
    "operator",
    "torch",
    "torch.compile",
    "verl",
    "CCE, no entropy",
    "Liger Triton, mean loss, no entropy",
    "Liger CuTe",
    "QuACK, mean loss, no entropy",
)
TIMED = ("figure", "ratio", "target")


def operator_view(title: str, pattern: str, columns: tuple[str, ...], **options: object) -> View:
    return View(title, rf"Forward and backward, {pattern}", columns=columns, **options)  # type: ignore[arg-type]


OPERATOR = (
    operator_view("One call at a time", rf"(?P<column>.+), {OPERATOR_SHAPE}", OURS, fields=TIMED),
    operator_view(
        "Other packages, one call at a time: time divided by that of the three GEMMs",
        rf"(?P<column>.+), {OPERATOR_SHAPE}",
        PACKAGES,
        fields=("ratio",),
        has_baseline=False,
    ),
    operator_view(
        "Eight steps in a row, time of one step",
        rf"(?P<column>.+), steps in a row, {OPERATOR_SHAPE}",
        OURS,
        fields=TIMED,
    ),
    operator_view(
        "In a CUDA graph; the three GEMMs are called outside a graph",
        rf"(?P<column>.+), in a CUDA graph, {OPERATOR_SHAPE}",
        OURS,
        fields=TIMED,
    ),
    operator_view(
        "70 % of the rows ignored; the operator's ratio is its time divided by its time with all rows",
        rf"(?P<column>.+), {OPERATOR_SHAPE}",
        (
            "three GEMMs of 30 % of the rows",
            "operator, 70 % of rows ignored",
            "operator, 70 % of rows ignored, steps in a row",
        ),
        fields=TIMED,
        has_baseline=False,
    ),
    operator_view(
        "Memory beyond the gradients",
        rf"(?P<column>.+), {OPERATOR_SHAPE}: memory beyond the gradients",
        OURS,
        fields=("figure", "target"),
    ),
    View(
        "Errors of gradients",
        rf"Gradient of (?P<gradient>hidden|weight), (?P<column>.+), {OPERATOR_SHAPE}",
        ("figure", "target"),
    ),
)
OPERATOR_ROWS = (
    operator_view(
        "Time, and its ratio to that of three GEMMs",
        rf"(?P<column>.+), {OPERATOR_SHAPE}",
        (),
        fields=("figure", "ratio"),
    ),
    operator_view(
        "Time divided by that at the next multiple of 256 rows",
        rf"(?P<column>.+), {OPERATOR_SHAPE}: next multiple of 256 rows",
        (),
        fields=("ratio", "target"),
        has_baseline=False,
    ),
)
FORWARD = tuple(
    View(title, rf"Forward, {state}, (?P<column>.+), {OPERATOR_SHAPE}", ("figure", "ratio"))
    for state, title in (
        ("settled", "Each contender alone, at the power limit"),
        ("mixed", "One call at a time, after a rest"),
    )
)
OPERATOR_TRANSFORMS = tuple(
    View(mode, rf"{mode}, (?P<column>.+), {OPERATOR_SHAPE}", ("ratio", "target"))
    for mode in (
        "Forward",
        "Forward and backward",
        "Forward and backward of the mean loss",
    )
)
OPERATOR_DTYPES = (
    View("Forward and backward", rf"(?P<case>.+), {OPERATOR_SHAPE}", TIMED, by_baseline=False),
)
OPERATOR_DIVERGENCE = (
    View(
        "Forward and backward",
        rf"(?P<kind>\w+), (?P<column>.+), {OPERATOR_SHAPE}",
        TIMED,
    ),
)
RANKS = (
    View(
        "Speedup over one GPU",
        rf"Speedup over one GPU, (?P<column>.+), (?P<GPUs>\d+) GPUs, {OPERATOR_SHAPE}",
        ("figure", "target"),
    ),
    operator_view(
        "Time of forward and backward on all GPUs",
        rf"(?P<column>.+), (?P<GPUs>\d+) GPUs, {OPERATOR_SHAPE}",
        (),
        fields=("figure",),
        has_baseline=False,
    ),
)
PEERS = (
    View(
        "Time divided by that of the GEMM in the same run",
        rf"(?P<column>.+?), {SHAPE}",
        ("ratio",),
        has_baseline=False,
        is_sorted=True,
    ),
    View("Time", rf"(?P<column>.+?), {SHAPE}", ("figure",), has_baseline=False, is_sorted=True),
    View(
        "Largest error of logprob / entropy, in nats",
        rf"(?P<column>.+?), {SHAPE}",
        (Note("", r"nats: logprob ([^,;]+)(?:, entropy ([^;]+))?"),),
        has_baseline=False,
        is_sorted=True,
    ),
    View(
        "Memory beyond inputs and results, in MiB",
        rf"(?P<column>.+?), {SHAPE}",
        (Note("", r"([^;]+) MiB of further memory"),),
        has_baseline=False,
        is_sorted=True,
    ),
)
FUSED = (
    View(
        "Settled times, and bursts after a rest",
        rf"GPU fused, {SHAPE}",
        (
            "figure",
            "ratio",
            Note("burst, ms", r"burst ([\d.]+) ms"),
            Note("ratio of bursts", r"([\d.]+) of the GEMM's"),
            Note("SM clock, MHz", r"SM clock (\d+) MHz"),
            Note("GEMM's SM clock, MHz", r"GEMM (\d+)"),
            Note("J", r"energy ([\d.]+) J"),
            Note("GEMM, J", r"GEMM's ([\d.]+) J"),
            Note("W", r"energy \S+ J at (\d+) W"),
            Note("GEMM, W", r"GEMM's \S+ J at (\d+) W"),
            Note("cuBLAS's kernel", r"GEMM's kernel ([^;]+)"),
        ),
    ),
)
FUSED_SMALL = (
    View(
        "Few rows",
        rf"GPU fused, few rows, {SHAPE}",
        ("figure", "baseline", "ratio"),
        has_baseline=False,
        by_baseline=True,
    ),
)
FUSED_ROWS = (
    View(
        "Any number of rows T, a column for each hidden size, in CUDA graphs: time divided by that of the GEMM",
        r"GPU fused, in a graph, H=(?P<column>\d+), V=\d+, T=(?P<T>\d+)",
        ("ratio",),
        has_baseline=False,
    ),
)
FUSED_EXTRAS = (
    View(
        "Time divided by that of logprob and entropy alone",
        rf"GPU fused, {SHAPE}, (?P<column>.+)",
        ("ratio",),
        columns=(
            "without combine",
            "and argmax",
            "and rank of the target",
            "and sum of p squared",
            "entropy at its own temperature",
            "and top-k of 20",
            "and 20 candidates per row",
            "fp32 rows as two bf16 splits, split included",
            "fp32 rows as three bf16 splits, split included",
        ),
    ),
)
CHUNKED = (
    View(
        "The chunked path on rows in device memory",
        rf"GPU chunked, logprob and entropy, {SHAPE}",
        ("figure", "spread", "ratio"),
    ),
    View(
        "The engine, from host memory to scores: time of a batch and of its stages",
        r"GPU engine (?P<engine>\S+), host to host, H=(?P<H>\d+), V=(?P<V>\d+), "
        r"batches of (?P<rows>\d+) rows, (?P<in_flight>\d+) in flight",
        (
            "figure",
            "spread",
            Note("copy in, ms", r"copy in ([\d.]+)"),
            Note("kernels, ms", r"kernels ([\d.]+)"),
            Note("combine, ms", r"combine ([\d.]+)"),
            Note("copy out, ms", r"copy out ([\d.]+)"),
        ),
    ),
)
ERROR_CASE = (
    r"GPU fused, error, H=(?P<H>\d+), V=\d+(?:, standard deviation (?P<logit_deviation>\d+))?"
)
GPU_ERRORS = (
    View(
        "Truncation corrected, as in the server",
        rf"{ERROR_CASE}, (?P<rows>(?:(?!truncation not).)+): (?P<column>[^:]+)",
        ("figure", "target"),
    ),
    View(
        "Truncation not corrected",
        rf"{ERROR_CASE}, (?P<rows>.+), truncation not corrected: (?P<column>[^:]+)",
        ("figure",),
    ),
)
GPU_ACCURACY = (
    View(
        "Errors of the engine",
        r"GPU, error against double, H=(?P<H>\d+), V=(?P<V>\d+), logits of standard deviation "
        r"(?P<logit_deviation>\d+): (?P<column>.+)",
        ("figure", "target"),
    ),
)
CPU_ACCURACY = (
    View(
        "Errors of the engine",
        r"CPU error against double, (?P<case>.+): (?P<column>.+)",
        ("figure", "target"),
    ),
)
CPU_SPEED = (
    View(
        "Time of a batch, a row for each baseline",
        r"CPU, T=(?P<T>\d+), H=(?P<H>\d+), V=(?P<V>\d+), bf16",
        ("figure", "baseline_name", "baseline", "ratio", "target"),
        has_baseline=False,
    ),
)
CPU_OPERATOR = (
    View(
        "Time of a forward pass",
        r"CPU operator, T=(?P<T>\d+), H=(?P<H>\d+), V=(?P<V>\d+), (?P<dtype>\w+)",
    ),
)
ARRANGED = (
    r"GPU engine, (?P<{group}>[^=]+?), H=(?P<H>\d+), V=(?P<V>\d+), batches of (?P<rows>\d+) rows, "
    r"\d+ in flight"
)
SPEEDUPS = (
    View(
        "Throughput, and its ratio to that of one GPU",
        ARRANGED.format(group="column"),
        ("figure", "ratio", "target"),
        has_baseline=False,
    ),
)
SHARDS = (
    View(
        "Stages of a batch, in ms",
        ARRANGED.format(group="arrangement"),
        (
            Note("copy in", r"copy in ([\d.]+)"),
            Note("copy in from other GPUs", r"from other GPUs ([\d.]+)"),
            Note("kernels", r"kernels ([\d.]+)"),
            Note("combine and exchange", r"exchange ([\d.]+)"),
            Note("copy out", r"copy out ([\d.]+)"),
            Note("time without kernels, %", r"not kernels ([\d.]+) %"),
        ),
        has_baseline=False,
    ),
)
SHARDS_LOAD = (
    View(
        "Loading a head of 4.3 GB from the page cache",
        r"GPU engine, (?P<arrangement>.+): load of a head of .+",
        (
            "figure",
            "spread",
            "target",
            Note("GB/s", r"([\d.]+) GB/s"),
            Note("memory differs from the plan by at most, MiB", r"within ([\d.]+) MiB"),
        ),
    ),
)
SERVICE = (
    View(
        "Throughput",
        r"Service, (?P<transport>.+), H=(?P<H>\d+), V=(?P<V>\d+)(?:, (?P<replicas>\d+) replicas)?",
    ),
)
ONE_ROW = (
    View(
        "Latency of one row above the engine's own median",
        r"Service, one row at a time over TCP(?:, (?P<caller>[^,=]+))?, H=(?P<H>\d+), V=(?P<V>\d+): "
        r"(?P<column>p\d+) above the engine's p50",
        ("figure", "spread", "target"),
        blank="waits for its answer",
    ),
)
SOAK = (
    View(
        "Growth in the measured time",
        r"Soak, (?P<device>\w+), H=(?P<H>\d+), V=(?P<V>\d+), (?P<load>.+): (?P<sampled>.+)",
        (
            "figure",
            "spread",
            Note("verdict", r"^([^;]+);"),
            Note("growth", r"; ([^;]+) in the time"),
        ),
    ),
)

NULL_ENGINE = r"Null engine that reads every byte, (?P<rows>.+)"
TRANSPORT_LOAD = (
    View(
        "CPU time of the server, null engine that reads every byte", NULL_ENGINE + r", server's CPU"
    ),
    View(
        "Throughput, null engine that reads every byte",
        r"Null engine that reads every byte, (?P<rows>(?:(?!, server's).)+)",
        (
            *("figure", "spread", "ratio", "target"),
            Note("client's CPU, s/GB", r"client's CPU ([\d.]+) s/GB"),
            Note("threads that only write rows, GB/s", r"only write the rows: ([\d.]+) GB/s"),
        ),
    ),
)

LM_EVAL = (
    View(
        "",
        r"H=(?P<H>\d+), V=(?P<V>\d+), (?P<texts>\d+ x \d+) tokens, (?P<model>.+): (?P<column>.+)",
        ("figure",),
        columns=(
            "time",
            "CPU time",
            "peak memory",
            "peak memory of the server",
            "largest error",
        ),
    ),
)

GATEWAY = (
    View(
        "",
        r"(?P<tokens>\d+) tokens, prompt_logprobs (?P<prompt_logprobs>\d+): (?P<column>.+)",
        ("figure",),
        columns=("response", "body", "head", "added by the gateway", "CPU time added"),
    ),
)

REAL_MODEL = (
    View(
        "The head, beside double precision of the same hidden states",
        r"head, (?P<dtype>\w+), (?P<scores>.+): (?P<column>.+)",
        ("figure",),
    ),
    View(
        "Ten continuations of 512 tokens in lm-eval",
        r"lm-eval, (?P<dtype>\w+), (?P<model>.+): (?P<column>.+)",
        ("figure",),
    ),
)

VIEWS: dict[str, tuple[View, ...]] = {
    "cpu_accuracy": CPU_ACCURACY,
    "cpu_accuracy_amx": CPU_ACCURACY,
    "cpu_operator": CPU_OPERATOR,
    "cpu_speed": CPU_SPEED,
    "cpu_speed_amx": CPU_SPEED,
    "gateway_cpu": GATEWAY,
    "gpu_accuracy": GPU_ACCURACY,
    "gpu_chunked": CHUNKED,
    "gpu_errors": GPU_ERRORS,
    "gpu_fused": FUSED,
    "gpu_fused_extras": FUSED_EXTRAS,
    "gpu_fused_rows": FUSED_ROWS,
    "gpu_fused_small": FUSED_SMALL,
    "gpu_shards": SHARDS,
    "gpu_shards_load": SHARDS_LOAD,
    "lm_eval_cpu": LM_EVAL,
    "lm_eval_gpu": LM_EVAL,
    "operator": OPERATOR,
    "operator_dtypes": OPERATOR_DTYPES,
    "operator_divergence": OPERATOR_DIVERGENCE,
    "operator_forward": FORWARD,
    "operator_ranks": RANKS,
    "operator_rows": OPERATOR_ROWS,
    "operator_transforms": OPERATOR_TRANSFORMS,
    "peers": PEERS,
    "real_model_cpu": REAL_MODEL,
    "service": SERVICE,
    "service_one_row": ONE_ROW,
    "service_replicas": SERVICE,
    "service_replicas_2048": SERVICE,
    "soak_cpu": SOAK,
    "soak_gpu": SOAK,
    "transport_load": TRANSPORT_LOAD,
    "transport_load_8": TRANSPORT_LOAD,
}

# Names of columns, labels and baselines for the tables, where they differ from those of the records.
SHORT = {
    "prompt_logprobs": "`prompt_logprobs`",
    "operator, logits kept": "logits kept",
    "operator, logits kept in part": "kept in part",
    "operator, mean loss, gradients in the forward": "mean loss",
    "operator, sequence parallel": "sequence parallel",
    "operator, 70 % of rows ignored": "operator, one call",
    "operator, 70 % of rows ignored, steps in a row": "operator, steps in a row",
    "three GEMMs, steps in a row": "three GEMMs",
    "cuBLASLt GEMM that writes bf16 logits": "GEMM",
    "torch's GEMM that writes bf16 logits": "GEMM",
    "bare gRPC sink that copies": "bare gRPC sink",
    "torch eager on bf16 logits, logprob and entropy": "torch eager",
    "torch.compile on bf16 logits, logprob and entropy": "torch.compile",
    "verl, logprob and entropy": "verl",
    "CCE, logprob alone": "CCE, no entropy",
    "QuACK, logprob alone": "QuACK, no entropy",
    "Liger CuTe, logprob and bf16 entropy": "Liger CuTe, bf16 entropy",
    "fp32 rows as two bf16 splits, split included": "fp32 rows, 2 splits",
    "fp32 rows as three bf16 splits, split included": "fp32 rows, 3 splits",
}

# Replacements for wording of older records that has changed since.
TRANSLATIONS = (
    ("the three GEMMs, of 30 % of the rows", "three GEMMs of 30 % of the rows"),
    ("bf16 terms", "bf16 splits"),
    (", its caller looks for the answer", ", busy-polls for its answer"),
    (" is not told", " is not detectable"),
    ("requests a second of 1 row beside bulk", "one-row requests per second next to bulk"),
    ("rows/s beside", "rows/s at the same time"),
    ("rows answered meanwhile", "rows answered during the swaps"),
    ("answers without the bits of their version", "answers that differ from their version"),
    ("candidates a row", "candidates per row"),
    ("a connection each, in", "one connection each, in"),
    ("the usual one", "the median one"),
    (" sent late by the load generator", " were sent late by the load generator"),
    ("bytes a message sent", "bytes per sent message"),
)
