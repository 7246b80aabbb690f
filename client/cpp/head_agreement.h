#pragma once

#include <string>
#include <vector>

#include "client/cpp/server_info.h"

namespace logprobd::client {

/// How the heads of two servers differ in what scores depend on (vocabulary, hidden size, dtype,
/// scale, soft cap, bias); empty where they do not.
std::string DescribeDifference(const ServerInfo& first, const ServerInfo& second);

/// The heads of the first server, with the tightest limits of all. `servers` hold the same heads
/// and are not empty.
ServerInfo TightestLimits(const std::vector<ServerInfo>& servers);

}  // namespace logprobd::client
