#include "server/engine/cuda_equal_sums.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/chunked/logit_chunk.h"
#include "kernels/common/dtype.h"
#include "kernels/common/tile.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/listed_logits.h"
#include "kernels/fused/params.h"
#include "kernels/fused/top_k.h"
#include "kernels/fused/top_k_scratch.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/engine/cuda_gemm.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/kernel_params.h"
#include "server/engine/workspace_plan.h"
#include "server/metrics/nvml.h"

namespace logprobd {
namespace {

using kernels::kTileColumns;

constexpr int64_t kRows = 256;  // every block tile but one has several blocks along the rows
constexpr int64_t kTiles = 2;
constexpr int64_t kColumns = kTiles * kTileColumns;
constexpr kernels::PartialLayout kLayout = kernels::PartialLayoutOf(kRows, kTiles);

/// Numbers of distinct hidden and weight rows, which repeat: making all rows would take longer than
/// all products. The numbers differ, so that most rows have a target product of their own.
constexpr int64_t kDistinctRows = 64;
constexpr int64_t kDistinctColumns = 96;
static_assert(kRows % kDistinctRows == 0 && kColumns % kDistinctColumns == 0);

/// Exponents of the synthetic values, which fp16 represents, too. Products then spread over
/// 2^-12 to 2^12.
constexpr uint32_t kNegativeExponents = 6;
constexpr uint32_t kExponents = 12;

struct NamedTile {
  kernels::FusedTile tile;
  const char* way;
};
/// The block tiles of the kernels of a GPU; the first one is the reference.
constexpr NamedTile kHopperTiles[] = {
    {kernels::FusedTile::k64PingPong, "the fused kernel with 64 rows"},
    {kernels::FusedTile::k64Pair, "the fused kernel with pairs of 64 rows"},
    {kernels::FusedTile::k128PingPong, "the fused kernel with pairs of 128 rows"},
    {kernels::FusedTile::k128Columns, "the fused kernel with 128 rows and pairs of column tiles"},
    {kernels::FusedTile::k256Cooperative, "the fused kernel with pairs of 256 rows"},
    {kernels::FusedTile::kSwapped80, "the fused kernel with swapped tiles of 80 rows"},
    {kernels::FusedTile::kSwapped96, "the fused kernel with swapped tiles of 96 rows"},
    {kernels::FusedTile::kSwapped112, "the fused kernel with swapped tiles of 112 rows"}};
constexpr NamedTile kOtherTiles[] = {
    {kernels::FusedTile::kMma64, "the fused kernel with 64 rows"},
    {kernels::FusedTile::kMma128, "the fused kernel with 128 rows"}};

constexpr const char* kBatchConsequence =
    "the last bits of a row's scores may depend on the other rows of its batch";

/// The results of one way in device memory.
struct Outputs {
  uint64_t max_keys[kRows];
  kernels::TileSums sums[kRows * kTiles];
  float target_logits[kRows];
  float tile_max[kRows * kTiles];
};

/// A floating-point format of 16 or 32 bits.
struct Format {
  int mantissa_bits;
  uint32_t exponent_bias;
  uint32_t sign;
};

Format FormatOf(kernels::Dtype dtype) {
  switch (dtype) {
    case kernels::Dtype::kBf16:
      return {.mantissa_bits = 7, .exponent_bias = 127, .sign = 0x8000};
    case kernels::Dtype::kF16:
      return {.mantissa_bits = 10, .exponent_bias = 15, .sign = 0x8000};
    case kernels::Dtype::kF32:
      break;
  }
  return {.mantissa_bits = 23, .exponent_bias = 127, .sign = 0x80000000U};
}

/// The sizes of the product, in elements. Hidden and weight rows are `depth` elements apart. A row
/// consists of `num_splits` parts of `hidden_size` elements and zeros. The parts of a weight row
/// are equal, as the chunked path copies them.
struct ProductSizes {
  kernels::Dtype dtype = kernels::Dtype::kBf16;
  int64_t hidden_size = 0;
  int64_t padded_hidden = 0;
  int64_t num_splits = 1;
  int64_t depth = 0;

