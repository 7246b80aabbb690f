#include "server/transport/pem.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

/// Returns the error of a file that cannot be opened, by errno.
absl::Status CannotRead(const NamedFile& file) {
  const int error = errno;
  absl::Status status =
      Wrong(file, absl::StrCat("cannot be read: ", std::generic_category().message(error)));
  return error == EMFILE || error == ENFILE || error == ENOMEM
             ? absl::ResourceExhaustedError(status.message())
             : status;
}

/// Returns all objects that `read_next` finds, which gets a BIO.
template <typename Object, typename ReadNext>
std::vector<Object> Parse(absl::string_view text, ReadNext read_next, bool& is_damaged) {
  const Bio bio = BioOf(text);
  std::vector<Object> objects;
  ERR_clear_error();
  for (Object next(read_next(bio.get())); next != nullptr; next.reset(read_next(bio.get()))) {
    objects.push_back(std::move(next));
  }
  is_damaged = ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE;
  ERR_clear_error();
  return objects;
}

}  // namespace

void OpensslFree::operator()(bio_st* bio) const { BIO_free(bio); }
void OpensslFree::operator()(x509_st* certificate) const { X509_free(certificate); }
void OpensslFree::operator()(X509_crl_st* list) const { X509_CRL_free(list); }

absl::Status Wrong(const NamedFile& file, absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(file.flag, ": ", file.path, " ", what));
}

absl::StatusOr<NamedFile> ReadNamedFile(absl::string_view flag, const std::string& path,
                                        int64_t mebibytes_max) {
  NamedFile file{flag, path, ""};
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return CannotRead(file);
  if (!S_ISREG(info.st_mode) || info.st_size > mebibytes_max << 20) {
    return Wrong(file, absl::StrCat("is not a regular file of at most ", mebibytes_max, " MiB"));
  }
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return CannotRead(file);
  file.content.assign(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  return file;
}

Bio BioOf(absl::string_view text) {
  // OpenSSL takes no null pointer, which an empty text may have.
  return Bio(BIO_new_mem_buf(text.empty() ? "" : text.data(), static_cast<int>(text.size())));
}

std::string NameOf(const X509_name_st* name) {
  const std::unique_ptr<char, decltype(&std::free)> text(X509_NAME_oneline(name, nullptr, 0),
                                                         std::free);
  return text == nullptr ? "" : std::string(text.get());
}

absl::Time TimeOf(const asn1_string_st* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

std::vector<Certificate> ParseCertificates(absl::string_view text, bool& is_damaged) {
  return Parse<Certificate>(
      text, [](BIO* bio) { return PEM_read_bio_X509(bio, nullptr, nullptr, nullptr); }, is_damaged);
}

std::vector<Crl> ParseRevocationLists(absl::string_view text, bool& is_damaged) {
  return Parse<Crl>(
      text, [](BIO* bio) { return PEM_read_bio_X509_CRL(bio, nullptr, nullptr, nullptr); },
      is_damaged);
}

}  // namespace logprobd
