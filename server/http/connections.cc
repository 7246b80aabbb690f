#include "server/http/connections.h"

#include <sys/socket.h>
#include <unistd.h>

namespace logprobd {

Connections::Scope::Scope(Connections& connections, int socket)
    : connections_(connections), socket_(socket) {
  const absl::MutexLock lock(&connections_.mutex_);
  connections_.sockets_.insert(socket_);
  if (connections_.is_shut_down_) {
    ::shutdown(socket_, SHUT_RDWR);
  }
}

Connections::Scope::~Scope() {
  {
    // Under the lock, and before it is closed: the number may be another file's right after.
    const absl::MutexLock lock(&connections_.mutex_);
    connections_.sockets_.erase(socket_);
  }
  ::shutdown(socket_, SHUT_RDWR);
  close(socket_);
}

void Connections::ShutDown() {
  const absl::MutexLock lock(&mutex_);
  is_shut_down_ = true;
  for (const int socket : sockets_) {
    ::shutdown(socket, SHUT_RDWR);
  }
}

}  // namespace logprobd
