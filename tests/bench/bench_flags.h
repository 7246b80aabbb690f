#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace logprobd::testing {

/// Adds what every benchmark takes.
inline void AddBenchFlags(CLI::App& app, std::string& out, std::string& commit, int& rounds) {
  app.add_option("--out", out, "Write the records as JSON")->type_name("FILE");
  app.add_option("--commit", commit, "Commit that the records name")->type_name("ID");
  app.add_option("--rounds", rounds, "Rounds; figures are their medians")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
}

}  // namespace logprobd::testing
