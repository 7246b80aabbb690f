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

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace logprobd {
namespace {

/// Part of the first and of the last line of a list.
constexpr absl::string_view kListMark = "CRL-----";

/// Returns all objects that `read_next` finds, which gets a BIO.
template <typename Object, typename ReadNext>
Parsed<Object> ParsePem(absl::string_view text, ReadNext read_next) {
  const Bio bio = BioOf(text);
  Parsed<Object> parsed;
  ERR_clear_error();
  for (Object next(read_next(bio.get())); next != nullptr; next.reset(read_next(bio.get()))) {
    parsed.objects.push_back(std::move(next));
  }
  parsed.is_damaged = ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE;
  ERR_clear_error();
  return parsed;
}

/// Returns null if the text is not one list and nothing else.
Crl ParseDerList(absl::string_view text) {
  const auto* data = reinterpret_cast<const unsigned char*>(text.data());
  const unsigned char* const end = data + text.size();
  Crl list(d2i_X509_CRL(nullptr, &data, static_cast<long>(text.size())));
  ERR_clear_error();
  return data == end ? std::move(list) : nullptr;
}

}  // namespace

void OpensslFree::operator()(bio_st* bio) const { BIO_free(bio); }
void OpensslFree::operator()(x509_st* certificate) const { X509_free(certificate); }
void OpensslFree::operator()(X509_crl_st* list) const { X509_CRL_free(list); }

absl::Status Wrong(const NamedFile& file, absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(file.flag, ": ", file.path, " ", what));
}

absl::Status CannotRead(const NamedFile& file, int error) {
  absl::Status status =
      Wrong(file, absl::StrCat("cannot be read: ", std::generic_category().message(error)));
  return error == EMFILE || error == ENFILE || error == ENOMEM
             ? absl::ResourceExhaustedError(status.message())
             : status;
}

absl::StatusOr<NamedFile> ReadNamedFile(absl::string_view flag, const std::string& path,
                                        int64_t mebibytes_max) {
  NamedFile file{flag, path, ""};
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return CannotRead(file, errno);
  if (!S_ISREG(info.st_mode) || info.st_size > mebibytes_max << 20) {
    return Wrong(file, absl::StrCat("is not a regular file of at most ", mebibytes_max, " MiB"));
  }
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return CannotRead(file, errno);
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

Parsed<Certificate> ParseCertificates(absl::string_view text) {
  return ParsePem<Certificate>(
      text, [](BIO* bio) { return PEM_read_bio_X509(bio, nullptr, NoPassphrase, nullptr); });
}

Parsed<Crl> ParseRevocationLists(absl::string_view text) {
  if (Crl list = ParseDerList(text); list != nullptr) {
    Parsed<Crl> parsed;
    parsed.objects.push_back(std::move(list));
    return parsed;
  }
  if (!absl::StrContains(text, kListMark)) return {};
  Parsed<Crl> parsed = ParsePem<Crl>(
      text, [](BIO* bio) { return PEM_read_bio_X509_CRL(bio, nullptr, NoPassphrase, nullptr); });
  // OpenSSL skips a list whose first line is damaged.
  const std::vector<absl::string_view> parts = absl::StrSplit(text, kListMark);
  parsed.is_damaged = parsed.is_damaged || parts.size() != 2 * parsed.objects.size() + 1;
  return parsed;
}

int NoPassphrase(char* /*buffer*/, int /*size*/, int /*writes*/, void* /*context*/) { return -1; }

}  // namespace logprobd
