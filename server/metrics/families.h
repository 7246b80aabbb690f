#pragma once

#include <string>
#include <vector>

// prometheus-cpp stays out of our headers: these names are all that they show of it.
namespace prometheus {
class Counter;
class Gauge;
class Histogram;
class Registry;
template <typename T>
class Family;
}  // namespace prometheus

namespace logprobd {

/// Upper bounds of a histogram's buckets, ascending. 50 us x 1.5^n to about 30 s: requests and
/// their stages.
std::vector<double> DurationBuckets();
/// 50 ms x 2^n to about 27 minutes: a weight that is read from a disk.
std::vector<double> LoadBuckets();
/// Powers of two, 1 to 2^20: rows, and requests.
std::vector<double> CountBuckets();

/// A new family of the registry, which owns it. `help` states the unit.
prometheus::Family<prometheus::Counter>& AddCounters(prometheus::Registry& registry,
                                                     const std::string& name,
                                                     const std::string& help);
prometheus::Family<prometheus::Gauge>& AddGauges(prometheus::Registry& registry,
                                                 const std::string& name, const std::string& help);
prometheus::Family<prometheus::Histogram>& AddHistograms(prometheus::Registry& registry,
                                                         const std::string& name,
                                                         const std::string& help);

}  // namespace logprobd
