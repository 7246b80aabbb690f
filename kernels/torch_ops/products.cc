#include "kernels/torch_ops/products.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

namespace logprobd::torch_ops {

bool IsMultipliedAsIs(const at::Tensor& a, const at::Tensor& b) {
  const bool is_sixteen_bit = a.scalar_type() == at::kBFloat16 || a.scalar_type() == at::kHalf;
  return a.is_cuda() && is_sixteen_bit && a.scalar_type() == b.scalar_type();
}

at::Tensor WideProduct(const at::Tensor& a, const at::Tensor& b, at::ScalarType wide) {
  if (IsMultipliedAsIs(a, b)) return at::mm(a, b, at::kFloat);
  const at::NoTF32Guard no_tf32;
  return at::mm(a.to(wide), b.to(wide));
}

void MultiplyInto(const at::Tensor& place, Into into, const at::Tensor& a, const at::Tensor& b,
                  at::ScalarType wide) {
  at::Tensor out = place;
  const bool is_float = out.scalar_type() == at::kFloat;
  if (IsMultipliedAsIs(a, b) && is_float && into == Into::kAddTo) {
    at::addmm_out(out, out, a, b, at::kFloat);
  } else if (IsMultipliedAsIs(a, b) && is_float) {
    at::mm_out(out, a, b, at::kFloat);
  } else if (IsMultipliedAsIs(a, b) && into == Into::kReplace &&
             out.scalar_type() == a.scalar_type()) {
    at::mm_out(out, a, b);
  } else if (into == Into::kAddTo) {
    out.add_(WideProduct(a, b, wide));
  } else {
    out.copy_(WideProduct(a, b, wide));
  }
}

}  // namespace logprobd::torch_ops
