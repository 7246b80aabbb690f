#pragma once

#include <string>
#include <utility>
#include <vector>

namespace logprobd::client {

/// Text as HTML shows it.
std::string HtmlText(const std::string& text);

/// One axis of a plot.
struct PlotAxis {
  std::string label;
  /// Logarithmic where all values are above 0; else linear, from 0.
  bool is_logarithmic = false;
  /// Places and texts of the ticks; empty: chosen.
  std::vector<std::pair<double, std::string>> ticks = {};
};

struct PlotSeries {
  std::string name;
  std::vector<std::pair<double, double>> points = {};  ///< x rising.
  int color = 0;                                       ///< 0 to 7: classes c0 to c7 of the page.
  bool is_dashed = false;
  bool has_markers = true;
};

/// Lines through points, as an <svg> that takes the width it is given. Each point tells its values
/// where one points at it. Empty series are left out; nothing to draw gives "".
std::string LinePlot(const PlotAxis& x, const PlotAxis& y, const std::vector<PlotSeries>& series);

/// Bars over [begin, end) of a logarithmic or linear x.
struct PlotBar {
  double begin = 0;
  double end = 0;
  double value = 0;
  std::string title;
};
std::string Histogram(const PlotAxis& x, const PlotAxis& y, const std::vector<PlotBar>& bars);

/// Horizontal bars in groups: one group a name, one bar a series.
struct BarGroup {
  std::string name;
  std::vector<double> values;  ///< One a series; below 0: none.
};
std::string BarGroups(const std::string& unit, const std::vector<std::string>& series,
                      const std::vector<BarGroup>& groups);

/// "1.5k", "20M"; three digits.
std::string ShortNumber(double value);

}  // namespace logprobd::client
