#include "tests/bench/rows_bench.h"

#include <algorithm>
#include <random>
#include <utility>

#include "server/base/errors.h"
#include "tests/bench/cuda_graph.h"
#include "tests/bench/storing_gemm.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kHeads = 3;
constexpr double kReplayMilliseconds = 12;

}  // namespace

absl::StatusOr<std::unique_ptr<RowsBench>> RowsBench::Create(int64_t hidden_size,
                                                             int64_t vocab_size, int64_t rows_max) {
  std::unique_ptr<RowsBench> bench(new RowsBench);
  LOGPROBD_ASSIGN_OR_RETURN(bench->fixture_, FusedFixture::Create({.hidden_size = hidden_size,
                                                                   .vocab_size = vocab_size,
                                                                   .rows_max = rows_max,
                                                                   .num_heads = kHeads}));
  bench->hidden_size_ = hidden_size;
  bench->vocab_size_ = vocab_size;
  return bench;
}

absl::StatusOr<std::map<std::string, std::vector<double>>> RowsBench::Measure(
    int64_t rows, const std::map<std::string, FusedFixture::Ask>& asks, int rounds, Timer& timer) {
  std::vector<std::unique_ptr<StoringGemm>> gemms;
  for (int64_t i = 0; i < kHeads; ++i) {
    LOGPROBD_ASSIGN_OR_RETURN(
        auto gemm,
        StoringGemm::Create({.rows = rows, .columns = vocab_size_, .depth = hidden_size_},
                            fixture_->NextWeight(), fixture_->Rows(kernels::Dtype::kBf16), timer));
    gemms.push_back(std::move(gemm));
  }
  size_t turn = 0;
  std::map<std::string, Work> works;
  works["gemm"] = [&](cudaStream_t s) { return gemms[turn++ % gemms.size()]->Run(s); };
  for (const auto& [name, ask] : asks) {
    works[name] = [this, rows, ask = ask](cudaStream_t s) { return fixture_->Score(rows, ask, s); };
  }
  std::map<std::string, std::unique_ptr<CudaGraph>> graphs;
  std::vector<std::string> order;
  for (const auto& [name, work] : works) {
    LOGPROBD_RETURN_IF_ERROR(timer.Milliseconds(work, 1).status());  // loads the kernels
    LOGPROBD_ASSIGN_OR_RETURN(graphs[name], CudaGraph::Create(work, kHeads, timer.stream()));
    order.push_back(name);
  }
  std::map<std::string, std::vector<double>> times;
  std::mt19937 random(1);
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::string& name : order) {
      const Work replay = [&](cudaStream_t s) { return graphs.at(name)->Run(s); };
      LOGPROBD_ASSIGN_OR_RETURN(const double one, timer.Milliseconds(replay, 1));
      const int repeats = std::max(1, static_cast<int>(kReplayMilliseconds / one));
      LOGPROBD_RETURN_IF_ERROR(timer.Milliseconds(replay, repeats).status());
      LOGPROBD_ASSIGN_OR_RETURN(const double settled, timer.Milliseconds(replay, repeats));
      times[name].push_back(settled / kHeads);
    }
  }
  return times;
}

}  // namespace logprobd::testing
