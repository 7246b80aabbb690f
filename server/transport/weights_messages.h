#pragma once

#include "logprobd/v1/weights.pb.h"
#include "server/base/weight_store.h"

namespace logprobd {

// Write the structures of WeightStore to the messages of the Weights service.
void Fill(const WeightsVersion& version, v1::WeightsVersion& out);
void Fill(const PushedVersion& version, v1::PushedVersion& out);
void Fill(const HeadWeightsState& state, v1::HeadWeightsState& out);

}  // namespace logprobd
