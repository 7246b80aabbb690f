// Registers torch.ops.logprobd.linear_divergence, its backward pass and its loss: schemas, kernels,
// shapes for tracing, and gradients.

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/torch_ops/api/autograd_context.h"
#include "kernels/torch_ops/api/signatures.h"
#include "kernels/torch_ops/divergence/divergence.h"
#include "kernels/torch_ops/divergence/divergence_rows.h"
#include "kernels/torch_ops/divergence/row_divergence.h"

namespace logprobd::torch_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kDivergenceName = "logprobd::linear_divergence";
using DivergenceTensors = decltype(ToTuple(std::declval<DivergenceOutputs>()));
using DivergenceOperator =
    Operator<DivergenceTensors(const DivergenceInputs&, const DivergenceOptions&)>;

constexpr const char* kDivergenceBackward = "logprobd::linear_divergence_backward";
using DivergenceBackwardOperator = Operator<Gradients(
    const DivergenceUpstream&, const DivergenceInputs&, const DivergenceOptions&, Needs)>;

constexpr const char* kDivergenceLoss = "logprobd::linear_divergence_loss";
/// The loss, divergence and entropy, and the three gradients.
using DivergenceLossTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
/// The arguments are inputs, options, row_weights, is_mean and needs.
using DivergenceLossOperator = Operator<DivergenceLossTensors(
    const DivergenceInputs&, const DivergenceOptions&, const MaybeTensor&, bool, Needs)>;

// Kernels.

DivergenceTensors Divergence(const DivergenceInputs& inputs, const DivergenceOptions& options) {
  return ToTuple(ForwardDivergence(inputs, options));
}

Gradients Differentiate(const DivergenceUpstream& upstream, const DivergenceInputs& inputs,
                        const DivergenceOptions& options, Needs needs) {
  return ToTuple(
      BackwardDivergence(upstream, inputs, options, ToGradientNeeds(needs, inputs.student_bias)));
}

DivergenceLossTensors Loss(const DivergenceInputs& inputs, const DivergenceOptions& options,
                           const MaybeTensor& row_weights, bool is_mean, Needs needs) {
  const DivergenceLoss result = ForwardDivergenceLoss(inputs, options, row_weights, is_mean,
                                                      ToGradientNeeds(needs, inputs.student_bias));
  return std::tuple_cat(std::tuple(result.loss, result.divergence, result.entropy),
                        ToTuple(result.gradients));
}

std::vector<int64_t> RowBytes(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                              at::ScalarType teacher_hidden, at::ScalarType teacher_weight,
                              int64_t columns) {
  const at::ScalarType wide =
      WideDtype(WideDtype(hidden, weight), WideDtype(teacher_hidden, teacher_weight));
  const DivergenceRowBytes bytes = RowBytesOf(device, hidden, weight, wide, columns);
  return {bytes.logits, bytes.gradient, static_cast<int64_t>(bytes.cache_kind)};
}

// Shapes for tracing. Sizes may be symbolic.

DivergenceTensors DivergenceShapes(const DivergenceInputs& inputs,
                                   const DivergenceOptions& options) {
  // A call in which only some tensors are on the meta device is dispatched to this function.
  CheckDevices(inputs);
  const Tensor& hidden = inputs.student_hidden;
  const auto wide = hidden.options().dtype(WideDtype(inputs));
  const auto sizes = hidden.sym_sizes();
  const auto rows = sizes.slice(0, sizes.size() - 1);
  c10::SymInt num_rows = 1;
  for (const c10::SymInt& size : rows) num_rows = num_rows * size;
  const auto per_row = [&] { return at::empty_symint(rows, wide); };
  DivergenceOutputs outputs;
  outputs.divergence = per_row();
  outputs.entropy = per_row();
  outputs.statistics =
      at::empty_symint({num_rows, int64_t{kNumStatistics}}, wide.dtype(at::kDouble));
  const c10::SymInt columns = options.vocab_valid > 0 ? c10::SymInt(options.vocab_valid)
                                                      : inputs.student_weight.sym_size(0);
  const bool is_narrow = options.keep_gradient == GradientCacheKind::kSixteenBits;
  outputs.cache = options.keep_gradient == GradientCacheKind::kNone
                      ? at::empty({0}, wide)
                      : at::empty_symint({num_rows, GradientPitch(columns)},
                                         is_narrow ? inputs.student_weight.options() : wide);
  return ToTuple(outputs);
}

Gradients StudentShapes(const DivergenceInputs& inputs, Needs needs) {
  return GradientShapes(inputs.student_hidden, inputs.student_weight, inputs.student_bias, needs);
}

