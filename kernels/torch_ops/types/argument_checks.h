#pragma once

// Checks of arguments. Each throws a c10::ValueError that names the argument, except
// WarnOfSlowInputs.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "kernels/torch_ops/types/linear_logprob.h"
#include "kernels/torch_ops/types/loss.h"

namespace logprobd::torch_ops {

// The following checks serve several operators.

/// Checks that `tensor`, if given, is on the device of `reference`.
void CheckOnDevice(const MaybeTensor& tensor, const char* name, const at::Tensor& reference,
                   const char* reference_name);

/// Checks that `tensor`, if given, has a floating-point dtype.
void CheckFloatingPoint(const MaybeTensor& tensor, const std::string& name);

// The names of a model's arguments begin with `prefix`, such as "student_".

/// Checks the dtypes of `hidden` and `weight`, that the shapes are [..., H] and [V, H], and that
/// the weight has at least `rows_min` rows.
void CheckHead(const std::string& prefix, const at::Tensor& hidden, const at::Tensor& weight,
               int64_t rows_min);

/// Checks that `tensor`, if given, has one floating-point number per row of `weight`.
void CheckPerColumn(const std::string& prefix, const char* name, const MaybeTensor& tensor,
                    const at::Tensor& weight);

void CheckSoftcap(const std::string& prefix, double softcap);

void CheckTemperature(double temperature);

/// Checks the dtype of a temperature per row and, on a CPU, its values in the rows that
/// `is_computed` selects; an undefined `is_computed` selects all rows.
void CheckRowTemperatures(const at::Tensor& temperatures, const at::Tensor& is_computed);

/// Warns once per process for each `message`, which says why inputs are slow and what to change.
void WarnOfSlowInputs(const std::string& message);

// The following checks are those of linear_logprob and linear_logprob_loss.

/// Checks that all tensors are on the device of hidden.
void CheckDevices(const LinearLogprobInputs& inputs, const MaybeTensor& weight_grad);

/// Checks that the weight's gradient can be added to `weight_grad`. Sizes may be symbolic.
void CheckWeightGrad(const MaybeTensor& weight_grad, const at::Tensor& weight);

/// Checks shapes, dtypes and options of a call on one of `num_ranks` ranks.
void CheckArguments(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                    int64_t num_ranks);

/// Checks that coefficients match the inputs. Sizes may be symbolic.
void CheckCoefficients(const LossCoefficients& coefficients, const LinearLogprobInputs& inputs);

}  // namespace logprobd::torch_ops