  int64_t part_pitch() const { return depth / num_splits; }
  int64_t row_bytes() const { return depth * kernels::DtypeBytes(dtype); }
};

/// Returns synthetic rows, [num_rows, depth]. Every second element of the latter half of a part
/// repeats an element of the first half, with the opposite sign in hidden rows, so that the
/// products of both cancel after many other products were added.
template <typename Element>
std::vector<Element> MakeRows(const ProductSizes& sizes, int64_t num_rows, bool is_hidden) {
  const Format format = FormatOf(sizes.dtype);
  const int64_t half = sizes.hidden_size / 2;
  uint64_t state = is_hidden ? 1 : 2;
  std::vector<Element> rows(static_cast<size_t>(num_rows * sizes.depth));
  for (int64_t row = 0; row < num_rows; ++row) {
    Element* const first_part = rows.data() + row * sizes.depth;
    for (int64_t split = 0; split < sizes.num_splits; ++split) {
      Element* const part = first_part + split * sizes.part_pitch();
      for (int64_t k = 0; k < sizes.hidden_size; ++k) {
        if (!is_hidden && split > 0) {
          part[k] = first_part[k];
        } else if (half > 0 && k >= half && k % 2 == 0) {
          part[k] = static_cast<Element>(part[k - half] ^ (is_hidden ? format.sign : 0U));
        } else {  // a linear congruential generator (Knuth, MMIX); its upper bits are random
          state = state * 6364136223846793005U + 1442695040888963407U;
          const auto random = static_cast<uint32_t>(state >> 32);
          const uint32_t exponent = format.exponent_bias - kNegativeExponents + random % kExponents;
          const uint32_t mantissa = (random >> 8) & ((1U << format.mantissa_bits) - 1);
          part[k] = static_cast<Element>((random >> 31 != 0 ? format.sign : 0U) |
                                         exponent << format.mantissa_bits | mantissa);
        }
      }
    }
  }
  return rows;
}

/// Copies `values` to the device `repeats` times, one copy behind the other.
template <typename T>
absl::StatusOr<DeviceBuffer> CopyToDevice(const std::vector<T>& values, int64_t repeats = 1) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  LOGPROBD_ASSIGN_OR_RETURN(DeviceBuffer buffer,
                            AllocateDevice(bytes * repeats, "the check of sums"));
  for (int64_t i = 0; i < repeats; ++i) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpy(buffer.get() + i * bytes, values.data(),
                                             static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
  }
  // A copy from pageable memory may return before its last part has arrived.
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(cudaStreamLegacy));
  return buffer;
}

/// Computes one product in several ways.
class SyntheticProduct {
 public:
  static absl::StatusOr<std::unique_ptr<SyntheticProduct>> Create(const ProductSizes& sizes) {
    std::unique_ptr<SyntheticProduct> product(new SyntheticProduct(sizes));
    LOGPROBD_RETURN_IF_ERROR(sizes.dtype == kernels::Dtype::kF32 ? product->Fill<uint32_t>()
                                                                 : product->Fill<uint16_t>());
    return product;
  }

  /// Adds the results of the fused kernel's block tiles and of the kernels that compute single
  /// logits and tiles.
  absl::Status AddFused(absl::Span<const NamedTile> tiles, std::vector<SumResults>& results);

  /// Adds the results of cuBLASLt in several shapes. The first ones must equal results[reference],
  /// which may be themselves.
  absl::Status AddChunked(size_t reference, std::vector<SumResults>& results);

 private:
  explicit SyntheticProduct(const ProductSizes& sizes) : sizes_(sizes) {}

  template <typename Element>
  absl::Status Fill();
  absl::Status EnqueueChunk(const CudaGemm& gemm, int64_t row, int64_t num_rows, int64_t tile,
                            int64_t num_tiles, Outputs* out);
  /// Waits for the work of the stream and copies the outputs to the host.
  absl::StatusOr<std::unique_ptr<Outputs>> Read(const DeviceBuffer& outputs);
  /// Adds target logits, keys of the maxima and sums.
  absl::Status AddAll(SumResults names, const DeviceBuffer& outputs,
                      std::vector<SumResults>& results);

