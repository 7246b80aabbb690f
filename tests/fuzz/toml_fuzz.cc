// Reads arbitrary bytes as a configuration file and as a file of tokens. Both readers must refuse
// them in one printable line, or return valid values.

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/app/options/config_file.h"
#include "server/app/options/token_file.h"
#include "server/base/errors.h"

namespace {

void CheckRefusal(const absl::Status& status) {
  LOGPROBD_CHECK(absl::IsInvalidArgument(status), status.ToString());
  LOGPROBD_CHECK(
      !status.message().empty() &&
          absl::c_none_of(status.message(), [](unsigned char c) { return absl::ascii_iscntrl(c); }),
      status.ToString());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int file = memfd_create("toml", MFD_CLOEXEC);
  static const std::string path = absl::StrCat("/proc/self/fd/", file);
  LOGPROBD_CHECK(ftruncate(file, 0) == 0 &&
                 pwrite(file, data, size, 0) == static_cast<ssize_t>(size));

  const auto settings = logprobd::ReadConfigFile(path);
  const auto entries = logprobd::ReadTokenFile(path);

  if (settings.ok()) {
    for (const logprobd::Setting& setting : *settings) {
      LOGPROBD_CHECK(setting.flag != nullptr && !setting.texts.empty());
    }
  } else {
    CheckRefusal(settings.status());
  }
  if (entries.ok()) {
    for (const logprobd::AccessEntry& entry : *entries) {
      LOGPROBD_CHECK(!entry.id.empty() && !entry.tenant.empty());
      LOGPROBD_CHECK(absl::c_linear_search(entry.scopes, true));
      LOGPROBD_CHECK(entry.share >= 0 && entry.share <= 1);  // 0 if the file names none
    }
  } else {
    CheckRefusal(entries.status());
  }
  return 0;
}
