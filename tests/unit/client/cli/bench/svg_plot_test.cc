#include "client/cli/bench/svg_plot.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(SvgPlotTest, EscapesText) {
  EXPECT_EQ(HtmlText("a<b> & \"c\" 'd'"), "a&lt;b&gt; &amp; &quot;c&quot; &#39;d&#39;");
}

TEST(SvgPlotTest, ShortensNumbers) {
  EXPECT_EQ(ShortNumber(0), "0");
  EXPECT_EQ(ShortNumber(0.25), "0.25");
  EXPECT_EQ(ShortNumber(1'500), "1.5k");
  EXPECT_EQ(ShortNumber(20e6), "20M");
  EXPECT_EQ(ShortNumber(3e9), "3G");
  EXPECT_EQ(ShortNumber(1e-17), "0");
}

TEST(SvgPlotTest, DrawsLinesBetweenTheEdges) {
  const std::string svg = LinePlot({.label = "load"}, {.label = "rows"},
                                   {{.name = "one", .points = {{0, 0}, {10, 100}}}});

  // From the lower left to the upper right corner of the frame.
  EXPECT_THAT(svg, HasSubstr("M58.0 254.0L506.0 12.0"));
  EXPECT_THAT(svg, AllOf(HasSubstr(">load<"), HasSubstr(">rows<"), HasSubstr(">100<"),
                         HasSubstr("<title>one: 100 at 10</title>")));
}

TEST(SvgPlotTest, SpacesPowersEvenlyOnALogarithmicAxis) {
  const std::string svg =
      LinePlot({.label = "x"}, {.label = "y", .is_logarithmic = true},
               {{.name = "one", .points = {{0, 1}, {5, 10}, {10, 100}}, .has_markers = false}});

  EXPECT_THAT(svg, HasSubstr("M58.0 254.0L282.0 133.0L506.0 12.0"));
  EXPECT_THAT(svg, Not(HasSubstr("circle")));
}

TEST(SvgPlotTest, DrawsOnePointAndEqualValues) {
  for (const bool is_logarithmic : {false, true}) {
    const std::string svg = LinePlot({.label = "x", .is_logarithmic = is_logarithmic},
                                     {.label = "y", .is_logarithmic = is_logarithmic},
                                     {{.name = "one", .points = {{4, 7}}, .is_dashed = true}});

    EXPECT_THAT(svg, AllOf(HasSubstr("<circle"), HasSubstr("dashed"), Not(HasSubstr("nan")),
                           Not(HasSubstr("inf"))));
  }
}

TEST(SvgPlotTest, UsesTheTicksItIsGiven) {
  const std::string svg =
      LinePlot({.label = "percentile", .ticks = {{0, "0"}, {1, "90"}, {2, "99"}}}, {.label = "ms"},
               {{.name = "one", .points = {{0, 1}, {2, 2}}}});

  EXPECT_THAT(svg, AllOf(HasSubstr(">90<"), HasSubstr(">99<")));
}

TEST(SvgPlotTest, DrawsNothingOfNothing) {
  EXPECT_THAT(LinePlot({}, {}, {}), IsEmpty());
  EXPECT_THAT(LinePlot({}, {}, {{.name = "empty"}}), IsEmpty());
  EXPECT_THAT(Histogram({}, {}, {}), IsEmpty());
  EXPECT_THAT(BarGroups("ms", {"one"}, {}), IsEmpty());
}

TEST(SvgPlotTest, DrawsABarForEachRange) {
  const std::string svg = Histogram({.label = "ms"}, {.label = "requests"},
                                    {{.begin = 0, .end = 5, .value = 10, .title = "ten"},
                                     {.begin = 5, .end = 10, .value = 5, .title = "five"}});

  EXPECT_THAT(svg, HasSubstr("x=\"58.0\" y=\"12.0\" width=\"223.0\" height=\"242.0\"><title>ten"));
  EXPECT_THAT(svg,
              HasSubstr("x=\"282.0\" y=\"133.0\" width=\"223.0\" height=\"121.0\"><title>five"));
}

TEST(SvgPlotTest, DrawsGroupsOfBarsAndLeavesOutWhatIsMissing) {
  const std::string svg =
      BarGroups("ms", {"one", "two"},
                {{.name = "queue", .values = {2, -1}}, {.name = "copy", .values = {1, 4}}});

  EXPECT_THAT(
      svg, AllOf(HasSubstr("<title>queue, one: 2 ms</title>"), Not(HasSubstr("<title>queue, two")),
                 HasSubstr("<title>copy, two: 4 ms</title>")));
}

}  // namespace
}  // namespace logprobd::client
