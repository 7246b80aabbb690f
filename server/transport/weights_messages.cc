#include "server/transport/weights_messages.h"

namespace logprobd {

void Fill(const WeightsVersion& version, v1::WeightsVersion& out) {
  out.set_version(version.version);
  out.set_sha256(version.sha256);
  out.set_source(version.source);
  out.set_loaded_unix_seconds(version.loaded_unix_seconds);
  out.set_weight_bytes(static_cast<uint64_t>(version.weight_bytes));
  out.set_dtype(static_cast<v1::Dtype>(version.dtype));
}

void Fill(const PushedVersion& version, v1::PushedVersion& out) {
  out.set_version(version.version);
  out.set_rows(static_cast<uint64_t>(version.rows));
  out.set_vocab_rows(static_cast<uint64_t>(version.vocab_rows));
}

void Fill(const HeadWeightsState& state, v1::HeadWeightsState& out) {
  out.set_head(state.head);
  if (state.live.version != 0) Fill(state.live, *out.mutable_live());
  if (state.staged.has_value()) Fill(*state.staged, *out.mutable_staged());
  if (state.previous.has_value()) Fill(*state.previous, *out.mutable_previous());
  if (state.pushed.has_value()) Fill(*state.pushed, *out.mutable_pushed());
  out.set_highest_version(state.highest_version);
}

}  // namespace logprobd