  const int32_t* targets() const { return reinterpret_cast<const int32_t*>(targets_.get()); }
  const float* log2_scales() const { return reinterpret_cast<const float*>(log2_scales_.get()); }
  float* dots() const { return reinterpret_cast<float*>(dots_.get()); }

  const ProductSizes sizes_;
  CudaStream stream_;
  DeviceBuffer hidden_;       // [kRows, depth]
  DeviceBuffer weight_;       // [kColumns, depth]
  DeviceBuffer targets_;      // int32 [kRows]
  DeviceBuffer log2_scales_;  // float [kRows]
  DeviceBuffer dots_;         // float [kRows, kColumns]
};

template <typename Element>
absl::Status SyntheticProduct::Fill() {
  LOGPROBD_ASSIGN_OR_RETURN(stream_, CreateStream());
  LOGPROBD_ASSIGN_OR_RETURN(
      hidden_, CopyToDevice(MakeRows<Element>(sizes_, kDistinctRows, /*is_hidden=*/true),
                            kRows / kDistinctRows));
  LOGPROBD_ASSIGN_OR_RETURN(
      weight_, CopyToDevice(MakeRows<Element>(sizes_, kDistinctColumns, /*is_hidden=*/false),
                            kColumns / kDistinctColumns));
  std::vector<int32_t> targets(kRows);
  for (int64_t row = 0; row < kRows; ++row) {
    targets[static_cast<size_t>(row)] = static_cast<int32_t>((row * 7 + 3) % kColumns);
  }
  LOGPROBD_ASSIGN_OR_RETURN(targets_, CopyToDevice(targets));
  // The standard deviation of a logit is about 200 times the root of the number of products. With
  // this temperature many columns of a tile contribute to its sums.
  const auto temperature = static_cast<float>(
      64 * std::sqrt(static_cast<double>(sizes_.hidden_size * sizes_.num_splits)));
  LOGPROBD_ASSIGN_OR_RETURN(
      log2_scales_, CopyToDevice(std::vector<float>(kRows, kernels::Log2Scale(temperature))));
  LOGPROBD_ASSIGN_OR_RETURN(
      dots_, AllocateDevice(kRows * kColumns * int64_t{sizeof(float)}, "the check of sums"));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Outputs>> SyntheticProduct::Read(const DeviceBuffer& outputs) {
  auto host = std::make_unique<Outputs>();
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host.get(), outputs.get(), sizeof(Outputs),
                                                cudaMemcpyDeviceToHost, stream_.get()));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream_.get()));
  return host;
}

/// Returns the bits of an array of 32-bit words.
template <typename T>
std::vector<uint32_t> BitsOf(const T* values, int64_t count) {
  std::vector<uint32_t> bits(static_cast<size_t>(count) * sizeof(T) / sizeof(uint32_t));
  std::memcpy(bits.data(), values, bits.size() * sizeof(uint32_t));
  return bits;
}

absl::Status SyntheticProduct::AddAll(SumResults names, const DeviceBuffer& outputs,
                                      std::vector<SumResults>& results) {
  LOGPROBD_ASSIGN_OR_RETURN(const auto host, Read(outputs));
  names.target_logits = BitsOf(host->target_logits, kRows);
  names.max_keys.assign(host->max_keys, host->max_keys + kRows);
  names.sums = BitsOf(host->sums, kRows * kTiles);
  results.push_back(std::move(names));
  return absl::OkStatus();
}

absl::StatusOr<DeviceBuffer> AllocateOutputs() {
  return AllocateDevice(sizeof(Outputs), "the check of sums");
}

Outputs* OnDevice(const DeviceBuffer& outputs) { return reinterpret_cast<Outputs*>(outputs.get()); }

