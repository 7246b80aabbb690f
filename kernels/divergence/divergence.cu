// DivergenceSumsKernel: reads a row of dot products of two models and gives its statistics.
//
// Idea      Online sums of both models' exponentials, weighted by log-ratios. One pass suffices
//           for the KL divergences, because KL(t || s) = E_t[y_t - y_s] - lse_t + lse_s.
// Work      One block per row. A thread takes four columns of both models at two places at a time.
// Traffic   8 bytes per column; memory bound.
// Numerics  Eight columns are summed in fp32, then added in fp64 relative to a whole base, which
//           grows with the largest logit. The order of additions is fixed.
// Limits    2^31 - 1 rows and columns.
// Source    Milakov, Gimelshein 2018, arXiv:1805.02867, for the online normalizer.
//
// MixtureKernel: gives the Jensen-Shannon divergence of a row, whose mixture needs both
// normalizers. Work, traffic and limits are those of DivergenceSumsKernel. The logarithm of the
// ratio to the mixture is computed from the difference of the log-probabilities, so it keeps its
// precision if student and teacher nearly agree.
//
// DivergenceGradientKernel: writes the gradient with respect to the student's dot products.
//
// Idea      Everything that does not depend on the column is computed once per block.
// Work      A block takes 4,096 columns of one row; a thread takes four at a time.
// Traffic   Reads 8 bytes per column and writes 2 (or 4); memory bound.
// Numerics  fp32, rounded once. Normalizers are split into whole number and rest.
// Limits    2^31 - 1 rows and columns.
// Source    Our own.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/device_math.cuh"
#include "kernels/divergence/divergence.h"

namespace logprobd::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;
constexpr unsigned kFullWarp = 0xFFFFFFFFU;
constexpr int kVector = 4;  // columns, 16 bytes
constexpr int kThreadVectors = 4;
constexpr int kBlockColumns = kThreads * kVector * kThreadVectors;  // of the gradient
constexpr double kLog2E = 1.44269504088896340736;

/// Scales of a row's logits to base 2. Without a transform they include the scale of the head.
struct RowScales {
  float student;
  float teacher;
};

template <bool kTransforms>
__device__ RowScales ScalesOf(const DivergenceRowsParams& params, int64_t row) {
  const double per_temperature = kLog2E / params.temperatures[row];
  if (kTransforms) {
    return {static_cast<float>(per_temperature), static_cast<float>(per_temperature)};
  }
  return {static_cast<float>(per_temperature * params.student.transform.scale),
          static_cast<float>(per_temperature * params.teacher.transform.scale)};
}

/// Reads the logits of `kCount` columns (4 or 1), which begin at `column`.
template <bool kTransforms, int kCount>
__device__ __forceinline__ void ReadLogits(const DivergenceModel& model, const float* dots,
                                           int64_t column, float* logits) {
  if constexpr (kCount == kVector) {
    const float4 four = __ldcs(reinterpret_cast<const float4*>(dots + column));
    logits[0] = four.x;
    logits[1] = four.y;
    logits[2] = four.z;
    logits[3] = four.w;
  } else {
    logits[0] = dots[column];
  }
  if constexpr (kTransforms) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float bias = model.bias == nullptr ? 0.0F : model.bias[column + i];
      logits[i] = LogitOf(logits[i], bias, model.transform);
    }
  }
}

/// Calls `add(integral_constant<int>, student logits, teacher logits)` for all columns of a row
/// that this thread has: eight at a time, then four, then one.
template <bool kTransforms, typename Add>
__device__ __forceinline__ void ForEachColumn(const DivergenceRowsParams& params, int64_t row,
                                              const Add& add) {
  const float* const student = params.student.dots + row * params.student.row_stride;
  const float* const teacher = params.teacher.dots + row * params.teacher.row_stride;
  const int64_t num_vectors = params.num_columns / kVector;
  int64_t vector = threadIdx.x;
  for (; vector + kThreads < num_vectors; vector += 2 * kThreads) {
    float s[2 * kVector];
    float t[2 * kVector];
    ReadLogits<kTransforms, kVector>(params.student, student, vector * kVector, s);
    ReadLogits<kTransforms, kVector>(params.teacher, teacher, vector * kVector, t);
    ReadLogits<kTransforms, kVector>(params.student, student, (vector + kThreads) * kVector,
                                     s + kVector);
    ReadLogits<kTransforms, kVector>(params.teacher, teacher, (vector + kThreads) * kVector,
                                     t + kVector);
    add(s, t);
  }
  if (vector < num_vectors) {
    float s[kVector];
    float t[kVector];
    ReadLogits<kTransforms, kVector>(params.student, student, vector * kVector, s);
    ReadLogits<kTransforms, kVector>(params.teacher, teacher, vector * kVector, t);
    add(s, t);
  }
  const int64_t column = num_vectors * kVector + threadIdx.x;
  if (column < params.num_columns) {
    float s[1];
    float t[1];
    ReadLogits<kTransforms, 1>(params.student, student, column, s);
    ReadLogits<kTransforms, 1>(params.teacher, teacher, column, t);
    add(s, t);
  }
}

