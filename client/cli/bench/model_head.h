#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/tensor_files/tensor.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// The weight and bias of a served head, read from the model folder.
struct ModelHead {
  Tensor weight;             ///< [vocab_rows, hidden_size], bf16, f16 or f32.
  std::vector<double> bias;  ///< [vocab_rows], or empty.
};

/// The wire's name for a tensor's type; bf16 unless it is f16 or f32.
Dtype FileDtype(ElementType type);

/// Finds what `head` describes in a folder with one or several .safetensors files, indexed or not.
/// NOT_FOUND or INVALID_ARGUMENT says in what the folder does not fit the head.
absl::StatusOr<ModelHead> OpenModelHead(const std::string& folder, const Head& head);

}  // namespace logprobd::client
