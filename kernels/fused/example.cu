// Runs the kernel without the server. It computes the log-probability and the entropy of 100 rows
// for a head whose tokens all have the same weight row, so the results are known: -ln V and ln V.
//
//   cmake --build <build folder> --target fused_example
//   <build folder>/tests/fused_example

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "kernels/combine/row_scores.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/params.h"

namespace k = logprobd::kernels;

template <typename T>
T* OnDevice(const std::vector<T>& values) {
  void* memory = nullptr;
  const bool ok = cudaMalloc(&memory, values.size() * sizeof(T)) == cudaSuccess &&
                  cudaMemcpy(memory, values.data(), values.size() * sizeof(T),
                             cudaMemcpyHostToDevice) == cudaSuccess;
  if (!ok) std::fprintf(stderr, "no device memory\n");
  return static_cast<T*>(memory);
}

int main() {
  constexpr int64_t kRows = 100, kHidden = 896, kVocab = 32'000;
  const int64_t tiles = k::NumTiles(kVocab);
  k::FusedPartialsParams partials;
  partials.num_rows = partials.readable_rows = kRows;
  partials.hidden_size = partials.hidden_stride = partials.weight_stride = kHidden;
  partials.hidden = OnDevice(std::vector<uint16_t>(kRows * kHidden, 0x3F80));   // 1.0 in bf16
  partials.weight = OnDevice(std::vector<uint16_t>(kVocab * kHidden, 0x3C00));  // 0.0078
  partials.vocab_size = kVocab;
  partials.tile_end = tiles;
  partials.log2_scales = OnDevice(std::vector<float>(kRows, k::Log2Scale(1.0F)));
  partials.targets = OnDevice(std::vector<int32_t>(kRows, 7));
  partials.layout = k::PartialLayoutOf(kRows, tiles);
  partials.sums = OnDevice(std::vector<k::TileSums>(kRows * tiles));
  partials.target_logits = OnDevice(std::vector<float>(kRows));
  k::RowScoresParams scores;
  scores.num_rows = kRows;
  scores.num_tiles = tiles;
  scores.vocab_size = kVocab;
  scores.layout = partials.layout;
  scores.sums = partials.sums;
  scores.log2_scales = partials.log2_scales;
  scores.target_logits = partials.target_logits;
  scores.normalizers = OnDevice(std::vector<k::RowNormalizer>(kRows));
  scores.nonfinite = OnDevice(std::vector<uint8_t>(kRows));
  scores.logprob = OnDevice(std::vector<float>(kRows));
  scores.entropy = OnDevice(std::vector<float>(kRows));
  float results[2] = {};
  const bool ok =
      k::LaunchFusedPartials(partials, nullptr) == cudaSuccess &&
      k::LaunchRowScores(scores, nullptr) == cudaSuccess &&
      cudaMemcpy(&results[0], scores.logprob, 4, cudaMemcpyDeviceToHost) == cudaSuccess &&
      cudaMemcpy(&results[1], scores.entropy, 4, cudaMemcpyDeviceToHost) == cudaSuccess;
  std::printf("logprob %.6f, entropy %.6f, ln V %.6f\n", results[0], results[1], std::log(kVocab));
  return ok && std::fabs(results[0] + std::log(kVocab)) < 1e-5 ? 0 : 1;
}
