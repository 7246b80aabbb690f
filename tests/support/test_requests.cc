#include "tests/support/test_requests.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "tests/support/fake_engine.h"

namespace logprobd::testing {
namespace {

uint32_t Next(uint32_t& state) {
  state = state * 1664525U + 1013904223U;
  return state >> 8;
}

/// Returns random bytes whose elements are finite in every dtype, because no exponent is all ones.
std::vector<std::byte> RandomBytes(size_t count, uint32_t& state) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(Next(state) & 0x3FU);
  }
  return bytes;
}

struct Pieces {
  std::vector<std::vector<std::byte>> storage;
};

HiddenPayload PayloadOf(const std::vector<std::byte>& bytes, int64_t piece_bytes,
                        int64_t misalignment) {
  HiddenPayload payload;
  payload.bytes = static_cast<int64_t>(bytes.size());
  auto pieces = std::make_shared<Pieces>();
  const auto offset = static_cast<size_t>(misalignment);
  const size_t step =
      piece_bytes == 0 ? std::max<size_t>(bytes.size(), 1) : static_cast<size_t>(piece_bytes);
  for (size_t begin = 0; begin < bytes.size(); begin += step) {
    const size_t size = std::min(step, bytes.size() - begin);
    std::vector<std::byte> piece(size + offset);
    std::memcpy(piece.data() + offset, bytes.data() + begin, size);
    pieces->storage.push_back(std::move(piece));
  }
  for (const std::vector<std::byte>& piece : pieces->storage) {
    payload.pieces.emplace_back(piece.data() + offset, piece.size() - offset);
  }
  payload.owner = std::move(pieces);
  return payload;
}