absl::Status SyntheticProduct::AddFused(absl::Span<const NamedTile> tiles,
                                        std::vector<SumResults>& results) {
  const size_t fused = results.size();
  const auto params_of = [&](Outputs* out) {
    kernels::FusedPartialsParams params;
    params.dtype = sizes_.dtype;
    params.num_rows = params.readable_rows = kRows;
    params.hidden_size = sizes_.padded_hidden;
    params.num_splits = static_cast<int32_t>(sizes_.num_splits);
    params.hidden = hidden_.get();
    params.weight = weight_.get();
    params.hidden_stride = params.weight_stride = sizes_.depth;
    params.vocab_size = kColumns;
    params.tile_end = kTiles;
    params.log2_scales = log2_scales();
    params.targets = targets();
    params.layout = kLayout;
    params.sums = out->sums;
    params.target_logits = out->target_logits;
    params.max_keys = out->max_keys;
    params.tile_max = out->tile_max;
    return params;
  };
  const auto add_tile = [&](kernels::FusedTile tile, SumResults names,
                            const DeviceBuffer& outputs) -> absl::Status {
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchFusedPartialsAs(
        params_of(OnDevice(outputs)), {tile, kernels::FusedRaster::kAlongRows, 1}, stream_.get()));
    return AddAll(std::move(names), outputs, results);
  };
  LOGPROBD_ASSIGN_OR_RETURN(const DeviceBuffer reference, AllocateOutputs());
  LOGPROBD_RETURN_IF_ERROR(
      add_tile(tiles.front().tile,
               {.way = tiles.front().way, .consequence = "", .reference = fused}, reference));
  for (const NamedTile& named : tiles.subspan(1)) {
    LOGPROBD_ASSIGN_OR_RETURN(const DeviceBuffer outputs, AllocateOutputs());
    LOGPROBD_RETURN_IF_ERROR(add_tile(
        named.tile, {.way = named.way, .consequence = kBatchConsequence, .reference = fused},
        outputs));
  }
  const kernels::FusedPartialsParams params = params_of(OnDevice(reference));
  LOGPROBD_ASSIGN_OR_RETURN(const DeviceBuffer lists, AllocateOutputs());
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      kernels::LaunchListedLogits({.partials = params,
                                   .ids = targets(),
                                   .count = kRows,
                                   .logits = OnDevice(lists)->target_logits},
                                  stream_.get()));
  const int64_t scratch_bytes = kernels::TopKScratchOf(kRows, 1, kTiles).size_bytes;
  LOGPROBD_ASSIGN_OR_RETURN(const DeviceBuffer scratch,
                            AllocateDevice(scratch_bytes, "the check of sums"));
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchFusedTopK({.partials = params,
                                                          .top_k = 1,
                                                          .keys = OnDevice(lists)->max_keys,
                                                          .workspace = scratch.get(),
                                                          .workspace_bytes = scratch_bytes},
                                                         stream_.get()));
  LOGPROBD_ASSIGN_OR_RETURN(const auto host, Read(lists));
  results.push_back(
      {.way = "listed logits (mma.sync)",
       .consequence = "candidate_logprobs and target_rank may contradict logprob and argmax_id in "
                      "the last bits",
       .reference = fused,
       .target_logits = BitsOf(host->target_logits, kRows)});
  results.push_back({.way = "top-k",
                     .consequence = "top_k_logprobs may contradict logprob in the last bits",
                     .reference = fused,
                     .max_keys = {host->max_keys, host->max_keys + kRows}});
  return absl::OkStatus();
}

absl::Status SyntheticProduct::EnqueueChunk(const CudaGemm& gemm, int64_t row, int64_t num_rows,
                                            int64_t tile, int64_t num_tiles, Outputs* out) {
  const int64_t columns = num_tiles * kTileColumns;
  LOGPROBD_RETURN_IF_ERROR(gemm.Run(weight_.get() + tile * kTileColumns * sizes_.row_bytes(),
                                    hidden_.get() + row * sizes_.row_bytes(),
                                    {.columns = columns, .rows = num_rows}, dots(), stream_.get()));
  kernels::TileStatsParams params;
  params.chunk.dots = dots();
  params.chunk.row_stride = columns;
  params.chunk.num_rows = num_rows;
  params.chunk.tile_begin = tile;
  params.chunk.num_tiles = num_tiles;
  params.chunk.vocab_size = kColumns;
  params.log2_scales = log2_scales() + row;
  params.targets = targets() + row;
  params.layout = kLayout;
  params.sums = out->sums + kLayout.At(row, 0);
  params.target_logits = out->target_logits + row;
  params.max_keys = out->max_keys + row;
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchTileStats(params, stream_.get()));
  return absl::OkStatus();
}

