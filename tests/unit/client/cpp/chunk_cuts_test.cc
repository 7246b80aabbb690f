// Random calls under random limits: the joined answers to their requests equal the answer to one
// request.
//
// The server of these tests computes the scores of a row from all that its message says about the
// row, by a hash, so a row that is swapped, repeated or paired with another row's target,
// temperature or candidates gets other scores.

#include <grpcpp/support/slice.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/chunk_messages.h"
#include "client/cpp/chunk_plan.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "logprobd/v1/scoring.pb.h"
#include "tests/support/draws.h"

namespace logprobd::client {
namespace {

using testing::Draws;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::SeedsOfDraws;

constexpr uint32_t kCalls = 1000;
constexpr int64_t kMany = int64_t{1} << 40;
constexpr Limits kUnbounded = {.message_bytes_max = kMany,
                               .request_rows_max = kMany,
                               .candidates_max = kMany,
                               .segments_max = kMany};
/// Bytes of a message that are reserved for names and numbers.
constexpr int64_t kReservedBytes = 1024;

template <typename T>
void Append(T value, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(T));
}

template <typename T>
std::string Encode(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <typename T>
std::vector<T> Decode(const std::string& bytes) {
  EXPECT_EQ(bytes.size() % sizeof(T), 0U);
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

// --- the server

/// All that a message says about a row.
struct Row {
  std::string about;  ///< Hidden states, target, temperatures and candidates.
  bool is_ignored = false;
  std::vector<int32_t> candidates;
};

Row MakeRow(std::string hidden, int32_t target, int32_t ignore_index, float temperature,
            std::optional<float> entropy_temperature, std::vector<int32_t> candidates) {
  std::string about = std::move(hidden);
  Append(target, &about);
  Append(temperature, &about);
  Append(entropy_temperature.value_or(-1), &about);
  about += Encode(candidates);
  return {std::move(about), target == ignore_index, std::move(candidates)};
}

uint64_t Hash(absl::string_view bytes, absl::string_view name, uint64_t index) {
  uint64_t hash = 0xCBF29CE484222325;
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001B3; };
  for (const char c : bytes) add(static_cast<unsigned char>(c));
  for (const char c : name) add(static_cast<unsigned char>(c));
  add(index);
  hash ^= hash >> 29;
  hash *= 0xBF58476D1CE4E5B9;
  return hash ^ (hash >> 32);
}

bool IsNonfinite(const Row& row) {
  return !row.is_ignored && Hash(row.about, "is_nonfinite", 0) % 9 == 0;
}

/// Returns an element of one of the row's columns. Floats have a wide range, so that their sum
/// depends on the order.
template <typename T>
T ValueOf(const Row& row, absl::string_view name, uint64_t index) {
  const uint64_t bits = Hash(row.about, name, index);
  if (row.is_ignored) return 0;
  if constexpr (std::is_same_v<T, float>) {
    if (IsNonfinite(row)) return std::numeric_limits<float>::quiet_NaN();
    const double magnitude = std::pow(10.0, static_cast<double>(bits % 21) - 12);
    const double factor = bits % 5 == 0 ? 0.0 : 1 + static_cast<double>(bits % 997) / 997;
    return static_cast<float>(-magnitude * factor);
  } else if constexpr (std::is_same_v<T, int32_t>) {
    return IsNonfinite(row) ? -1 : static_cast<int32_t>(bits % (1U << 31));
  } else {
    return IsNonfinite(row) ? T{0} : static_cast<T>(bits % 4 > 0);
  }
}

/// Returns the sum of the logprobs of a segment, its number of rows, or whether all are greedy.
template <typename T>
T SegmentOf(const std::vector<Row>& rows, int64_t begin, int64_t end) {
  double sum = 0;
  uint32_t scored = 0;
  bool is_greedy = true;
  for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
    if (rows[i].is_ignored) continue;
    sum += static_cast<double>(ValueOf<float>(rows[i], "logprob", 0));
    is_greedy = is_greedy && ValueOf<uint8_t>(rows[i], "greedy", 0) != 0;
    ++scored;
  }
  if constexpr (std::is_same_v<T, double>) return sum;
  if constexpr (std::is_same_v<T, uint32_t>) return scored;
  return static_cast<T>(is_greedy);
}

/// What is asked about rows.
struct Question {
  uint32_t outputs = 0;
  int64_t top_k = 0;
  std::vector<int64_t> segment_offsets;
};

/// Returns the column of these rows in an answer.
template <typename T>
std::vector<T> ColumnOf(const ScoreColumn<T>& column, const std::vector<Row>& rows,
                        const Question& question) {
  std::vector<T> values;
  const auto add = [&](const Row& row, uint64_t index) {
    values.push_back(ValueOf<T>(row, column.name, index));
  };
  switch (column.shape) {
    case ColumnShape::kRow:
      if ((question.outputs & column.bit) == 0) break;
      for (const Row& row : rows) add(row, 0);
      break;
    case ColumnShape::kTopK:
      for (const Row& row : rows) {
        for (int64_t k = 0; k < question.top_k; ++k) add(row, static_cast<uint64_t>(k));
      }
      break;
    case ColumnShape::kCandidate:
      for (const Row& row : rows) {
        for (size_t i = 0; i < row.candidates.size(); ++i) {
          add(row, i * 1000 + static_cast<uint64_t>(row.candidates[i]));
        }
      }
      break;
    case ColumnShape::kSegment:
      for (size_t i = 1; i < question.segment_offsets.size(); ++i) {
        values.push_back(
            SegmentOf<T>(rows, question.segment_offsets[i - 1], question.segment_offsets[i]));
      }
      break;
  }
  return values;
}

uint32_t LongestStage(const std::vector<Row>& rows, absl::string_view name) {
  uint32_t longest = 0;
  for (const Row& row : rows) {
    longest = std::max(longest, static_cast<uint32_t>(Hash(row.about, name, 0) % 10'000));
  }
  return longest;
}

/// Returns the time of the kernels for these rows, which differs from that of other rows.
uint64_t KernelNanoseconds(const std::vector<Row>& rows) {
  uint64_t sum = rows.size();
  for (const Row& row : rows) sum = sum * 31 + Hash(row.about, "kernel_ns", 0) % 1'000'000;
  return sum % (uint64_t{1} << 50);
}

int64_t CountIgnored(const std::vector<Row>& rows) {
  return std::count_if(rows.begin(), rows.end(), [](const Row& row) { return row.is_ignored; });
}

/// Returns the rows of a message, whose arrays must fit each other.
std::vector<Row> RowsOf(const v1::ScoreRequest& request) {
  const size_t num_rows = request.rows();
  const auto dtype = static_cast<Dtype>(request.dtype());
  const auto row_bytes = static_cast<size_t>(request.hidden_size() * DtypeBytes(dtype));
  const auto targets = Decode<int32_t>(request.targets());
  auto temperatures = Decode<float>(request.row_temperatures());
  if (temperatures.empty()) temperatures.assign(num_rows, request.temperature());
  const auto ids = Decode<int32_t>(request.candidate_ids());
  auto offsets = Decode<uint32_t>(request.candidate_offsets());
  if (offsets.empty()) offsets.assign(num_rows + 1, 0);
  const bool fits = request.hidden().size() == num_rows * row_bytes && targets.size() == num_rows &&
                    temperatures.size() == num_rows && offsets.size() == num_rows + 1 &&
                    offsets.front() == 0 && offsets.back() == ids.size() &&
                    std::is_sorted(offsets.begin(), offsets.end());
  EXPECT_TRUE(fits) << "the arrays of a message do not fit each other";
  if (!fits) return {};
  std::vector<Row> rows;
  for (size_t i = 0; i < num_rows; ++i) {
    rows.push_back(MakeRow(request.hidden().substr(i * row_bytes, row_bytes), targets[i],
                           request.ignore_index(), temperatures[i],
                           request.has_entropy_temperature()
                               ? std::optional(request.entropy_temperature())
                               : std::nullopt,
                           {ids.begin() + offsets[i], ids.begin() + offsets[i + 1]}));
  }
  return rows;
}

std::string BytesOfColumn(absl::string_view name, const v1::ScoreResponse& response) {
  const auto* const field = response.GetDescriptor()->FindFieldByName(std::string(name));
  return response.GetReflection()->GetString(response, field);
}

void SetColumn(absl::string_view name, const std::string& bytes, v1::ScoreResponse* response) {
  const auto* const field = response->GetDescriptor()->FindFieldByName(std::string(name));
  response->GetReflection()->SetString(response, field, bytes);
}

/// Scores a message.
v1::ScoreResponse Answer(const v1::ScoreRequest& request, uint64_t version = 1) {
  const std::vector<Row> rows = RowsOf(request);
  Question question = {
      .outputs = request.outputs(), .top_k = request.top_k(), .segment_offsets = {}};
  for (const uint32_t offset : Decode<uint32_t>(request.segment_offsets())) {
    question.segment_offsets.push_back(offset);
  }
  v1::ScoreResponse response;
  response.set_rows(request.rows());
  response.set_weights_version(version);
  response.set_ignored_rows(static_cast<uint32_t>(CountIgnored(rows)));
  response.set_nonfinite_rows(
      static_cast<uint32_t>(std::count_if(rows.begin(), rows.end(), IsNonfinite)));
  ForEachScoreColumn([&](const auto& column) {
    SetColumn(column.name, Encode(ColumnOf(column, rows, question)), &response);
  });
  response.mutable_timings()->set_queue_us(LongestStage(rows, "queue_us"));
  response.mutable_timings()->set_copy_us(LongestStage(rows, "copy_us"));
  response.mutable_timings()->set_engine_us(LongestStage(rows, "engine_us"));
  response.mutable_timings()->set_total_us(LongestStage(rows, "total_us"));
  if (request.trace()) response.mutable_trace()->set_kernel_ns(KernelNanoseconds(rows));
  return response;
}

// --- random calls

/// The memory and the arguments of a random call, and its rows.
struct RandomCall {
  explicit RandomCall(Draws& draws) {
    args.rows = draws.OneOf(kNumRows)(draws);
    args.hidden_size = draws.Between(2, 5);
    args.dtype = draws.OneOf(kDtypes);
    args.temperature = draws.Chance(50) ? 1.0F : Quarters(draws);
    if (draws.Chance(40)) args.entropy_temperature = Quarters(draws);
    args.ignore_index = draws.OneOf(kIgnoreIndices);
    args.outputs = static_cast<uint32_t>(draws.Between(0, (1 << kOutputNames.size()) - 1));
    args.top_k = static_cast<int32_t>(draws.Between(0, 3));
    args.head = draws.Chance(50) ? "" : "base";
    args.weights_version = static_cast<uint64_t>(draws.Between(0, 3));
    args.priority = static_cast<Priority>(draws.Between(1, 3));
    args.reject_nonfinite = draws.Chance(50);
    args.request_id = draws.Chance(50) ? "" : "id";
    args.trace = draws.Chance(50);

    const int64_t ignored_percent = draws.OneOf(kIgnoredPercent);
    const bool has_temperatures = draws.Chance(40);
    const bool has_candidates = draws.Chance(50);
    if (has_candidates) candidate_offsets.push_back(0);
    for (int64_t row = 0; row < args.rows; ++row) {
      std::string bytes;
      Append(static_cast<uint32_t>(row), &bytes);  // so that all rows differ
      while (std::ssize(bytes) < args.hidden_size * DtypeBytes(args.dtype)) {
        bytes.push_back(static_cast<char>(draws.Between(0, 255)));
      }
      hidden += bytes;
      targets.push_back(draws.Chance(ignored_percent) ? args.ignore_index
                                                      : static_cast<int32_t>(draws.Between(0, 50)));
      if (has_temperatures) row_temperatures.push_back(Quarters(draws));
      std::vector<int32_t> candidates;
      if (has_candidates) {
        candidates.resize(static_cast<size_t>(draws.Between(0, 4)));
        for (int32_t& id : candidates) id = static_cast<int32_t>(draws.Between(0, 50));
        candidate_ids.insert(candidate_ids.end(), candidates.begin(), candidates.end());
        candidate_offsets.push_back(std::ssize(candidate_ids));
      }
      rows.push_back(MakeRow(bytes, targets.back(), args.ignore_index,
                             has_temperatures ? row_temperatures.back() : args.temperature,
                             args.entropy_temperature, candidates));
    }
    if (draws.Chance(60)) {
      segment_offsets = {0};
      const int64_t cuts = draws.Chance(80) ? draws.Between(0, 6) : 2 * args.rows + 40;
      for (int64_t i = 0; i < cuts; ++i) segment_offsets.push_back(draws.Between(0, args.rows));
      if (args.rows > 0 || draws.Chance(50)) segment_offsets.push_back(args.rows);
      std::sort(segment_offsets.begin(), segment_offsets.end());
    }
    args.hidden = {reinterpret_cast<const std::byte*>(hidden.data()), hidden.size()};
    args.targets = targets;
    args.row_temperatures = row_temperatures;
    args.candidate_ids = candidate_ids;
    args.candidate_offsets = candidate_offsets;
    args.segment_offsets = segment_offsets;
  }
  RandomCall(const RandomCall&) = delete;
  RandomCall& operator=(const RandomCall&) = delete;

  int64_t hidden_bytes() const { return args.hidden_size * DtypeBytes(args.dtype); }
  /// Bytes of a row in a message, without its candidates.
  int64_t row_bytes() const {
    return hidden_bytes() + 4 + (row_temperatures.empty() ? 0 : 4) +
           (candidate_offsets.empty() ? 0 : 4);
  }
  uint32_t outputs() const { return args.outputs == 0 ? output::kDefault : args.outputs; }
  std::vector<Row> RowsOfChunk(const Chunk& chunk) const {
    return {rows.begin() + chunk.row_begin, rows.begin() + chunk.row_end};
  }

  std::string hidden;
  std::vector<int32_t> targets;
  std::vector<float> row_temperatures;
  std::vector<int32_t> candidate_ids;
  std::vector<int64_t> candidate_offsets;
  std::vector<int64_t> segment_offsets;
  ScoreArgs args;
  std::vector<Row> rows;

 private:
  using NumRows = int64_t (*)(Draws&);
  static constexpr auto kNumRows =
      std::to_array<NumRows>({[](Draws&) { return int64_t{0}; }, [](Draws&) { return int64_t{1}; },
                              [](Draws& draws) { return draws.Between(2, 12); },
                              [](Draws& draws) { return draws.Between(2, 40); },
                              [](Draws& draws) { return draws.Between(2, 40); },
                              [](Draws& draws) { return draws.Between(100, 300); }});
  static constexpr std::array<Dtype, 3> kDtypes = {Dtype::kBf16, Dtype::kF16, Dtype::kF32};
  static constexpr std::array<int32_t, 4> kIgnoreIndices = {-100, -1, 77,
                                                            std::numeric_limits<int32_t>::min()};
  static constexpr std::array<int64_t, 5> kIgnoredPercent = {0, 0, 30, 90, 100};

  static float Quarters(Draws& draws) { return static_cast<float>(draws.Between(1, 16)) / 4; }
};

/// Limits of the server and the client's own target size of a request.
struct Bounds {
  Limits limits;
  int64_t request_bytes = kMany;
};

Bounds DrawBounds(const RandomCall& call, Draws& draws) {
  const int64_t rows = std::max<int64_t>(1, call.args.rows);
  const std::vector<int64_t> near = {1, 2, 3, 5, rows / 2 + 1, rows, 2 * rows};
  const auto some_bytes = [&](int64_t reserved) {
    if (draws.Chance(30)) return kMany;
    if (draws.Chance(10)) return draws.Between(1, reserved + 1);
    const int64_t whole = rows * call.row_bytes() + 4 * std::ssize(call.candidate_ids);
    const int64_t extra = draws.Chance(50) ? draws.Between(-4, 12) : draws.Between(0, 300);
    return std::max<int64_t>(1, reserved + whole / draws.OneOf(near) + extra);
  };
  int64_t most = 1;
  for (const Row& row : call.rows) most = std::max(most, std::ssize(row.candidates));
  const std::vector<int64_t> candidates = {most, most + 3, 4 * most + 1, kMany};
  const std::vector<int64_t> segments = {1, 4, 100, kMany};
  return {.limits = {.message_bytes_max = some_bytes(kReservedBytes),
                     .request_rows_max = draws.Chance(40) ? kMany : draws.OneOf(near),
                     .candidates_max = draws.OneOf(candidates),
                     .segments_max = draws.OneOf(segments)},
          .request_bytes = some_bytes(0)};
}

v1::ScoreRequest Parse(const grpc::ByteBuffer& body) {
  grpc::Slice slice;
  EXPECT_TRUE(body.DumpToSingleSlice(&slice).ok());
  v1::ScoreRequest request;
  EXPECT_TRUE(request.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
  return request;
}

grpc::ByteBuffer Body(const v1::ScoreResponse& response) {
  const grpc::Slice slice(response.SerializeAsString());
  return {&slice, 1};
}

constexpr auto kKeep = [](uint64_t) -> absl::StatusOr<bool> { return true; };

/// A random call, its division into requests, and what the server receives and answers.
class CutCall {
 public:
  explicit CutCall(uint32_t seed)
      : draws(seed), call(draws), bounds(DrawBounds(call, draws)), plan(Plan(bounds)) {
    EXPECT_EQ(CheckScoreArgs(call.args), absl::OkStatus());
  }

  ChunkPlan Plan(const Bounds& within) const {
    return PlanChunks(call.args, within.limits, within.request_bytes);
  }
  v1::ScoreRequest Received(const Chunk& chunk) const {
    return Parse(EncodeScoreRequest(call.args, plan, chunk, nullptr));
  }
  v1::ScoreResponse Answered(const Chunk& chunk, uint64_t version = 1) const {
    return Answer(Received(chunk), version);
  }

  /// Returns the chunks in random order.
  std::vector<const Chunk*> Shuffled() {
    std::vector<const Chunk*> chunks;
    for (const Chunk& chunk : plan.chunks) chunks.push_back(&chunk);
    for (int64_t i = std::ssize(chunks) - 1; i > 0; --i) {
      std::swap(chunks[static_cast<size_t>(i)], chunks[static_cast<size_t>(draws.Between(0, i))]);
    }
    return chunks;
  }

  /// Compares the columns of a result with those that follow from the arguments.
  void ExpectColumns(const ScoreResult& result) const {
    const Question question = {.outputs = call.outputs(),
                               .top_k = call.args.top_k,
                               .segment_offsets = call.segment_offsets};
    ForEachScoreColumn([&](const auto& column) {
      const auto expected = ColumnOf(column, call.rows, question);
      const auto& values = result.*column.values;
      EXPECT_EQ(values.size(), expected.size()) << column.name;
      // Bytes tell 0.0 from -0.0, and let NaN equal NaN.
      EXPECT_TRUE(Encode(values) == Encode(expected))
          << column.name << ": " << ::testing::PrintToString(values) << ", not "
          << ::testing::PrintToString(expected);
    });
  }

  /// Compares a result with what follows from the arguments and the chunks that were sent.
  void ExpectResult(const ScoreResult& result, const ChunkPlan& sent) const {
    ExpectColumns(result);
    const std::vector<Row>& rows = call.rows;
    EXPECT_EQ(result.rows, call.args.rows);
    EXPECT_EQ(result.top_k, call.args.top_k);
    EXPECT_EQ(result.ignored_rows, CountIgnored(rows));
    EXPECT_EQ(result.nonfinite_rows, std::count_if(rows.begin(), rows.end(), IsNonfinite));
    EXPECT_EQ(result.timings.queue_us, LongestStage(rows, "queue_us"));
    EXPECT_EQ(result.timings.copy_us, LongestStage(rows, "copy_us"));
    EXPECT_EQ(result.timings.engine_us, LongestStage(rows, "engine_us"));
    EXPECT_EQ(result.timings.total_us, LongestStage(rows, "total_us"));
    EXPECT_EQ(result.requests, std::ssize(sent.chunks));
    std::vector<uint64_t> kernels;
    std::vector<uint64_t> expected;
    for (const RequestTrace& trace : result.traces) {
      kernels.push_back(static_cast<uint64_t>(absl::ToInt64Nanoseconds(trace.kernel)));
    }
    for (const Chunk& chunk : sent.chunks) {
      if (call.args.trace) expected.push_back(KernelNanoseconds(call.RowsOfChunk(chunk)));
    }
    EXPECT_EQ(kernels, expected);
  }

  Draws draws;
  const RandomCall call;
  const Bounds bounds;
  const ChunkPlan plan;
};

/// Runs `check` with the call of each seed, until one fails.
template <typename Check>
void ForEachCall(const Check& check) {
  for (const uint32_t seed : SeedsOfDraws(kCalls)) {
    SCOPED_TRACE(absl::StrCat("LOGPROBD_TEST_SEED=", seed));
    CutCall cut(seed);
    check(cut);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(ChunkCutsTest, JoinedAnswersEqualTheAnswerToOneRequest) {
  int64_t calls_that_are_cut = 0;
  int64_t sums_in_client = 0;

  ForEachCall([&](CutCall& cut) {
    const ChunkPlan whole = cut.Plan({.limits = kUnbounded});
    ASSERT_EQ(whole.chunks.size(), 1U);
    ResultMerger alone(cut.call.args, whole);
    const v1::ScoreRequest request =
        Parse(EncodeScoreRequest(cut.call.args, whole, whole.chunks[0], nullptr));
    ASSERT_TRUE(alone.Add(whole.chunks[0], Body(Answer(request)), kKeep).ok());
    cut.ExpectResult(alone.Finish(), whole);

    ResultMerger merger(cut.call.args, cut.plan);
    std::set<uint64_t> versions;
    for (const Chunk* chunk : cut.Shuffled()) {
      const auto version = static_cast<uint64_t>(cut.draws.Between(1, 3));
      versions.insert(version);
      const absl::StatusOr<bool> is_kept =
          merger.Add(*chunk, Body(cut.Answered(*chunk, version)), kKeep);
      ASSERT_TRUE(is_kept.ok()) << is_kept.status();
      ASSERT_TRUE(*is_kept);
    }
    const ScoreResult result = merger.Finish();
    cut.ExpectResult(result, cut.plan);
    EXPECT_EQ(std::set(result.weights_versions.begin(), result.weights_versions.end()), versions);
    EXPECT_TRUE(std::is_sorted(result.weights_versions.begin(), result.weights_versions.end()));
    EXPECT_EQ(result.weights_versions.size(), versions.size());
    EXPECT_EQ(result.weights_version, *versions.rbegin());
    calls_that_are_cut += cut.plan.chunks.size() > 1 ? 1 : 0;
    sums_in_client += cut.plan.sum_segments_in_client ? 1 : 0;
  });

  // Otherwise the draws would prove little.
  if (std::getenv("LOGPROBD_TEST_SEED") == nullptr && !HasFailure()) {
    EXPECT_GT(calls_that_are_cut, kCalls / 4);
    EXPECT_GT(sums_in_client, kCalls / 10);
  }
}

TEST(ChunkCutsTest, RequestsHoldEachRowOnceAndTheArgumentsOfTheCall) {
  ForEachCall([](CutCall& cut) {
    const ScoreArgs& args = cut.call.args;
    std::vector<std::string> sent;
    for (const Chunk& chunk : cut.plan.chunks) {
      const v1::ScoreRequest request = cut.Received(chunk);
      for (const Row& row : RowsOf(request)) sent.push_back(row.about);
      EXPECT_EQ(request.rows(), chunk.rows());
      EXPECT_EQ(request.request_id(), args.request_id);
      EXPECT_EQ(request.head(), args.head);
      EXPECT_EQ(request.weights_version(), args.weights_version);
      EXPECT_EQ(static_cast<int>(request.dtype()), static_cast<int>(args.dtype));
      EXPECT_EQ(request.hidden_size(), args.hidden_size);
      EXPECT_EQ(request.ignore_index(), args.ignore_index);
      EXPECT_EQ(request.top_k(), static_cast<uint32_t>(args.top_k));
      EXPECT_EQ(static_cast<int>(request.priority()), static_cast<int>(args.priority));
      EXPECT_EQ(request.reject_nonfinite(), args.reject_nonfinite);
      EXPECT_EQ(request.trace(), args.trace);
      EXPECT_EQ(request.has_entropy_temperature(), args.entropy_temperature.has_value());
      EXPECT_EQ(request.outputs(),
                cut.call.outputs() |
                    (cut.plan.sum_segments_in_client ? output::kLogprob | output::kGreedy : 0U));
    }

    std::vector<std::string> expected;
    for (const Row& row : cut.call.rows) expected.push_back(row.about);
    EXPECT_TRUE(sent == expected) << sent.size() << " rows are sent, of " << expected.size();
  });
}

TEST(ChunkCutsTest, RequestsKeepTheLimits) {
  ForEachCall([](CutCall& cut) {
    const Limits& limits = cut.bounds.limits;
    const int64_t message_bytes = limits.message_bytes_max - kReservedBytes;
    const auto segments = std::max<int64_t>(0, std::ssize(cut.call.segment_offsets) - 1);
    for (const Chunk& chunk : cut.plan.chunks) {
      const v1::ScoreRequest request = cut.Received(chunk);
      const auto ids = std::ssize(request.candidate_ids()) / 4;
      EXPECT_LE(chunk.rows(), limits.request_rows_max);
      EXPECT_LE(ids, limits.candidates_max);
      EXPECT_EQ(ids, chunk.candidate_end - chunk.candidate_begin);
      if (segments > 0 && !request.segment_offsets().empty()) {
        EXPECT_EQ(cut.plan.chunks.size(), 1U);
        EXPECT_LE(segments, limits.segments_max);
      }
      if (chunk.rows() <= 1) continue;  // a row above the limits is sent alone
      const int64_t arrays = chunk.rows() * cut.call.row_bytes() + 4 * ids;
      EXPECT_LE(arrays + (request.segment_offsets().empty() ? 0 : 4 * segments), message_bytes);
      EXPECT_LE(static_cast<int64_t>(request.ByteSizeLong()), limits.message_bytes_max);
      EXPECT_LE(chunk.rows() * cut.call.hidden_bytes() + 4 * ids, cut.bounds.request_bytes);
    }

    if (segments > 0 || !cut.call.candidate_ids.empty()) return;
    for (size_t i = 1; i < cut.plan.chunks.size(); ++i) {
      const int64_t both = cut.plan.chunks[i - 1].rows() + cut.plan.chunks[i].rows();
      EXPECT_TRUE(both > limits.request_rows_max || both * cut.call.row_bytes() > message_bytes ||
                  both * cut.call.hidden_bytes() > cut.bounds.request_bytes)
          << "requests " << i - 1 << " and " << i << " could be one";
    }
  });
}

TEST(ChunkCutsTest, RequestsForPlacedRowsSayTheSameAboutThem) {
  void* const memory =
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  Placement placement;
  placement.shared =
      SharedSpan{.region = std::make_shared<SharedRegion>(
                     "region-1", absl::MakeSpan(static_cast<std::byte*>(memory), 4096)),
                 .offset = 128,
                 .bytes = 64};

  ForEachCall([&](CutCall& cut) {
    for (const Chunk& chunk : cut.plan.chunks) {
      v1::ScoreRequest placed =
          Parse(EncodeSliceRequest(cut.call.args, cut.plan, chunk, placement));
      v1::ScoreRequest inside = cut.Received(chunk);
      ASSERT_EQ(placed.shared_memory().offset(), 128U);
      placed.clear_shared_memory();
      inside.clear_hidden();
      EXPECT_EQ(placed.SerializeAsString(), inside.SerializeAsString());
    }
  });
}

/// Returns `bytes` with another length: elements or single bytes more or fewer.
std::string WithAnotherLength(const std::string& bytes, size_t element_bytes, Draws& draws) {
  std::vector<std::string> others = {bytes + '\0', bytes + std::string(element_bytes, '\1')};
  if (!bytes.empty()) {
    others.push_back(bytes + bytes);
    others.push_back(bytes.substr(1));
    others.push_back(bytes.substr(element_bytes));
    others.push_back(bytes.substr(0, bytes.size() - element_bytes));
    others.emplace_back();
  }
  return draws.OneOf(others);
}

TEST(ChunkCutsTest, RefusesAnAnswerOfAnotherLengthWithTheNameOfItsColumn) {
  ForEachCall([](CutCall& cut) {
    ResultMerger merger(cut.call.args, cut.plan);
    const std::vector<const Chunk*> chunks = cut.Shuffled();
    const auto columns = static_cast<int64_t>(std::tuple_size_v<decltype(kScoreColumns)>);
    int64_t column_left = cut.draws.Between(0, columns - 1);
    ForEachScoreColumn([&](const auto& column) {
      if (column_left-- != 0) return;
      v1::ScoreResponse response = cut.Answered(*chunks[0]);
      const std::string right = BytesOfColumn(column.name, response);
      const size_t element_bytes = sizeof((ScoreColumns().*column.values)[0]);
      const std::string wrong = WithAnotherLength(right, element_bytes, cut.draws);
      SetColumn(column.name, wrong, &response);

      const absl::Status status = merger.Add(*chunks[0], Body(response), kKeep).status();

      EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
      EXPECT_EQ(status.message(),
                absl::StrCat("the server sent ", wrong.size(), " bytes of ", column.name,
                             ", but the client expects ", right.size()));
    });

    // The refused answer leaves nothing behind.
    for (const Chunk* chunk : chunks) {
      ASSERT_TRUE(merger.Add(*chunk, Body(cut.Answered(*chunk)), kKeep).ok());
    }
    cut.ExpectResult(merger.Finish(), cut.plan);
  });
}

TEST(ChunkCutsTest, RefusesAnAnswerToAnotherRequestUnlessItsArraysHaveTheSameLengths) {
  int64_t refused = 0;
  ForEachCall([&](CutCall& cut) {
    if (cut.plan.chunks.size() < 2) return;
    const std::vector<const Chunk*> chunks = cut.Shuffled();
    const Chunk& asked = *chunks[0];
    const Chunk& answered = *chunks[1];
    const auto candidates = [](const Chunk& chunk) {
      return chunk.candidate_end - chunk.candidate_begin;
    };
    ResultMerger merger(cut.call.args, cut.plan);

    const absl::Status status = merger.Add(asked, Body(cut.Answered(answered)), kKeep).status();

    if (asked.rows() != answered.rows()) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
      EXPECT_EQ(status.message(), absl::StrCat("the server answered ", answered.rows(),
                                               " rows, but ", asked.rows(), " were sent"));
    } else if (candidates(asked) != candidates(answered)) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
      EXPECT_THAT(std::string(status.message()), HasSubstr("bytes of candidate_logprobs"));
    } else {
      EXPECT_EQ(status, absl::OkStatus());
    }
    refused += status.ok() ? 0 : 1;
  });
  if (std::getenv("LOGPROBD_TEST_SEED") == nullptr && !HasFailure()) {
    EXPECT_GT(refused, kCalls / 20);
  }
}

TEST(ChunkCutsTest, ChunksOfOtherVersionsAreNamedAndReplaced) {
  ForEachCall([](CutCall& cut) {
    ResultMerger merger(cut.call.args, cut.plan);
    std::vector<uint64_t> versions(cut.plan.chunks.size());
    std::vector<const Chunk*> chunks = cut.Shuffled();
    const Chunk* const twice = cut.draws.OneOf(chunks);
    chunks.push_back(twice);
    for (const Chunk* chunk : chunks) {
      const auto version = static_cast<uint64_t>(cut.draws.Between(1, 2));
      versions[static_cast<size_t>(chunk - cut.plan.chunks.data())] = version;
      ASSERT_TRUE(merger.Add(*chunk, Body(cut.Answered(*chunk, version)), kKeep).ok());
    }

    std::vector<const Chunk*> stale;
    for (size_t i = 0; i < versions.size(); ++i) {
      if (versions[i] != 2) stale.push_back(&cut.plan.chunks[i]);
    }
    EXPECT_EQ(merger.OtherThan(2), stale);
    for (const Chunk* chunk : stale) {
      ASSERT_TRUE(merger.Add(*chunk, Body(cut.Answered(*chunk, 2)), kKeep).ok());
    }
    const ScoreResult result = merger.Finish();
    EXPECT_THAT(result.weights_versions, ElementsAre(2U));
    cut.ExpectResult(result, cut.plan);
  });
}

}  // namespace
}  // namespace logprobd::client
