"""Sizes of the servers of these tests, and what they saw."""

HIDDEN = 512
VOCAB = 31


def transports(server):
    return [request.transport for request in server.requests]
