#pragma once

#include <vector>

#include "server/app/plan.h"
#include "server/batching/device_turns.h"

namespace logprobd {

/// What the heads of a server are to its DeviceTurns, in their order; empty where no two of them
/// share a device. A row's work is its matrix product: vocabulary x hidden.
std::vector<DeviceTurns::Head> TurnHeadsOf(const ServerPlan& plan);

/// Whether devices of a replica wait for each other there: then no head may be served while another
/// is loaded, since loading launches kernels that wait too.
bool AnyWaitsForPeers(const std::vector<DeviceTurns::Head>& heads);

}  // namespace logprobd
