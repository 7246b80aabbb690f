"""The constants of the policy by which clients retry and choose servers.

client/README.md describes it. They stand in proto/contract.json, and the C++ client has the same.
"""

# [generated: python_policy]
ATTEMPTS_MAX = 8
"""Most attempts at a request while servers are unavailable."""
OVERLOADED_ATTEMPTS_MAX = 1000
"""Most attempts at a request while servers refuse it because of load."""
WAIT_FIRST_SECONDS = 0.1
"""Upper bound of the first random wait; it doubles with each attempt."""
WAIT_MAX_SECONDS = 5.0
"""Upper bound of every random wait."""
CALL_TIMEOUT_SECONDS = 300.0
"""Time limit of a call with all its requests and retries."""
INFLIGHT_MAX = 8
"""Requests of a call that are in flight at each server."""
NOTICE_SECONDS = 1.0
"""Time without an answer after which the caller is told that the call waits."""
READY_PAUSE_FIRST_SECONDS = 0.02
"""First pause between two probes of a server that is not ready; it grows by half each time."""
READY_PAUSE_MAX_SECONDS = 0.5
"""Longest pause between two such probes."""
CHECK_SECONDS = 10.0
"""Interval between checks of each of several servers, while calls are made."""
CHECK_TIMEOUT_SECONDS = 5.0
"""Time limit of each request of a check, and of a probe."""
FIRST_LOOK_SECONDS = 1.0
"""Time for which the first call waits for the other servers once one is ready."""
LOOK_AGAIN_SECONDS = 0.25
"""Interval at which a call with waiting requests looks whether more servers are ready."""
BACKOFF_FIRST_SECONDS = 0.5
"""First bound of the time for which a failed server is left out; it doubles with each failure."""
BACKOFF_MAX_SECONDS = 30.0
"""Longest bound of that time."""
BUSY_SECONDS = 0.1
"""Time for which a server is avoided after a refusal because of load without a hint."""
VERSION_SECONDS = 10.0
"""Time for which the version of the weights that a server reported counts as known."""
RESOLVE_SECONDS = 30.0
"""Interval between look-ups of a name."""
RESOLVE_PAUSE_SECONDS = 1.0
"""Shortest interval between look-ups, after a failure of a server or of a look-up."""
RESTARTS_MAX = 3
"""Restarts of a call on several servers whose weights change."""
SWAP_ROUNDS_MAX = 3
"""Rounds of a call; each scores again what another version scored before."""
RECONNECT_FIRST_SECONDS = 0.1
"""First pause before a lost connection is opened again."""
RECONNECT_MAX_SECONDS = 2.0
"""Longest pause before a lost connection is opened again."""
KEEPALIVE_SECONDS = 30.0
"""Time after which an idle connection is probed."""
KEEPALIVE_TIMEOUT_SECONDS = 10.0
"""Time for the answer to this probe; without it the connection is closed."""
# [end]
