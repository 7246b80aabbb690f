#include "server/batching/hidden_rows.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/test_requests.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kHiddenSize = 16'384;
constexpr int64_t kRowBytes = kHiddenSize * 2;  // Half of kRunBytes.

/// A batch of consecutive whole requests.
class Batch {
 public:
  void Add(RequestSpec spec) {
    spec.hidden_size = kHiddenSize;
    auto pending = std::make_shared<PendingRequest>();
    pending->request = MakeRequest(spec);
    pending->CountRows();
    BatchPart part{.pending = pending, .row_begin = pending->next_row};
    while (pending->next_row < spec.rows) {
      ++part.num_rows;
      part.row_end = ++pending->next_row;
      pending->SkipIgnoredRows();
    }
    part.batch_row = num_rows_;
    num_rows_ += part.num_rows;
    parts_.push_back(std::move(part));
  }

  std::vector<BatchPart>& parts() { return parts_; }

  /// Returns each run as "memory+row*rows", where memory is "staging" or the index of the request.
  std::vector<std::string> Describe(absl::Span<const HiddenRun> runs) const {
    std::vector<std::string> names;
    for (const HiddenRun& run : runs) {
      std::string memory = "staging";
      const std::byte* begin = staging();
      for (size_t i = 0; i < parts_.size(); ++i) {
        const auto piece = parts_[i].pending->request.hidden.pieces.front();
        if (run.data >= piece.begin() && run.data < piece.end()) {
          memory = absl::StrCat(i);
          begin = piece.data();
        }
      }
      names.push_back(absl::StrCat(memory, "+", (run.data - begin) / kRowBytes, "*", run.num_rows,
                                   run.gpu < 0 ? std::string() : absl::StrCat(" gpu", run.gpu)));
    }
    return names;
  }

  const std::byte* staging() const { return staging_.data(); }

 private:
  std::vector<BatchPart> parts_;
  int64_t num_rows_ = 0;
  std::vector<std::byte> staging_{64 * kRowBytes};
};

RequestSpec Message(int64_t rows) { return {.rows = rows}; }
RequestSpec Pinned(int64_t rows, std::vector<int64_t> ignored = {}) {
  return {.rows = rows,
          .ignored_rows = std::move(ignored),
          .place = PayloadPlace::kSharedMemory,
          .is_pinned = true};
}
RequestSpec OnGpu(int64_t rows, int32_t gpu, std::vector<int64_t> ignored = {}) {
  return {
      .rows = rows, .ignored_rows = std::move(ignored), .place = PayloadPlace::kDevice, .gpu = gpu};
}

TEST(HiddenRunsTest, HasNoRunsWhenAllRowsAreStaged) {
  Batch batch;
  batch.Add(Message(3));
  batch.Add({.rows = 3, .place = PayloadPlace::kSharedMemory});
  HiddenRuns runs;

  runs.Place(absl::MakeSpan(batch.parts()), kRowBytes, batch.staging());

  EXPECT_TRUE(runs.empty());
  EXPECT_THAT(runs.Of(0, 6), ElementsAre());
  EXPECT_FALSE(batch.parts()[0].is_in_place || batch.parts()[1].is_in_place);
}

TEST(HiddenRunsTest, ReadsPinnedRowsInPlaceAndStagesTheOthers) {
  Batch batch;
  batch.Add(Message(1));
  batch.Add(Message(2));
  batch.Add(Pinned(3));
  batch.Add(Message(1));
  HiddenRuns runs;

  runs.Place(absl::MakeSpan(batch.parts()), kRowBytes, batch.staging());

  EXPECT_THAT(batch.Describe(runs.Of(0, 7)), ElementsAre("staging+0*3", "2+0*3", "staging+6*1"));
}

TEST(HiddenRunsTest, StagesPinnedRowsInShortRuns) {
  for (const auto& [ignored, is_in_place] :
       std::vector<std::pair<std::vector<int64_t>, bool>>{{{}, true},
                                                          {{2}, true},         // 2 + 3 rows
                                                          {{1}, true},         // 1 + 4 rows
                                                          {{1, 3, 5}, false},  // 1 + 1 + 1
                                                          {{0, 2, 3, 4, 5}, false}}) {
    Batch batch;
    batch.Add(Pinned(6, ignored));
    HiddenRuns runs;

    runs.Place(absl::MakeSpan(batch.parts()), kRowBytes, batch.staging());

    EXPECT_EQ(batch.parts().front().is_in_place, is_in_place) << ignored.size();
    EXPECT_EQ(runs.empty(), !is_in_place);
  }
}

TEST(HiddenRunsTest, MakesARunOfConsecutiveGpuRowsHoweverShort) {
  Batch batch;
  batch.Add(OnGpu(7, 3, {0, 2, 5}));
  HiddenRuns runs;

  runs.Place(absl::MakeSpan(batch.parts()), kRowBytes, batch.staging());

  EXPECT_THAT(batch.Describe(runs.Of(0, 4)), ElementsAre("0+1*1 gpu3", "0+3*2 gpu3", "0+6*1 gpu3"));
}

TEST(HiddenRunsTest, CutsRunsAtAnyRow) {
  Batch batch;
  batch.Add(Pinned(4));
  batch.Add(Message(2));
  batch.Add(OnGpu(3, 0));
  HiddenRuns runs;
  runs.Place(absl::MakeSpan(batch.parts()), kRowBytes, batch.staging());

  EXPECT_THAT(batch.Describe(runs.Of(0, 3)), ElementsAre("0+0*3"));
  EXPECT_THAT(batch.Describe(runs.Of(3, 9)), ElementsAre("0+3*1", "staging+4*2", "2+0*3 gpu0"));
  EXPECT_THAT(batch.Describe(runs.Of(5, 7)), ElementsAre("staging+5*1", "2+0*1 gpu0"));
}

TEST(HiddenRunsTest, ForgetsThePreviousBatch) {
  Batch first;
  first.Add(Pinned(4));
  Batch second;
  second.Add(Message(2));
  HiddenRuns runs;
  runs.Place(absl::MakeSpan(first.parts()), kRowBytes, first.staging());

  runs.Place(absl::MakeSpan(second.parts()), kRowBytes, second.staging());

  EXPECT_TRUE(runs.empty());
}

}  // namespace
}  // namespace logprobd::testing