std::vector<std::byte> BytesOf(const HiddenPayload& payload) {
  std::vector<std::byte> bytes;
  for (const absl::Span<const std::byte> piece : payload.pieces) {
    bytes.insert(bytes.end(), piece.begin(), piece.end());
  }
  return bytes;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace

ScoreRequest MakeRequest(const RequestSpec& spec) {
  uint32_t state = spec.seed;
  const auto rows = static_cast<size_t>(spec.rows);
  const auto row_bytes = static_cast<size_t>(spec.hidden_size * DtypeBytes(spec.dtype));
  std::vector<std::byte> bytes = RandomBytes(rows * row_bytes, state);
  for (const int64_t row : spec.nonfinite_rows) {
    std::memset(bytes.data() + static_cast<size_t>(row) * row_bytes, 0xFF, row_bytes);
  }

  ScoreRequest request;
  request.request_id = absl::StrCat("request-", spec.seed);
  request.dtype_number = static_cast<int32_t>(spec.dtype);
  request.rows = spec.rows;
  request.hidden_size = spec.hidden_size;
  request.targets.resize(rows);
  for (int32_t& target : request.targets) {
    target = static_cast<int32_t>(Next(state) % spec.vocab_size);
  }
  for (const int64_t row : spec.greedy_rows) {
    uint16_t first = 0;
    std::memcpy(&first, bytes.data() + static_cast<size_t>(row) * row_bytes, sizeof(first));
    request.targets[static_cast<size_t>(row)] = static_cast<int32_t>(first % spec.vocab_size);
  }
  for (const int64_t row : spec.ignored_rows) {
    request.targets[static_cast<size_t>(row)] = request.ignore_index;
  }
  request.temperature = spec.temperature;
  request.entropy_temperature = spec.entropy_temperature;
  request.output_bits = spec.outputs.bits();
  request.top_k = spec.top_k;
  if (!spec.candidate_counts.empty()) {
    request.candidate_offsets.push_back(0);
    for (const int64_t count : spec.candidate_counts) {
      for (int64_t i = 0; i < count; ++i) {
        request.candidate_ids.push_back(static_cast<int32_t>(Next(state) % spec.vocab_size));
      }
      request.candidate_offsets.push_back(static_cast<uint32_t>(request.candidate_ids.size()));
    }
  }
  request.segment_offsets = spec.segment_offsets;
  request.priority_number = static_cast<int32_t>(spec.priority) + 1;
  request.reject_nonfinite = spec.reject_nonfinite;
  request.hidden = PayloadOf(bytes, spec.piece_bytes, spec.misalignment);
  request.hidden.place = spec.place;
  request.hidden.is_pinned = spec.is_pinned;
  request.hidden.gpu = spec.gpu;
  request.client_id = spec.client_id;
  request.sub_client_id = spec.sub_client_id;
  request.deadline = spec.deadline;
  return request;
}

ScoreRequest RequestOfRows(int64_t rows) { return MakeRequest(RequestSpec{.rows = rows}); }

ScoreResult ExpectedResult(const ScoreRequest& request, int64_t vocab_size,
                           uint64_t weights_version) {
  const std::vector<std::byte> bytes = BytesOf(request.hidden);
  const auto rows = static_cast<size_t>(request.rows);
  const auto row_bytes = static_cast<size_t>(request.hidden_size * DtypeBytes(request.dtype()));
  std::vector<FakeScores> all(rows);  // zeros for ignored rows
  std::vector<uint8_t> greedy(rows);
  ScoreResult result;
  result.rows = request.rows;
  result.weights_version = weights_version;
  for (size_t row = 0; row < rows; ++row) {
    const int32_t target = request.targets[row];
    if (target == request.ignore_index) {
      ++result.ignored_rows;
      continue;
    }
    const float temperature = request.row_temperatures.empty() ? request.temperature.value_or(1.0F)
                                                               : request.row_temperatures[row];
    all[row] = FakeScoresOf(absl::MakeConstSpan(bytes).subspan(row * row_bytes, row_bytes),
                            request.dtype(), target, temperature,
                            request.entropy_temperature.value_or(temperature), vocab_size);
    greedy[row] = static_cast<uint8_t>(all[row].argmax_id == target);
    result.nonfinite_rows += all[row].nonfinite ? 1 : 0;
  }

  const auto column = [&](Output output, auto FakeScores::*field, auto& values) {
    if (request.outputs().Has(output)) {
      for (const FakeScores& scores : all) {
        values.push_back(scores.*field);
      }
    }
  };
  column(Output::kLogprob, &FakeScores::logprob, result.logprob);
  column(Output::kEntropy, &FakeScores::entropy, result.entropy);
  column(Output::kLse, &FakeScores::lse, result.lse);
  column(Output::kArgmax, &FakeScores::argmax_id, result.argmax_id);
  column(Output::kArgmax, &FakeScores::argmax_logprob, result.argmax_logprob);
  column(Output::kSumPSquared, &FakeScores::sum_p_squared, result.sum_p_squared);
  column(Output::kMaxLogit, &FakeScores::max_logit, result.max_logit);
  column(Output::kMinLogit, &FakeScores::min_logit, result.min_logit);
  column(Output::kTargetRank, &FakeScores::target_rank, result.target_rank);
  if (request.outputs().Has(Output::kGreedy)) {
    result.greedy = greedy;
  }
  for (size_t row = 0; row < rows; ++row) {
    const bool ignored = request.targets[row] == request.ignore_index;
    for (int32_t rank = 0; rank < request.top_k; ++rank) {
      result.top_k_ids.push_back(ignored ? 0 : FakeTopKId(all[row], rank, vocab_size));
      result.top_k_logprobs.push_back(ignored ? 0 : FakeTopKLogprob(all[row], rank));
    }
    if (request.candidate_offsets.empty()) {
      continue;
    }
    for (size_t i = request.candidate_offsets[row]; i < request.candidate_offsets[row + 1]; ++i) {
      result.candidate_logprobs.push_back(
          ignored ? 0 : FakeCandidateLogprob(all[row], request.candidate_ids[i]));
    }
  }
  for (int64_t segment = 0; segment < request.num_segments(); ++segment) {
    const auto index = static_cast<size_t>(segment);
    double sum = 0;
    uint32_t count = 0;
    bool all_greedy = true;
    for (size_t row = request.segment_offsets[index]; row < request.segment_offsets[index + 1];
         ++row) {
      if (request.targets[row] != request.ignore_index) {
        sum += static_cast<double>(all[row].logprob);
        ++count;
        all_greedy = all_greedy && greedy[row] != 0;
      }
    }
    result.segment_logprob.push_back(sum);
    result.segment_rows.push_back(count);
    result.segment_greedy.push_back(static_cast<uint8_t>(all_greedy));
  }
  return result;
}

std::string Differences(const ScoreResult& actual, const ScoreResult& expected) {
  std::vector<std::string> names;
  const auto check = [&](absl::string_view name, bool same) {
    if (!same) {
      names.emplace_back(name);
    }
  };
  check("rows", actual.rows == expected.rows);
  check("ignored_rows", actual.ignored_rows == expected.ignored_rows);
  check("nonfinite_rows", actual.nonfinite_rows == expected.nonfinite_rows);
  check("weights_version", actual.weights_version == expected.weights_version);
  ForEachOutputColumn([&](const auto& column) {
    check(column.name, SameBits(actual.*column.values, expected.*column.values));
  });
  return absl::StrJoin(names, ", ");
}

}  // namespace logprobd::testing
