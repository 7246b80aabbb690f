// Measures the time of the CPU kernels and of oneDNN's GEMM on one head.
//
// Reads one command per line from standard input (ours, onednn_bf16, onednn_f32_out, onednn_f32 or
// memory) and prints one line of JSON for each, so that a script can alternate rounds with other
// processes. Our weight and oneDNN's are converted to their preferred layouts outside the measured
// time.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dnnl.hpp"
#include "kernels/common/tile.h"
#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/row_scorer.h"
#include "server/engine/cpu_engine.h"
#include "server/engine/cpu_head.h"
#include "tests/support/in_memory_head.h"

namespace logprobd {
namespace {

struct Shape {
  int64_t rows = 256;
  int64_t hidden = 1024;
  int64_t vocab = 151'936;
  int32_t threads = 0;
};

/// Returns a field of /proc/self/status in bytes, for example VmHWM.
int64_t StatusBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string name;
  while (status >> name) {
    int64_t kib = 0;
    if (name == field + ":" && status >> kib) return kib * 1024;
    status.clear();
    std::getline(status, name);
  }
  return 0;
}

void ResetPeakMemory() { std::ofstream("/proc/self/clear_refs") << "5"; }

/// Returns approximately normal bf16 values, multiplied by `scale`. Draws them from a small table,
/// which is fast.
HostMemory RandomBf16(int64_t count, float scale, uint64_t seed) {
  std::vector<float> table = testing::NormalValues(1 << 14, seed);
  for (float& value : table) value *= scale;
  const std::vector<std::byte> encoded = testing::EncodeFloats(table, Dtype::kBf16);
  HostMemory memory = *HostMemory::Allocate(count * 2);
  auto* out = reinterpret_cast<uint16_t*>(memory.data());
  const auto* from = reinterpret_cast<const uint16_t*>(encoded.data());
  uint64_t state = seed;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    out[i] = from[state >> 50];
  }
  return memory;
}

/// Scores a batch with our CPU kernels.
class OursRun {
 public:
  OursRun(const Shape& shape, const std::byte* hidden, const std::byte* weight)
      : shape_(shape), hidden_(hidden) {
    const int64_t tile_bytes = kernels::PackedTileBytes(kernels::Dtype::kBf16, shape.hidden);
    packed_ = *HostMemory::Allocate(kernels::NumTiles(shape.vocab) * tile_bytes);
    for (int64_t tile = 0; tile < kernels::NumTiles(shape.vocab); ++tile) {
      const int64_t begin = tile * kernels::kTileColumns;
      const int64_t columns = std::min<int64_t>(kernels::kTileColumns, shape.vocab - begin);
      kernels::PackTile(kernels::Dtype::kBf16, {weight + begin * shape.hidden * 2, shape.hidden},
                        columns, shape.hidden, packed_.data() + tile * tile_bytes);
    }
    kernels::CpuHead head;
    head.packed_weight = packed_.data();
    head.hidden_size = shape.hidden;
    head.vocab_size = shape.vocab;
    head.tile_end = kernels::NumTiles(shape.vocab);
    for (int64_t row = 0; row < shape.rows; ++row) {
      targets_.push_back(static_cast<int32_t>(row * 7919 % shape.vocab));
    }
    temperatures_.assign(targets_.size(), 1.0F);
    logprob_.resize(targets_.size());
    entropy_.resize(targets_.size());
    nonfinite_.resize(targets_.size());
    ResetPeakMemory();
    const int64_t before = StatusBytes("VmRSS");
    scorer_ = std::make_unique<kernels::RowScorer>(
        head, kernels::RowScorer::Options{.isa = kernels::BestCpuIsa(),
                                          .num_threads = shape.threads,
                                          .batch_rows_max = shape.rows});
    Run();
    extra_bytes_ = StatusBytes("VmHWM") - before;
  }

  void Run() {
    kernels::ScoreRowsParams params;
    params.hidden = hidden_;
    params.num_rows = shape_.rows;
    params.targets = targets_.data();
    params.temperatures = temperatures_.data();
    params.logprob = logprob_.data();
    params.entropy = entropy_.data();
    params.nonfinite = nonfinite_.data();
    scorer_->Score(params);
  }

  int64_t extra_bytes() const { return extra_bytes_; }

 private:
  const Shape shape_;
  const std::byte* const hidden_;
  HostMemory packed_;
  std::vector<int32_t> targets_;
  std::vector<float> temperatures_;
  std::vector<float> logprob_;
  std::vector<float> entropy_;
  std::vector<uint8_t> nonfinite_;
  std::unique_ptr<kernels::RowScorer> scorer_;
  int64_t extra_bytes_ = 0;
};

