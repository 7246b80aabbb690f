#pragma once

// Wrappers of the PTX instructions with which a warp multiplies 16-bit matrices, for compute
// capability 8.0 and later: mma.sync, ldmatrix and cp.async.

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"

namespace logprobd::kernels {

/// Computes sums += a b^T for 16 rows of a and 8 rows of b, each of 16 elements (mma.m16n8k16).
/// Lane 4 g + q holds rows g and g + 8 of a and row g of b, of each row elements 2 q, 2 q + 1
/// (a[0], a[1] and b0) and 2 q + 8, 2 q + 9 (a[2], a[3] and b1). Its sums belong to row g (the
/// first two) and row g + 8 of a, and rows 2 q and 2 q + 1 of b.
template <Dtype kDtype>
__device__ __forceinline__ void AddProducts(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  static_assert(kDtype != Dtype::kF32);
  if constexpr (kDtype == Dtype::kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Loads four matrices of 8 rows of 16 bytes from shared memory (ldmatrix.x4). Lane 8 i + r passes
/// the address of row r of matrix i. Lane 4 g + q gets bytes 4 q to 4 q + 3 of row g of matrix i in
/// matrices[i]. The asm is volatile and clobbers memory because barriers order it.
__device__ __forceinline__ void LoadMatrices(uint32_t (&matrices)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}

/// Copies a 16-byte chunk of global memory to shared memory without waiting.
__device__ __forceinline__ void CopyChunk(uint32_t to, const std::byte* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/// Copies the first `bytes` of a chunk and fills the rest with zeros. With 0 bytes nothing is read.
__device__ __forceinline__ void CopyPartOfChunk(uint32_t to, const std::byte* from, int32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

/// Ends the group of the thread's copies since the last call; a group may be empty.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until all groups of the thread's copies except the latest kPending are complete.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Returns an address in shared memory as the instructions take it.
__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace logprobd::kernels
