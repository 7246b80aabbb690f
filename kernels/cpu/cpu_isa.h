#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace logprobd::kernels {

/// Instruction sets that have kernels of their own, from the least to the most capable.
enum class CpuIsa {
  kGeneric,     ///< Any CPU that the compiler's default target names.
  kAvx2,        ///< AVX2, FMA and F16C.
  kAvx512,      ///< AVX-512 F, BW, DQ and VL.
  kAvx512Bf16,  ///< and AVX512-BF16: dot products of bf16 pairs.
  kAmxBf16,     ///< and AMX-BF16: matrix products of bf16 tiles.
};

inline constexpr CpuIsa kAllCpuIsas[] = {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512,
                                         CpuIsa::kAvx512Bf16, CpuIsa::kAmxBf16};

/// "generic", "avx2", "avx512", "avx512_bf16", "amx_bf16".
std::string_view CpuIsaName(CpuIsa isa);
std::optional<CpuIsa> CpuIsaByName(std::string_view name);

/// Whether this build has kernels for `isa` and this machine runs them: CPU and operating system.
/// For AMX it asks the kernel, once, for the right to use the tile registers.
bool CpuIsaRuns(CpuIsa isa);

/// The most capable that runs.
CpuIsa BestCpuIsa();

}  // namespace logprobd::kernels
