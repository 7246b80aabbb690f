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

/// Shares devices among heads: a batch needs a turn from before it is cut until its engine is done.
///
/// Fair by work, which is rows x cost of a row: of the heads that wait, the one that has been given
/// the least goes next, as with deficit round robin over a quantum smaller than any batch. A head
/// that has been idle starts level with the others; what it had too much before it still owes. One
/// that has little to do saves up no more than its batches in flight could have been.
/// Heads that share no device do not touch each other.
///
/// On a device at most as many batches are in flight as the head with the most replicas there has
/// on its own, so that copies of one overlap the kernels of another, and a head whose neighbours
/// have nothing to do never waits. Who goes next keeps its devices free of others until it can go.
///
/// Replicas whose devices wait for each other are never in flight together with another such on any
/// device: each could wait for a kernel that the other's keeps from starting. All batches of one
/// end before the other's begin; a hold lasts for two batches, so that they overlap. Thread-safe.
class DeviceTurns {
 public:
  /// Where a replica's batches run.
  struct Lane {
    std::vector<std::string> devices = {};  ///< "gpu0", each once.
    bool waits_for_peers = false;           ///< Kernels of one device wait for another's.
  };

  struct Head {
    std::vector<Lane> lanes = {};  ///< A replica each.
    double row_cost = 1;           ///< Work of a row, > 0, in a unit common to all heads.
  };

  /// A batch reads the whole weight however few its rows are: as much work as so many.
  static constexpr int64_t kBatchRowsMin = 128;

  explicit DeviceTurns(const std::vector<Head>& heads);

  /// Called, on any thread, when a head that waits can have its turn now or when it should ask
  /// again; it must not block and holds nothing of this object. Returns once no call of the former
  /// `wake` runs. An empty one: none.
  void SetWake(int head, std::function<void()> wake);

  /// Takes a turn for a batch on one of `replicas` (not empty, most wanted first) and says which;
  /// or nothing: then the head waits for one of them, and is woken. The caller holds no lock that a
  /// `wake` takes.
  std::optional<int> Take(int head, absl::Span<const int> replicas);

  /// Counts the rows of a batch that has its turn.
  void Charge(int head, int64_t rows);

  /// Ends a turn. Locks as for Take.
  void GiveBack(int head, int replica);

  /// The head no longer waits. Locks as for Take.
  void Withdraw(int head);

 private:
  struct LaneState {
    std::vector<size_t> devices;  ///< Indices.
    bool waits_for_peers = false;
    int in_flight = 0;
    int taken_in_hold = 0;  ///< Turns since it was last idle.
  };

  struct HeadState {
    std::vector<LaneState> lanes;
    double row_cost = 1;
    size_t group = 0;  ///< Heads joined by devices.
    double served = 0;
    int64_t last_turn = 0;
    std::vector<int> wanted;  ///< Replicas; empty: it does not wait.
    bool is_woken = false;
    int in_flight = 0;
  };

  struct Group {
    double time = 0;        ///< `served` of the last turn's head.
    double charge_max = 0;  ///< Largest charge of a batch.
  };

  /// What is left of the devices as turns are dealt out.
  struct Room {
    std::vector<int> batches;
    std::vector<const LaneState*> holders;  ///< Of those that wait for peers, or null.
  };

  /// A wake function, which may be running.
  struct Waker {
    absl::Mutex mutex;
    std::function<void()> wake ABSL_GUARDED_BY(mutex);
  };

  struct Grant {
    size_t head;
    int replica;
  };

  static bool Fits(const LaneState& lane, const Room& room);
  static void Occupy(const LaneState& lane, Room& room);
  Room RoomLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static bool IsInHold(const HeadState& head);
  std::vector<Grant> GrantsLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Heads to be woken.
  std::vector<size_t> WakeableLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Wake(const std::vector<size_t>& heads) ABSL_LOCKS_EXCLUDED(mutex_);

  std::vector<std::unique_ptr<Waker>> wakers_;
  absl::Mutex mutex_;
  std::vector<HeadState> heads_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> capacity_;  ///< Batches of each device.
  std::vector<Group> groups_ ABSL_GUARDED_BY(mutex_);
  int64_t num_turns_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logprobd
