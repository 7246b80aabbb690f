"""Servers on the nodes of a Ray cluster, and log-probabilities of datasets of Ray Data.

logprobd_adapters.ray.health has a Ray Serve application that reports the health of the servers.
"""

from logprobd_adapters.ray.batch import ScoreBatch
from logprobd_adapters.ray.pool import ScorerPool

__all__ = ["ScoreBatch", "ScorerPool"]
