#include "server/app/server.h"

namespace logprobd {

BuildFacts Build() { return {LOGPROBD_VERSION, LOGPROBD_COMMIT}; }

}  // namespace logprobd
