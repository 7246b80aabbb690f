// Compares every score of a RowScorer with the double reference, for a head in one shard and in
// several.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/tile.h"
#include "kernels/cpu/row_scorer.h"
#include "kernels/reference/row_reference.h"

namespace logprobd::kernels {
namespace {

constexpr int64_t kRows = 41;
constexpr int64_t kHidden = 9;
constexpr int64_t kVocab = 1000;  // six tiles, of which the last has 40 columns
constexpr int32_t kTopK = 5;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint16_t ToBf16(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }

/// Returns `count` multiples of 1/2 in [-2, 2). Dot products of them are exact in fp32, and many
/// are equal.
std::vector<uint16_t> Values(int64_t count, uint32_t seed) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  uint32_t state = seed;
  for (uint16_t& value : values) {
    state = state * 1664525U + 1013904223U;
    value = ToBf16((static_cast<float>(state >> 29) - 4.0F) / 2.0F);
  }
  return values;
}

struct Freed {
  void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{64}); }
};

/// A head whose logits are exact in fp32; some biases are -inf. Beyond the vocabulary the bias is
/// larger than every logit.
struct SomeHead {
  explicit SomeHead(int64_t vocab = kVocab)
      : weight(Values(vocab * kHidden, 2)),
        bias(static_cast<size_t>(NumTiles(vocab) * kTileColumns), 1e6F),
        tiles(static_cast<std::byte*>(
            ::operator new (static_cast<size_t>(PackedWeightBytes(Dtype::kBf16, kHidden, vocab)),
                            std::align_val_t{64}))) {
    for (int64_t column = 0; column < vocab; ++column) {
      bias[static_cast<size_t>(column)] = static_cast<float>(column * 37 % 16 - 8) / 8;
    }
    for (const size_t column : {3U, 191U, 192U, 999U}) {
      if (column < static_cast<size_t>(vocab)) bias[column] = -kInfinity;
    }
    strided = {.strided_weight = {weight.data(), kHidden},
               .dtype = Dtype::kBf16,
               .hidden_size = kHidden,
               .vocab_size = vocab,
               .tile_end = NumTiles(vocab),
               .transform = {.scale = 0.25F},
               .bias = bias.data()};
    packed = strided;
    packed.strided_weight = {};
    packed.packed_weight = tiles.get();
    for (int64_t tile = 0; tile < NumTiles(vocab); ++tile) {
      const int64_t first = tile * kTileColumns;
      PackTile(Dtype::kBf16, strided.strided_weight.From(Dtype::kBf16, first, 0),
               std::min<int64_t>(kTileColumns, vocab - first), kHidden,
               tiles.get() + tile * PackedTileBytes(Dtype::kBf16, kHidden));
    }
  }

  /// Returns tiles [begin, end) of the head.
  CpuHead Shard(int64_t begin, int64_t end) const {
    CpuHead shard = packed;
    shard.packed_weight = tiles.get() + begin * PackedTileBytes(Dtype::kBf16, kHidden);
    shard.tile_begin = begin;
    shard.tile_end = end;
    return shard;
  }

  std::vector<uint16_t> weight;
  std::vector<float> bias;
  std::unique_ptr<std::byte, Freed> tiles;
  CpuHead strided;
  CpuHead packed;
};

/// Rows to score.
struct Batch {
  explicit Batch(int64_t vocab = kVocab) : hidden(Values(kRows * kHidden, 1)) {
    for (int32_t row = 0; row < kRows; ++row) {
      targets.push_back(static_cast<int32_t>(row * 7919 % vocab));
      temperatures.push_back(0.5F + 0.05F * static_cast<float>(row));
      entropy_temperatures.push_back(2.0F - 0.03F * static_cast<float>(row));
    }
    if (vocab != kVocab) return;
    // The edges of tiles, logits of -inf and a row without a target.
    const std::vector<int32_t> first = {0, 3, 191, 192, 193, 575, 576, 999, 960, 959, -1};
    std::copy(first.begin(), first.end(), targets.begin());
    candidate_rows = {0, 0, 0, 5, 15, 16, 17, 31, 40, 40};
    candidate_ids = {0, 191, 192, 3, 998, 400, 575, 576, 7, 7};
  }

