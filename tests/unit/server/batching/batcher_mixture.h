#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/heartbeat.h"
#include "server/base/score_request.h"
#include "server/base/scoring_engine.h"
#include "server/batching/batcher.h"
#include "server/batching/device_turns.h"
#include "server/batching/version_replicas.h"
#include "server/metrics/metrics.h"
#include "server/metrics/snapshot.h"
#include "tests/support/draws.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_engine.h"

namespace logprobd::testing {

/// A FakeEngine whose batches end when the test says so, and which shows each batch when it starts.
class HeldEngine final : public ScoringEngine {
 public:
  using OnStart = std::function<void(const ScoreBatch&)>;

  HeldEngine(const FakeEngine::Options& options, OnStart on_start)
      : fake_(options), on_start_(std::move(on_start)) {
    fake_.Hold();
  }

  const HeadInfo& info() const override { return fake_.info(); }
  int64_t batch_rows_max() const override { return fake_.batch_rows_max(); }
  MemoryPlan memory() const override { return fake_.memory(); }
  absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) override {
    return fake_.AllocateStaging(size_bytes);
  }
  void Start(ScoreBatch& batch, ScoreDone done) override;
  bool healthy() const override { return fake_.healthy(); }
  bool reads_in_place() const override { return fake_.reads_in_place(); }
  int64_t row_step(int64_t num_rows) const override { return fake_.row_step(num_rows); }

  /// Ends the oldest batch with `status` and returns when the Batcher has dealt with it.
  void End(const absl::Status& status);
  void SetHealthy(bool healthy) { fake_.SetHealthy(healthy); }

 private:
  FakeEngine fake_;
  const OnStart on_start_;
  absl::Mutex mutex_;
  int64_t num_released_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t num_ended_ ABSL_GUARDED_BY(mutex_) = 0;
};

/// The Batchers of some heads, to which anything may happen in any order, and a model of them that
/// follows from the events alone and says what must come of each.
///
/// A step is one event, after which all batch threads sleep; only the fake clock wakes them. The
/// model knows each row: whether it waits, which engine has it, and what has become of it. From
/// that it computes the charges, the metrics, whether a batch must be in flight, the answer to each
/// Submit with its retry hint, and the end of each request, all of which must hold after each step.
class BatcherMixture {
 public:
  /// With several heads, they share devices and take turns. The order in which their threads run is
  /// then not part of the draw, so that a seed repeats the events but not each batch.
  BatcherMixture(uint32_t seed, int num_heads);
  ~BatcherMixture();
  BatcherMixture(const BatcherMixture&) = delete;
  BatcherMixture& operator=(const BatcherMixture&) = delete;

  /// Makes one event happen and checks everything.
  void Step();
  /// Ends all Batchers, in one of the ways in which that is possible, and checks that every request
  /// is answered and nothing is held any more.
  void End();

  /// Returns the last events, for the message of a failure.
  std::string LastEvents() const;

 private:
  struct Version;
  struct Head;

  static constexpr int64_t kHiddenSize = 4;
  /// How long the published age, and a request that woke no thread, may be behind.
  static constexpr absl::Duration kGaugePeriod = absl::Seconds(1);
  /// A wait in real time that takes longer is for something that does not happen.
  static constexpr absl::Duration kWaitMax = absl::Minutes(1);
  static constexpr size_t kQueue = static_cast<size_t>(Metrics::LeftAt::kQueue);
  static constexpr size_t kEngine = static_cast<size_t>(Metrics::LeftAt::kEngine);

  /// What the engines of a version add to each logprob.
  static float OffsetOf(uint64_t version) { return -100 * static_cast<float>(version); }
  /// Whether a retry hint is `expected` in whole milliseconds, rounded up; one more or less is a
  /// matter of rounding.
  static bool IsNear(absl::Duration hint, absl::Duration expected) {
    const absl::Duration whole = absl::Ceil(expected, absl::Milliseconds(1));
    return absl::AbsDuration(hint - whole) <= absl::Milliseconds(1);
  }