__device__ DivergenceSums ShuffledDown(const DivergenceSums& sums, int distance) {
  DivergenceSums other;
  other.student_base = __shfl_down_sync(kFullWarp, sums.student_base, distance);
  other.teacher_base = __shfl_down_sync(kFullWarp, sums.teacher_base, distance);
  other.student = __shfl_down_sync(kFullWarp, sums.student, distance);
  other.weighted = __shfl_down_sync(kFullWarp, sums.weighted, distance);
  other.teacher = __shfl_down_sync(kFullWarp, sums.teacher, distance);
  other.gap = __shfl_down_sync(kFullWarp, sums.gap, distance);
  return other;
}

template <DivergenceKind kKind, bool kTransforms>
__global__ void __launch_bounds__(kThreads)
    DivergenceSumsKernel(const DivergenceRowsParams params, DivergenceStatistics* statistics) {
  const int64_t row = blockIdx.x;
  const RowScales scales = ScalesOf<kTransforms>(params, row);
  DivergenceSums sums;
  ForEachColumn<kTransforms>(params, row, [&](const auto& student, const auto& teacher) {
    AddColumns<kKind>(sums, student, teacher, scales.student, scales.teacher);
  });
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    Join<kKind>(sums, ShuffledDown(sums, distance));
  }
  // A constructor would run for shared memory, so the array is of plain bytes.
  __shared__ alignas(DivergenceSums) unsigned char memory[kWarps * sizeof(DivergenceSums)];
  auto* const of_warps = reinterpret_cast<DivergenceSums*>(memory);
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = sums;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) Join<kKind>(sums, of_warps[warp]);
  statistics[row] = StatisticsOf<kKind>(sums, params.num_columns);
}

__device__ MixtureShares SharesOf(const DivergenceRowsParams& params) {
  return {static_cast<float>(params.beta), static_cast<float>(1 - params.beta)};
}

/// Returns the sum over the block's threads, in a fixed order. Only thread 0 gets it.
__device__ double BlockSum(double value) {
  __shared__ double of_warps[kWarps];
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_down_sync(kFullWarp, value, distance);
  }
  __syncthreads();  // The array may still be read by an earlier call.
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  if (threadIdx.x != 0) return 0;
  for (int warp = 1; warp < kWarps; ++warp) value += of_warps[warp];
  return value;
}

template <bool kTransforms>
__global__ void __launch_bounds__(kThreads)
    MixtureKernel(const DivergenceRowsParams params, DivergenceStatistics* statistics) {
  const int64_t row = blockIdx.x;
  const RowScales scales = ScalesOf<kTransforms>(params, row);
  const SplitNormalizer student_normalizer = Split(statistics[row].student_lse);
  const SplitNormalizer teacher_normalizer = Split(statistics[row].teacher_lse);
  const MixtureShares shares = SharesOf(params);
  double student_part = 0;  // of KL(s || m), in bits
  double teacher_part = 0;  // of KL(t || m), in bits
  ForEachColumn<kTransforms>(params, row, [&](const auto& student, const auto& teacher) {
    constexpr int kCount = sizeof(student) / sizeof(float);
    float student_sum = 0.0F;
    float teacher_sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float log2_s = Log2Probability(student[i], scales.student, student_normalizer);
      const float log2_t = Log2Probability(teacher[i], scales.teacher, teacher_normalizer);
      const MixtureRatios ratios = RatiosToMixture(log2_t - log2_s, shares);
      student_sum += WeightedValue(FastExp2(log2_s), ratios.student);
      teacher_sum += WeightedValue(FastExp2(log2_t), ratios.teacher);
    }
    student_part += student_sum;
    teacher_part += teacher_sum;
  });
  student_part = BlockSum(student_part);
  teacher_part = BlockSum(teacher_part);
  if (threadIdx.x != 0) return;
  const double divergence = kLn2 * (params.beta * teacher_part + (1 - params.beta) * student_part);
  statistics[row].student_share = kLn2 * student_part;
  statistics[row].divergence = divergence < 0 ? 0 : divergence;
}