Gradients DifferentiateShapes(const DivergenceUpstream& /*upstream*/,
                              const DivergenceInputs& inputs, const DivergenceOptions& /*options*/,
                              Needs needs) {
  return StudentShapes(inputs, needs);
}

DivergenceLossTensors LossShapes(const DivergenceInputs& inputs, const DivergenceOptions& options,
                                 const MaybeTensor& /*row_weights*/, bool /*is_mean*/,
                                 Needs needs) {
  DivergenceOptions uncached = options;
  uncached.keep_gradient = GradientCacheKind::kNone;
  const auto [divergence, entropy, statistics, cache] = DivergenceShapes(inputs, uncached);
  return std::tuple_cat(std::tuple(at::empty({}, divergence.options()), divergence, entropy),
                        StudentShapes(inputs, needs));
}

// Gradients.

class DivergenceFunction : public torch::autograd::Function<DivergenceFunction> {
 public:
  static constexpr size_t kNumArguments = 5;

  static variable_list forward(AutogradContext* context, const Tensor& /*hidden*/,
                               const Tensor& /*weight*/, const MaybeTensor& /*bias*/,
                               const DivergenceInputs& inputs, const DivergenceOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [divergence, entropy, statistics, cache] =
        DivergenceOperator::Call(kDivergenceName, inputs, options);
    DivergenceUpstream saved;
    saved.statistics = statistics;
    if (options.keep_gradient != GradientCacheKind::kNone) saved.cache = cache;
    context->save_for_backward(ToList(inputs, saved));
    context->saved_data[kIsCaptured] = IsCapturing(inputs);
    SaveOptions(options, *context);
    context->mark_non_differentiable({statistics, cache});
    context->set_materialize_grads(false);  // Undefined gradients do not become zeros.
    return {divergence, entropy, statistics, cache};
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    auto [inputs, of_results] =
        FromList<DivergenceInputs, DivergenceUpstream>(context->get_saved_variables());
    of_results.divergence = IfDefined(upstream[0]);
    of_results.entropy = IfDefined(upstream[1]);
    // Without a graph the cache has only the rows of the mask, which a captured pass does not know.
    if (context->saved_data[kIsCaptured].toBool() != IsCapturing(inputs)) {
      of_results.cache.reset();
    }
    const Needs needs = NeedsOf(*context, inputs.student_bias.has_value());
    return GradientsOfArguments(
        kNumArguments, needs,
        DivergenceBackwardOperator::Call(kDivergenceBackward, of_results, inputs,
                                         SavedOptions<DivergenceOptions>(*context), needs));
  }
};

DivergenceTensors DivergenceWithGradient(const DivergenceInputs& inputs,
                                         const DivergenceOptions& options) {
  CheckNeedsNoGradient(inputs.row_temperature, "temperature");
  return ToTuple<DivergenceTensors>(DivergenceFunction::apply(
      inputs.student_hidden, inputs.student_weight, inputs.student_bias, inputs, options));
}

/// A loss whose gradients are formed in the forward pass. Its backward pass scales them in place,
/// and so can run only once.
class DivergenceLossFunction : public torch::autograd::Function<DivergenceLossFunction> {
 public:
  static constexpr size_t kNumArguments = 8;

  static variable_list forward(AutogradContext* context, const Tensor& /*hidden*/,
                               const Tensor& /*weight*/, const MaybeTensor& bias,
                               const DivergenceInputs& inputs, const DivergenceOptions& options,
                               const MaybeTensor& row_weights, bool is_mean, Needs needs) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto results =
        DivergenceLossOperator::Call(kDivergenceLoss, inputs, options, row_weights, is_mean, needs);
    const auto& [loss, divergence, entropy, d_hidden, d_weight, d_bias] = results;
    SaveGradients({d_hidden, d_weight, d_bias}, bias.has_value(), *context);
    context->mark_non_differentiable({divergence, entropy, d_hidden, d_weight, d_bias});
    context->set_materialize_grads(false);
    return ListOf(results);
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    return BackwardOfLoss(
        *context, upstream[0], kNumArguments, "linear_divergence_loss",
        "linear_divergence_loss: a previous backward has used the gradients, which were formed in "
        "the forward. Call linear_divergence_loss again for each backward, or use "
        "linear_divergence, which supports retain_graph");
  }
};

DivergenceLossTensors LossWithGradient(const DivergenceInputs& inputs,
                                       const DivergenceOptions& options,
                                       const MaybeTensor& row_weights, bool is_mean, Needs needs) {
  CheckNeedsNoGradient(inputs.row_temperature, "temperature");
  CheckNeedsNoGradient(row_weights, "row_weights");
  needs = NeedsInForward(needs, inputs.student_hidden, inputs.student_weight, inputs.student_bias);
  return ToTuple<DivergenceLossTensors>(DivergenceLossFunction::apply(
      inputs.student_hidden, inputs.student_weight, inputs.student_bias, inputs, options,
      row_weights, is_mean, needs));
}

