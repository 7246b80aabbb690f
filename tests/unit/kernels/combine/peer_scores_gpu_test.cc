#include <cstdint>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/combine/peer_scores.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"
#include "tests/unit/kernels/combine/partials_case.h"

namespace logprobd::kernels {
namespace {

using namespace partials_case;  // NOLINT: helpers of these tests
using logprobd::testing::DeviceArray;

constexpr int64_t kSliceBytes = 1'024;

/// Ranks that share one GPU, each with a stream and a mailbox.
class Ranks {
 public:
  explicit Ranks(int32_t num_ranks) : abort_(std::vector<uint32_t>(1, 0)) {
    const auto bytes = static_cast<size_t>(MailboxBytes(num_ranks, kSliceBytes));
    group_.num_ranks = num_ranks;
    group_.slice_bytes = kSliceBytes;
    group_.abort = abort_.data();
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      mailboxes_.push_back(
          std::make_unique<DeviceArray<uint64_t>>(std::vector<uint64_t>(bytes / 8, 0)));
      group_.mailboxes[rank] = reinterpret_cast<std::byte*>(mailboxes_.back()->data());
      streams_.emplace_back();
      EXPECT_EQ(cudaStreamCreateWithFlags(&streams_.back(), cudaStreamNonBlocking), cudaSuccess);
    }
  }
  ~Ranks() {
    for (cudaStream_t stream : streams_) EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }

  PeerStep Step(int32_t rank, uint64_t epoch) const {
    PeerStep step = {group_, epoch};
    step.group.rank = rank;
    return step;
  }
  cudaStream_t stream(int32_t rank) const { return streams_[static_cast<size_t>(rank)]; }
  void Abort() {
    const uint32_t one = 1;
    EXPECT_EQ(cudaMemcpy(abort_.data(), &one, sizeof(one), cudaMemcpyHostToDevice), cudaSuccess);
  }

 private:
  DeviceArray<uint32_t> abort_;
  std::vector<std::unique_ptr<DeviceArray<uint64_t>>> mailboxes_;
  std::vector<cudaStream_t> streams_;
  PeerGroup group_;
};

/// Returns the inputs of rank `rank` of `num_ranks`. The rank that holds a row's target, largest or
/// smallest logit varies from row to row.
PartialsCase KnownTo(const PartialsCase& all, int32_t rank, int32_t num_ranks) {
  PartialsCase own = all;
  for (int64_t row = 0; row < all.num_rows; ++row) {
    const auto i = static_cast<size_t>(row);
    if (row % num_ranks != rank) own.target_logits[i] = 0.0F;
    if ((row + 1) % num_ranks != rank) own.max_keys[i] = LogitKey(-50.0F, 3);
    if ((row + 2) % num_ranks != rank) own.min_keys[i] = ~OrderedBits(60.0F);
  }
  return own;
}

/// Inputs and outputs of a rank in device memory.
struct RankRun {
  RankRun(const PartialsCase& all, const std::vector<int64_t>& cuts, size_t rank)
      : run(KnownTo(all, static_cast<int32_t>(rank), static_cast<int32_t>(cuts.size() - 1))),
        num_tiles(cuts[rank + 1] - cuts[rank]),
        sums(ShardOf(all, all.sums, cuts[rank], cuts[rank + 1])),
        entropy_sums(ShardOf(all, all.entropy_sums, cuts[rank], cuts[rank + 1])) {}

  RowScoresParams Params(const Ask& ask, int64_t num_rows) const {
    RowScoresParams params = run.Params(ask);
    params.num_tiles = num_tiles;
    params.layout = PartialLayoutOf(num_rows, num_tiles);
    params.sums = sums.data();
    if (ask.entropy_sums) params.entropy_sums = entropy_sums.data();
    return params;
  }

  ScoresRun run;
  int64_t num_tiles;
  DeviceArray<TileSums> sums;
  DeviceArray<TileSums> entropy_sums;
};

class PeerScoresTest : public testing::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    ASSERT_EQ(ProbePeerScores(),
              cudaSuccess);  // loads the kernel first: loading waits for the device
  }
};

TEST_F(PeerScoresTest, AnyCutIntoShardsGivesTheBitsOfRowScoresInEveryEpoch) {
  for (const std::vector<int64_t>& cuts : kCuts) {
    const auto num_ranks = static_cast<int32_t>(cuts.size() - 1);
    const Ranks ranks(num_ranks);
    uint64_t epoch = 0;
    for (const int64_t rows : {7, 1, 64, 65, 256, 3, 200, 5}) {
      for (const Ask ask : {Ask{true, true}, Ask{false, true}, Ask{true, false}}) {
        SCOPED_TRACE(::testing::Message()
                     << num_ranks << " ranks, " << rows << " rows, epoch " << epoch + 1
                     << ", squares " << ask.squares << ", entropy of its own " << ask.entropy_sums);
        const PartialsCase c = MakeCase(rows);
        const Outputs whole = ScoreWhole(c, ask);
        std::vector<std::unique_ptr<RankRun>> runs;
        for (size_t rank = 0; rank + 1 < cuts.size(); ++rank) {
          runs.push_back(std::make_unique<RankRun>(c, cuts, rank));
        }

        ++epoch;
        for (int32_t rank = 0; rank < num_ranks; ++rank) {
          ASSERT_EQ(LaunchPeerScores({.step = ranks.Step(rank, epoch),
                                      .scores = runs[static_cast<size_t>(rank)]->Params(ask, rows)},
                                     ranks.stream(rank)),
                    cudaSuccess);
        }
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

        ExpectSameBits(runs.front()->run.Read(), whole);
      }
    }
  }
}

TEST_F(PeerScoresTest, ARankWithoutPeersEndsWhenAborted) {
  Ranks ranks(2);
  const PartialsCase c = MakeCase(130);
  const RankRun run(c, {0, 10, 29}, 0);
  ranks.Abort();

  ASSERT_EQ(
      LaunchPeerScores({.step = ranks.Step(0, 1), .scores = run.Params({}, 130)}, ranks.stream(0)),
      cudaSuccess);

  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(PeerScoresTest, RefusesBrokenBounds) {
  const Ranks ranks(2);
  const PartialsCase c = MakeCase(257);
  const RankRun run(c, {0, 10, 29}, 0);
  const auto launch_with = [&](const auto& change) {
    PeerScoresParams params = {.step = ranks.Step(0, 1), .scores = run.Params({}, 256)};
    params.scores.num_rows = 256;
    change(params);
    return LaunchPeerScores(params, nullptr);
  };

  using Params = PeerScoresParams;
  EXPECT_EQ(launch_with([](Params& p) { p.scores.num_rows = 257; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.scores.num_rows = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.scores.sums = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.scores.num_tiles = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.scores.target_rank = p.scores.argmax_id; }),
            cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.step.epoch = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.step.group.num_ranks = 17; }), cudaErrorInvalidValue);
  EXPECT_EQ(launch_with([](Params& p) { p.step.group.abort = nullptr; }), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace logprobd::kernels