  std::vector<uint16_t> hidden;
  std::vector<int32_t> targets;
  std::vector<float> temperatures;
  std::vector<float> entropy_temperatures;  ///< Empty: those of the rows.
  std::vector<int32_t> candidate_rows;
  std::vector<int32_t> candidate_ids;
};

/// The scores of a batch.
struct Scores {
  explicit Scores(const Batch& batch) : candidate_logprobs(batch.candidate_ids.size()) {}

  std::vector<float> logprob = std::vector<float>(kRows);
  std::vector<float> entropy = logprob;
  std::vector<float> lse = logprob;
  std::vector<float> lse_rest = logprob;
  std::vector<float> argmax_logprob = logprob;
  std::vector<float> sum_p_squared = logprob;
  std::vector<float> max_logit = logprob;
  std::vector<float> min_logit = logprob;
  std::vector<int32_t> argmax_id = std::vector<int32_t>(kRows);
  std::vector<int32_t> target_rank = argmax_id;
  std::vector<int32_t> top_k_ids = std::vector<int32_t>(kRows * kTopK);
  std::vector<float> top_k_logprobs = std::vector<float>(kRows * kTopK);
  std::vector<float> candidate_logprobs;
  std::vector<uint8_t> nonfinite = std::vector<uint8_t>(kRows);
};

/// A score that a batch may ask for.
struct Kind {
  std::string name;
  std::function<void(const Batch&, Scores&, ScoreRowsParams&)> ask;
  std::function<std::vector<uint32_t>(const Scores&)> bits;
};

template <typename T>
Kind KindOf(std::string name, std::vector<T> Scores::*score, T* ScoreRowsParams::*param) {
  return {.name = std::move(name),
          .ask = [=](const Batch& /*batch*/, Scores& scores,
                     ScoreRowsParams& params) { params.*param = (scores.*score).data(); },
          .bits =
              [=](const Scores& scores) {
                std::vector<uint32_t> bits;
                for (const T value : scores.*score) bits.push_back(std::bit_cast<uint32_t>(value));
                return bits;
              }};
}

std::vector<Kind> AllKinds() {
  using P = ScoreRowsParams;
  std::vector<Kind> kinds = {
      KindOf("logprob", &Scores::logprob, &P::logprob),
      KindOf("entropy", &Scores::entropy, &P::entropy),
      KindOf("lse", &Scores::lse, &P::lse),
      KindOf("lse_rest", &Scores::lse_rest, &P::lse_rest),
      KindOf("argmax_id", &Scores::argmax_id, &P::argmax_id),
      KindOf("argmax_logprob", &Scores::argmax_logprob, &P::argmax_logprob),
      KindOf("sum_p_squared", &Scores::sum_p_squared, &P::sum_p_squared),
      KindOf("max_logit", &Scores::max_logit, &P::max_logit),
      KindOf("min_logit", &Scores::min_logit, &P::min_logit),
      KindOf("target_rank", &Scores::target_rank, &P::target_rank),
      KindOf("top_k_ids", &Scores::top_k_ids, &P::top_k_ids),
      KindOf("top_k_logprobs", &Scores::top_k_logprobs, &P::top_k_logprobs),
      KindOf("candidate_logprobs", &Scores::candidate_logprobs, &P::candidate_logprobs)};
  const auto ask_top_k = [](const Batch& /*batch*/, Scores& scores, ScoreRowsParams& params) {
    params.top_k = kTopK;  // both arrays are needed
    params.top_k_ids = scores.top_k_ids.data();
    params.top_k_logprobs = scores.top_k_logprobs.data();
  };
  kinds[10].ask = kinds[11].ask = ask_top_k;
  kinds[12].ask = [](const Batch& batch, Scores& scores, ScoreRowsParams& params) {
    params.num_candidates = static_cast<int64_t>(batch.candidate_ids.size());
    params.candidate_rows = batch.candidate_rows.data();
    params.candidate_ids = batch.candidate_ids.data();
    params.candidate_logprobs = scores.candidate_logprobs.data();
  };
  return kinds;
}

