#pragma once

#include <string>
#include <vector>

namespace logprobd::testing {

/// A safetensors file and the error message that a strict reader gives for it.
struct SafetensorsCase {
  std::string name;  ///< Letters only, since it is part of the names of tests and files.
  std::string bytes;
  std::string complaint;  ///< Part of the reader's error message, empty for a valid file.
};

/// Returns one invalid file for each rule of the format, and valid files that are unusual.
std::vector<SafetensorsCase> SafetensorsCases();

}  // namespace logprobd::testing
