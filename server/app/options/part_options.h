#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/app/options/server_options.h"
#include "server/base/head_info.h"
#include "server/batching/batcher.h"
#include "server/engine/engines.h"
#include "server/transport/tls_files.h"
#include "server/weights/allowed_roots.h"
#include "server/weights/head_weights.h"

namespace logprobd {

// Each function translates the settings of one head, as HeadOptions returns them, into the options
// of one part of the server.

ModelFolderOptions ModelOptionsOf(const ServerOptions& options);
EngineOptions EngineOptionsOf(const ServerOptions& options);
Batcher::Options BatcherOptionsOf(const ServerOptions& options);
/// TlsFiles::Options::is_enabled says whether there are any files.
TlsFiles::Options TlsOptionsOf(const ServerOptions& options);

/// Returns the folders from which new weights may be loaded, or null if loading is off. By default
/// this is the parent of the model's folder, or the model's folder itself if its parent is the root
/// of the file system; for a model in Hugging Face's cache, whose files are links, see
/// HubFoldersOf. `options.model` is a path, as FindModel returns it. Returns NOT_FOUND or
/// INVALID_ARGUMENT if --weights-root names something that is not a folder.
absl::StatusOr<std::shared_ptr<const AllowedRoots>> WeightsRootsOf(const ServerOptions& options);

/// Returns the number of staging buffers that each replica has from the start. If weights can be
/// swapped there are enough for two versions, because page-locking memory next to a live version
/// stalls it.
int NumStagingBuffers(const ServerOptions& options);

/// Returns the longest time that a batch may take on the chosen device. There is no default limit
/// on a CPU, whose speed is not known.
absl::Duration BatchTimeMaxOf(const ServerOptions& options, Device device);

/// Returns the time for which a thread of the server may stand still with work in hand before the
/// process ends. It is long enough for an engine to give up a batch after BatchTimeMaxOf and to
/// answer it, since that costs only a replica.
absl::Duration HangTimeMaxOf(const ServerOptions& options);

/// Returns the limits that are published to clients and enforced. Rows and message bytes never
/// exceed one client's share of the queue. Answers count towards that share too. A request within
/// the limits can therefore be served, unless its lists (top_k, candidates) are too large for the
/// share.
RequestLimits LimitsOf(const ServerOptions& options);

/// Returns the maximum number of bytes of host memory for the regions of clients.
int64_t SharedMemoryBytesMax(const ServerOptions& options);

}  // namespace logprobd
