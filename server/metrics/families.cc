#include "server/metrics/families.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

namespace logprobd {
namespace {

std::vector<double> Geometric(double first, double factor, double last) {
  std::vector<double> bounds;
  for (double bound = first; bound <= last; bound *= factor) {
    bounds.push_back(bound);
  }
  return bounds;
}

}  // namespace

std::vector<double> DurationBuckets() { return Geometric(50e-6, 1.5, 33); }

std::vector<double> LoadBuckets() { return Geometric(0.05, 2, 1'640); }

std::vector<double> CountBuckets() { return Geometric(1, 2, 1 << 20); }

prometheus::Family<prometheus::Counter>& AddCounters(prometheus::Registry& registry,
                                                     const std::string& name,
                                                     const std::string& help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}

prometheus::Family<prometheus::Gauge>& AddGauges(prometheus::Registry& registry,
                                                 const std::string& name, const std::string& help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}

prometheus::Family<prometheus::Histogram>& AddHistograms(prometheus::Registry& registry,
                                                         const std::string& name,
                                                         const std::string& help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}

}  // namespace logprobd
