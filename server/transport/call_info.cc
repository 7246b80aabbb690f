#include "server/transport/call_info.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <chrono>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"
#include "server/base/peer_network.h"
#include "server/transport/access_processor.h"

namespace logprobd {
namespace internal {

absl::Time DeadlineOn(const Clock& clock, absl::Time deadline,
                      absl::FunctionRef<absl::Time()> wall_now) {
  return clock.Now() + (deadline - wall_now());
}

std::string ClientId(absl::string_view claimed, absl::string_view peer) {
  if (claimed.empty()) {
    // "ipv4:127.0.0.1:50312", "ipv6:%5B::1%5D:50312", "unix:"
    if (peer.substr(0, 4) == "unix") return "unix";
    return std::string(peer.substr(0, peer.rfind(':')));
  }
  std::string id(claimed.substr(0, kClientIdBytesMax));
  for (char& c : id) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) &&
        absl::string_view("._:@/-").find(c) == absl::string_view::npos) {
      c = '_';
    }
  }
  return id;
}

}  // namespace internal

namespace {

absl::string_view ViewOf(const grpc::string_ref& text) { return {text.data(), text.size()}; }

}  // namespace

std::string PeerNetworkOf(absl::string_view peer) {
  sockaddr_storage address = {};
  std::string host(peer.substr(0, peer.rfind(':')));  // without the port
  if (absl::string_view four = host; absl::ConsumePrefix(&four, "ipv4:")) {
    auto& in = reinterpret_cast<sockaddr_in&>(address);
    if (inet_pton(AF_INET, four.data(), &in.sin_addr) == 1) in.sin_family = AF_INET;
  } else if (absl::string_view six = host;
             absl::ConsumePrefix(&six, "ipv6:%5B") || absl::ConsumePrefix(&six, "ipv6:[")) {
    auto& in = reinterpret_cast<sockaddr_in6&>(address);
    const std::string bare(six.substr(0, six.find_first_of("%]")));  // without a zone
    if (inet_pton(AF_INET6, bare.c_str(), &in.sin6_addr) == 1) in.sin6_family = AF_INET6;
  }
  return address.ss_family == AF_UNSPEC ? host : PeerNetworkOf(address);
}

CallInfo CallInfoOf(const grpc::CallbackServerContext& context, const AccessList* access,
                    const Clock& clock) {
  CallInfo info;
  const auto& metadata = context.client_metadata();
  const auto claimed = metadata.find("client_id");
  std::string own_id = internal::ClientId(
      claimed == metadata.end() ? absl::string_view() : ViewOf(claimed->second), context.peer());
  if (access == nullptr) {
    info.client_id = std::move(own_id);
  } else {
    // Names that clients choose would let one caller take the shares of many.
    const std::shared_ptr<const grpc::AuthContext> connection = context.auth_context();
    const absl::StatusOr<std::shared_ptr<const AccessEntry>> entry =
        access->Identify(CredentialsOf(metadata, connection.get()));
    info.access = entry.status();
    if (entry.ok()) {
      info.client_id = (*entry)->tenant;
      info.sub_client_id = std::move(own_id);
      info.client_share = (*entry)->share;
      info.priority_max = (*entry)->priority_max;
    }
  }
  const auto [first, last] = metadata.equal_range("traceparent");
  if (first != last && std::next(first) == last) {  // Of several, none is known to be right.
    info.trace_context = TraceContext::Parse(ViewOf(first->second));
  }
  const auto deadline = context.deadline();
  if (deadline != std::chrono::system_clock::time_point::max()) {
    info.deadline = internal::DeadlineOn(clock, absl::FromChrono(deadline), WallNow);
  }
  return info;
}

}  // namespace logprobd
