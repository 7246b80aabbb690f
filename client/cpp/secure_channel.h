#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/tls.h"

namespace logprobd::client {

/// How the channels of a client are secured. By default they are plaintext.
struct ChannelSecurity {
  std::shared_ptr<grpc::ChannelCredentials> credentials;  ///< Null for plaintext.
  std::string server_name;  ///< Name to check instead of the address's host; may be empty.
};

/// Reads the files and checks them. Returns INVALID_ARGUMENT that names the option, the file and
/// what is wrong.
absl::StatusOr<ChannelSecurity> ReadTls(const std::optional<Tls>& tls);

/// Opens a channel, which connects at its first call. A Unix socket is always plaintext.
std::shared_ptr<grpc::Channel> OpenChannel(const std::string& address,
                                           const ChannelSecurity& security,
                                           grpc::ChannelArguments arguments);

/// Adds the metadata that carries a caller's token to a call, unless the token is empty.
void AddToken(const std::string& token, grpc::ClientContext& context);

/// Returns advice, which continues the message, if gRPC's message of a failed connection says that
/// TLS may be the reason; otherwise "".
std::string TlsHint(absl::string_view message);

}  // namespace logprobd::client
