#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace logprobd::kernels {

/// Instruction sets for which there are kernels, from the least to the most capable. Each of the
/// x86 sets includes the ones before it.
enum class CpuIsa {
  kGeneric,     ///< Any CPU of the compiler's default target.
  kAvx2,        ///< AVX2, FMA and F16C.
  kAvx512,      ///< AVX-512 F, BW, DQ and VL.
  kAvx512Bf16,  ///< AVX512-BF16: dot products of bf16 pairs.
  kAmxBf16,     ///< AMX-BF16: matrix products of bf16 tiles.
};

inline constexpr CpuIsa kAllCpuIsas[] = {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512,
                                         CpuIsa::kAvx512Bf16, CpuIsa::kAmxBf16};

/// Returns "generic", "avx2", "avx512", "avx512_bf16" or "amx_bf16".
std::string_view CpuIsaName(CpuIsa isa);
/// Returns the instruction set with this CpuIsaName, or nullopt if the name is unknown.
std::optional<CpuIsa> CpuIsaByName(std::string_view name);

/// Returns true if this build has kernels for `isa` and the CPU and the operating system of this
/// machine support it. For AMX the first call requests permission from the operating system to use
/// the tile registers.
bool CpuIsaRuns(CpuIsa isa);

/// Returns the most capable instruction set for which CpuIsaRuns is true.
CpuIsa BestCpuIsa();

}  // namespace logprobd::kernels
