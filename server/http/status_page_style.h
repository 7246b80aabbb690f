#pragma once

namespace logprobd {

/// The style sheet of the status page. Text has a contrast of at least 4.5 to 1 in both the light
/// and the dark color scheme.
inline constexpr char kStatusPageStyle[] = R"css(
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --line: #dde1e7; --text: #1b1f27; --soft: #5a6372;
  --good: #17713a; --warn: #8a5300; --bad: #b3261e; --alarm: #b3261e; --on: #fff;
  --c1: #2560c4; --c2: #12927f; --c3: #9a5bd0; --c4: #c9761a; --free: #e4e8ee; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171c; --card: #1d2128; --line: #333a45; --text: #e6e9ee; --soft: #a3acba;
  --good: #1f7a47; --warn: #8f5a0c; --bad: #b93a32; --alarm: #ff8a80;
  --c1: #5b93f5; --c2: #35b39f; --c3: #b583e6; --c4: #dd9545; --free: #2c333d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 20px 16px 32px; background: var(--page);
  color: var(--text); font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; }
header { display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: center; }
h1 { font-size: 24px; margin: 0; }
h2 { font-size: 17px; margin: 0 0 10px; display: flex; flex-wrap: wrap; gap: 4px 10px;
  align-items: center; }
h3 { font-size: 13px; margin: 16px 0 6px; color: var(--soft); font-weight: 600; }
nav { margin-left: auto; display: flex; gap: 14px; }
a { color: var(--c1); }
p { margin: 6px 0; }
.soft { color: var(--soft); font-size: 13px; }
.badge { display: inline-block; border-radius: 12px; padding: 2px 11px; color: var(--on); font-weight: 600;
  font-size: 13px; }
.ready { background: var(--good); } .degraded { background: var(--warn); }
.not-ready { background: var(--bad); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; margin-top: 14px; min-width: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr));
  gap: 0 14px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr));
  gap: 10px 14px; }
.figures b { display: block; font-size: 19px; font-weight: 600; line-height: 1.25;
  white-space: nowrap; }
.figures span { color: var(--soft); font-size: 12.5px; }
.alarm { color: var(--alarm); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: 13.5px; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 12.5px;
  white-space: nowrap; }
th, td { padding: 3px 10px 3px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
tr:last-child td { border-bottom: 0; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; overflow-wrap: normal; white-space: nowrap; }
.draw { width: 34%; }
svg { display: block; width: 100%; height: 12px; border-radius: 3px; background: var(--free); }
svg.tall { height: 22px; border-radius: 5px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0;
  font-size: 13.5px; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; }
.key { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 0;
  margin: 6px 0 12px; font-size: 13px; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px;
  margin-right: 6px; border: 1px solid var(--line); }
.c1 { fill: var(--c1); background: var(--c1); } .c2 { fill: var(--c2); background: var(--c2); }
.c3 { fill: var(--c3); background: var(--c3); } .c4 { fill: var(--c4); background: var(--c4); }
.free { fill: var(--free); background: var(--free); }
.light { opacity: .35; } .middle { opacity: .6; }
@media (max-width: 560px) { nav { margin-left: 0; width: 100%; } .wide { display: none; }
  th, td { padding-right: 8px; } section { padding: 12px; } .draw { width: 22%; } }
)css";

}  // namespace logprobd