template <bool kTransforms>
__device__ DivergenceGradientRow RowOf(const DivergenceGradientParams& params, int64_t row) {
  const DivergenceStatistics& statistics = params.statistics[row];
  const RowScales scales = ScalesOf<kTransforms>(params.rows, row);
  const double factor = params.rows.student.transform.scale / params.rows.temperatures[row];
  const auto upstream = [&](const double* values) {
    return values == nullptr ? 0.0F : static_cast<float>(values[row] * factor);
  };
  DivergenceGradientRow result;
  result.student_scale = scales.student;
  result.teacher_scale = scales.teacher;
  result.student = Split(statistics.student_lse);
  result.teacher = Split(statistics.teacher_lse);
  result.shares = SharesOf(params.rows);
  result.student_share = static_cast<float>(statistics.student_share);
  result.entropy = static_cast<float>(statistics.entropy);
  result.d_divergence = upstream(params.d_divergence);
  result.d_entropy = upstream(params.d_entropy);
  return result;
}

template <DivergenceKind kKind, bool kTransforms>
__device__ __forceinline__ float GradientOf(const DivergenceGradientRow& row, float student,
                                            float teacher, float softcap) {
  float gradient = DivergenceGradient<kKind>(row, student, teacher);
  if (kTransforms && softcap > 0.0F && gradient != 0.0F) {
    const float share = student / softcap;
    gradient *= fmaf(-share, share, 1.0F);
  }
  return gradient;
}

__device__ __forceinline__ void Store(float* out, const float (&values)[kVector]) {
  *reinterpret_cast<float4*>(out) = make_float4(values[0], values[1], values[2], values[3]);
}
template <class Element>
__device__ __forceinline__ void Store(Element* out, const float (&values)[kVector]) {
  *reinterpret_cast<uint2*>(out) =
      make_uint2(PackPair<Element>(values[0], values[1]), PackPair<Element>(values[2], values[3]));
}
__device__ __forceinline__ void Store(float* out, float value) { *out = value; }
__device__ __forceinline__ void Store(__nv_bfloat16* out, float value) {
  *out = __float2bfloat16_rn(value);
}
__device__ __forceinline__ void Store(__half* out, float value) { *out = __float2half_rn(value); }

template <DivergenceKind kKind, bool kTransforms, class Element>
__global__ void __launch_bounds__(kThreads)
    DivergenceGradientKernel(const DivergenceGradientParams params) {
  const int64_t row = blockIdx.y + static_cast<int64_t>(gridDim.y) * blockIdx.z;
  if (row >= params.rows.num_rows) return;
  __shared__ DivergenceGradientRow constants;
  if (threadIdx.x == 0) constants = RowOf<kTransforms>(params, row);
  __syncthreads();
  const DivergenceModel& student_model = params.rows.student;
  const DivergenceModel& teacher_model = params.rows.teacher;
  const float* const student = student_model.dots + row * student_model.row_stride;
  const float* const teacher = teacher_model.dots + row * teacher_model.row_stride;
  const float softcap = student_model.transform.softcap;
  Element* const out = static_cast<Element*>(params.gradients) + row * params.gradient_stride;
  const int64_t num_columns = params.rows.num_columns;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockColumns + threadIdx.x * kVector;
#pragma unroll
  for (int part = 0; part < kThreadVectors; ++part) {
    const int64_t column = first + static_cast<int64_t>(part) * kThreads * kVector;
    if (column + kVector <= num_columns) {
      float s[kVector];
      float t[kVector];
      ReadLogits<kTransforms, kVector>(student_model, student, column, s);
      ReadLogits<kTransforms, kVector>(teacher_model, teacher, column, t);
      float gradients[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        gradients[i] = GradientOf<kKind, kTransforms>(constants, s[i], t[i], softcap);
      }
      Store(out + column, gradients);
      continue;
    }
    for (int64_t rest = column; rest < num_columns; ++rest) {
      float s;
      float t;
      ReadLogits<kTransforms, 1>(student_model, student, rest, &s);
      ReadLogits<kTransforms, 1>(teacher_model, teacher, rest, &t);
      Store(out + rest, GradientOf<kKind, kTransforms>(constants, s, t, softcap));
    }
  }
}

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % (kVector * sizeof(float)) == 0;
}

