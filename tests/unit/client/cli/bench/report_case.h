#pragma once

#include "client/cli/bench/bench_report.h"

namespace logprobd::client {

/// A load of 1,000 requests in two seconds with latencies of 1 to 10 ms.
inline BenchLoad SomeLoad(int64_t rows, int64_t concurrency) {
  BenchLoad load;
  load.plan.mix = {.sizes = {{.rows = rows}}};
  load.plan.concurrency = concurrency;
  Interval& measured = load.measurement.measured;
  measured.seconds = 2;
  measured.sizes.resize(1);
  measured.sizes[0].rows = 1'000 * rows;
  measured.sizes[0].transports = {{Transport::kSharedMemory, 1'000}};
  for (int i = 1; i <= 1'000; ++i) measured.sizes[0].latency.Record(i * 1e-5);
  for (int i = 0; i < 3; ++i) {
    load.measurement.windows.push_back({.begin_seconds = i * 0.7,
                                        .seconds = 0.7,
                                        .requests = 333,
                                        .errors = 0,
                                        .rows_per_second = 500.0 * static_cast<double>(rows),
                                        .latency_seconds = 0.005});
  }
  load.measurement.stable = true;
  load.measurement.inflight_max = concurrency;
  return load;
}

/// A mix of two sizes in an open loop, with late sends.
inline BenchLoad SomeMix() {
  BenchLoad load = SomeLoad(1, 1);
  load.plan.mix = {.sizes = {{.rows = 1, .weight = 80}, {.rows = 256, .weight = 20}}};
  load.plan.request_rate = 500;
  Interval& measured = load.measurement.measured;
  measured.sizes.resize(2);
  measured.sizes[1].rows = 256 * 10;
  measured.sizes[1].transports = {{Transport::kTcp, 10}};
  for (int i = 0; i < 10; ++i) measured.sizes[1].latency.Record(0.25);
  measured.late = {.by_generator = 7,
                   .generator_seconds_max = 0.25,
                   .by_server = 5,
                   .server_seconds_max = 0.5,
                   .unsent = 3};
  load.measurement.stable = false;
  load.measurement.inflight_max = 64;
  return load;
}

inline ServerFigures SomeServer() {
  ServerFigures server;
  server.seconds = 2;
  server.rows_scored = 256'000;
  server.batches = 100;
  server.batch_rows_mean = 2'560;
  server.stages = {{.name = "queue", .count = 10, .mean_seconds = 0.002},
                   {.name = "kernel", .count = 100, .mean_seconds = 0.004}};
  server.queue_rows_peak = 512;
  server.rejected = {{"queue_rows", 3}};
  server.received_bytes = 2e9;
  server.cpu_seconds = 3;
  server.cpu_seconds_per_gigabyte = 1.5;
  server.resident_bytes_peak = 1 << 30;
  server.gpus = {{.name = "0", .busy_ratio = 0.5, .teraflops = 321}};
  return server;
}

inline BenchReport SomeReport() {
  BenchReport report;
  report.title = "Load of head h";
  report.facts = {{"head", "h"}, {"command", "logprobctl bench <x>"}};
  report.row_bytes = 8'192;
  return report;
}

}  // namespace logprobd::client
