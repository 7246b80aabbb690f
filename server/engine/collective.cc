#include "server/engine/collective.h"

#include "absl/strings/cord.h"

namespace logprobd {
namespace {

constexpr absl::string_view kNameUrl = "logprobd/collective";

}  // namespace

absl::Status CollectiveError(absl::string_view name, absl::string_view message) {
  absl::Status status = absl::InternalError(message);
  status.SetPayload(kNameUrl, absl::Cord(name));
  return status;
}

std::optional<std::string> CollectiveOf(const absl::Status& status) {
  const absl::optional<absl::Cord> name = status.GetPayload(kNameUrl);
  if (!name.has_value()) return std::nullopt;
  return std::string(*name);
}

}  // namespace logprobd
