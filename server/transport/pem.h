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

/// Returns that a file or a folder cannot be read because of `error`, an errno: RESOURCE_EXHAUSTED
/// if no file descriptor or no memory is left, else FAILED_PRECONDITION.
absl::Status CannotRead(const NamedFile& file, int error);

/// Reads a regular file of at most `mebibytes_max`. Returns the errors of CannotRead, and
/// FAILED_PRECONDITION for other files.
absl::StatusOr<NamedFile> ReadNamedFile(absl::string_view flag, const std::string& path,
                                        int64_t mebibytes_max = 4);

/// Returns a source that reads `text`, which must outlive it.
Bio BioOf(absl::string_view text);

std::string NameOf(const X509_name_st* name);

/// Returns the past for a malformed time.
absl::Time TimeOf(const asn1_string_st* time);

/// What a text contains.
template <typename Object>
struct Parsed {
  std::vector<Object> objects;
  bool is_damaged = false;  ///< It contains others, which are malformed.
};

/// Parses the certificates of a PEM text.
Parsed<Certificate> ParseCertificates(absl::string_view text);

/// Parses the revocation lists of a PEM text, or one of DER. A text without a trace of a list is
/// not damaged.
Parsed<Crl> ParseRevocationLists(absl::string_view text);

/// Refuses a passphrase: a server that starts unattended has none, and OpenSSL would otherwise ask
/// for it on the terminal, for a certificate or a list, too. A callback of OpenSSL's PEM functions.
int NoPassphrase(char* buffer, int size, int writes, void* context);

}  // namespace logprobd
