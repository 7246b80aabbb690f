#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace logprobd::client {

/// Text in columns: the first left-aligned, the rest right-aligned, as wide as their widest cell.
class Table {
 public:
  explicit Table(std::vector<std::string> header);

  /// As many cells as the header has.
  void AddRow(std::vector<std::string> cells);

  void Print(std::ostream& out) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// "1,234,567"
std::string CountText(int64_t count);
/// "1.5 GiB"
std::string BytesText(int64_t bytes);
/// A duration in milliseconds: "0.213", "12.30", "456.7".
std::string MillisecondsText(double seconds);

}  // namespace logprobd::client
