#include "server/app/build_info.h"

namespace logprobd {

BuildInfo Build() { return {LOGPROBD_VERSION, LOGPROBD_COMMIT}; }

}  // namespace logprobd
