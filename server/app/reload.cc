#include "server/app/reload.h"

#include <variant>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"

namespace logprobd {

absl::StatusOr<Reload> PlanReload(const ServerOptions& start, const ServerOptions& current,
                                  const ServerOptions& wanted) {
  Reload reload;
  reload.options = current;
  for (const Flag& flag : Flags()) {
    if (FlagValueAsToml(flag, current) == FlagValueAsToml(flag, wanted)) {
      continue;
    }
    const std::string name(flag.name);
    if (!flag.is_reloadable) {
      reload.needs_restart.push_back(name);
    } else if (name == "top-k-max" && wanted.top_k_max > start.top_k_max) {
      reload.needs_restart.push_back(absl::StrCat(name, " above ", start.top_k_max));
    } else {
      std::visit([&](auto member) { reload.options.*member = wanted.*member; }, flag.member);
      reload.applied.push_back(name);
    }
  }
  LOGPROBD_RETURN_IF_ERROR(CheckServerOptions(reload.options));
  return reload;
}

}  // namespace logprobd
