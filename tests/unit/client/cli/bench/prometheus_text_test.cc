#include "client/cli/bench/prometheus_text.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kPage[] = R"(# HELP rows_total Rows.
# TYPE rows_total counter
rows_total{head="a",kind="scored"} 10
rows_total{head="a",kind="ignored"} 2
rows_total{head="b",kind="scored"} 1e3 1700000000000

cpu_seconds 1.5
odd{text="quote \" slash \\ comma , brace }"} 7
)";

TEST(MetricsPageTest, AddsTheSamplesThatHaveTheLabels) {
  const absl::StatusOr<MetricsPage> page = MetricsPage::Parse(kPage);

  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(page->Sum("rows_total"), 1'012);
  EXPECT_EQ(page->Sum("rows_total", {{"kind", "scored"}}), 1'010);
  EXPECT_EQ(page->Sum("rows_total", {{"kind", "scored"}, {"head", "a"}}), 10);
  EXPECT_EQ(page->Sum("rows_total", {{"kind", "other"}}), 0);
  EXPECT_EQ(page->Sum("cpu_seconds"), 1.5);
  EXPECT_EQ(page->Sum("odd", {{"text", "quote \" slash \\ comma , brace }"}}), 7);
}

TEST(MetricsPageTest, TellsWhatThereIs) {
  const absl::StatusOr<MetricsPage> page = MetricsPage::Parse(kPage);

  EXPECT_TRUE(page->Has("cpu_seconds"));
  EXPECT_FALSE(page->Has("cpu"));
  EXPECT_THAT(page->LabelValues("rows_total", "head"), ElementsAre("a", "b"));
  EXPECT_THAT(page->LabelValues("cpu_seconds", "head"), IsEmpty());
}

TEST(MetricsPageTest, NamesALineThatIsNotOfTheFormat) {
  for (const char* text : {"<html>", "rows_total", "rows_total{head=\"a\" 1", "rows_total{head} 1",
                           "rows_total ten", "rows_total 1 2 3", "{a=\"b\"} 1"}) {
    EXPECT_THAT(std::string(MetricsPage::Parse(text).status().message()), HasSubstr(text)) << text;
  }
}

}  // namespace
}  // namespace logprobd::client
