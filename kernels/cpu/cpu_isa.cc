#include "kernels/cpu/cpu_isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include <cstdint>

namespace logprobd::kernels {
namespace {

#if defined(__x86_64__)

struct CpuFeatures {
  bool avx2 = false;
  bool avx512 = false;
  bool avx512_bf16 = false;
  bool amx_bf16 = false;
};

constexpr bool Bit(uint32_t word, int bit) { return ((word >> bit) & 1U) != 0; }

/// Returns the register sets that the operating system saves and restores (XCR0).
uint64_t EnabledRegisters() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

/// Requests the AMX tile registers; Linux grants them to a process only on request.
bool RequestTileRegisters() {
#if defined(__linux__)
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
#else
  return false;
#endif
}

CpuFeatures DetectFeatures() {
  CpuFeatures features;
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return features;
  const bool fma = Bit(ecx, 12);
  const bool osxsave = Bit(ecx, 27);
  const bool f16c = Bit(ecx, 29);
  if (!osxsave) return features;
  const uint64_t enabled = EnabledRegisters();
  constexpr uint64_t kYmm = 0x6;
  constexpr uint64_t kZmm = 0xE6;
  constexpr uint64_t kTiles = 0x60000;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return features;
  features.avx2 = Bit(ebx, 5) && fma && f16c && (enabled & kYmm) == kYmm;
  features.avx512 = features.avx2 && Bit(ebx, 16) && Bit(ebx, 17) && Bit(ebx, 30) && Bit(ebx, 31) &&
                    (enabled & kZmm) == kZmm;
  const bool amx = Bit(edx, 22) && Bit(edx, 24) && (enabled & kTiles) == kTiles;
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0) return features;
  features.avx512_bf16 = features.avx512 && Bit(eax, 5);
  features.amx_bf16 = features.avx512_bf16 && amx && RequestTileRegisters();
  return features;
}

#endif  // __x86_64__

}  // namespace

std::string_view CpuIsaName(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kGeneric:
      return "generic";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kAvx512Bf16:
      return "avx512_bf16";
    case CpuIsa::kAmxBf16:
      return "amx_bf16";
  }
  return "unknown";
}

std::optional<CpuIsa> CpuIsaByName(std::string_view name) {
  for (const CpuIsa isa : kAllCpuIsas) {
    if (CpuIsaName(isa) == name) return isa;
  }
  return std::nullopt;
}

bool CpuIsaRuns(CpuIsa isa) {
  if (isa == CpuIsa::kGeneric) return true;
#if defined(__x86_64__)
  static const CpuFeatures features = DetectFeatures();
  switch (isa) {
    case CpuIsa::kGeneric:
      return true;
    case CpuIsa::kAvx2:
      return features.avx2;
    case CpuIsa::kAvx512:
      return features.avx512;
    case CpuIsa::kAvx512Bf16:
      return features.avx512_bf16;
    case CpuIsa::kAmxBf16:
      return features.amx_bf16;
  }
#endif
  return false;
}

CpuIsa BestCpuIsa() {
  CpuIsa best = CpuIsa::kGeneric;
  for (const CpuIsa isa : kAllCpuIsas) {
    if (CpuIsaRuns(isa)) best = isa;
  }
  return best;
}

}  // namespace logprobd::kernels
