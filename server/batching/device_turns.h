#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

namespace logprobd {

/// Shares devices among heads. A head takes a turn before it cuts a batch and gives the turn back
/// when the engine is done with the batch.
///
/// Fairness: turns are shared by work, which is the number of rows times the cost of a row. The
/// waiting head that has received the least work is next, as in deficit round robin with a quantum
/// smaller than any batch. A head that was idle starts at the same level as the others, but excess
/// work that it received before is still counted. A head with little work never lags behind the
/// others by more than the work of its batches in flight. Heads that share no device do not affect
/// each other.
///
/// Capacity: a device has at most as many batches in flight as the head with the most replicas on
/// it would have alone. Therefore the copies of one batch overlap the kernels of another, and a
/// head never waits for idle heads. The devices of the next head are kept free until it can launch.
///
/// Peers: two replicas whose GPUs wait for each other are never in flight together on any device,
/// because each could wait for a kernel that the other prevents from starting. All batches of one
/// replica end before those of the other begin. A replica holds its devices for two batches, so
/// that these overlap.
///
/// Thread-safe.
class DeviceTurns {
 public:
  /// The devices on which a replica's batches run.
  struct Lane {
    std::vector<std::string> devices = {};  ///< Names such as "gpu0", each once.
    bool waits_for_peers = false;           ///< Kernels on one device wait for another device.
  };

  struct Head {
    std::vector<Lane> lanes = {};  ///< One lane per replica.
    double row_cost = 1;           ///< Work per row, > 0, in a unit common to all heads.
  };

  /// A batch counts as at least this many rows, because it reads the whole weight however few its
  /// rows are.
  static constexpr int64_t kBatchRowsMin = 128;

  explicit DeviceTurns(const std::vector<Head>& heads);

  /// Sets the function that is called, on any thread, when waiting head `head` should call Take
  /// again. `wake` must not block; this object holds no lock during the call except one that guards
  /// `wake` itself. Returns once no call of the previous `wake` is running. If `wake` is empty, no
  /// function is called.
  void SetWake(int head, std::function<void()> wake);

  /// Takes a turn for a batch on one of `replicas` (not empty, in order of preference) and returns
  /// that replica. Returns nullopt if none is free; the head then waits for one of them and is
  /// woken. The caller must not hold a lock that a `wake` takes.
  std::optional<int> Take(int head, absl::Span<const int> replicas);

  /// Charges the head for the rows of a batch that has its turn.
  void Charge(int head, int64_t rows);

  /// Ends a turn. The caller must not hold a lock that a `wake` takes.
  void GiveBack(int head, int replica);

  /// Ends the head's wait. The caller must not hold a lock that a `wake` takes.
  void Withdraw(int head);

 private:
  struct LaneState {
    std::vector<size_t> devices;  ///< Device indices.
    bool waits_for_peers = false;
    int in_flight = 0;
    int taken_in_hold = 0;  ///< Number of turns taken since the lane was last idle.
  };

  struct HeadState {
    std::vector<LaneState> lanes;
    double row_cost = 1;
    size_t group = 0;   ///< Index of the group of heads that share devices.
    double served = 0;  ///< Work received.
    int64_t last_turn = 0;
    std::vector<int> requested;  ///< Replicas for which it waits; empty if it does not wait.
    bool is_woken = false;
    int in_flight = 0;
  };

  struct Group {
    double time = 0;        ///< `served` of the head that had the last turn.
    double charge_max = 0;  ///< Largest charge of a batch.
  };

  /// Free capacity of the devices while turns are assigned.
  struct Room {
    std::vector<int> batches;               ///< [num_devices], number of further batches that fit.
    std::vector<const LaneState*> holders;  ///< [num_devices], lane that waits for peers, or null.
  };

  /// A wake function; `mutex` is held while it runs.
  struct Waker {
    absl::Mutex mutex;
    std::function<void()> wake ABSL_GUARDED_BY(mutex);
  };

  /// A turn that a head can have now.
  struct Grant {
    size_t head;
    int replica;
  };

  static bool Fits(const LaneState& lane, const Room& room);
  static void Occupy(const LaneState& lane, Room& room);
  Room RoomLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Returns whether the head may take another turn before other heads, because one of its lanes
  /// still holds its devices. If a hold lasted for only one batch, the devices would be idle while
  /// the next batch is copied.
  static bool IsInHold(const HeadState& head);
  /// Returns which of the waiting heads can have a turn now, and on which replica.
  std::vector<Grant> GrantsLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Returns the heads to wake.
  std::vector<size_t> WakeableLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Wake(const std::vector<size_t>& heads) ABSL_LOCKS_EXCLUDED(mutex_);

  std::vector<std::unique_ptr<Waker>> wakers_;
  absl::Mutex mutex_;
  std::vector<HeadState> heads_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> capacity_;  ///< [num_devices], maximum number of batches in flight.
  std::vector<Group> groups_ ABSL_GUARDED_BY(mutex_);
  int64_t num_turns_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logprobd
