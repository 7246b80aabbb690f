#include "client/cli/bench/double_reference.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "client/cli/bench/float_formats.h"

namespace logprobd::client {
namespace {

constexpr int64_t kTileRows = 64;

/// Sums over the logits seen so far: m = max z, s = sum exp(z - m), t = sum exp(z - m) (z - m).
struct Running {
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  double sum_diff = 0;
  double target = std::numeric_limits<double>::quiet_NaN();

  void Add(double logit) { Join({.max = logit, .sum = 1, .sum_diff = 0}); }

  void Join(const Running& other) {
    if (!std::isnan(other.target)) target = other.target;
    if (other.sum == 0) return;
    const double joint = std::max(max, other.max);
    const auto moved = [joint](const Running& part) {
      const double shift = part.max - joint;
      const double scale = part.sum == 0 ? 0 : std::exp(shift);
      return std::pair(scale * part.sum,
                       part.sum == 0 ? 0 : scale * (part.sum_diff + shift * part.sum));
    };
    const auto [own_sum, own_diff] = moved(*this);
    const auto [other_sum, other_diff] = moved(other);
    max = joint;
    sum = own_sum + other_sum;
    sum_diff = own_diff + other_diff;
  }
};

/// In eight interleaved sums, so that the additions do not wait for each other.
double Dot(const double* a, const double* b, int64_t length) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  double sum = 0;
  for (; i < length; ++i) sum += a[i] * b[i];
  for (const double lane : lanes) sum += lane;
  return sum;
}

void Widen(const std::byte* from, int64_t count, Dtype dtype, double* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = LoadElement(from, i, dtype);
}

class Reference {
 public:
  Reference(const ModelHead& model, const Head& head, Dtype dtype,
            absl::Span<const ReferenceRow> rows)
      : model_(model),
        head_(head),
        rows_(rows),
        hidden_(rows.size() * static_cast<size_t>(head.hidden_size)) {
    for (size_t row = 0; row < rows.size(); ++row) {
      Widen(rows[row].hidden, head.hidden_size, dtype,
            hidden_.data() + row * static_cast<size_t>(head.hidden_size));
    }
  }

  int64_t tiles() const { return (head_.vocab_size + kTileRows - 1) / kTileRows; }

  /// Adds one tile of the vocabulary to every row.
  void AddTile(int64_t tile, std::vector<double>& weight, std::vector<Running>& running) const {
    const int64_t begin = tile * kTileRows;
    const int64_t end = std::min(begin + kTileRows, head_.vocab_size);
    const int64_t length = head_.hidden_size;
    const Dtype dtype = FileDtype(model_.weight.type);
    weight.resize(static_cast<size_t>((end - begin) * length));
    Widen(model_.weight.data.data() + begin * length * DtypeBytes(dtype), (end - begin) * length,
          dtype, weight.data());
    for (size_t row = 0; row < rows_.size(); ++row) {
      const double* const hidden = hidden_.data() + static_cast<int64_t>(row) * length;
      for (int64_t column = begin; column < end; ++column) {
        const double logit =
            Transform(Dot(hidden, weight.data() + (column - begin) * length, length), column);
        running[row].Add(logit);
        if (column == rows_[row].target) running[row].target = logit;
      }
    }
  }

 private:
  double Transform(double dot, int64_t column) const {
    double logit = static_cast<double>(head_.scale) * dot;
    if (!model_.bias.empty()) logit += model_.bias[static_cast<size_t>(column)];
    const double cap = head_.softcap;
    return cap > 0 ? cap * std::tanh(logit / cap) : logit;
  }

  const ModelHead& model_;
  const Head& head_;
  const absl::Span<const ReferenceRow> rows_;
  std::vector<double> hidden_;  ///< [rows, hidden_size]
};

}  // namespace

std::vector<ReferenceScore> ScoreInDouble(const ModelHead& model, const Head& head, Dtype dtype,
                                          absl::Span<const ReferenceRow> rows,
                                          const std::function<void(double)>& on_progress) {
  const Reference reference(model, head, dtype, rows);
  const int64_t tiles = reference.tiles();
  const size_t cores = std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::vector<Running>> parts(cores, std::vector<Running>(rows.size()));
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::vector<std::thread> threads;
  threads.reserve(cores);
  for (std::vector<Running>& part : parts) {
    threads.emplace_back([&] {
      std::vector<double> weight;
      for (int64_t tile = next.fetch_add(1); tile < tiles; tile = next.fetch_add(1)) {
        reference.AddTile(tile, weight, part);
        done.fetch_add(1);
      }
    });
  }
  while (done.load() < tiles) {
    on_progress(static_cast<double>(done.load()) / static_cast<double>(tiles));
    absl::SleepFor(absl::Milliseconds(2));
  }
  for (std::thread& thread : threads) thread.join();

  std::vector<ReferenceScore> scores;
  for (size_t row = 0; row < rows.size(); ++row) {
    Running joined;
    for (const std::vector<Running>& part : parts) joined.Join(part[row]);
    const double log_sum = std::log(joined.sum);
    scores.push_back({.logprob = joined.target - joined.max - log_sum,
                      .entropy = log_sum - joined.sum_diff / joined.sum});
  }
  return scores;
}

}  // namespace logprobd::client
