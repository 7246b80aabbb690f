#pragma once

#include <unordered_set>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace logprobd {

/// The sockets of the requests at hand, so that the end of the server need not wait for clients
/// that neither send nor read. Thread-safe.
class Connections {
 public:
  /// Names a socket for as long as this lives; then closes it.
  class Scope {
   public:
    Scope(Connections& connections, int socket);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Connections& connections_;
    const int socket_;
  };

  /// Shuts down all sockets, those of later Scopes too: waits on them end.
  void ShutDown();

 private:
  absl::Mutex mutex_;
  bool is_shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_set<int> sockets_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
