"""The constants of the policy by which clients retry and choose servers.

client/README.md describes it. They stand in proto/contract.json, and the C++ client has the same.
"""

# [generated: python_policy]
ATTEMPTS_MAX = 8
"""Most attempts of a request while no server is available."""
OVERLOADED_ATTEMPTS_MAX = 1000
"""Most attempts of a request while servers are overloaded."""
BACKOFF_FIRST_SECONDS = 0.1
"""Upper bound of the first random wait; it doubles with each attempt."""
BACKOFF_MAX_SECONDS = 5.0
"""Upper bound of every random wait."""
# [end]