bool IsValid(const DivergenceModel& model, int64_t num_columns) {
  return model.dots != nullptr && IsAligned(model.dots) && model.row_stride >= num_columns &&
         model.row_stride % kVector == 0 && model.transform.scale != 0.0F;
}

bool IsValid(const DivergenceRowsParams& params) {
  return params.num_rows > 0 && params.num_rows <= INT32_MAX && params.num_columns > 0 &&
         params.num_columns <= INT32_MAX && IsValid(params.student, params.num_columns) &&
         IsValid(params.teacher, params.num_columns) && params.temperatures != nullptr &&
         (params.kind != DivergenceKind::kJsd || (params.beta > 0 && params.beta < 1));
}

bool Transforms(const DivergenceRowsParams& params) {
  const auto transforms = [](const DivergenceModel& model) {
    return model.bias != nullptr || model.transform.softcap > 0.0F;
  };
  return transforms(params.student) || transforms(params.teacher);
}

template <DivergenceKind kKind>
void LaunchSums(const DivergenceRowsParams& params, DivergenceStatistics* statistics,
                cudaStream_t stream) {
  const auto kernel =
      Transforms(params) ? DivergenceSumsKernel<kKind, true> : DivergenceSumsKernel<kKind, false>;
  kernel<<<static_cast<uint32_t>(params.num_rows), kThreads, 0, stream>>>(params, statistics);
}

template <DivergenceKind kKind, class Element>
void LaunchGradient(const DivergenceGradientParams& params, cudaStream_t stream) {
  constexpr int64_t kGridRowsMax = 65'535;
  const int64_t num_rows = params.rows.num_rows;
  const int64_t planes = (num_rows + kGridRowsMax - 1) / kGridRowsMax;
  const dim3 grid(
      static_cast<uint32_t>((params.rows.num_columns + kBlockColumns - 1) / kBlockColumns),
      static_cast<uint32_t>((num_rows + planes - 1) / planes), static_cast<uint32_t>(planes));
  const auto kernel = Transforms(params.rows) ? DivergenceGradientKernel<kKind, true, Element>
                                              : DivergenceGradientKernel<kKind, false, Element>;
  kernel<<<grid, kThreads, 0, stream>>>(params);
}

template <class Element>
void LaunchGradient(const DivergenceGradientParams& params, cudaStream_t stream) {
  switch (params.rows.kind) {
    case DivergenceKind::kForwardKl:
      return LaunchGradient<DivergenceKind::kForwardKl, Element>(params, stream);
    case DivergenceKind::kReverseKl:
      return LaunchGradient<DivergenceKind::kReverseKl, Element>(params, stream);
    case DivergenceKind::kJsd:
      return LaunchGradient<DivergenceKind::kJsd, Element>(params, stream);
  }
}

}  // namespace

cudaError_t LaunchDivergenceSums(const DivergenceRowsParams& params,
                                 DivergenceStatistics* statistics, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (!IsValid(params) || statistics == nullptr) return cudaErrorInvalidValue;
  switch (params.kind) {
    case DivergenceKind::kForwardKl:
      LaunchSums<DivergenceKind::kForwardKl>(params, statistics, stream);
      break;
    case DivergenceKind::kReverseKl:
      LaunchSums<DivergenceKind::kReverseKl>(params, statistics, stream);
      break;
    case DivergenceKind::kJsd:
      LaunchSums<DivergenceKind::kJsd>(params, statistics, stream);
      const auto kernel = Transforms(params) ? MixtureKernel<true> : MixtureKernel<false>;
      kernel<<<static_cast<uint32_t>(params.num_rows), kThreads, 0, stream>>>(params, statistics);
      break;
  }
  return cudaGetLastError();
}

cudaError_t LaunchDivergenceGradient(const DivergenceGradientParams& params, cudaStream_t stream) {
  if (params.rows.num_rows == 0) return cudaSuccess;
  if (!IsValid(params.rows) || params.statistics == nullptr || params.gradients == nullptr ||
      !IsAligned(params.gradients) || params.gradient_stride < params.rows.num_columns ||
      params.gradient_stride % kVector != 0) {
    return cudaErrorInvalidValue;
  }
  switch (params.dtype) {
    case Dtype::kBf16:
      LaunchGradient<__nv_bfloat16>(params, stream);
      break;
    case Dtype::kF16:
      LaunchGradient<__half>(params, stream);
      break;
    case Dtype::kF32:
      LaunchGradient<float>(params, stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
