"""A server on each node of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from logprobd import Client, RetryPolicy, Tls
from logprobd.errors import InvalidArgument
from logprobd.serve import ServerProcess, server_program
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_MAX_SECONDS = 30.0
"""Pause before a server that died is started again: it doubles with each death up to the maximum,
and is the first again for a server that ran for longer than the maximum."""

_ASK_SECONDS = 5.0

_LOG = logging.getLogger("logprobd")

# A client waits for servers that load their heads again: 40 pauses, mostly of 2.5 s on average.
_PATIENCE = RetryPolicy(attempts_max=40)

# Runs a program that the kernel terminates when its parent, process argv[1], ends: PR_SET_PDEATHSIG
# is 1. The parent may have ended already. A preexec_fn could deadlock in a process with threads.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class _Supervisor:
    """Runs a server, and starts it again whenever it dies. It is an actor."""

    def __init__(self, flags: Sequence[str], listen: str | None, timeout: float) -> None:
        """Starts the server, and does not wait for it.

        Args:
            flags: flags of the server, beside the address.
            listen: host to listen on. None: that of the node in the cluster.
            timeout: seconds until a server that was started must be ready.
        """
        host = listen or ray.util.get_node_ip_address()
        host = f"[{host}]" if ":" in host else host
        self._flags = ["--listen", f"{host}:0", *flags]
        self._timeout = timeout
        self._changed = threading.Condition()
        self._address = ""
        self._error: Exception | None = None
        # The kernel takes the end of the thread that starts a process for that of its parent.
        threading.Thread(target=self._run, name="logprobd-supervisor", daemon=True).start()

    def address(self) -> str:
        """Returns the address of the latest server that was ready, or "" if none was."""
        return self._address

    def await_address(self) -> str:
        """Returns the address of the first server. Raises its error if it does not start."""
        with self._changed:
            self._changed.wait_for(lambda: self._address or self._error)
            if not self._address and self._error:
                raise self._error
            return self._address

    def _run(self) -> None:
        pause = BACKOFF_FIRST_SECONDS
        while True:
            began = time.monotonic()
            try:
                launcher = [sys.executable, "-ISc", _LAUNCHER, str(os.getpid())]
                with ServerProcess([*launcher, server_program(), *self._flags]) as server:
                    self._note(server.await_ready(self._timeout))
                    raise server.wait()
            except Exception as error:  # without this thread no server would be started again
                is_known = isinstance(error, (OSError, ImportError, RuntimeError))
                _LOG.error("%s\nstarting it again", error, exc_info=not is_known)
                self._note(error)
            if time.monotonic() - began > BACKOFF_MAX_SECONDS:
                pause = BACKOFF_FIRST_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, BACKOFF_MAX_SECONDS)

    def _note(self, state: str | Exception) -> None:
        with self._changed:
            if isinstance(state, str):
                self._address = state
            else:
                self._error = state
            self._changed.notify_all()


class ScorerPool:
    """Servers of one model on the nodes of the Ray cluster that this process is connected to.

        with ScorerPool("/models/Qwen3-8B") as pool, pool.client() as client:
            result = client.score(hidden, targets)

    A placement group spreads the servers strictly: no node has two. On each node an actor runs the
    server, starts it again when it dies, and itself is started again by Ray. The server ends with
    its actor. Rows go from clients to servers, never through Ray. The pool can be passed to tasks
    and actors; the servers end when the pool is closed, or when the driver that made it ends.

    Args:
        model: Hugging Face model folder, .safetensors file, or id in Hugging Face's cache, which
            must be on each node.
        num_servers: None: one on each node that has the CPUs and GPUs.
        gpus_per_server: None: all GPUs of the node, on nodes with GPUs. Without any GPU in the
            cluster, and with 0, the servers score on the CPU.
        cpus_per_server: CPUs that Ray reserves for a server, also the threads that score on a CPU.
        tls_cert, tls_key: PEM files, on each node, of the servers' certificate and key. With them
            servers listen on the addresses of the nodes, and tls_client_ca or tokens must say who
            may use them. The certificate must contain these addresses, or clients set
            tls.server_name.
        tls_client_ca: PEM file, on each node, of the CAs of the clients' certificates.
        tokens: file, on each node, of the tokens that callers need; see the server's --tokens.
        insecure: listen on the addresses of the nodes without TLS, where everybody who reaches them
            can use the servers: for private networks. Without it and tls_cert, servers listen on
            loopback, which serves clusters of one host.
        tls, token: of the clients that the pool makes; see logprobd.Client. The files must be where
            clients are. Default: the variables of the process that makes a client.
        http: HOST:PORT or https://HOST:PORT of metrics and status page on each node, as the
            server's flag, or "none".
        flags: further flags of the servers, such as ["--shards", "2"].
        timeout: seconds until all servers must be placed, and then until each must be ready.

    Raises InvalidArgument if the cluster has too few nodes, or several hosts whose servers would
    listen on loopback, or if the arguments of TLS do not fit each other; TimeoutError; and
    RuntimeError with the end of a server's log if it does not start.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        num_servers: int | None = None,
        gpus_per_server: int | None = None,
        cpus_per_server: int = 1,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_client_ca: str | os.PathLike[str] | None = None,
        tokens: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        tls: Tls | None = None,
        token: str | None = None,
        http: str = "none",
        flags: Sequence[str] = (),
        timeout: float = 600.0,
    ) -> None:
        bundles = _bundles(ray.nodes(), num_servers, gpus_per_server, cpus_per_server)
        files = {
            "--tls-cert": tls_cert,
            "--tls-key": tls_key,
            "--tls-client-ca": tls_client_ca,
            "--tokens": tokens,
        }
        security = _security_flags(files, insecure)
        hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        if len(hosts) > 1 and not security:
            raise InvalidArgument(
                f"the cluster has {len(hosts)} hosts, and servers on loopback serve only their "
                "own: give tls_cert, tls_key and tokens, or pass insecure=True if only those reach "
                "its network who may use the servers"
            )
        listen = None if security else "127.0.0.1"
        has_tls = bool(security) and not insecure
        # Servers without TLS are not asked for it, whatever the environment of a client says.
        self._credentials: dict[str, Any] = {"tls": tls if has_tls else False, "token": token}
        self._group: PlacementGroup | None = placement_group(bundles, strategy="STRICT_SPREAD")
        self.actors: list[Any] = []
        """The actors that run the servers, in the order of `addresses`."""
        try:
            if not self._group.wait(timeout):
                raise TimeoutError(
                    f"no {len(bundles)} nodes had {bundles} free for {timeout:g} s: lower "
                    "num_servers, gpus_per_server or cpus_per_server"
                )
            supervisor = ray.remote(_Supervisor)
            for index, bundle in enumerate(bundles):
                engine = ["--device", "cuda"]
                if not bundle["GPU"]:
                    engine = ["--device", "cpu", "--cpu-threads", str(cpus_per_server)]
                options = supervisor.options(
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle["GPU"],
                    max_restarts=-1,
                    max_concurrency=4,  # address is answered while await_address waits
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                )
                command = ["--model", os.fspath(model), *engine, "--http", http, *security, *flags]
                self.actors.append(options.remote(command, listen, timeout))
            starting = [actor.await_address.remote() for actor in self.actors]
            # The error of an actor, with the server's log, says more than that of a timeout here.
            self._addresses: list[str] = ray.get(starting, timeout=timeout + _ASK_SECONDS)
        except BaseException as error:
            self.close()
            cause = getattr(error, "cause", None)  # Ray wraps an actor's error.
            raise cause if isinstance(cause, Exception) else error from None

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the servers. Requests in flight fail. Idempotent."""
        for actor in self.actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self.actors, self._addresses, self._group = [], [], None

    def addresses(self) -> list[str]:
        """Returns the addresses of the servers, "host:port" in the order of the nodes.

        A server that is started again has another port. Until then, and while its actor does not
        answer, its latest known address is returned. Raises RuntimeError after close().
        """
        if not self.actors:
            raise RuntimeError("the pool is closed")
        calls = [actor.address.remote() for actor in self.actors]
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=_ASK_SECONDS)
        for index, call in enumerate(calls):
            if call in answered:
                with contextlib.suppress(RayActorError):  # Ray starts the actor again
                    self._addresses[index] = ray.get(call) or self._addresses[index]
        return list(self._addresses)

    def client(self, **options: Any) -> Client:
        """Returns a client of all servers, which follows them when they are started again.

        It can be passed to tasks and actors. `logprobd.AsyncClient(pool.addresses)`, with tls= and
        token=, is the client for asyncio.

        Args:
            options: settings of logprobd.Client. By default it waits longer for servers than others
                do, while they load the head again.
        """
        return Client(self.addresses, **({"retry": _PATIENCE} | self._credentials | options))


def _security_flags(
    files: Mapping[str, str | os.PathLike[str] | None], insecure: bool
) -> list[str]:
    """Returns the flags by which a server listens on the address of its node; [] means loopback.

    Args:
        files: flags of TLS and tokens, and their files.

    Raises InvalidArgument if the files do not fit each other or `insecure`.
    """
    given = {flag: os.fspath(path) for flag, path in files.items() if path}
    if insecure and given:
        raise InvalidArgument(f"insecure=True excludes {', '.join(given)}")
    is_complete = {"--tls-cert", "--tls-key"} < given.keys()  # and at least one of the others
    if given and not is_complete:
        raise InvalidArgument("tls_cert, tls_key, and tls_client_ca or tokens belong together")
    return ["--insecure"] if insecure else [text for pair in given.items() for text in pair]


def _bundles(
    nodes: Sequence[dict[str, Any]],
    num_servers: int | None,
    gpus_per_server: int | None,
    cpus_per_server: int,
) -> list[dict[str, float]]:
    """Returns the resources of each server. See ScorerPool."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = gpus_per_server
    if gpus is None:
        gpus = min(1, max(int(each.get("GPU", 0)) for each in resources))
    able = [r for r in resources if r.get("CPU", 0) >= cpus_per_server and r.get("GPU", 0) >= gpus]
    counts = sorted((int(each.get("GPU", 0)) for each in able), reverse=True)
    num_servers = len(able) if num_servers is None else num_servers
    if not 0 < num_servers <= len(able):
        raise InvalidArgument(
            f"num_servers is {num_servers}, expected 1 to {len(able)}, the number of nodes with "
            f"{cpus_per_server} CPUs and {gpus} GPUs"
        )
    return [
        {"CPU": cpus_per_server, "GPU": count if gpus_per_server is None else gpus_per_server}
        for count in counts[:num_servers]
    ]
