#include "client/cpp/same_host.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace logprobd::client {

absl::string_view TransportName(Transport transport) {
  switch (transport) {
    case Transport::kTcp:
      return "tcp";
    case Transport::kUnix:
      return "unix";
    case Transport::kSharedMemory:
      return "shm";
    case Transport::kCudaIpc:
      return "cuda_ipc";
  }
  return "unknown";
}

absl::StatusOr<TransportChoice> ParseTransportChoice(absl::string_view text) {
  if (text == "auto") return TransportChoice::kAuto;
  if (text == "tcp") return TransportChoice::kTcp;
  if (text == "shm") return TransportChoice::kSharedMemory;
  if (text == "cuda-ipc" || text == "cuda_ipc") return TransportChoice::kCudaIpc;
  return absl::InvalidArgumentError(
      absl::StrCat("transport is \"", text, "\", must be auto, tcp, shm or cuda-ipc"));
}

}  // namespace logprobd::client
