#include "client/cli/bench/svg_plot.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace logprobd::client {
namespace {

constexpr double kWidth = 520;
constexpr double kHeight = 300;
constexpr double kLeft = 58;
constexpr double kRight = 14;
constexpr double kTop = 12;
constexpr double kBottom = 46;
constexpr int kColors = 8;
constexpr int kTicksWanted = 5;

/// Values to places along one axis.
class Scale {
 public:
  Scale(const PlotAxis& axis, double least, double most, double from, double to)
      : is_logarithmic_(axis.is_logarithmic && least > 0), from_(from), to_(to) {
    begin_ = is_logarithmic_ ? least : std::min(least, 0.0);
    end_ = most;
    if (!axis.ticks.empty()) {
      begin_ = axis.ticks.front().first;
      end_ = std::max(most, axis.ticks.back().first);
      ticks_ = axis.ticks;
    } else if (is_logarithmic_) {
      MakeLogarithmicTicks();
    } else {
      MakeTicks();
    }
    if (end_ <= begin_) end_ = begin_ + 1;
  }

  double Place(double value) const {
    const double share = is_logarithmic_
                             ? std::log(std::max(value, begin_) / begin_) / std::log(end_ / begin_)
                             : (value - begin_) / (end_ - begin_);
    return from_ + share * (to_ - from_);
  }

  const std::vector<std::pair<double, std::string>>& ticks() const { return ticks_; }

 private:
  void MakeTicks() {
    const double range = end_ > begin_ ? end_ - begin_ : 1;
    const double rough = range / kTicksWanted;
    const double power = std::pow(10, std::floor(std::log10(rough)));
    const double step = power * (rough / power <= 1   ? 1
                                 : rough / power <= 2 ? 2
                                 : rough / power <= 5 ? 5
                                                      : 10);
    end_ = begin_ + std::ceil(range / step - 1e-9) * step;
    for (double tick = begin_; tick <= end_ + step / 2; tick += step) {
      ticks_.emplace_back(tick, ShortNumber(tick));
    }
  }

  /// 1, 2, 5 of each power of ten, or the powers alone where there are many.
  void MakeLogarithmicTicks() {
    if (end_ < begin_ * 1.5) {  // one value, or nearly
      begin_ /= 1.5;
      end_ *= 1.5;
    }
    const bool is_wide = end_ / begin_ > 1e3;
    for (double power = std::pow(10, std::floor(std::log10(begin_))); power <= end_; power *= 10) {
      for (const double factor : {1.0, 2.0, 5.0}) {
        const double tick = power * factor;
        if (is_wide && factor != 1) continue;
        if (tick >= begin_ * 0.999 && tick <= end_ * 1.001) {
          ticks_.emplace_back(tick, ShortNumber(tick));
        }
      }
    }
  }

  const bool is_logarithmic_;
  const double from_;
  const double to_;
  double begin_ = 0;
  double end_ = 1;
  std::vector<std::pair<double, std::string>> ticks_;
};

std::string Open(double height, const std::string& label) {
  return absl::StrFormat("<svg viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"%s\">", kWidth,
                         height, HtmlText(label));
}

/// Grid, ticks and labels.
std::string Frame(const PlotAxis& x_axis, const PlotAxis& y_axis, const Scale& x, const Scale& y) {
  std::string svg = Open(kHeight, absl::StrCat(y_axis.label, " by ", x_axis.label));
  const double bottom = kHeight - kBottom;
  for (const auto& [value, text] : y.ticks()) {
    absl::StrAppendFormat(&svg,
                          "<path class=\"rule\" d=\"M%g %.1fH%g\"/><text class=\"end\" x=\"%g\" "
                          "y=\"%.1f\">%s</text>",
                          kLeft, y.Place(value), kWidth - kRight, kLeft - 6, y.Place(value) + 4,
                          HtmlText(text));
  }
  for (const auto& [value, text] : x.ticks()) {
    absl::StrAppendFormat(&svg,
                          "<path class=\"rule\" d=\"M%.1f %gV%g\"/><text class=\"mid\" x=\"%.1f\" "
                          "y=\"%g\">%s</text>",
                          x.Place(value), kTop, bottom, x.Place(value), bottom + 17,
                          HtmlText(text));
  }
  absl::StrAppendFormat(&svg,
                        "<path class=\"axis\" d=\"M%g %gV%gH%g\"/>"
                        "<text class=\"mid label\" x=\"%g\" y=\"%g\">%s</text>"
                        "<text class=\"mid label\" transform=\"translate(13 %g) rotate(-90)\">%s"
                        "</text>",
                        kLeft, kTop, bottom, kWidth - kRight, (kLeft + kWidth - kRight) / 2,
                        kHeight - 8, HtmlText(x_axis.label), (kTop + bottom) / 2,
                        HtmlText(y_axis.label));
  return svg;
}

struct Extent {
  double least = std::numeric_limits<double>::infinity();
  double most = -std::numeric_limits<double>::infinity();
  void Add(double value) {
    least = std::min(least, value);
    most = std::max(most, value);
  }
};

}  // namespace