// Autocast casts both models' tensors as torch.nn.functional.linear casts its arguments.

template <at::DeviceType kDevice>
DivergenceInputs CastInputs(const DivergenceInputs& inputs) {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  DivergenceInputs cast = inputs;
  for (at::Tensor DivergenceInputs::*const tensor :
       {&DivergenceInputs::student_hidden, &DivergenceInputs::student_weight,
        &DivergenceInputs::teacher_hidden, &DivergenceInputs::teacher_weight}) {
    cast.*tensor = at::autocast::cached_cast(dtype, inputs.*tensor, kDevice);
  }
  for (MaybeTensor DivergenceInputs::*const tensor :
       {&DivergenceInputs::student_bias, &DivergenceInputs::teacher_bias}) {
    cast.*tensor = at::autocast::cached_cast(dtype, inputs.*tensor, kDevice);
  }
  return cast;
}

template <at::DeviceType kDevice>
DivergenceTensors AutocastDivergence(const DivergenceInputs& inputs,
                                     const DivergenceOptions& options) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return DivergenceOperator::Call(kDivergenceName, CastInputs<kDevice>(inputs), options);
}

template <at::DeviceType kDevice>
DivergenceLossTensors AutocastLoss(const DivergenceInputs& inputs, const DivergenceOptions& options,
                                   const MaybeTensor& row_weights, bool is_mean, Needs needs) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return DivergenceLossOperator::Call(kDivergenceLoss, CastInputs<kDevice>(inputs), options,
                                      row_weights, is_mean, needs);
}

// Registration.

template <at::DeviceType kDevice>
void RegisterAutocast(torch::Library& library) {
  library.impl("linear_divergence", DivergenceOperator::Kernel<&AutocastDivergence<kDevice>>());
  library.impl("linear_divergence_loss", DivergenceLossOperator::Kernel<&AutocastLoss<kDevice>>());
}

void RegisterKernels(torch::Library& library) {
  library.impl("linear_divergence", DivergenceOperator::Kernel<&Divergence>());
  library.impl("linear_divergence_backward", DivergenceBackwardOperator::Kernel<&Differentiate>());
  library.impl("linear_divergence_loss", DivergenceLossOperator::Kernel<&Loss>());
}

TORCH_LIBRARY_FRAGMENT(logprobd, library) {
  library.def(
      "divergence_row_bytes(Device device, ScalarType hidden_dtype, ScalarType weight_dtype, "
      "ScalarType teacher_hidden_dtype, ScalarType teacher_weight_dtype, int columns) -> int[]",
      &RowBytes);
  const std::string call = Declare<DivergenceInputs>() + ", " + Declare<DivergenceOptions>();
  const auto define = [&](const std::string& schema) { library.def(schema.c_str()); };
  define("linear_divergence(" + call + ") -> (" + Declare<DivergenceOutputs>() + ")");
  define("linear_divergence_backward(" + Declare<DivergenceUpstream>() + ", " + call +
         ", bool[3] needs) -> (" + Declare<InputGradients>() + ")");
  define("linear_divergence_loss(" + call +
         ", Tensor? row_weights, bool is_mean, bool[3] needs) -> (Tensor loss, Tensor divergence, "
         "Tensor entropy, " +
         Declare<InputGradients>() + ")");
}

TORCH_LIBRARY_IMPL(logprobd, CPU, library) { RegisterKernels(library); }
TORCH_LIBRARY_IMPL(logprobd, CUDA, library) { RegisterKernels(library); }

TORCH_LIBRARY_IMPL(logprobd, AutocastCPU, library) { RegisterAutocast<at::kCPU>(library); }
TORCH_LIBRARY_IMPL(logprobd, AutocastCUDA, library) { RegisterAutocast<at::kCUDA>(library); }

TORCH_LIBRARY_IMPL(logprobd, Meta, library) {
  library.impl("linear_divergence", DivergenceOperator::Kernel<&DivergenceShapes>());
  library.impl("linear_divergence_backward",
               DivergenceBackwardOperator::Kernel<&DifferentiateShapes>());
  library.impl("linear_divergence_loss", DivergenceLossOperator::Kernel<&LossShapes>());
}

TORCH_LIBRARY_IMPL(logprobd, Autograd, library) {
  library.impl("linear_divergence", DivergenceOperator::Kernel<&DivergenceWithGradient>());
  // A second derivative is an error rather than a constant.
  library.impl("linear_divergence_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("linear_divergence_loss", DivergenceLossOperator::Kernel<&LossWithGradient>());
}

}  // namespace
}  // namespace logprobd::torch_ops
