#include "client/cli/bench/load_result.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace logprobd::client {

void SizeStats::Merge(const SizeStats& other) {
  rows += other.rows;
  errors += other.errors;
  latency.Merge(other.latency);
  for (const auto& [transport, count] : other.transports) transports[transport] += count;
}

std::string SizeStats::TransportText() const {
  std::vector<std::pair<int64_t, Transport>> used;
  for (const auto& [transport, count] : transports) used.emplace_back(-count, transport);
  std::sort(used.begin(), used.end());
  return absl::StrJoin(used, "+", [](std::string* out, const auto& each) {
    absl::StrAppend(out, TransportName(each.second));
  });
}

void LateSends::Merge(const LateSends& other) {
  by_generator += other.by_generator;
  by_server += other.by_server;
  unsent += other.unsent;
  generator_seconds_max = std::max(generator_seconds_max, other.generator_seconds_max);
  server_seconds_max = std::max(server_seconds_max, other.server_seconds_max);
}

SizeStats Interval::Total() const {
  SizeStats total;
  for (const SizeStats& size : sizes) total.Merge(size);
  return total;
}

void Interval::Append(const Interval& other) {
  if (sizes.size() < other.sizes.size()) sizes.resize(other.sizes.size());
  for (size_t i = 0; i < other.sizes.size(); ++i) sizes[i].Merge(other.sizes[i]);
  seconds += other.seconds;
  late.Merge(other.late);
  first_error.Update(other.first_error);
}

}  // namespace logprobd::client
