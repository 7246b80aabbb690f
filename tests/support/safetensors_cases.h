#pragma once

#include <string>
#include <vector>

namespace logprobd::testing {

/// A safetensors file and what a strict reader says to it.
struct SafetensorsCase {
  std::string name;  ///< Letters only: it is part of a test's name and a file's.
  std::string bytes;
  std::string complaint;  ///< Part of the message, or empty: the file is right.
};

/// One file a rule of the format, and files that are unusual but right.
std::vector<SafetensorsCase> SafetensorsCases();

}  // namespace logprobd::testing
