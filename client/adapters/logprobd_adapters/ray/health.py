"""A Ray Serve application that reports the health of the servers of a ScorerPool."""

from __future__ import annotations

import dataclasses

from logprobd import RetryPolicy
from logprobd.errors import LogprobdError
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from logprobd_adapters.ray.pool import ScorerPool

_ASK_SECONDS = 10.0


@serve.deployment(ray_actor_options={"num_cpus": 0})
class ScorerHealth:
    """Answers GET with the states of the servers: 200 while one is ready, 503 otherwise.

        serve.run(ScorerHealth.bind(pool), name="logprobd", route_prefix="/logprobd")

    Ray Serve, too, counts it as unhealthy while no server is ready. Rows are not sent through it.
    """

    def __init__(self, pool: ScorerPool) -> None:
        once = RetryPolicy(attempts_max=1)
        self._client = pool.client(timeout=_ASK_SECONDS, retry=once, channels=1)

    def check_health(self) -> None:
        """Asks each server for its gRPC health. Raises LogprobdError if none is ready."""
        self._client.list_heads()

    def __call__(self, _: Request) -> JSONResponse:
        error = ""
        try:
            self.check_health()
        except LogprobdError as caught:
            error = str(caught)
        servers = [dataclasses.asdict(server) for server in self._client.servers()]
        return JSONResponse({"servers": servers, "error": error}, 503 if error else 200)
