#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/rpc_transport.h"

namespace logprobd::client {

/// An RpcTransport without a network. A test answers the calls and fires the timers. Not
/// thread-safe.
class FakeTransport final : public RpcTransport {
 public:
  struct PendingCall : RpcRequest {
    RpcDone done;
  };

  struct Scope final : CancelScope {
    void Cancel() override { is_cancelled_ = true; }
    bool is_cancelled() override { return is_cancelled_; }

   private:
    bool is_cancelled_ = false;
  };

  std::shared_ptr<CancelScope> NewScope() override { return std::make_shared<Scope>(); }

  void Call(RpcRequest&& request, RpcDone done) override {
    grpc::ByteBuffer body;  // a moved ByteBuffer would keep its references to the caller's memory
    body.Swap(&request.body);
    calls.push_back({std::move(request), std::move(done)});
    calls.back().body.Swap(&body);
    ++calls_made;
    calls_max = std::max(calls_max, calls.size());
  }

  void After(absl::Duration delay, const std::shared_ptr<CancelScope>&,
             absl::AnyInvocable<void() &&> callback) override {
    delays.push_back(delay);
    timers.push_back(std::move(callback));
  }

  absl::Time Now() const override { return now; }

  /// Answers the `index`th pending call.
  void Reply(RpcReply reply, size_t index = 0) {
    PendingCall call = std::move(calls[index]);
    calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(index));
    call.body.Clear();
    std::move(call.done)(std::move(reply));
  }

  /// Fires the oldest timer.
  void FireTimer() {
    absl::AnyInvocable<void()&&> callback = std::move(timers.front());
    timers.pop_front();
    std::move(callback)();
  }

  absl::Time now = absl::UnixEpoch();
  std::deque<PendingCall> calls;
  std::vector<absl::Duration> delays;  ///< All delays requested so far.
  std::deque<absl::AnyInvocable<void() &&>> timers;
  size_t calls_made = 0;
  size_t calls_max = 0;  ///< Largest number of calls pending at once.
};

}  // namespace logprobd::client
