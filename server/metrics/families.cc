#include "server/metrics/families.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <cstddef>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

constexpr size_t kLabelBytesMax = 128;

/// Rounds to the 12 significant digits with which bounds are served. This removes the rounding
/// errors of the multiplications.
double RoundTo12Digits(double bound) {
  double rounded = bound;
  return absl::SimpleAtod(absl::StrFormat("%.12g", bound), &rounded) ? rounded : bound;
}

std::vector<double> Geometric(double first, double factor, double last) {
  std::vector<double> bounds;
  for (double bound = first; bound <= last; bound *= factor) {
    bounds.push_back(RoundTo12Digits(bound));
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

std::string LabelValue(absl::string_view text) {
  std::string value;
  while (!text.empty()) {
    const size_t length = Utf8SequenceLength(text);
    const bool keep = length > 0 && !IsUnsafeToShow(text.substr(0, length));
    const size_t width = keep ? length : 1;
    if (value.size() + width > kLabelBytesMax) break;
    if (keep) {
      value.append(text.data(), length);
    } else {
      value.push_back('_');
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return value;
}

}  // namespace logprobd
