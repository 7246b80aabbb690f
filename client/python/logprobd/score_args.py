"""The arguments of a score call: their names, types, defaults and descriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

Progress = Callable[[int, int], object]

DEFAULT_IGNORE_INDEX = -100

Scored = TypeVar("Scored")
"""What `score` returns: a ScoreResult, or a coroutine of one."""


@dataclass(frozen=True)
class ScoreArgs:
    """The arguments of `score`, which describes them."""

    hidden: Any
    targets: Any
    _: KW_ONLY
    temperature: Any = 1.0
    outputs: Iterable[str] = ("logprob", "entropy")
    entropy_temperature: float | None = None
    candidates: Any = None
    top_k: int = 0
    segments: Any = None
    ignore_index: int = DEFAULT_IGNORE_INDEX
    head: str = ""
    weights_version: int = 0
    priority: str = "normal"
    reject_nonfinite: bool = False
    dtype: str | None = None
    request_id: str = ""
    traceparent: str = ""
    trace: bool = False
    timeout: float | None = None
    progress: Progress | None = None


class ScoreMethod(Generic[Scored]):
    """The method `score` of Client and of AsyncClient."""

    def score(
        self,
        hidden: Any,
        targets: Any,
        *,
        temperature: Any = 1.0,
        outputs: Iterable[str] = ("logprob", "entropy"),
        entropy_temperature: float | None = None,
        candidates: Any = None,
        top_k: int = 0,
        segments: Any = None,
        ignore_index: int = DEFAULT_IGNORE_INDEX,
        head: str = "",
        weights_version: int = 0,
        priority: str = "normal",
        reject_nonfinite: bool = False,
        dtype: str | None = None,
        request_id: str = "",
        traceparent: str = "",
        trace: bool = False,
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> Scored:
        """Scores the target of each row of hidden states.

        Args:
            hidden: [..., hidden_size], the input of the head after the final norm (Hugging Face's
                last_hidden_state). A torch (CPU or CUDA), NumPy or DLPack array of bfloat16,
                float16 or float32 with any strides. A nested tensor of the layout torch.jagged is
                read as packed rows, [rows, hidden_size]; so are targets, temperature and
                candidates.
            targets: [...], one id per row, in [0, vocab) or ignore_index. Targets must be shifted
                already: targets[i] is the token that follows row i (from_packed and from_padded
                shift them).
            temperature: divisor of the logits, 1e-4 to 1e4. A number, or an array that broadcasts
                to the shape of targets; its values in ignored rows are not read.
            outputs: names of scores with one value per row: the properties of ScoreResult that have
                the shape of targets; "argmax" gives argmax_id and argmax_logprob.
            entropy_temperature: temperature of the entropy alone. None means the value of
                temperature.
            candidates: further ids to score, as an array [..., n], as one list of ids per row, or
                as a tuple of ids [n] and offsets [rows + 1].
            top_k: number of best ids to return for each row.
            segments: offsets [segments + 1] of consecutive flattened rows to sum, from 0 to rows.
            ignore_index: target of rows that are not scored; their outputs are zeros.
            head: name of the head; "" means the only head.
            weights_version: version of the weights to score with. 0 means the live version, which
                is the same for all rows of the call.
            priority: "high", "normal" or "low".
            reject_nonfinite: raise InvalidArgument if a row's logits contain NaN or Inf, instead of
                returning NaN for that row.
            dtype: "bf16" for a NumPy uint16 array that contains bfloat16 bits; otherwise the type
                to round to before sending.
            request_id: text that appears in the server's log, at most 128 bytes.
            traceparent: W3C traceparent of the caller's span. The server's log names the trace of a
                request that fails. "" means the one that the client's inject_trace gives.
            trace: return the times of the server's stages in ScoreResult.traces.
            timeout: seconds for the whole call, including retries. None means the client's timeout.
            progress: function that is called after each answered request with the number of
                finished rows and the number of all rows.

        Raises InvalidArgument, NotFound, Overloaded, Unavailable, DeadlineExceeded,
        WeightsVersionMismatch, HeadMismatch, Cancelled or ServerBug.
        """
        return self._run_score(
            ScoreArgs(
                hidden,
                targets,
                temperature=temperature,
                outputs=outputs,
                entropy_temperature=entropy_temperature,
                candidates=candidates,
                top_k=top_k,
                segments=segments,
                ignore_index=ignore_index,
                head=head,
                weights_version=weights_version,
                priority=priority,
                reject_nonfinite=reject_nonfinite,
                dtype=dtype,
                request_id=request_id,
                traceparent=traceparent,
                trace=trace,
                timeout=timeout,
                progress=progress,
            )
        )

    def _run_score(self, args: ScoreArgs) -> Scored:
        raise NotImplementedError
