"""Sizes of the head that the servers of these tests serve, and the transports of their requests."""

HIDDEN = 512
VOCAB = 31


def transports(server):
    return [request.transport for request in server.requests]