ScoreRowsParams ParamsOf(const Batch& batch, const std::vector<Kind>& kinds, Scores& scores) {
  ScoreRowsParams params;
  params.hidden = batch.hidden.data();
  params.num_rows = kRows;
  params.targets = batch.targets.data();
  params.temperatures = batch.temperatures.data();
  if (!batch.entropy_temperatures.empty()) {
    params.entropy_temperatures = batch.entropy_temperatures.data();
  }
  params.nonfinite = scores.nonfinite.data();
  for (const Kind& kind : kinds) kind.ask(batch, scores, params);
  return params;
}

/// Runs loops backwards on the calling thread, as three of its workers.
class BackwardThreads : public LoopThreads {
 public:
  explicit BackwardThreads(int32_t num_threads) : num_threads_(num_threads) {}
  int32_t num_threads() const override { return num_threads_; }
  void ForEach(int64_t num_units, const std::function<void(int64_t, int32_t)>& body) override {
    for (int64_t unit = num_units - 1; unit >= 0; --unit) {
      body(unit, static_cast<int32_t>(unit % 3) * (num_threads_ - 1) / 2);
    }
  }

 private:
  const int32_t num_threads_;
};

/// How a scorer divides its work.
struct Division {
  int64_t batch_rows_max;
  int32_t num_threads;
  int64_t step_rows;  ///< Number of rows of a step that follows.
};
// Three steps of one unit of rows, and one step of three units, which are small because many
// threads share the memory.
constexpr Division kDivisions[] = {{16, 3, 16}, {kRows, 256, 48}};

class RowScorerScoresTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!CpuIsaRuns(GetParam())) GTEST_SKIP() << "this CPU has no " << CpuIsaName(GetParam());
  }

  RowScorer::Options Options(const Division& division) const {
    return {.isa = GetParam(),
            .num_threads = division.num_threads,
            .batch_rows_max = division.batch_rows_max,
            .top_k_max = kTopK};
  }

  Scores ScoreWhole(const CpuHead& head, const Batch& batch, const Division& division,
                    const std::vector<Kind>& kinds = AllKinds()) const {
    Scores scores(batch);
    BackwardThreads threads(division.num_threads);
    RowScorer scorer(head, Options(division), threads);
    EXPECT_EQ(scorer.step_rows(), division.step_rows);
    scorer.Score(ParamsOf(batch, kinds, scores));
    return scores;
  }

  /// Scores with shards that begin at these tiles; the last bound is the end of the last shard.
  Scores ScoreInShards(const SomeHead& head, const Batch& batch, const Division& division,
                       const std::vector<int64_t>& bounds,
                       const std::vector<Kind>& kinds = AllKinds()) const;
};

INSTANTIATE_TEST_SUITE_P(All, RowScorerScoresTest, ::testing::ValuesIn(kAllCpuIsas),
                         [](const auto& info) { return std::string(CpuIsaName(info.param)); });

/// Combines element by element what every shard has, and gives it to every shard.
template <typename T, typename Combine>
void ReduceAs(const std::vector<std::span<const Reduction>>& shards, size_t at, Combine combine) {
  for (int64_t i = 0; i < shards[0][at].count; ++i) {
    T value = static_cast<T*>(shards[0][at].values)[i];
    for (size_t shard = 1; shard < shards.size(); ++shard) {
      value = combine(value, static_cast<T*>(shards[shard][at].values)[i]);
    }
    for (const auto& each : shards) static_cast<T*>(each[at].values)[i] = value;
  }
}

void Reduce(const std::vector<std::span<const Reduction>>& shards) {
  const auto max = [](auto a, auto b) { return std::max(a, b); };
  for (size_t at = 0; at < shards[0].size(); ++at) {
    switch (shards[0][at].type) {
      case ReductionType::kMaxInt32:
        ReduceAs<int32_t>(shards, at, max);
        break;
      case ReductionType::kMaxUint32:
        ReduceAs<uint32_t>(shards, at, max);
        break;
      case ReductionType::kMaxUint64:
        ReduceAs<uint64_t>(shards, at, max);
        break;
      case ReductionType::kSumInt32:
        ReduceAs<int32_t>(shards, at, std::plus<>());
        break;
      case ReductionType::kSumInt64:
        ReduceAs<int64_t>(shards, at, std::plus<>());
        break;
    }
  }
}

