#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "client/cli/tensor_files/tensor.h"

namespace logprobd::client {

/// Maps one tensor of a .safetensors file. NOT_FOUND lists the names there are; INVALID_ARGUMENT
/// says what is wrong with the file: header length, JSON, a name given twice, a range outside the
/// data or that does not match the shape.
absl::StatusOr<Tensor> ReadSafetensors(const std::string& path, const std::string& tensor);

}  // namespace logprobd::client