absl::Status SyntheticProduct::AddChunked(size_t reference, std::vector<SumResults>& results) {
  constexpr int64_t kFewRows = kRowGranularity;
  const size_t chunked = results.size();
  LOGPROBD_ASSIGN_OR_RETURN(
      const std::unique_ptr<CudaGemm> gemm,
      CudaGemm::Create({.dtype = sizes_.dtype,
                        .depth = sizes_.depth,
                        .shapes = {{.columns = kColumns, .rows = kRows},
                                   {.columns = kTileColumns, .rows = kFewRows},
                                   {.columns = kRows, .rows = kRows}}}));
  LOGPROBD_ASSIGN_OR_RETURN(const DeviceBuffer whole, AllocateOutputs());
  LOGPROBD_RETURN_IF_ERROR(EnqueueChunk(*gemm, 0, kRows, 0, kTiles, OnDevice(whole)));
  LOGPROBD_RETURN_IF_ERROR(
      AddAll({.way = "the chunked path (cuBLASLt)",
              .consequence =
                  "scores of --kernel chunked and of --kernel fused may differ in the last bits",
              .reference = reference},
             whole, results));

  LOGPROBD_ASSIGN_OR_RETURN(const DeviceBuffer parts, AllocateOutputs());
  for (int64_t row = 0; row < kRows; row += kFewRows) {
    for (int64_t tile = 0; tile < kTiles; ++tile) {
      LOGPROBD_RETURN_IF_ERROR(EnqueueChunk(*gemm, row, kFewRows, tile, 1, OnDevice(parts)));
    }
  }
  LOGPROBD_RETURN_IF_ERROR(AddAll({.way = "the chunked path with smaller chunks",
                                   .consequence = kBatchConsequence,
                                   .reference = chunked},
                                  parts, results));

  LOGPROBD_ASSIGN_OR_RETURN(const DeviceBuffer gathered,
                            AllocateDevice(kRows * sizes_.row_bytes(), "the check of sums"));
  LOGPROBD_ASSIGN_OR_RETURN(const DeviceBuffer diagonal, AllocateOutputs());
  kernels::TargetLogitsParams params;
  params.targets = {
      .targets = targets(), .num_rows = kRows, .column_begin = 0, .column_end = kColumns};
  params.dots = dots();
  params.row_stride = kRows;
  params.logits = OnDevice(diagonal)->target_logits;
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchGatherWeight(
      params.targets, weight_.get(), sizes_.row_bytes(), gathered.get(), stream_.get()));
  LOGPROBD_RETURN_IF_ERROR(gemm->Run(gathered.get(), hidden_.get(),
                                     {.columns = kRows, .rows = kRows}, dots(), stream_.get()));
  LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchTargetLogits(params, stream_.get()));
  LOGPROBD_ASSIGN_OR_RETURN(const auto host, Read(diagonal));
  results.push_back({.way = "the chunked path's product with targets",
                     .consequence = "target_rank may contradict argmax_id in the last bits",
                     .reference = chunked,
                     .target_logits = BitsOf(host->target_logits, kRows)});
  return absl::OkStatus();
}

/// Returns the fused kernels that score heads of this dtype on the current device.
kernels::FusedArch FusedArchFor(Dtype head_dtype, GpuKernel kernel) {
  const bool is_fused = head_dtype != Dtype::kF32 && kernel != GpuKernel::kChunked;
  return is_fused ? kernels::FusedArchOfCurrentDevice() : kernels::FusedArch::kNone;
}

/// Everything on which the sums of a GPU depend, as one line.
struct Environment {
  std::string text;
  bool is_complete = true;  ///< False if the driver's version is not known.
};

absl::StatusOr<Environment> EnvironmentOf(const HeadInfo& head, GpuKernel kernel, int gpu) {
  cudaDeviceProp properties{};
  int runtime_version = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, gpu));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaRuntimeGetVersion(&runtime_version));
  const std::string driver = Nvml().DriverVersion();
  return Environment{
      .text = absl::StrCat(properties.name, ", driver ", driver.empty() ? "unknown" : driver,
                           ", CUDA ", runtime_version, ", cuBLASLt ", cublasLtGetVersion(),
                           ", logprobd ", LOGPROBD_VERSION, ", fused kernels ",
                           static_cast<int>(FusedArchFor(head.dtype, kernel)), ", ",
                           DtypeName(head.dtype), " head, hidden size ", head.hidden_size),
      .is_complete = !driver.empty()};
}

}  // namespace