Scores RowScorerScoresTest::ScoreInShards(const SomeHead& head, const Batch& batch,
                                          const Division& division,
                                          const std::vector<int64_t>& bounds,
                                          const std::vector<Kind>& kinds) const {
  RowScorer::Options options = Options(division);
  options.num_shards = static_cast<int32_t>(bounds.size()) - 1;
  BackwardThreads threads(division.num_threads);
  std::vector<std::unique_ptr<RowScorer>> shards;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    options.num_tiles_max = std::max(options.num_tiles_max, bounds[i + 1] - bounds[i]);
  }
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    const CpuHead shard = head.Shard(bounds[i], bounds[i + 1]);
    shards.push_back(std::make_unique<RowScorer>(shard, options, threads));
  }
  Scores scores(batch);
  const ScoreRowsParams params = ParamsOf(batch, kinds, scores);
  const auto run = [&](const std::function<std::span<const Reduction>(RowScorer&)>& step) {
    std::vector<std::span<const Reduction>> arrays;
    for (const auto& shard : shards) arrays.push_back(step(*shard));
    Reduce(arrays);
  };
  for (int64_t row = 0; row < kRows; row += division.step_rows) {
    const int64_t num_rows = std::min(division.step_rows, kRows - row);
    if (params.target_rank != nullptr) {
      run([&](RowScorer& shard) { return shard.ScoreTargets(params, row, num_rows); });
    }
    run([&](RowScorer& shard) { return shard.ScoreTiles(params, row, num_rows); });
    run([](RowScorer& shard) { return shard.SumTiles(); });
    RowScorer& last = *shards.back();
    if (params.top_k > 0) {
      uint64_t* gathered = last.gathered_top_keys();
      for (const auto& shard : shards) {
        const std::span<const uint64_t> keys = shard->TopKeys();
        EXPECT_EQ(keys.size(), static_cast<size_t>(num_rows * params.top_k));
        gathered = std::copy(keys.begin(), keys.end(), gathered);
      }
    }
    last.WriteScores();
  }
  return scores;
}

/// Returns the logits of a row, which are exact.
std::vector<double> LogitsOf(const SomeHead& head, const Batch& batch, size_t row) {
  const auto vocab = head.packed.vocab_size;
  return LogitsReference(batch.hidden.data() + row * kHidden, Dtype::kBf16, head.weight.data(),
                         Dtype::kBf16, vocab, kHidden, head.packed.transform, head.bias);
}

void ExpectNear(double ours, double expected, const char* name) {
  if (std::isinf(expected)) {
    EXPECT_EQ(ours, expected) << name;
  } else {
    EXPECT_NEAR(ours, expected, 2e-6 * std::max(1.0, std::fabs(expected))) << name;
  }
}