  /// A request, what has become of it, and how it must end.
  struct Asked {
    int id = 0;
    Head* head = nullptr;
    ScoreRequest request;  ///< Without its rows.
    ScoreResult expected;  ///< Without the offset of a version.
    RequestTicket ticket = 0;
    absl::Time submitted;
    int64_t rows_to_score = 0;
    int64_t payload_bytes = 0;
    int64_t held_bytes = 0;
    bool is_on_gpu = false;  ///< Its rows are read in place.
    std::weak_ptr<void> payload;
    const Version* version = nullptr;  ///< The version whose engines have had rows of it.
    uint64_t number = 0;               ///< Version that its answer names.
    bool is_retiring = false;
    int64_t next_row = 0;  ///< First row to be scored that no engine has had.
    int64_t rows_started = 0;
    int64_t rows_scored = 0;
    int parts_in_flight = 0;
    int in_place_parts = 0;  ///< Those of `parts_in_flight` that are read in place.
    std::optional<absl::StatusCode> due;
    std::optional<absl::Duration> due_hint;
    bool is_failing = false;          ///< A batch with rows of it has failed.
    bool may_be_unavailable = false;  ///< UNAVAILABLE would be right, too.
    std::optional<absl::StatusOr<ScoreResult>> answer;
    absl::Time answered;

    bool is_small() const { return rows_to_score <= kSmallRequestRows; }
    /// The result that its version gives.
    ScoreResult Result() const;
    int64_t waiting_rows() const { return due.has_value() ? 0 : rows_to_score - rows_started; }
    bool has_ended() const { return due.has_value() && parts_in_flight == 0; }
    /// What the Batcher charges for it.
    QueueLoad load() const;
    void SkipIgnoredRows();
  };

  /// The rows of a request in a batch.
  struct Part {
    Asked* asked;
    int64_t batch_row;
    int64_t num_rows;
    bool is_in_place;
  };

  /// A batch from its first start until all of its requests are told.
  struct Batch {
    Version* version;
    size_t replica;
    std::vector<std::pair<Asked*, int64_t>> rows;
    std::vector<Part> parts;
    absl::Time started;
    int64_t middle = 0;  ///< Rows below it have `first`, the others `last`.
    absl::Status first;
    absl::Status last;
  };

  /// A batch, or a half of it, that an engine has or is to get.
  struct Flight {
    enum class Piece { kWhole, kFirst, kSecond };
    std::shared_ptr<Batch> batch;
    Piece piece = Piece::kWhole;
  };

  struct Replica {
    std::unique_ptr<HeldEngine> engine;
    std::deque<Flight> flights;      ///< What its engine has.
    std::vector<Flight> relaunches;  ///< Halves that the Batcher is to start.
    int in_flight = 0;               ///< Number of batches, as the Batcher counts them.
    absl::Time busy_since = absl::InfiniteFuture();
    absl::Duration last_batch = absl::InfiniteDuration();
  };

  struct Version {
    Head* head;
    uint64_t number;
    bool waits_for_peers;
    absl::Time last_small = absl::InfinitePast();
    std::vector<Replica> members;
    std::unique_ptr<VersionReplicas> replicas;

    int NumHealthy() const;
    int NumInFlight() const;
    /// Returns the fewest batches in flight of a healthy replica, or none without a free slot.
    std::optional<int> FewestInFlight() const;
  };

  /// How fast the replicas of a head have been, by the comment of DrainRate.
  struct Rate {
    struct Measured {
      absl::Time ended;
      double seconds_per_row;
      bool is_representative;
    };
    std::vector<Measured> measured;
    std::map<size_t, absl::Time> last_ends;  ///< By replica.
    double mean = 0;
    int num_replicas = 1;

    void Add(int64_t rows, int64_t representative_rows, absl::Time started, absl::Time ended,
             size_t replica);
    absl::Duration RetryAfter(double rows) const;
    /// Whether rows that take `left` at the best rate must, or may, be refused.
    bool MustRefuse(int64_t rows, absl::Duration left, absl::Time now) const;
    bool MayRefuse(int64_t rows, absl::Duration left, absl::Time now) const;
  };

