#include "kernels/torch_ops/paths/cpu_scorer.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>

#include "kernels/common/tile.h"
#include "kernels/torch_ops/types/kernel_dtype.h"

namespace logprobd::torch_ops {
namespace {

/// Largest number of threads for which a scorer's workspace stays below its bound.
constexpr int kThreadsMax = 256;

at::Tensor PaddedBias(const Problem& problem, Columns columns) {
  if (!problem.inputs.bias.has_value()) return {};
  at::Tensor padded = at::zeros({kernels::NumTiles(columns.size()) * kernels::kTileColumns},
                                problem.inputs.bias->options().dtype(at::kFloat));
  padded.narrow(0, 0, columns.size())
      .copy_(problem.inputs.bias->narrow(0, columns.begin, columns.size()));
  return padded;
}

kernels::CpuHead HeadOf(const Problem& problem, Columns columns, int64_t first_id,
                        int64_t vocab_size, const at::Tensor& bias) {
  const at::Tensor& weight = problem.inputs.weight;
  kernels::CpuHead head;
  head.dtype = *KernelDtype(weight.scalar_type());
  head.strided_weight =
      kernels::StridedWeight{weight.const_data_ptr(), weight.stride(0), weight.stride(1)}.From(
          head.dtype, columns.begin, 0);
  head.hidden_size = weight.size(1);
  head.vocab_size = vocab_size;
  head.tile_begin = first_id / kernels::kTileColumns;
  head.tile_end = head.tile_begin + kernels::NumTiles(columns.size());
  head.transform = {.scale = static_cast<float>(problem.options.scale),
                    .softcap = static_cast<float>(problem.options.softcap)};
  if (bias.defined()) head.bias = bias.const_data_ptr<float>() - first_id;
  return head;
}

kernels::RowScorer::Options OptionsOf(const Problem& problem, int64_t num_rows,
                                      int32_t num_threads) {
  static const kernels::CpuIsa isa = kernels::BestCpuIsa();
  return {.isa = isa,
          .num_threads = num_threads,
          .batch_rows_max = num_rows,
          .top_k_max = static_cast<int32_t>(problem.options.top_k),
          .num_shards = static_cast<int32_t>(problem.group.size())};
}

}  // namespace

bool UsesCpuKernels(const Problem& problem) {
  return problem.device().is_cpu() && problem.wide == at::kFloat;
}

TorchThreads::TorchThreads() : num_threads_(std::min(at::get_num_threads(), kThreadsMax)) {}

void TorchThreads::ForEach(int64_t num_units,
                           const std::function<void(int64_t unit, int32_t worker)>& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t unit = next++; unit < num_units; unit = next++) {
        body(unit, static_cast<int32_t>(worker));
      }
    }
  };
  at::parallel_for(0, std::min<int64_t>(num_threads_, num_units), /*grain_size=*/1, work);
}

CpuScorer::CpuScorer(const Problem& problem, Columns columns, int64_t first_id, int64_t vocab_size,
                     int64_t num_rows)
    : bias_(PaddedBias(problem, columns)),
      scorer_(HeadOf(problem, columns, first_id, vocab_size, bias_),
              OptionsOf(problem, num_rows, threads_.num_threads()), threads_) {}

kernels::ScoreRowsParams RowsParams(const at::Tensor& hidden) {
  kernels::ScoreRowsParams params;
  params.hidden_dtype = *KernelDtype(hidden.scalar_type());
  params.hidden = hidden.const_data_ptr();
  params.num_rows = hidden.size(0);
  return params;
}

at::Tensor CpuLogits(const at::Tensor& hidden, const Problem& problem, Columns columns) {
  const int64_t num_rows = hidden.size(0);
  const at::Tensor rows = hidden.contiguous();
  const at::Tensor no_targets = at::full({num_rows}, -1, rows.options().dtype(at::kInt));
  const at::Tensor temperatures = at::ones({num_rows}, rows.options().dtype(at::kFloat));
  const at::Tensor nonfinite = at::empty({num_rows}, rows.options().dtype(at::kByte));
  at::Tensor logits = at::empty({num_rows, columns.size()}, rows.options().dtype(at::kFloat));
  kernels::ScoreRowsParams params = RowsParams(rows);
  params.targets = no_targets.const_data_ptr<int32_t>();
  params.temperatures = temperatures.const_data_ptr<float>();
  params.nonfinite = nonfinite.mutable_data_ptr<uint8_t>();
  auto* const out = logits.mutable_data_ptr<float>();
  params.visit_logits = [&](const kernels::TileLogits& tile) {
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      std::copy_n(tile.logits + row * kernels::kTileColumns, tile.num_columns,
                  out + (tile.row_begin + row) * columns.size() + tile.first_column);
    }
  };
  CpuScorer(problem, columns, /*first_id=*/0, columns.size(), num_rows)->Score(params);
  return logits;
}

}  // namespace logprobd::torch_ops
