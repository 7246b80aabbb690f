#include "tests/fuzz/push_parser_check.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/unknown_field_set.h"
#include "google/protobuf/util/message_differencer.h"
#include "server/transport/push_parser.h"
#include "tests/fuzz/wire_parser_check.h"

namespace logprobd::testing {
namespace {

/// Returns whether `reason` is one for which ParsePush may refuse what Protobuf accepts.
bool IsStricterRule(absl::string_view reason) {
  for (const absl::string_view rule :
       {"given twice", "more than one", "must be at most", "more than 64 bits"}) {
    if (absl::StrContains(reason, rule)) return true;
  }
  return false;
}

}  // namespace

std::optional<std::string> PushParserDifference(absl::string_view bytes, uint32_t seed) {
  v1::PushWeightsRequest theirs;
  const bool is_valid = theirs.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  const CutBytes cut(bytes, seed);
  absl::StatusOr<ParsedPush> ours = ParsePush(cut.pieces());
  if (!ours.ok()) {
    return !is_valid || IsStricterRule(ours.status().message())
               ? std::nullopt
               : std::optional<std::string>(absl::StrCat("refused: ", ours.status().message()));
  }
  if (!is_valid) return "ParsePush accepts what Protobuf refuses";
  std::string data;
  for (const absl::Span<const std::byte> piece : ours->data) {
    data.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  if (data != theirs.rows().data()) return "the data differ";
  if (theirs.has_rows()) theirs.mutable_rows()->clear_data();
  // Those beside header and rows are skipped.
  theirs.GetReflection()->MutableUnknownFields(&theirs)->Clear();
  std::string difference;
  google::protobuf::util::MessageDifferencer differencer;
  differencer.ReportDifferencesToString(&difference);
  return differencer.Compare(ours->message, theirs) ? std::nullopt
                                                    : std::optional<std::string>(difference);
}

}  // namespace logprobd::testing