/// Expects the scores of finite rows.
void ExpectScoresOf(const SomeHead& head, const Batch& batch, const Scores& scores) {
  for (size_t row = 0; row < kRows; ++row) {
    SCOPED_TRACE(::testing::Message() << "row " << row);
    RowQuestion question = {.target = std::max(batch.targets[row], 0),
                            .temperature = static_cast<double>(batch.temperatures[row]),
                            .entropy_temperature = 0,
                            .top_k = kTopK,
                            .candidate_ids = {}};
    if (!batch.entropy_temperatures.empty()) {
      question.entropy_temperature = static_cast<double>(batch.entropy_temperatures[row]);
    }
    std::vector<float> candidates;
    for (size_t i = 0; i < batch.candidate_ids.size(); ++i) {
      if (batch.candidate_rows[i] != static_cast<int32_t>(row)) continue;
      question.candidate_ids.push_back(batch.candidate_ids[i]);
      candidates.push_back(scores.candidate_logprobs[i]);
    }

    const RowReference truth = ScoreRowReference(LogitsOf(head, batch, row), question);

    EXPECT_EQ(scores.nonfinite[row], 0);
    if (batch.targets[row] >= 0) {
      ExpectNear(scores.logprob[row], truth.logprob, "logprob");
      EXPECT_EQ(scores.target_rank[row], truth.target_rank);
    }
    ExpectNear(scores.entropy[row], truth.entropy, "entropy");
    ExpectNear(scores.lse[row], truth.lse, "lse");
    const double exact_lse = static_cast<double>(scores.lse[row]) + scores.lse_rest[row];
    EXPECT_NEAR(exact_lse, truth.lse, 1.5e-7);  // closer than fp32, whose unit is 4.8e-7 here
    EXPECT_EQ(scores.argmax_id[row], truth.argmax_id);
    ExpectNear(scores.argmax_logprob[row], truth.argmax_logprob, "argmax_logprob");
    ExpectNear(scores.sum_p_squared[row], truth.sum_p_squared, "sum_p_squared");
    EXPECT_EQ(scores.max_logit[row], truth.max_logit);
    EXPECT_EQ(scores.min_logit[row], truth.min_logit);
    for (size_t k = 0; k < kTopK; ++k) {
      const size_t at = row * kTopK + k;
      if (k < truth.top_k_ids.size()) {
        EXPECT_EQ(scores.top_k_ids[at], truth.top_k_ids[k]) << "entry " << k;
        ExpectNear(scores.top_k_logprobs[at], truth.top_k_logprobs[k], "top_k_logprobs");
      } else {
        EXPECT_EQ(scores.top_k_ids[at], -1) << "entry " << k;
        EXPECT_TRUE(std::isnan(scores.top_k_logprobs[at])) << "entry " << k;
      }
    }
    for (size_t i = 0; i < candidates.size(); ++i) {
      ExpectNear(candidates[i], truth.candidate_logprobs[i], "candidate_logprobs");
    }
  }
}

TEST_P(RowScorerScoresTest, EveryScoreIsThatOfTheReference) {
  const SomeHead head;
  for (const Division& division : kDivisions) {
    SCOPED_TRACE(::testing::Message() << "steps of " << division.step_rows << " rows");
    Batch batch;

    ExpectScoresOf(head, batch, ScoreWhole(head.packed, batch, division));
    batch.entropy_temperatures.clear();
    ExpectScoresOf(head, batch, ScoreWhole(head.packed, batch, division));
  }
  ExpectScoresOf(head, Batch(), ScoreWhole(head.strided, Batch(), kDivisions[0]));
}

TEST_P(RowScorerScoresTest, ShardsGiveTheBitsOfOneShard) {
  const SomeHead head;
  for (const Division& division : kDivisions) {
    for (const bool has_own_entropy : {false, true}) {
      Batch batch;
      if (!has_own_entropy) batch.entropy_temperatures.clear();
      const Scores whole = ScoreWhole(head.packed, batch, division);

      const Scores ours = ScoreInShards(head, batch, division, {0, 1, 4, 6});

      for (const Kind& kind : AllKinds()) {
        if (kind.name == "logprob" || kind.name == "target_rank") continue;
        EXPECT_EQ(kind.bits(ours), kind.bits(whole)) << kind.name;
      }
      ExpectScoresOf(head, batch, ours);  // also of targets, except of the row without one
    }
  }
}

TEST_P(RowScorerScoresTest, AScoreAloneHasTheBitsThatItHasAmongTheOthers) {
  const SomeHead head;
  Batch batch;
  batch.targets[10] = 10;  // what a row without a target gets as logprob is not defined
  for (const Division& division : kDivisions) {
    const Scores all = ScoreWhole(head.packed, batch, division);
    for (const Kind& kind : AllKinds()) {
      const Scores whole = ScoreWhole(head.packed, batch, division, {kind});
      const Scores in_shards = ScoreInShards(head, batch, division, {0, 2, 6}, {kind});

      EXPECT_EQ(kind.bits(whole), kind.bits(all)) << kind.name;
      EXPECT_EQ(kind.bits(in_shards), kind.bits(all)) << kind.name << ", in shards";
    }
  }
}

