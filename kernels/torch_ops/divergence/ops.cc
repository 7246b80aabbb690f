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
#include "kernels/torch_ops/divergence/row_divergence.h"
#include "kernels/torch_ops/rows/device_ops.h"

namespace logprobd::torch_ops {

template <>
struct SchemaType<DivergenceKind> {
  using Argument = int64_t;
  static constexpr const char* kName = "int";
};
template <>
struct SchemaType<GradientCacheKind> {
  using Argument = int64_t;
  static constexpr const char* kName = "int";
};

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

GradientNeeds ToGradientNeeds(Needs needs, const DivergenceInputs& inputs) {
  return {needs[0], needs[1], needs[2] && inputs.student_bias.has_value()};
}

Gradients ToGradients(const InputGradients& gradients) {
  return {gradients.hidden, gradients.weight, gradients.bias};
}

// Kernels.

DivergenceTensors Divergence(const DivergenceInputs& inputs, const DivergenceOptions& options) {
  return ToTuple(ForwardDivergence(inputs, options));
}

Gradients Differentiate(const DivergenceUpstream& upstream, const DivergenceInputs& inputs,
                        const DivergenceOptions& options, Needs needs) {
  return ToGradients(BackwardDivergence(upstream, inputs, options, ToGradientNeeds(needs, inputs)));
}

DivergenceLossTensors Loss(const DivergenceInputs& inputs, const DivergenceOptions& options,
                           const MaybeTensor& row_weights, bool is_mean, Needs needs) {
  const DivergenceLoss result =
      ForwardDivergenceLoss(inputs, options, row_weights, is_mean, ToGradientNeeds(needs, inputs));
  return std::tuple_cat(std::tuple(result.loss, result.divergence, result.entropy),
                        ToGradients(result.gradients));
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

Gradients GradientShapes(const DivergenceInputs& inputs, Needs needs) {
  const auto shape = [](const Tensor& input, bool is_needed) {
    return is_needed ? at::empty_symint(input.sym_sizes(), input.options())
                     : at::empty({0}, input.options());
  };
  return {shape(inputs.student_hidden, needs[0]), shape(inputs.student_weight, needs[1]),
          shape(inputs.student_bias.value_or(inputs.student_weight),
                needs[2] && inputs.student_bias.has_value())};
}

Gradients DifferentiateShapes(const DivergenceUpstream& /*upstream*/,
                              const DivergenceInputs& inputs, const DivergenceOptions& /*options*/,
                              Needs needs) {
  return GradientShapes(inputs, needs);
}

DivergenceLossTensors LossShapes(const DivergenceInputs& inputs, const DivergenceOptions& options,
                                 const MaybeTensor& /*row_weights*/, bool /*is_mean*/,
                                 Needs needs) {
  DivergenceOptions uncached = options;
  uncached.keep_gradient = GradientCacheKind::kNone;
  const auto [divergence, entropy, statistics, cache] = DivergenceShapes(inputs, uncached);
  return std::tuple_cat(std::tuple(at::empty({}, divergence.options()), divergence, entropy),
                        GradientShapes(inputs, needs));
}

// Gradients. autograd::Function differentiates the tensors that `forward` takes directly; tensors
// inside structs, such as the teacher's, are constants to it. A missing bias has no index in
// needs_input_grad.

constexpr size_t kHidden = 0, kWeight = 1, kBias = 2;

constexpr const char* kIsCaptured = "is_captured";

bool IsCapturing(const DivergenceInputs& inputs) {
  const at::Device device = inputs.student_hidden.device();
  return DeviceOps::For(device.type()).IsCapturing(device);
}

class DivergenceFunction : public torch::autograd::Function<DivergenceFunction> {
 public:
  static constexpr size_t kNumArguments = 5;

  static variable_list forward(AutogradContext* context, const Tensor& /*hidden*/,
                               const Tensor& /*weight*/, const MaybeTensor& /*bias*/,
                               const DivergenceInputs& inputs, const DivergenceOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [divergence, entropy, statistics, cache] =
        DivergenceOperator::Call(kDivergenceName, inputs, options);
    variable_list saved = {statistics,
                           options.keep_gradient == GradientCacheKind::kNone ? Tensor() : cache};
    ForEachField<DivergenceInputs>([&](const auto& field) {
      const MaybeTensor input = inputs.*field.member;
      saved.push_back(input.value_or(Tensor()));
    });
    context->save_for_backward(saved);
    context->saved_data[kIsCaptured] = IsCapturing(inputs);
    SaveOptions(options, *context);
    context->mark_non_differentiable({statistics, cache});
    context->set_materialize_grads(false);  // Undefined gradients do not become zeros.
    return {divergence, entropy, statistics, cache};
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const variable_list saved = context->get_saved_variables();
    DivergenceInputs inputs;
    size_t next = 2;
    ForEachField<DivergenceInputs>([&]<typename T>(const Field<DivergenceInputs, T>& field) {
      if constexpr (std::is_same_v<T, MaybeTensor>) {
        inputs.*field.member = IfDefined(saved[next++]);
      } else {
        inputs.*field.member = saved[next++];
      }
    });
    DivergenceUpstream gradients_of_results = {IfDefined(upstream[0]), IfDefined(upstream[1]),
                                               saved[0], IfDefined(saved[1])};
    // Without a graph the cache has only the rows of the mask, which a captured pass does not know.
    if (context->saved_data[kIsCaptured].toBool() != IsCapturing(inputs)) {
      gradients_of_results.cache.reset();
    }
    const Needs needs = {context->needs_input_grad(kHidden), context->needs_input_grad(kWeight),
                         inputs.student_bias.has_value() && context->needs_input_grad(kBias)};
    const auto [d_hidden, d_weight, d_bias] =
        DivergenceBackwardOperator::Call(kDivergenceBackward, gradients_of_results, inputs,
                                         SavedOptions<DivergenceOptions>(*context), needs);
    variable_list gradients(kNumArguments);
    if (needs[0]) gradients[kHidden] = d_hidden;
    if (needs[1]) gradients[kWeight] = d_weight;
    if (needs[2]) gradients[kBias] = d_bias;
    return gradients;
  }
};

DivergenceTensors DivergenceWithGradient(const DivergenceInputs& inputs,
                                         const DivergenceOptions& options) {
  CheckNeedsNoGradient(inputs.row_temperature, "temperature");
  const variable_list out = DivergenceFunction::apply(inputs.student_hidden, inputs.student_weight,
                                                      inputs.student_bias, inputs, options);
  return {out[0], out[1], out[2], out[3]};
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
    const auto [loss, divergence, entropy, d_hidden, d_weight, d_bias] =
        DivergenceLossOperator::Call(kDivergenceLoss, inputs, options, row_weights, is_mean, needs);
    context->save_for_backward({d_hidden, d_weight, d_bias});
    context->saved_data["has_bias"] = bias.has_value();
    context->mark_non_differentiable({divergence, entropy, d_hidden, d_weight, d_bias});
    context->set_materialize_grads(false);
    return {loss, divergence, entropy, d_hidden, d_weight, d_bias};
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    constexpr const char* kHasRun = "has_run";
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "linear_divergence_loss has no second derivative: its gradients are constants");
    TORCH_CHECK(
        context->saved_data.count(kHasRun) == 0,
        "linear_divergence_loss: a previous backward has used the gradients, which were formed in "
        "the forward. Call linear_divergence_loss again for each backward, or use "
        "linear_divergence, which supports retain_graph");
    variable_list gradients(kNumArguments);
    if (!upstream[0].defined()) return gradients;
    context->saved_data[kHasRun] = true;
    const variable_list saved = context->get_saved_variables();
    const size_t num_inputs = context->saved_data["has_bias"].toBool() ? 3 : 2;
    for (const size_t input : {kHidden, kWeight, kBias}) {
      if (input >= num_inputs || !context->needs_input_grad(input)) continue;
      Tensor gradient = saved[input];
      ScaleGradientOperator::Call(kScaleGradient, gradient, upstream[0]);
      gradients[input] = gradient;
    }
    return gradients;
  }
};

DivergenceLossTensors LossWithGradient(const DivergenceInputs& inputs,
                                       const DivergenceOptions& options,
                                       const MaybeTensor& row_weights, bool is_mean, Needs needs) {
  CheckNeedsNoGradient(inputs.row_temperature, "temperature");
  CheckNeedsNoGradient(row_weights, "row_weights");
  needs[0] = needs[0] || NeedsGradient(inputs.student_hidden);
  needs[1] = needs[1] || NeedsGradient(inputs.student_weight);
  needs[2] = inputs.student_bias.has_value() && (needs[2] || NeedsGradient(inputs.student_bias));
  const variable_list out = DivergenceLossFunction::apply(
      inputs.student_hidden, inputs.student_weight, inputs.student_bias, inputs, options,
      row_weights, is_mean, needs);
  return {out[0], out[1], out[2], out[3], out[4], out[5]};
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
         ", bool[3] needs) -> (Tensor d_hidden, Tensor d_weight, Tensor d_bias)");
  define("linear_divergence_loss(" + call +
         ", Tensor? row_weights, bool is_mean, bool[3] needs) -> (Tensor loss, Tensor divergence, "
         "Tensor entropy, Tensor d_hidden, Tensor d_weight, Tensor d_bias)");
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