/// Computes the product [rows, hidden] x [hidden, vocab] with oneDNN, which writes all logits.
class OneDnnRun {
 public:
  using Type = dnnl::memory::data_type;

  OneDnnRun(const Shape& shape, const std::byte* hidden, const std::byte* weight, Type in, Type out)
      : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    using Tag = dnnl::memory::format_tag;
    const dnnl::memory::desc given_source({shape.rows, shape.hidden}, Type::bf16, Tag::ab);
    const dnnl::memory::desc given_weight({shape.hidden, shape.vocab}, Type::bf16, Tag::ba);
    const dnnl::memory::desc source({shape.rows, shape.hidden}, in, Tag::ab);
    const dnnl::memory::desc any_weight({shape.hidden, shape.vocab}, in, Tag::any);
    const dnnl::memory::desc result({shape.rows, shape.vocab}, out, Tag::ab);
    const dnnl::matmul::primitive_desc matmul({source, any_weight, result}, engine_);
    matmul_ = dnnl::matmul(matmul);
    source_ = Reordered(given_source, hidden, source);
    weight_ = Reordered(given_weight, weight, matmul.weights_desc());
    result_ = dnnl::memory(result, engine_);
    Run();
  }

  void Run() {
    matmul_.execute(
        stream_, {{DNNL_ARG_SRC, source_}, {DNNL_ARG_WEIGHTS, weight_}, {DNNL_ARG_DST, result_}});
    stream_.wait();
  }

 private:
  dnnl::memory Reordered(const dnnl::memory::desc& from, const std::byte* data,
                         const dnnl::memory::desc& to) {
    // oneDNN takes a non-const pointer, but a reorder only reads its source.
    dnnl::memory given(from, engine_, const_cast<std::byte*>(data));
    dnnl::memory reordered(to, engine_);
    dnnl::reorder(given, reordered).execute(stream_, given, reordered);
    stream_.wait();
    return reordered;
  }

  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::matmul matmul_;
  dnnl::memory source_;
  dnnl::memory weight_;
  dnnl::memory result_;
};

int Main(const Shape& shape) {
  const HostMemory hidden = RandomBf16(shape.rows * shape.hidden, 1.0F, 1);
  const HostMemory weight = RandomBf16(shape.vocab * shape.hidden, 3.0F / 32.0F, 2);
  using Type = dnnl::memory::data_type;
  std::unique_ptr<OursRun> ours;
  std::map<std::string, std::unique_ptr<OneDnnRun>> onednn;
  const std::map<std::string, std::pair<Type, Type>> types = {
      {"onednn_bf16", {Type::bf16, Type::bf16}},
      {"onednn_f32_out", {Type::bf16, Type::f32}},
      {"onednn_f32", {Type::f32, Type::f32}}};
  std::string command;
  while (std::cin >> command) {
    std::function<void()> run;
    if (command == "ours" || command == "memory") {
      if (ours == nullptr) {
        ours = std::make_unique<OursRun>(shape, hidden.data(), weight.data());
      }
      if (command == "memory") {
        std::printf("{\"extra_bytes\": %lld, \"isa\": \"%s\", \"threads\": %d}\n",
                    static_cast<long long>(ours->extra_bytes()),
                    kernels::CpuIsaName(kernels::BestCpuIsa()).data(), shape.threads);
        std::fflush(stdout);
        continue;
      }
      run = [&] { ours->Run(); };
    } else if (const auto found = types.find(command); found != types.end()) {
      std::unique_ptr<OneDnnRun>& gemm = onednn[command];
      if (gemm == nullptr) {
        gemm = std::make_unique<OneDnnRun>(shape, hidden.data(), weight.data(), found->second.first,
                                           found->second.second);
      }
      run = [&gemm] { gemm->Run(); };
    } else {
      std::fprintf(stderr, "unknown command: %s\n", command.c_str());
      return 1;
    }
    const auto begin = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::printf("{\"seconds\": %.6f}\n", seconds.count());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace logprobd

int main(int argc, char** argv) {
  logprobd::Shape shape;
  if (argc > 1) shape.rows = std::atoll(argv[1]);
  if (argc > 2) shape.hidden = std::atoll(argv[2]);
  if (argc > 3) shape.vocab = std::atoll(argv[3]);
  shape.threads = argc > 4 ? std::atoi(argv[4]) : logprobd::UsableCpuCount();
  return logprobd::Main(shape);
}
