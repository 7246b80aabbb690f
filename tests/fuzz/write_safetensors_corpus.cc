// Writes the safetensors files of the unit tests as a seed corpus for the fuzzer:
//   write_safetensors_corpus FOLDER

#include <fstream>
#include <iostream>
#include <string>

#include "tests/support/safetensors_cases.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: write_safetensors_corpus FOLDER\n";
    return 2;
  }
  for (const auto& one : logprobd::testing::SafetensorsCases()) {
    const std::string path = std::string(argv[1]) + "/" + one.name;
    std::ofstream file(path, std::ios::binary);
    file << one.bytes;
    file.close();
    if (!file.good()) {
      std::cerr << "cannot write " << path << "\n";
      return 1;
    }
  }
  return 0;
}