absl::StatusOr<std::vector<SumResults>> ComputeSums(Dtype head_dtype, int64_t hidden_size,
                                                    GpuKernel kernel) {
  const kernels::FusedArch arch = FusedArchFor(head_dtype, kernel);
  const bool is_hopper = arch == kernels::FusedArch::kSm90;
  const WorkspacePlan plan = PlanWorkspace(
      {.vocab_size = kColumns, .hidden_size = hidden_size, .head_dtype = KernelDtype(head_dtype)});
  ProductSizes sizes = {.dtype = plan.head_dtype,
                        .hidden_size = hidden_size,
                        .padded_hidden = plan.padded_hidden,
                        .num_splits = 1,
                        .depth = plan.padded_hidden};
  std::vector<ProductSizes> products = {sizes};
  if (plan.ProductFormOf(kernels::Dtype::kF32) == ProductForm::kBf16Split) {
    sizes.num_splits = kernels::kHiddenSplits;
    sizes.depth = kernels::SplitPitch(hidden_size) * kernels::kHiddenSplits;
    products.push_back(sizes);
  }
  std::vector<SumResults> results;
  for (const ProductSizes& product_sizes : products) {
    LOGPROBD_ASSIGN_OR_RETURN(const auto product, SyntheticProduct::Create(product_sizes));
    const size_t first = results.size();
    if (arch != kernels::FusedArch::kNone) {
      LOGPROBD_RETURN_IF_ERROR(product->AddFused(
          is_hopper ? absl::MakeConstSpan(kHopperTiles) : absl::MakeConstSpan(kOtherTiles),
          results));
    }
    // Only on Hopper does cuBLASLt add in the order of the fused kernels.
    LOGPROBD_RETURN_IF_ERROR(product->AddChunked(is_hopper ? first : results.size(), results));
    for (size_t i = first; i < results.size() && product_sizes.num_splits > 1; ++i) {
      absl::StrAppend(&results[i].way, " for fp32 rows");
    }
  }
  return results;
}

absl::Status CheckEqualSums(const HeadInfo& head, const EngineOptions& options, int gpu) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(gpu));
  LOGPROBD_ASSIGN_OR_RETURN(const Environment environment,
                            EnvironmentOf(head, options.kernel, gpu));
  const auto check = [&]() -> absl::StatusOr<std::string> {
    const absl::Time start = options.clock->Now();
    LOGPROBD_ASSIGN_OR_RETURN(const std::vector<SumResults> results,
                              ComputeSums(head.dtype, head.hidden_size, options.kernel));
    std::string difference = DescribeUnequalSums(results);
    LogInfo("checked that all paths sum alike",
            {{"gpu", gpu},
             {"environment", environment.text},
             {"result", difference.empty() ? "equal" : "unequal"},
             {"seconds", absl::ToDoubleSeconds(options.clock->Now() - start)}});
    return difference;
  };
  const absl::StatusOr<std::string> difference =
      CheckUnlessKnown(environment.is_complete ? options.state_dir : "", environment.text, check);
  if (!difference.ok()) {
    // Whatever prevents the check need not prevent scoring; a lost device fails the next step.
    LogWarning(
        "the check that all paths sum alike could not run; bit-identical scores are unproven",
        {{"gpu", gpu},
         {"environment", environment.text},
         {"reason", difference.status().message()}});
    return absl::OkStatus();
  }
  if (difference->empty()) return absl::OkStatus();
  LogWarning(
      "bit-identical scores are not guaranteed on this GPU; scores are as accurate as before",
      {{"gpu", gpu},
       {"environment", environment.text},
       {"difference", *difference},
       {"advice",
        "use a driver and a cuBLAS with which this check passes, or do not compare bits; please "
        "report this line"}});
  if (options.metrics != nullptr) options.metrics->SetUnequalSums(gpu);
  return absl::OkStatus();
}

}  // namespace logprobd
