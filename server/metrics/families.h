#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

// The headers of this folder expose nothing of prometheus-cpp except these names.
namespace prometheus {
class Counter;
class Gauge;
class Histogram;
class Registry;
template <typename T>
class Family;
}  // namespace prometheus

namespace logprobd {

/// Returns the upper bounds of the histogram buckets for durations of requests and their stages, in
/// seconds, ascending: 50 us x 1.5^n up to 32 s, rounded to 12 significant digits.
std::vector<double> DurationBuckets();
/// Returns the bounds for the time to read a weight from a disk: 50 ms x 2^n up to 27 min.
std::vector<double> LoadBuckets();
/// Returns the bounds for numbers of rows and requests: powers of two from 1 to 2^20.
std::vector<double> CountBuckets();

/// Adds a family to the registry, which owns it. `help` states the unit.
prometheus::Family<prometheus::Counter>& AddCounters(prometheus::Registry& registry,
                                                     const std::string& name,
                                                     const std::string& help);
prometheus::Family<prometheus::Gauge>& AddGauges(prometheus::Registry& registry,
                                                 const std::string& name, const std::string& help);
prometheus::Family<prometheus::Histogram>& AddHistograms(prometheus::Registry& registry,
                                                         const std::string& name,
                                                         const std::string& help);

/// Returns `text` in a form that is safe as a label value: replaces characters of IsUnsafeToShow
/// and bytes that are not UTF-8 with '_' and truncates it to 128 bytes. Names come from model
/// folders, and one invalid byte would make Prometheus reject the whole scrape.
std::string LabelValue(absl::string_view text);

}  // namespace logprobd
