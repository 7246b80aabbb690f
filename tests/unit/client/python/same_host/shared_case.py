"""Sizes of the servers of these tests, and the transports of the requests that they received."""

HIDDEN = 512
VOCAB = 31


def transports(server):
    return [request.transport for request in server.requests]