std::string HtmlText(const std::string& text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string ShortNumber(double value) {
  const double magnitude = std::abs(value);
  if (magnitude >= 1e9) return absl::StrFormat("%.3gG", value / 1e9);
  if (magnitude >= 1e6) return absl::StrFormat("%.3gM", value / 1e6);
  if (magnitude >= 1e3) return absl::StrFormat("%.3gk", value / 1e3);
  return absl::StrFormat("%.3g", magnitude < 1e-12 ? 0.0 : value);
}

std::string LinePlot(const PlotAxis& x_axis, const PlotAxis& y_axis,
                     const std::vector<PlotSeries>& series) {
  Extent xs;
  Extent ys;
  for (const PlotSeries& one : series) {
    for (const auto& [x, y] : one.points) {
      xs.Add(x);
      ys.Add(y);
    }
  }
  if (xs.least > xs.most) return "";
  const Scale x(x_axis, xs.least, xs.most, kLeft, kWidth - kRight);
  const Scale y(y_axis, ys.least, ys.most, kHeight - kBottom, kTop);
  std::string svg = Frame(x_axis, y_axis, x, y);
  for (const PlotSeries& one : series) {
    if (one.points.empty()) continue;
    std::string path;
    std::string markers;
    for (const auto& [px, py] : one.points) {
      absl::StrAppendFormat(&path, "%s%.1f %.1f", path.empty() ? "M" : "L", x.Place(px),
                            y.Place(py));
      if (!one.has_markers) continue;
      absl::StrAppendFormat(
          &markers,
          "<circle class=\"c%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"><title>%s: %s at %s"
          "</title></circle>",
          one.color % kColors, x.Place(px), y.Place(py), HtmlText(one.name), ShortNumber(py),
          ShortNumber(px));
    }
    absl::StrAppendFormat(&svg, "<path class=\"line c%d%s\" d=\"%s\"><title>%s</title></path>%s",
                          one.color % kColors, one.is_dashed ? " dashed" : "", path,
                          HtmlText(one.name), markers);
  }
  return svg + "</svg>";
}

std::string Histogram(const PlotAxis& x_axis, const PlotAxis& y_axis,
                      const std::vector<PlotBar>& bars) {
  if (bars.empty()) return "";
  double most = 0;
  for (const PlotBar& bar : bars) most = std::max(most, bar.value);
  const Scale x(x_axis, bars.front().begin, bars.back().end, kLeft, kWidth - kRight);
  const Scale y(y_axis, 0, most, kHeight - kBottom, kTop);
  std::string svg = Frame(x_axis, y_axis, x, y);
  for (const PlotBar& bar : bars) {
    const double left = x.Place(bar.begin);
    const double top = y.Place(bar.value);
    absl::StrAppendFormat(
        &svg,
        "<rect class=\"c0\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>%s"
        "</title></rect>",
        left, top, std::max(x.Place(bar.end) - left - 1, 1.0), kHeight - kBottom - top,
        HtmlText(bar.title));
  }
  return svg + "</svg>";
}

std::string BarGroups(const std::string& unit, const std::vector<std::string>& series,
                      const std::vector<BarGroup>& groups) {
  constexpr double kBar = 14;
  constexpr double kGap = 12;
  constexpr double kNames = 74;
  constexpr double kValues = 64;
  double most = 0;
  for (const BarGroup& group : groups) {
    for (const double value : group.values) most = std::max(most, value);
  }
  if (most <= 0) return "";
  const double group_height = kBar * static_cast<double>(series.size()) + kGap;
  std::string svg =
      Open(group_height * static_cast<double>(groups.size()) + kGap, absl::StrCat("bars, ", unit));
  double top = kGap / 2;
  for (const BarGroup& group : groups) {
    absl::StrAppendFormat(&svg, "<text class=\"end\" x=\"%g\" y=\"%.1f\">%s</text>", kNames - 8,
                          top + (group_height - kGap) / 2 + 4, HtmlText(group.name));
    for (size_t i = 0; i < group.values.size(); ++i) {
      const double value = group.values[i];
      if (value < 0) continue;
      const double width = std::max((kWidth - kNames - kValues) * value / most, 1.0);
      const double bar_top = top + kBar * static_cast<double>(i);
      absl::StrAppendFormat(
          &svg,
          "<rect class=\"c%d\" x=\"%g\" y=\"%.1f\" width=\"%.1f\" height=\"%g\"><title>%s, %s: %s "
          "%s</title></rect><text x=\"%.1f\" y=\"%.1f\">%s</text>",
          static_cast<int>(i) % kColors, kNames, bar_top, width, kBar - 2, HtmlText(group.name),
          HtmlText(series[i]), ShortNumber(value), HtmlText(unit), kNames + width + 5,
          bar_top + kBar - 4, ShortNumber(value));
    }
    top += group_height;
  }
  return svg + "</svg>";
}

}  // namespace logprobd::client