  struct Head {
    int index = 0;
    std::string name;
    std::vector<DeviceTurns::Lane> lanes;
    FakeEngine::Options engine;
    Batcher::Options options;  ///< With the limits in force.
    StagingStore staging;
    uint64_t last_number = 1;
    std::vector<std::unique_ptr<Version>> versions;
    Version* live = nullptr;
    Version* retiring = nullptr;
    bool must_await = false;  ///< A commit has not been followed by a successful AwaitRetired.
    uint64_t live_number = 0;
    std::string kind;
    absl::Status failure;
    Rate rate;
    std::vector<Asked*> active;  ///< Requests that hold something, in the order of Submit.
    std::unique_ptr<Batcher> batcher;
    std::optional<absl::Time> unpublished_since;  ///< A Submit may have woken nobody since.
    int64_t started_rows = 0;                     ///< Rows of all batches.
    int64_t started_batches = 0;
    std::array<int64_t, 3> rows = {};  ///< Scored, ignored and nonfinite rows of answers.
  };

  /// The waiting rows of a live or retiring version.
  struct Waiting {
    int64_t rows = 0;
    int64_t bulk = 0;
    bool has_small = false;
    absl::Time oldest = absl::InfiniteFuture();
    std::vector<const Asked*> requests = {};
  };

  /// The answers that a Submit may get.
  struct Prediction {
    absl::StatusCode code = absl::StatusCode::kOk;
    std::optional<Rejection> reason = std::nullopt;
    std::optional<absl::Duration> hint = std::nullopt;
    bool may_be_late = false;  ///< DEADLINE_EXCEEDED would be right, too.
  };

  // Events.
  void Submit(Head& head);
  void EndBatch(Replica& replica, const absl::Status& status);
  void EndSomeBatch(Head& head);
  void Cancel(Head& head);
  void Advance(absl::Duration step);
  absl::Duration SomeStep(const Head& head);
  void SetLimits(Head& head);
  void Lose(Head& head);
  void ChangeVersion(Head& head);
  void Commit(Head& head, Version* next);
  void AwaitRetired(Head& head);
  /// What another thread may do while a batch is started.
  void InterfereWithStart(Head& head);

  // Set-up.
  void MakeHead(Head& head, int num_heads);
  Version* MakeVersion(Head& head);
  std::unique_ptr<Asked> MakeAsked(Head& head);
  void DrawLimits(Batcher::Options& options);

  // The model.
  void OnStart(Version& version, size_t replica, const ScoreBatch& batch);
  void BeginBatch(Version& version, size_t replica, const ScoreBatch& batch,
                  std::vector<std::pair<Asked*, int64_t>> rows)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndPiece(Replica& replica, const Flight& flight, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndWhole(Replica& replica, Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLostPieces() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeDue(Asked& asked, absl::StatusCode code) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeUnservableDue(Head& head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Prediction Predict(Head& head, const Asked& asked) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<Prediction> PredictAdmission(const Head& head, const Asked& asked) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Waiting WaitingFor(const Head& head, bool is_retiring) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Whether a batch of the live version must be in flight by now.
  bool MustLaunch(const Head& head) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t BulkRowsMax(const Head& head, const Waiting& waiting) const;
  bool VersionsTakeTurns(const Head& head) const;

  // The checks.
  void Settle();
  void Check();
  void CheckAnswers(Head& head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckLaunches(const Head& head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckMetrics(Head& head, const MetricsSnapshot& metrics)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckCounters(const MetricsSnapshot& metrics) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckNothingIsHeld();
  /// Returns a replica whose engine has a batch, or null once the head has none. Waits for halves
  /// that the Batcher is to start.
  Replica* AwaitFlight(Head& head);
  void Note(std::string event);

  FakeClock clock_;
  Draws draws_;
  Heartbeats heartbeats_;
  Metrics metrics_;
  std::unique_ptr<DeviceTurns> turns_;  ///< Null for one head.
  bool has_woken_ = false;              ///< The event of this step wakes each thread.
  int num_threads_ = 0;                 ///< Number of batch threads.

  mutable absl::Mutex mutex_;
  Draws start_draws_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Asked>> asked_;
  std::vector<std::unique_ptr<Head>> heads_;
  std::array<int64_t, 3> num_cancelled_ ABSL_GUARDED_BY(mutex_) = {};  ///< By Metrics::LeftAt.
  std::array<int64_t, 3> num_late_ ABSL_GUARDED_BY(mutex_) = {};
  std::deque<std::string> events_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd::testing
