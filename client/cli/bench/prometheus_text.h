#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd::client {

/// The samples of a page in Prometheus' text format, comments left out.
class MetricsPage {
 public:
  using Labels = std::map<std::string, std::string>;
  struct Sample {
    std::string name;
    Labels labels;
    double value = 0;
  };

  /// INVALID_ARGUMENT names the first line that is not of the format.
  static absl::StatusOr<MetricsPage> Parse(absl::string_view text);

  /// Sum of the samples of this name that have these labels among theirs; 0 where there are none.
  double Sum(absl::string_view name, const Labels& labels = {}) const;
  bool Has(absl::string_view name) const;
  /// The values that a label has in samples of this name, each once, in order.
  std::vector<std::string> LabelValues(absl::string_view name, const std::string& label) const;

 private:
  std::vector<Sample> samples_;
};

}  // namespace logprobd::client
