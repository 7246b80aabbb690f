#pragma once

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace logprobd::testing {

/// A temporary folder of its own name, since tests run at the same time. The destructor removes it.
class TempFolder {
 public:
  TempFolder() : path_(std::filesystem::temp_directory_path() / "logprobd_test_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) {
      throw std::system_error(errno, std::generic_category(), path_);
    }
  }
  ~TempFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string path(const std::string& name) const { return path_ + "/" + name; }

  /// Writes a file, in folders that it creates, and returns its path.
  std::string Write(const std::string& name, std::string_view bytes) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream file(path(name), std::ios::binary);
    file << bytes;
    file.close();
    if (!file.good()) {
      throw std::runtime_error(path(name) + ": cannot be written");
    }
    return path(name);
  }

  std::string Read(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

 private:
  std::string path_;
};

}  // namespace logprobd::testing
