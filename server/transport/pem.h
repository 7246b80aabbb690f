#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

// OpenSSL's types.
struct asn1_string_st;
struct bio_st;
struct x509_st;
struct X509_crl_st;
struct X509_name_st;

namespace logprobd {

// PEM files, and what OpenSSL finds in them.

struct OpensslFree {
  void operator()(bio_st* bio) const;
  void operator()(x509_st* certificate) const;
  void operator()(X509_crl_st* list) const;
};
using Bio = std::unique_ptr<bio_st, OpensslFree>;
using Certificate = std::unique_ptr<x509_st, OpensslFree>;
using Crl = std::unique_ptr<X509_crl_st, OpensslFree>;

/// A file that a flag names, and its content.
struct NamedFile {
  absl::string_view flag;
  std::string path;
  std::string content;
};

/// Returns FAILED_PRECONDITION: "FLAG: PATH what".
absl::Status Wrong(const NamedFile& file, absl::string_view what);

/// Reads a regular file of at most `mebibytes_max`. Returns RESOURCE_EXHAUSTED if no file
/// descriptor or no memory is left, and FAILED_PRECONDITION for everything else.
absl::StatusOr<NamedFile> ReadNamedFile(absl::string_view flag, const std::string& path,
                                        int64_t mebibytes_max = 4);

/// Returns a source that reads `text`, which must outlive it.
Bio BioOf(absl::string_view text);

std::string NameOf(const X509_name_st* name);

/// Returns the past for a malformed time.
absl::Time TimeOf(const asn1_string_st* time);

/// Return the certificates or the revocation lists of a PEM text, and set `is_damaged` if the text
/// is malformed after them.
std::vector<Certificate> ParseCertificates(absl::string_view text, bool& is_damaged);
std::vector<Crl> ParseRevocationLists(absl::string_view text, bool& is_damaged);

}  // namespace logprobd