TEST_P(RowScorerScoresTest, ARowThatIsNotFiniteGetsNoScoresAndChangesNoOtherRow) {
  const SomeHead head;
  for (const Division& division : kDivisions) {
    Batch batch;
    batch.targets[10] = 10;
    const Scores expected = ScoreWhole(head.packed, batch, division);
    const std::vector<size_t> rows = {5, 16, 40};  // each has candidates
    batch.hidden[5 * kHidden] = ToBf16(kNan);
    batch.hidden[16 * kHidden + 1] = ToBf16(kInfinity);
    batch.hidden[40 * kHidden + 2] = ToBf16(-kInfinity);

    for (const bool is_whole : {true, false}) {
      SCOPED_TRACE(is_whole ? "one shard" : "three shards");
      const Scores ours = is_whole ? ScoreWhole(head.packed, batch, division)
                                   : ScoreInShards(head, batch, division, {0, 3, 5, 6});

      for (size_t row = 0; row < kRows; ++row) {
        SCOPED_TRACE(::testing::Message() << "row " << row);
        const bool is_finite = std::find(rows.begin(), rows.end(), row) == rows.end();
        EXPECT_EQ(ours.nonfinite[row], is_finite ? 0 : 1);
        for (const auto score : {&Scores::logprob, &Scores::entropy, &Scores::lse,
                                 &Scores::lse_rest, &Scores::argmax_logprob, &Scores::sum_p_squared,
                                 &Scores::max_logit, &Scores::min_logit}) {
          if (is_finite) {
            EXPECT_EQ((ours.*score)[row], (expected.*score)[row]);
          } else {
            EXPECT_TRUE(std::isnan((ours.*score)[row]));
          }
        }
        EXPECT_EQ(ours.argmax_id[row], is_finite ? expected.argmax_id[row] : -1);
        EXPECT_EQ(ours.target_rank[row], is_finite ? expected.target_rank[row] : -1);
        for (size_t at = row * kTopK; at < (row + 1) * kTopK; ++at) {
          EXPECT_EQ(ours.top_k_ids[at], is_finite ? expected.top_k_ids[at] : -1);
          EXPECT_EQ(std::isnan(ours.top_k_logprobs[at]), !is_finite);
        }
      }
      for (size_t i = 0; i < batch.candidate_ids.size(); ++i) {
        const auto row = static_cast<size_t>(batch.candidate_rows[i]);
        EXPECT_EQ(std::isnan(ours.candidate_logprobs[i]),
                  std::find(rows.begin(), rows.end(), row) != rows.end());
      }
    }
  }
}

TEST_P(RowScorerScoresTest, ARowWhoseLogitsAreAllMinusInfinityIsNotFinite) {
  SomeHead head;
  std::fill(head.bias.begin(), head.bias.end(), -kInfinity);
  const Batch batch;

  const Scores whole = ScoreWhole(head.packed, batch, kDivisions[0]);
  const Scores in_shards = ScoreInShards(head, batch, kDivisions[0], {0, 3, 6});

  for (const Scores* scores : {&whole, &in_shards}) {
    EXPECT_EQ(scores->nonfinite, std::vector<uint8_t>(kRows, 1));
    EXPECT_EQ(scores->argmax_id, std::vector<int32_t>(kRows, -1));
    EXPECT_EQ(scores->top_k_ids, std::vector<int32_t>(kRows * kTopK, -1));
    EXPECT_TRUE(std::isnan(scores->lse[0]));
  }
}

TEST_P(RowScorerScoresTest, EntriesOfTopKBeyondTheVocabularyAreEmpty) {
  const SomeHead small(3);
  const Batch batch_of_small(3);

  ExpectScoresOf(small, batch_of_small, ScoreWhole(small.packed, batch_of_small, kDivisions[0]));

  // A vocabulary of more columns than a tile, of which each shard has fewer than the list.
  const SomeHead two_tiles(kTileColumns + 2);
  const Batch batch(kTileColumns + 2);
  const Scores ours = ScoreInShards(two_tiles, batch, kDivisions[0], {0, 1, 2});
  ExpectScoresOf(two_tiles, batch, ours);
}

}  // namespace
}  // namespace logprobd::kernels
