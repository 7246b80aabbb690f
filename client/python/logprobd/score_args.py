"""Defines the names, types, defaults and descriptions of the arguments of a score call.

Client, AsyncClient and the plan of a call take a ScoreArgs. `with_score_args` gives a method the
signature and the documentation of ScoreArgs, so that callers, `help` and type checkers see plain
keyword arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

Progress = Callable[[int, int], object]

DEFAULT_IGNORE_INDEX = -100


@dataclass(frozen=True)
class ScoreArgs:
    """The arguments of `score`.

    Args:
        hidden: [..., hidden_size], the input of the head after the final norm (Hugging Face's
            last_hidden_state). A torch (CPU or CUDA), NumPy or DLPack array of bfloat16, float16
            or float32 with any strides. A nested tensor of the layout torch.jagged is read as
            packed rows, [rows, hidden_size]; so are targets, temperature and candidates.
        targets: [...], one id per row, in [0, vocab) or ignore_index. Targets must be shifted
            already: targets[i] is the token that follows row i (from_packed and from_padded shift
            them).
        temperature: divisor of the logits, 1e-4 to 1e4. A number, or an array that broadcasts to
            the shape of targets; its values in ignored rows are not read.
        outputs: any of logprob, entropy, lse, argmax, greedy, sum_p_squared, max_logit, min_logit,
            target_rank.
        entropy_temperature: temperature of the entropy alone. None means the value of temperature.
        candidates: further ids to score, as an array [..., n], as one list of ids per row, or as a
            tuple of ids [n] and offsets [rows + 1].
        top_k: number of best ids to return for each row.
        segments: offsets [segments + 1] of consecutive flattened rows to sum, from 0 to rows.
        ignore_index: target of rows that are not scored; their outputs are zeros.
        head: name of the head; "" means the only head.
        weights_version: version of the weights to score with. 0 means the live version, which is
            the same for all rows of the call.
        priority: "high", "normal" or "low".
        reject_nonfinite: raise InvalidArgument if a row's logits contain NaN or Inf, instead of
            returning NaN for that row.
        dtype: "bf16" for a NumPy uint16 array that contains bfloat16 bits; otherwise the type to
            round to before sending.
        request_id: text that appears in the server's log, at most 128 bytes.
        traceparent: W3C traceparent of the caller's span. The server's log names the trace of a
            request that fails. "" means the one that the client's inject_trace gives.
        trace: return the times of the server's stages in ScoreResult.traces.
        timeout: seconds for the whole call, including retries. None means the client's timeout.
        progress: function that is called after each answered request with the number of finished
            rows and the number of all rows.
    """

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


_P = ParamSpec("_P")
_Self = TypeVar("_Self")
_Result = TypeVar("_Result")
_Method = Callable[[_Self, ScoreArgs], _Result]


def _with_arguments(
    args_class: Callable[_P, ScoreArgs],
) -> Callable[[Callable[[_Self, ScoreArgs], _Result]], Callable[Concatenate[_Self, _P], _Result]]:
    """Returns a decorator for methods that take a ScoreArgs, so that callers pass its fields."""
    fields = list(inspect.signature(args_class).parameters.values())

    def decorate(
        method: Callable[[_Self, ScoreArgs], _Result],
    ) -> Callable[Concatenate[_Self, _P], _Result]:
        def bound(*args: _P.args, **kwargs: _P.kwargs) -> ScoreArgs:
            try:
                return args_class(*args, **kwargs)
            except TypeError as error:  # A wrong argument. Its message names the caller's method.
                text = str(error).replace(f"{ScoreArgs.__name__}.__init__", method.__name__)
                raise TypeError(text) from None

        def call(self: _Self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
            return method(self, bound(*args, **kwargs))

        async def call_async(self: _Self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
            return await cast(Any, method(self, bound(*args, **kwargs)))

        is_async = inspect.iscoroutinefunction(method)
        wrapper: Any = functools.wraps(method)(call_async if is_async else call)
        signature = inspect.signature(method)
        own = next(iter(signature.parameters.values()))
        wrapper.__signature__ = signature.replace(parameters=[own, *fields])
        described = (inspect.getdoc(args_class) or "").partition("Args:")
        wrapper.__doc__ = f"{inspect.getdoc(method)}\n\n{''.join(described[1:])}"
        return cast(Callable[Concatenate[_Self, _P], _Result], wrapper)

    return decorate


with_score_args = _with_arguments(ScoreArgs)
