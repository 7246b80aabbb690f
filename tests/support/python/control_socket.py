"""A client of the control socket that uses plain sockets and is independent of our client library."""

import mmap
import os
import select
import socket

from scoring_rpc import messages


class Region:
    """A region that its client has mapped."""

    def __init__(self, message, file: int) -> None:
        self.id = message.id
        self.file = file
        self.memory = mmap.mmap(file, message.bytes)

    def close(self) -> None:
        self.memory.close()
        os.close(self.file)


class ControlSocket:
    """A lease that ends when it is closed."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20)
        self.socket.connect(path)

    def receive(self):
        """Returns the next reply, or None if the server has closed the connection, and its file descriptors."""
        data, files, _, _ = socket.recv_fds(self.socket, 8192, 4)
        if not data and self._has_ended():  # otherwise it is a reply with no field set
            return None, files
        return messages("local").LocalReply.FromString(data), files

    def _has_ended(self) -> bool:
        return bool(select.select([self.socket], [], [], 0)[0])

    def call(self, **kind):
        self.socket.send(messages("local").LocalRequest(**kind).SerializeToString())
        return self.receive()

    def hello(self):
        return self.call(hello=messages("local").Hello(client_id="test"))[0]

    def create_region(self, size: int) -> Region:
        reply, files = self.call(create_region=messages("local").CreateRegion(bytes=size))
        assert reply.status_code == 0, reply.status_message
        return Region(reply.region, files[0])

    def close_region(self, region: Region):
        return self.call(close_region=messages("local").CloseRegion(id=region.id))[0]

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "ControlSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
