"""Log-probabilities and entropy of tokens, from the hidden states that enter the LM head.

    with logprobd.Client("127.0.0.1:8470") as client:
        result = client.score(hidden, targets)
        result.logprob, result.entropy

AsyncClient has the methods of Client as coroutines, and serve starts a server on this host.
"""

from logprobd.aio import AsyncClient
from logprobd.balance import ServerState
from logprobd.client import Client
from logprobd.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadMismatch,
    InvalidArgument,
    LogprobdError,
    NotFound,
    Overloaded,
    ServerBug,
    Unavailable,
    WeightsConflict,
    WeightsDataLoss,
    WeightsVersionMismatch,
)
from logprobd.info import HeadInfo, Limits, Shard, VerifyReport
from logprobd.packing import Shifted, from_packed, from_padded
from logprobd.result import ScoreResult
from logprobd.retry import RetryPolicy
from logprobd.serve import serve
from logprobd.tls import Tls
from logprobd.trace import RequestTrace, StageTrace
from logprobd.weights import (
    HeadWeights,
    LoadProgress,
    PushedVersion,
    WeightsClient,
    WeightsVersion,
)

__version__ = "0.2.0"

__all__ = [
    "AsyncClient",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "HeadInfo",
    "HeadMismatch",
    "HeadWeights",
    "InvalidArgument",
    "Limits",
    "LoadProgress",
    "LogprobdError",
    "NotFound",
    "Overloaded",
    "PushedVersion",
    "RequestTrace",
    "RetryPolicy",
    "ScoreResult",
    "ServerBug",
    "ServerState",
    "Shard",
    "Shifted",
    "StageTrace",
    "Tls",
    "Unavailable",
    "VerifyReport",
    "WeightsClient",
    "WeightsConflict",
    "WeightsDataLoss",
    "WeightsVersion",
    "WeightsVersionMismatch",
    "__version__",
    "from_packed",
    "from_padded",
    "serve",
]
