#include "server/app/build_facts.h"

namespace logprobd {

BuildFacts Build() { return {LOGPROBD_VERSION, LOGPROBD_COMMIT}; }

}  // namespace logprobd
