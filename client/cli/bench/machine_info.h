#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace logprobd::client {

/// What a number cannot be read without. The machine's name is left out on purpose.
struct MachineInfo {
  std::string cpu_model;  ///< "unknown" where the system does not say.
  int cores = 1;          ///< That this process may use.
  std::string date;       ///< UTC, "2026-11-21T22:16:00Z".
};

MachineInfo ReadMachineInfo();

/// The value of "model name" in the text of /proc/cpuinfo; "unknown" where there is none.
std::string CpuModelOf(absl::string_view cpuinfo);

/// A command line as one would type it: arguments with other than plain characters are quoted.
std::string CommandLineText(const std::vector<std::string>& arguments);

}  // namespace logprobd::client
